"""Simulated pods: each counts the results of its load under its own delivered parameters.

A setting is simulated once, and its intervals are repeated. So a fleet that decides well comes to rest, as a real one
does; counters that stay the same whatever is decided would be explored for ever.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import exp, log
from random import Random
from typing import TYPE_CHECKING

from carpool.batching.counters import ModelStats, Stats, combine
from carpool.exchange.report import Lane, Queue, Report, Stalls
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, linear

if TYPE_CHECKING:
    from carpool.exchange.change import Change
    from carpool.simulation.outcome import Setting

INTERVAL = 2.0
"""Seconds for which a pod counts before anybody looks again."""

SLO = 0.05
MODEL = "resnet"

LOADS = (20.0, 100.0, 200.0, 400.0, 700.0, 1000.0, 1300.0, 1500.0)
"""Requests per second of a pod; the device saturates at 1,700."""

DEVICE = Device(times=linear(0.005, 0.0005), cv=0.05)
INTERVALS = 8
"""That a setting is simulated for."""

WARM = 2
"""Intervals before those: the queue fills."""

FINENESS = log(1.1)
"""Waits that differ by less than this factor are simulated as one."""


class VirtualPod:
    """One pod: its load, and its delivered parameters."""

    def __init__(self, number: int) -> None:
        """Begin with no parameters but a sidecar's own; ``number`` says which load, and where in the intervals."""
        self.change: Change | None = None
        self._load = LOADS[number // 5 % len(LOADS)]
        self._offset = number
        self._earlier = ModelStats()
        """What was counted under other parameters."""
        self._since = 0

    @property
    def parameters(self) -> Parameters:
        """What it runs."""
        known = {} if self.change is None else self.change.parameters
        return known.get(MODEL) or known.get("*") or Parameters()

    def receive(self, change: Change, interval: int) -> None:
        """Run other parameters from the end of an interval on."""
        if change.parameters != (self.change and self.change.parameters):
            self._earlier, self._since = self._counted(interval), interval
        self.change = change

    def report(self, interval: int, target: str = "") -> Report:
        """Say what it has counted by the end of an interval."""
        generation, parameters = 0 if self.change is None else self.change.generation, self.parameters
        lane = Lane(
            parameters=parameters, pass_through=parameters.pass_through, queued_requests=0, cap=64, quarantined=False
        )
        return Report(
            stats=Stats(interval * INTERVAL, models={MODEL: self._counted(interval)}),
            uptime_seconds=interval * INTERVAL,
            ready=True,
            readiness="ready",
            target=target,
            generation=generation,
            running=generation,
            slo_seconds=SLO,
            queue=Queue(rows=0, in_flight=1, slots=1),
            lanes={MODEL: lane},
            stalls=Stalls(0, 0.0),
        )

    def _counted(self, interval: int) -> ModelStats:
        parameters = self.parameters
        wait = 0.0 if parameters.max_wait <= 0 else exp(round(log(parameters.max_wait) / FINENESS) * FINENESS)
        key = (parameters.max_batch, wait, parameters.max_in_flight, parameters.pass_through)
        return combine([self._earlier, _several(self._load, key, interval - self._since, self._offset % INTERVALS)])


Key = tuple[int, float, int, bool]
"""Largest batch, wait, batches in flight, whether requests pass through."""


@cache
def _several(load: float, key: Key, count: int, offset: int) -> ModelStats:
    """Add ``count`` intervals up, from the one at ``offset`` on."""
    parts = _intervals(load, key)
    rounds, rest = divmod(count, len(parts))
    one = combine(parts)
    return combine([*[one] * rounds, *(parts[(offset + index) % len(parts)] for index in range(rest))])


@cache
def _intervals(load: float, key: Key) -> list[ModelStats]:
    """Return what a pod counts in each of several intervals."""
    size, wait, flights, passes = key
    setting = Parameters(max_batch=size, max_wait=Duration(wait), max_in_flight=flights, pass_through=passes)
    found: list[Stats] = []

    def observe(_: float, stats: list[Stats]) -> list[Setting] | None:
        found.append(stats[0])
        return None

    seconds = (WARM + INTERVALS) * INTERVAL
    arrivals = until(Poisson(load), seconds + INTERVAL, Random(1))
    # A sidecar learns by itself what a batch takes. Without that no request is held for others.
    known = DEVICE.estimate()
    Simulation(arrivals, DEVICE, slo=SLO, parameters=setting, estimate=known).every(INTERVAL, observe).run()
    shown = found[WARM - 1 : WARM + INTERVALS]
    return [after.since(before).models[""] for before, after in pairwise(shown)]
