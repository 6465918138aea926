"""Failures of calls to an upstream."""

from __future__ import annotations

from typing import Literal, TypeAlias

FailureKind: TypeAlias = Literal[
    "refused", "connect", "reset", "timeout", "protocol", "too-large", "busy", "buffers-full"
]  # fmt: skip

STATUS = {"refused": 503, "connect": 503, "timeout": 504, "busy": 503, "buffers-full": 503}
"""Status by kind of failure; 502 for any other."""


class UpstreamError(Exception):
    """A call that got no complete answer.

    `kind` is the reason: nothing listens at its address (refused), no connection could be made for another reason
    (connect), the upstream closed or reset it (reset), it was silent (timeout), its data were not HTTP (protocol), or
    it sent more than is accepted (too-large); too many calls wait for a connection already (busy), or there is no room
    to buffer the answer (buffers-full).
    `answered_bytes`: some bytes of an answer had arrived, so the upstream has seen the request.
    """

    def __init__(self, kind: FailureKind, text: str, *, answered_bytes: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.answered_bytes = answered_bytes

    @property
    def status(self) -> int:
        """The status of the answer to the client."""
        return STATUS.get(self.kind, 502)

    @property
    def reason(self) -> str:
        """The machine-readable reason in the answer to the client."""
        # Requests and answers share one budget, so both have the same reason.
        return self.kind if self.kind == "buffers-full" else f"upstream-{self.kind}"
