"""Counters of token streams, by model; they only grow."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from carpool.exchange.report import OTHER
from carpool.exchange.token_streams import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 32
"""Most models counted separately; callers can invent names."""


class Histogram:
    """Durations by ``BOUNDS``; one more count than bounds, the last beyond them all."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


class Counts:
    """One model's counters."""

    __slots__ = (
        "durations",
        "ends",
        "gaps",
        "hits",
        "met",
        "missed",
        "output_tokens",
        "prompt_tokens",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        """Requests by how they ended: stop, length, other, cancelled, failed, an error's status, a refusal's reason."""
        self.prompt_tokens = 0
        """Of requests that got an answer."""
        self.output_tokens = 0
        self.hits = 0
        """Answers that met the targets of the SLO for token streams."""
        self.met = self.missed = 0
        """Interactive requests that met them, and that missed one or were refused: the input for jobs."""
        self.ttft = Histogram()
        """Seconds from arrival to the first token."""
        self.tpot = Histogram()
        """Seconds per token after the first, by answer."""
        self.gaps = Histogram()
        """Seconds between pieces of streams that carry tokens."""
        self.durations = Histogram()
        """Seconds from arrival to the end of complete answers."""

    def ended(self, how: str) -> None:
        """Count the end of a request."""
        self.ends[how] = self.ends.get(how, 0) + 1


class Models:
    """Counters by model, as many as there is room for."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}

    def __iter__(self) -> Iterator[tuple[str, Counts]]:
        """Yield models and counters."""
        return iter(self._counts.items())

    def judged(self) -> tuple[int, int]:
        """Return how many interactive requests met the targets, and how many did not."""
        return sum(each.met for each in self._counts.values()), sum(each.missed for each in self._counts.values())

    def known(self, model: str) -> Counts:
        """Return the counters of a model that had an answer, or of all others."""
        return self._counts.get(model) or self._new(OTHER)

    def proven(self, model: str) -> Counts:
        """Return the counters of a model whose answer has begun: from now on it has its own, if there is room."""
        found = self._counts.get(model)
        if found is not None:
            return found
        room = len(self._counts) < MOST and len(model) <= 128
        return self._new(model if room else OTHER)

    def _new(self, model: str) -> Counts:
        return self._counts.setdefault(model, Counts())
