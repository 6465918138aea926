"""The neighbours in virtual time: the simulator drives the Batcher that the sidecar drives.

The same load, device and parameters as on real sockets. Equal seeds give equal figures on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from carpool.batching.requests import Priority
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import ENDS, End
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from neighbours.catalogue import RATE
from neighbours.server import FIXED, PER_ROW
from neighbours.trials import MAX_BATCH, MAX_IN_FLIGHT, MAX_WAIT

if TYPE_CHECKING:
    from carpool.simulation.outcome import Outcome

SECONDS = 60.0
SLO = 5.0

V1, V2, OTHER = range(3)
"""Keys: only requests with equal ones share a batch. Healthy requests are V1 and V2 in turn."""

DEVICE = Device(linear(FIXED, PER_ROW))
PARAMETERS = Parameters(max_batch=MAX_BATCH, max_wait=Duration(MAX_WAIT), max_in_flight=MAX_IN_FLIGHT)

Arrivals: TypeAlias = Callable[[Random], list[Arrival]]


class Played(Struct, frozen=True):
    """What became of healthy requests in virtual time."""

    p99_ms: float
    ratio: float
    """To the p99 without the neighbour."""
    failed: int
    """Requests without an answer."""


def at(rate: float, rng: Random) -> list[float]:
    """Return when requests of independent callers arrive."""
    return until(Poisson(rate), SECONDS, rng)


def alike(times: list[float]) -> list[Arrival]:
    """Return requests as healthy callers send them: they may share batches with one another."""
    return [Arrival(time, key=index % OTHER) for index, time in enumerate(times)]


def _poison(share: float) -> Arrivals:
    rate = RATE * share / (1 - share)
    return lambda rng: [each._replace(poisoned=True) for each in alike(at(rate, rng))]


def _short(share: float) -> Arrivals:
    rate = RATE * share / (1 - share)
    return lambda rng: [each._replace(short=True) for each in alike(at(rate, rng))]


def _hanging(rng: Random) -> list[Arrival]:
    return [Arrival(time, key=OTHER, model="other", hangs=True) for time in at(4.0, rng)]


def _cancels(rng: Random) -> list[Arrival]:
    return [
        Arrival(time, key=OTHER if index % 2 else V1, patience=rng.uniform(0, 0.15))
        for index, time in enumerate(at(200.0, rng))
    ]


def _flood(key: int, priority: int) -> Arrivals:
    # 640 requests of 32 rows a second take 8 seconds of the device.
    return lambda rng: [Arrival(time, rows=32, key=key, priority=priority) for time in at(640.0, rng)]


ARRIVALS: dict[str, Arrivals] = {
    **{f"poison-{status}-{percent:g}": _poison(percent / 100) for status in (422, 500) for percent in (0.3, 1, 3, 10)},
    **{f"short-{percent:g}": _short(percent / 100) for percent in (0.3, 3)},
    "hanging": _hanging,
    "cancels": _cancels,
    "flood": _flood(OTHER, Priority.NORMAL),
    "flood-low": _flood(V2, Priority.LOW),
}
"""What arrives beside healthy requests, by the neighbour's name. The simulator can't express the others."""


def play(name: str, seed: int = 1) -> Played | None:
    """Play a neighbour; ``None``: the simulator can't express it."""
    others = ARRIVALS.get(name)
    if others is None:
        return None
    rng = Random(seed)
    healthy = alike(at(RATE, rng))
    before, _ = beside(healthy, [])
    p99, failed = beside(healthy, others(rng))
    return Played(round(p99 * 1e3, 1), round(p99 / before, 3), failed)


def beside(healthy: list[Arrival], others: list[Arrival]) -> tuple[float, int]:
    """Play both; return the p99 of the answers to healthy requests in seconds, and how many of them got none."""
    marked = [*((arrival, True) for arrival in healthy), *((arrival, False) for arrival in others)]
    marked.sort(key=lambda each: each[0].time)
    outcome = simulate([arrival for arrival, _ in marked])
    theirs = [index for index, (_, good) in enumerate(marked) if good]
    answered = [index for index in theirs if ENDS[outcome.ends[index]] in {End.HIT, End.LATE}]
    latencies = sorted(outcome.latencies[index] for index in answered)
    return latencies[int(0.99 * len(latencies))] if latencies else 0.0, len(theirs) - len(answered)


def simulate(arrivals: list[Arrival]) -> Outcome:
    """Play arrivals with the sidecar's parameters, which knows how long batches take."""
    estimate = DEVICE.estimate(MAX_BATCH)
    return Simulation(arrivals, DEVICE, slo=SLO, parameters=PARAMETERS, estimate=estimate).run()
