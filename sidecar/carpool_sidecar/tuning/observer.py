"""What the tuner is sent: every model's counts since it last took some, and the generation of the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import STALLED_SHARE, Observation
from carpool_sidecar.models import OTHER
from carpool_sidecar.tuning.messages import Observations, Observed

if TYPE_CHECKING:
    from carpool.batching.batcher import Batcher
    from carpool.batching.counters import Stats
    from carpool_sidecar.tuning.stalls import StallWatcher


class Observer:
    """Counts since ``began``, then since the last ones that were ``taken``."""

    def __init__(self, batcher: Batcher, stalls: StallWatcher, began: Stats) -> None:
        self._batcher = batcher
        self._stalls = stalls
        self._before = began
        self._stalled_before = stalls.total
        self._mixed: set[str] = set()
        """Models replaced since: part of their service times is the old model's."""
        self._generation = 0
        """How often everything was forgotten and learned again."""
        self._restarts = 0
        """How often the upstream was replaced or restarted."""
        self._replaced: Counter[str] = Counter()
        """In addition, how often one model was replaced."""

    def observations(self, stats: Stats, *, applies: bool) -> Observations:
        """Return every model's observation up to ``stats``; ``applies``: whether the tuner sets parameters."""
        since = stats.since(self._before)
        seconds = stats.at - self._before.at
        paused = self._stalls.total - self._stalled_before
        observed = {}
        for state in self._batcher.models():
            if state.name == OTHER:
                continue
            counts = since.models[state.name]
            observation = Observation(
                now=stats.at,
                seconds=seconds,
                stats=replace(counts, cells=[]) if state.name in self._mixed else counts,
                growing=self._batcher.grows(state.name),
                stalled=paused > STALLED_SHARE * seconds,
                paused=paused,
                queued_rows=stats.queued_rows,
                others=since.others(state.name),
            )
            # A tuner that decides gets the parameters it has set; one that only observes, those in force.
            parameters = state.parameters if applies else state.in_force
            observed[state.name] = Observed(observation, parameters, self.generation(state.name))
        return Observations(observed)

    def taken(self, stats: Stats) -> None:
        """Note that the tuner took the observations up to ``stats``."""
        self._before = stats
        self._stalled_before = self._stalls.total
        self._mixed.clear()

    def begin(self) -> None:
        """Begin another generation of every model: a tuner is set up anew."""
        self._generation += 1

    def forget(self, now: float, model: str | None = None) -> None:
        """Leave out what was counted of a model that was replaced, or of all: the upstream was."""
        if model is None:
            self._restarts += 1
            self._before = self._batcher.stats(now)
        else:
            self._replaced[model] += 1
            self._mixed.add(model)

    def generation(self, model: str) -> int:
        """Return how often a model was learned again: replies with another number are outdated."""
        return self._generation + self._replaced[model]

    def replaced(self, model: str) -> int:
        """Return how often the model, or its server, was replaced."""
        return self._restarts + self._replaced[model]
