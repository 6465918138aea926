"""The load of this replica, for autoscalers and people: the rate of the last seconds relative to the capacity."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool.batching.counters import Stats
    from carpool.forecasting.capacity import Capacity

SPAN = 15.0
"""Seconds over which rates are counted: an HPA's interval."""

STEP = 1.5
"""Seconds between two snapshots."""

LEAST = 1.0
"""Least seconds for a rate."""


class Utilization(NamedTuple):
    """Forecast share of time for which the device is busy, 0 to 1."""

    forecast: float
    target: float
    """0: the objective has none."""
    lowest: float
    """With the least device time within the SLO."""


class ModelLoad(Struct, frozen=True, rename="camel", kw_only=True):
    """One model's load. Requests per second; the capacity is ``None`` until batches were measured."""

    rate: float
    capacity: float | None = None
    """Capacity of one replica within the SLO, if it has the whole device."""
    capacity_lower: float | None = None
    """The same at the upper confidence of batch latency."""
    capacity_zero_wait: float | None = None
    """The same if no request ever waited for others."""
    capacity_alone: float | None = None
    """The same without batching."""
    capacity_by_hand: float | None = None
    """The same with the policy's baseline; also ``None`` without one."""
    load: float | None = None
    """Rate over capacity."""


class StreamLoad(Struct, frozen=True, rename="camel", kw_only=True):
    """The load of token streams, all models of the engine together. ``None``: not known yet."""

    rate: float
    """Requests per second, refused ones included."""
    capacity: float | None = None
    """Requests per second that the engine carries within the targets for TTFT and TPOT."""
    capacity_tokens: float | None = None
    """The same in output tokens per second."""
    load: float | None = None
    """Rate over capacity."""


class ReplicaLoad(Struct, frozen=True, rename="camel", kw_only=True):
    """``GET /capacity``."""

    load: float | None
    """Load of this replica in units of one replica's capacity: adds up over replicas. ``None``: requests come, and the
    capacity is not known yet."""
    utilization: float
    """Share of the last seconds for which the device computed, 0 to 1."""
    lowest_utilization: float
    """The lowest utilization at this load within the SLO."""
    models: dict[str, ModelLoad]
    token_streams: StreamLoad | None = None
    """Only with a gate."""


class _Mark(NamedTuple):
    at: float
    busy: float
    arrivals: dict[str, int]
    work: dict[str, float]
    """Sum of the seconds of batches."""


class LoadWatch:
    """Keeps a few snapshots of the counters, and the last capacity of each model."""

    def __init__(self, stats: Stats) -> None:
        self._marks = deque([_mark(stats)])
        self._last = self._marks[0]
        self._capacities: dict[str, Capacity] = {}

    def look(self, stats: Stats) -> None:
        """Take a snapshot."""
        self._last = _mark(stats)
        if self._last.at - self._marks[-1].at >= STEP:
            self._marks.append(self._last)
        while len(self._marks) > 1 and self._last.at - self._marks[1].at >= SPAN:
            self._marks.popleft()
        self._capacities = {name: each for name, each in self._capacities.items() if name in stats.models}

    def measured(self, model: str, capacity: Capacity) -> None:
        """Store a model's new capacity."""
        self._capacities[model] = capacity

    def forget(self, model: str | None = None) -> None:
        """Forget the capacity of a model, or of all: it is measured again."""
        for name in [model] if model is not None else list(self._capacities):
            self._capacities.pop(name, None)

    def now(self, utilization: Mapping[str, Utilization], executors: Mapping[str, int]) -> ReplicaLoad:
        """Return the replica's load; ``utilization``: forecast, by model; ``executors``: learned server concurrency."""
        first, last = self._marks[0], self._last
        seconds = last.at - first.at
        models, work = {}, 0.0
        for name, arrivals in last.arrivals.items():
            # A model that is new, or came again after it was forgotten, began in between.
            come = max(arrivals - first.arrivals.get(name, 0), 0)
            work += max(last.work[name] - first.work.get(name, 0.0), 0.0) / executors.get(name, 1)
            capacity, rate = self._capacities.get(name), come / seconds if seconds >= LEAST else 0.0
            if capacity is None:
                models[name] = ModelLoad(rate=rate, load=None if rate else 0.0)
            else:
                models[name] = ModelLoad(
                    rate=rate,
                    capacity=capacity.rate,
                    capacity_lower=capacity.lower,
                    capacity_zero_wait=capacity.zero_wait,
                    capacity_alone=capacity.alone,
                    capacity_by_hand=capacity.by_hand or None,
                    load=rate / capacity.rate if capacity.rate else inf,
                )
        # Wall time with a batch in flight; if the server computes several at once, the used share of its capacity.
        busy = min((last.busy - first.busy) / seconds, work / seconds, 1.0) if seconds >= LEAST else 0.0
        # As a share of the forecast, which may be of a load that just began: the last seconds were less busy. Each
        # forecast is of the whole device, other models included. One of a model without requests is outdated.
        asked = [each for name, each in utilization.items() if name in models and models[name].rate]
        forecast = max((each.forecast for each in asked), default=0.0)
        saved = sum(max(each.forecast - each.lowest, 0.0) for each in asked)
        lowest = busy * max(1 - saved / forecast, 0.0) if forecast else busy
        loads = [each.load for each in models.values()]
        return ReplicaLoad(
            load=None if None in loads else sum(load for load in loads if load is not None),
            utilization=busy,
            lowest_utilization=lowest,
            models=models,
        )


def _mark(stats: Stats) -> _Mark:
    models = stats.models.items()
    return _Mark(
        stats.at,
        stats.device_busy,
        {name: counted.arrivals for name, counted in models},
        {name: sum(cell[5] for cell in counted.cells if not cell[3]) for name, counted in models},
    )
