"""Whether a model server speaks V2, by its answers to V2's questions of health."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.backends.base import Backend, Document

LOADING = 60.0
"""Seconds of 503 to both questions of V2, by a server that was never heard to speak it, after which it counts as one
that does not: some answer 503 to every path that they don't know. While one loads its model it may do so, too."""

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


class Heard:
    """What the server speaks. Where somebody named the path to ask, all but V2's answers are none of its matter."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._refusing: float | None = None  # since when all questions of V2 are answered with 503
        self._spoke_v2 = False  # ever; it is the same server after a restart
        self._refuses_all = False  # it did so for LOADING
        self.speech = Speech.UNKNOWN

    def gone(self) -> None:
        """Take note that the server was away, and may be another process now."""
        self.speech, self._refusing = Speech.UNKNOWN, None

    async def take(self, answer: Document, now: float) -> None:
        """Take the answer to the question whether the model is ready; ask another question where it says too little."""
        named = self._backend.readiness
        if named is None:
            self.speech = await self._judged(answer, now)
        elif named == READY and 0 < answer.status < 400:
            self.speech = Speech.V2
        self._spoke_v2 = self._spoke_v2 or self.speech is Speech.V2

    async def _judged(self, answer: Document, now: float) -> Speech:
        """Return what the server speaks that answered V2's question like this.

        TensorFlow Serving answers every path that it doesn't know with 400, which is Triton's word for "not ready". A
        Triton that exits, or could not start, answers 400 to both questions; but it answered one before. A server that
        answers both with 503 for long does not know them, unless it ever answered one; one that knows either is not
        ready.
        """
        refusing, self._refusing = self._refusing, None
        if self.speech is Speech.V2 or 0 < answer.status < 400:
            return Speech.V2
        if answer.status in NOT_SPOKEN:
            return Speech.OTHER
        busy = answer.status == UNAVAILABLE and self.speech is Speech.OTHER and not self._refuses_all
        if answer.status == 0 or busy:
            return self.speech
        live = await self._backend.ask(LIVE)
        if 0 < live.status < 400:
            return Speech.V2
        if answer.status != UNAVAILABLE:
            return self.speech if live.status in {0, UNAVAILABLE} else Speech.OTHER
        if live.status != UNAVAILABLE or self._spoke_v2:
            return self.speech
        self._refusing = now if refusing is None else refusing
        self._refuses_all = self._refuses_all or now - self._refusing >= LOADING
        return Speech.OTHER if self._refuses_all else self.speech
