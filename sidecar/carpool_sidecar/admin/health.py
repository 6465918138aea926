"""Whether the model can serve, and whether it was restarted since."""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING

from carpool_sidecar.backends.base import Document

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.backends.base import Backend

INTERVAL = 1.0
"""Seconds between two looks; the first ones, while the model loads, are no closer."""

AGAIN = 30.0
"""Seconds between two questions of V2 to a server that does not speak it: the question may run its model."""

PATIENCE = 60.0
"""Seconds of 503 to both questions of V2, by a server that was never heard to speak it, after which it counts as one
that does not: some answer 503 to every path that they don't know. While one loads its model it may do so, too."""

UNASKED = "the model has not been asked yet"

NOT_SPOKEN = frozenset({401, 403, 404, 405, 501})
"""Answers of a server that doesn't know the question, or does not let everybody ask: that it accepts connections is all
there is to know."""

READY, LIVE = b"/v2/health/ready", b"/v2/health/live"
"""Questions of V2: whether models can be asked, and whether the server is there."""

UNAVAILABLE = 503
"""Says that a server is not ready, whatever it speaks."""


class Speech(Enum):
    """What the server speaks, as far as its answers since it was last gone show."""

    UNKNOWN = auto()
    V2 = auto()
    OTHER = auto()


class Health:
    """Mirrors the model's readiness.

    ``found`` is called when somebody answers for the first time, or again after nobody was there; it is told which.
    ``clock`` gives monotonic seconds.
    """

    def __init__(
        self, backend: Backend, found: Callable[[bool], None], clock: Callable[[], float], log: logging.Logger
    ) -> None:
        self._backend = backend
        self._found = found
        self._clock = clock
        self._log = log
        self._known = False
        self._gone = True
        self._speech = Speech.UNKNOWN
        self._again = 0.0  # when a server that does not speak V2 is asked again
        self._refusing: float | None = None  # since when all questions of V2 are answered with 503
        self._answers = 0  # that callers had of the server, at the last look
        self.ready = False
        self.reason = UNASKED

    def unreachable(self) -> None:
        """Take note that a call found nobody there."""
        self._gone = True

    async def run(self) -> None:
        """Look at the model until cancelled."""
        while True:
            self.observe(await self.look())
            await asyncio.sleep(INTERVAL)

    async def look(self) -> Document:
        """Ask whether the model is ready; of a server that does not speak V2, only whether it is there."""
        backend = self._backend
        if self._gone:
            self._speech, self._refusing = Speech.UNKNOWN, None
        if self._speech is Speech.OTHER and self._clock() < self._again:
            # Connections that a busy server has no time to accept would fill its backlog, and callers find no room.
            return Document(0, foreign=True) if self._serves() else await backend.connect()
        answer = await backend.ask(backend.readiness)
        if backend.readiness == READY:
            self._speech = await self._heard(answer)
            self._again = self._clock() + AGAIN
        return Document(404) if self._speech is Speech.OTHER and answer.status else answer

    async def _heard(self, answer: Document) -> Speech:
        """Return what the server speaks that answered V2's question like this.

        TensorFlow Serving answers every path that it doesn't know with 400, which is Triton's word for "not ready". A
        Triton that exits, or could not start, answers 400 to both questions; but it answered one before. A server that
        answers both with 503 for long does not know them; one that knows either is not ready.
        """
        refusing, self._refusing = self._refusing, None
        if self._speech is Speech.V2 or 0 < answer.status < 400:
            return Speech.V2
        if answer.status in NOT_SPOKEN:
            return Speech.OTHER
        if answer.status == 0 or (answer.status == UNAVAILABLE and self._speech is Speech.OTHER):  # it is busy
            return self._speech
        live = await self._backend.ask(LIVE)
        if 0 < live.status < 400:
            return Speech.V2
        if answer.status == UNAVAILABLE:
            if live.status != UNAVAILABLE:
                return self._speech
            self._refusing = self._clock() if refusing is None else refusing
            return Speech.OTHER if self._clock() - self._refusing >= PATIENCE else self._speech
        return self._speech if live.status in {0, UNAVAILABLE} else Speech.OTHER

    def observe(self, answer: Document) -> None:
        """Take one answer to the question whether the model is ready."""
        before = self.reason
        if answer.status or answer.foreign:
            # As kubelets read the answers to a probe: a pod that is ready without a sidecar is ready with one. A server
            # of another protocol, such as gRPC or TLS, does not know the question either, and may hang up.
            if self._speech is not Speech.V2:
                self.ready = 200 <= answer.status < 400 or answer.status in NOT_SPOKEN or answer.foreign
            elif answer.status:  # a server that knows the question may hang up once: that says nothing of the model
                self.ready = 200 <= answer.status < 400
            if self.ready or answer.status:
                self.reason = "ready" if self.ready else f"the model answers that question with {answer.status}"
            if self._gone:
                self._gone = False
                self._found(self._known)
                self._known = True
        elif answer.reachable:
            # A server with one worker answers after the request that it computes: it is busy, not broken. One that does
            # not speak V2 owes no answer.
            if self._gone or not (self._serves() or self._speech is Speech.OTHER):
                self.ready = False
            if not self.ready:
                self.reason = "the model does not answer that question in time"
        else:
            self.ready = False
            self._gone = True
            self.reason = "the model does not accept connections"
        if self.reason != before:
            self._log.info("readiness changed", extra={"ready": self.ready, "reason": self.reason})
        self._answers = self._backend.traffic.answers

    def _serves(self) -> bool:
        """Whether callers' requests are with the server, or were answered since the last look."""
        traffic = self._backend.traffic
        return traffic.under_way > 0 or traffic.answers > self._answers
