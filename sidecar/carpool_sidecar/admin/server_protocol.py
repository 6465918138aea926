"""Whether a model server speaks V2, from its answers to V2's health requests."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.backends.base import Backend, Document

LOADING = 60.0
"""A server that never spoke V2 counts as one without V2 after so many seconds of 503 to both health requests: some
answer 503 to every unknown path. A server that loads its model may do so, too."""

NOT_SPOKEN = frozenset({401, 403, 404, 405, 501})
"""Answers of a server that doesn't know the request, or refuses it without credentials: it is only known to accept
connections."""

READY, LIVE = b"/v2/health/ready", b"/v2/health/live"
"""V2's health requests: whether models are ready, and whether the server is live."""

UNAVAILABLE = 503
"""A server that answers this is not ready, whatever its protocol."""


class ServerProtocol(Enum):
    """The server's protocol, as shown by its answers since it was last gone."""

    UNKNOWN = auto()
    V2 = auto()
    OTHER = auto()


class ProtocolDetection:
    """The server's protocol. If the readiness path is configured, only answers to V2's requests are judged."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._refusing: float | None = None  # since when all V2 health requests are answered with 503
        self._spoke_v2 = False  # at any time; it is the same server after a restart
        self._refuses_all = False  # it did so for LOADING
        self.protocol = ServerProtocol.UNKNOWN

    def gone(self) -> None:
        """Note that the server was gone, and may now be another process."""
        self.protocol, self._refusing = ServerProtocol.UNKNOWN, None

    async def take(self, answer: Document, now: float) -> None:
        """Take the answer about the model's readiness; if it is not conclusive, send the other health request."""
        named = self._backend.readiness
        if named is None:
            self.protocol = await self._judged(answer, now)
        elif named == READY and 0 < answer.status < 400:
            self.protocol = ServerProtocol.V2
        self._spoke_v2 = self._spoke_v2 or self.protocol is ServerProtocol.V2

    async def _judged(self, answer: Document, now: float) -> ServerProtocol:
        """Return the protocol of a server that gave this answer to V2's readiness request.

        TensorFlow Serving answers every unknown path with 400, which means "not ready" for Triton. A Triton that
        exits, or could not start, answers 400 to both requests; but it answered one before. A server that answers both
        with 503 for long does not know them, unless it ever answered one; a server that knows either is not ready.
        """
        refusing, self._refusing = self._refusing, None
        if self.protocol is ServerProtocol.V2 or 0 < answer.status < 400:
            return ServerProtocol.V2
        if answer.status in NOT_SPOKEN:
            return ServerProtocol.OTHER
        busy = answer.status == UNAVAILABLE and self.protocol is ServerProtocol.OTHER and not self._refuses_all
        if answer.status == 0 or busy:
            return self.protocol
        live = await self._backend.ask(LIVE)
        if 0 < live.status < 400:
            return ServerProtocol.V2
        if answer.status != UNAVAILABLE:
            return self.protocol if live.status in {0, UNAVAILABLE} else ServerProtocol.OTHER
        if live.status != UNAVAILABLE or self._spoke_v2:
            return self.protocol
        self._refusing = now if refusing is None else refusing
        self._refuses_all = self._refuses_all or now - self._refusing >= LOADING
        return ServerProtocol.OTHER if self._refuses_all else self.protocol
