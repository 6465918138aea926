"""Whether the model can serve, and whether it was restarted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_sidecar.admin.server_protocol import NOT_SPOKEN, READY, ProtocolDetection, ServerProtocol
from carpool_sidecar.backends.base import Document

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.backends.base import Backend

INTERVAL = 1.0
"""Seconds between two checks, or the duration of the last one if longer; the same while the model loads."""

AGAIN = 30.0
"""Seconds between two V2 health requests to a server without V2: the request may run its model."""

UNASKED = "the model has not answered yet"


class Patience:
    """For how long a model that was ready may answer that it is not."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # since when it is not ready

    def bears(self, now: float) -> bool:
        """Note that it is not ready; return whether that is still tolerated."""
        self._since = now if self._since is None else self._since
        return now - self._since < self._seconds

    def forget(self) -> None:
        """Note that it is ready, or counts as unready."""
        self._since = None


class Health:
    """Mirrors the model's readiness.

    ``found`` is called when a server answers for the first time or becomes ready (False), and when one answers again
    after it was gone (True).
    ``clock`` gives monotonic seconds. ``patience``: for how long a model that was ready may answer that it is not, or
    not answer, before it counts as unready. One that refuses connections counts as unready at once, and as gone.
    """

    def __init__(
        self,
        backend: Backend,
        found: Callable[[bool], None],
        clock: Callable[[], float],
        log: logging.Logger,
        patience: float = 0.0,
    ) -> None:
        self._backend = backend
        self._found = found
        self._clock = clock
        self._log = log
        self._known = False
        self._gone = True
        self._detection = ProtocolDetection(backend)
        self._again = 0.0  # when a server without V2 is asked again
        self._patience = Patience(patience)
        self._answers = 0  # answers to callers until the last check
        self.ready = False
        self.reason = UNASKED

    def unreachable(self) -> None:
        """Note that the server refused the connection of a call."""
        self._gone = True

    async def run(self) -> None:
        """Check the model until cancelled."""
        while True:
            began = self._clock()
            answer = await self.look()
            self.observe(answer)
            # An answer that takes seconds is work: checks use at most half of the model's time. A missing answer need
            # not be work, and a pod must not wait twice for it.
            await asyncio.sleep(max(INTERVAL, self._clock() - began) if answer.status else INTERVAL)

    async def look(self) -> Document:
        """Ask whether the model is ready; of a server without V2, only whether it accepts connections."""
        backend = self._backend
        if self._gone:
            self._detection.gone()
        if self._detection.protocol is ServerProtocol.OTHER and self._clock() < self._again:
            # Connections that a busy server has no time to accept would fill its backlog and keep callers out.
            return Document(0, foreign=True) if self._serves() else await backend.connect()
        answer = await backend.ask(backend.readiness or READY)
        await self._detection.take(answer, self._clock())
        self._again = self._clock() + AGAIN
        return Document(404) if self._detection.protocol is ServerProtocol.OTHER and answer.status else answer

    def observe(self, answer: Document) -> None:
        """Take one answer about the model's readiness."""
        before = self.reason
        loaded = self.ready
        was_ready = loaded and not self._gone
        if answer.status or answer.foreign:
            # Read as kubelets read readiness answers: a pod that is ready without a sidecar is ready with one. A server
            # of another protocol, such as gRPC or TLS, does not know the request either, and may hang up.
            if self._detection.protocol is not ServerProtocol.V2:
                self.ready = 200 <= answer.status < 400 or answer.status in NOT_SPOKEN or answer.foreign
            elif answer.status:  # a server that knows the request may hang up once: that is no answer about the model
                self.ready = 200 <= answer.status < 400
            if self.ready or answer.status:
                self.reason = "ready" if self.ready else f"the model answers that question with {answer.status}"
            if self._gone:
                self._gone = False
                self._found(self._known)
                self._known = True
            elif self.ready and not loaded:
                self._found(False)  # while a model is loaded, the server need not describe it
        elif answer.reachable:
            # A server with one worker answers after its present request: it is busy, not broken. A server without V2
            # need not answer, but accept connections.
            silent = self._detection.protocol is ServerProtocol.OTHER and not answer.why
            if self._gone or not (self._serves() or silent):
                self.ready = False
            if not self.ready:
                self.reason = answer.why or "the model does not answer that question in time"
        else:
            self.ready = False
            self._gone = True
            self.reason = answer.why
        if was_ready and not self.ready and answer.reachable and self._patience.bears(self._clock()):
            self.ready, self.reason = True, before
        elif answer.status or not self.ready or (answer.foreign and self._detection.protocol is not ServerProtocol.V2):
            self._patience.forget()
        if self.reason != before:
            self._log.info("readiness changed", extra={"ready": self.ready, "reason": self.reason})
        self._answers = self._backend.traffic.answers

    def _serves(self) -> bool:
        """Whether the server has callers' requests, or answered some since the last check."""
        traffic = self._backend.traffic
        return traffic.under_way > 0 or traffic.answers > self._answers
