"""The neighbours in virtual time: the simulator drives the Batcher that the sidecar drives.

The same load, device and parameters as on real sockets. Equal seeds give equal figures on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from msgspec import Struct

from carpool.arrivals import Poisson, until
from carpool.outcome import ENDS, End
from carpool.policy import Duration, Parameters
from carpool.riding import Priority
from carpool.simulation import Arrival, Device, Simulation, linear
from neighbours.catalogue import RATE
from neighbours.server import FIXED, PER_ROW
from neighbours.trials import MAX_BATCH, MAX_IN_FLIGHT, MAX_WAIT

SECONDS = 60.0
SLO = 5.0

V1, V2, OTHER = range(3)
"""Lengths, which are keys here: only equal ones share a batch. Healthy requests are V1 and V2 in turn."""

DEVICE = Device(linear(FIXED, PER_ROW))
PARAMETERS = Parameters(max_batch=MAX_BATCH, max_wait=Duration(MAX_WAIT), max_in_flight=MAX_IN_FLIGHT)

Crowd: TypeAlias = Callable[[Random], list[Arrival]]


class Played(Struct, frozen=True):
    """What became of healthy requests in virtual time."""

    p99_ms: float
    ratio: float
    """To the p99 without the neighbour."""
    failed: int
    """Requests without an answer."""


def _at(rate: float, rng: Random) -> list[float]:
    return until(Poisson(rate), SECONDS, rng)


def _alike(times: list[float]) -> list[Arrival]:
    """Return requests that may share batches with healthy ones."""
    return [Arrival(time, length=index % OTHER) for index, time in enumerate(times)]


def _poison(share: float) -> Crowd:
    rate = RATE * share / (1 - share)
    return lambda rng: [each._replace(poisoned=True) for each in _alike(_at(rate, rng))]


def _cancels(rng: Random) -> list[Arrival]:
    return [
        Arrival(time, length=OTHER if index % 2 else V1, patience=rng.uniform(0, 0.15))
        for index, time in enumerate(_at(200.0, rng))
    ]


def _flood(length: int, priority: int) -> Crowd:
    # 640 requests of 32 rows a second take 8 seconds of the device.
    return lambda rng: [Arrival(time, rows=32, length=length, priority=priority) for time in _at(640.0, rng)]


CROWDS: dict[str, Crowd] = {
    **{f"poison-{status}-{percent:g}": _poison(percent / 100) for status in (422, 500) for percent in (0.3, 1, 3, 10)},
    "cancels": _cancels,
    "flood": _flood(OTHER, Priority.NORMAL),
    "flood-low": _flood(V2, Priority.LOW),
}
"""What arrives beside healthy requests, by the neighbour's name. The simulator can't express the others."""


def play(name: str, seed: int = 1) -> Played | None:
    """Play a neighbour; ``None``: the simulator can't express it."""
    crowd = CROWDS.get(name)
    if crowd is None:
        return None
    rng = Random(seed)
    healthy = _alike(_at(RATE, rng))
    before, _ = _healthy(healthy, [])
    p99, failed = _healthy(healthy, crowd(rng))
    return Played(round(p99 * 1e3, 1), round(p99 / before, 3), failed)


def _healthy(healthy: list[Arrival], others: list[Arrival]) -> tuple[float, int]:
    """Return the p99 of healthy requests' answers, and how many got none."""
    mixed = sorted(
        [*((each, True) for each in healthy), *((each, False) for each in others)], key=lambda each: each[0].time
    )
    simulation = Simulation(
        [arrival for arrival, _ in mixed], DEVICE, slo=SLO, parameters=PARAMETERS,
        estimate=DEVICE.estimate(MAX_BATCH),
    )  # fmt: skip
    outcome = simulation.run()
    good = {End.HIT, End.LATE}
    latencies, failed = [], 0
    for index, (_, theirs) in enumerate(mixed):
        if theirs and ENDS[outcome.ends[index]] in good:
            latencies.append(outcome.latencies[index])
        elif theirs:
            failed += 1
    latencies.sort()
    return latencies[int(0.99 * len(latencies))] if latencies else SLO, failed
