"""A rule that no product uses: AIMD on TPOT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.generation.requests import Action, Request, Slo, State
from carpool_cli.streams.rules import Cap

if TYPE_CHECKING:
    from carpool.generation.profiles import EngineProfile


class Aimd(Cap):
    """A cap that grows by one a second while requests wait, and falls by a tenth where TPOT is missed.

    As congestion control does it (Chiu and Jain 1989), by the mean time per token of the last second.
    """

    def __init__(self, slo: Slo, profile: EngineProfile, *, start: float = 16.0) -> None:
        super().__init__(start, slo, profile, margin=0.85)
        self._decoding = 0
        self._since = 0.0
        self._at = 0.0
        self._steps = 0.0
        self._seconds = 0.0

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Compare the last second with the target, and change the cap."""
        if self._decoding:
            self._steps += tokens / self._decoding
            self._seconds += now - self._at
        self._at = now
        if now - self._since < 1.0 or not self._steps:
            return []
        if self._seconds / self._steps > self.slo.tpot:
            self.most = max(1.0, 0.9 * self.most)
        elif self.waiting:
            self.most += 1
        self._since, self._steps, self._seconds = now, 0.0, 0.0
        return self.poll(now)

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Count a stream."""
        self._decoding += 1
        return super().first_token(request, now)

    def ended(self, request: Request, now: float, output_tokens: int, *, complete: bool = True) -> list[Action]:
        """Count it no more."""
        self._decoding -= request.state is State.DECODING
        return super().ended(request, now, output_tokens, complete=complete)
