"""The loads for every contender: rising loads up to twice the capacity, and a scenario's own timeline."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from proof.rows import Phase
from proof.scenario import OnOff
from proof.world import Stretch

if TYPE_CHECKING:
    from proof.rows import Kind
    from proof.scenario import Scenario

LOW = (0.1, 0.2, 0.35, 0.5, 0.6)
"""Loads at which device time is compared, as shares of the highest at which the oracle meets the SLO."""

HIGH = (0.7, 0.8, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0, 1.02, 1.04)
"""Loads among which the highest is searched at which the SLO is met."""

OVERLOAD = 2.0

LOADS = (*LOW, *HIGH, OVERLOAD)
"""Loads of the load ramp, in this order."""

MEASURED_LOW, MEASURED_HIGH = 3000, 8000
"""Least requests to judge a step by. At 1 % misses 80 of 8,000 are expected, give or take 9."""

BURSTS = 20
"""Least bursts and lulls to judge a step by."""


class Step(NamedTuple):
    """A load, and the seconds from the course's begin in which it is measured."""

    load: float
    start: float
    stop: float


class Stair(NamedTuple):
    """A course of ascending loads, each measured once it had time to settle."""

    course: tuple[Stretch, ...]
    steps: tuple[Step, ...]


def stair(scenario: Scenario, capacity: float) -> Stair:
    """Lay out the loads for a capacity in requests per second.

    How long to settle goes by what a careful tuner may do: a riskier step every 10 s and 300 requests, six of them
    until a wait of 25 ms is reached, one or two after each of the next loads. Beyond 0.9 the steps are too small to
    move anything but the queue.
    """
    course, steps = [], []
    at = 0.0
    for load in LOADS:
        rate = load * capacity
        if load == LOADS[0]:
            settle = max(80.0, 6.5 * 300 / rate)
        elif load <= 0.9:
            settle = max(12.0, 600 / rate)
        else:
            settle = max(4.0, 2500 / rate)
        low = load in LOW
        measured = max(8.0, MEASURED_LOW / rate) if low else max(3.0, MEASURED_HIGH / rate)
        settle, measured = _fair(scenario, settle, measured)
        course.append(Stretch(settle + measured, rate))
        steps.append(Step(load, at + settle, at + settle + measured))
        at += settle + measured
    return Stair(tuple(course), tuple(steps))


def _fair(scenario: Scenario, settle: float, measured: float) -> tuple[float, float]:
    """Make whole days, or many bursts, of what is measured; and seconds of both."""
    if scenario.cycle:
        measured = ceil(measured / scenario.cycle) * scenario.cycle
        settle = ceil(settle / scenario.cycle) * scenario.cycle
    elif isinstance(scenario.arrivals, OnOff):
        measured = max(measured, BURSTS * float(scenario.arrivals.on + scenario.arrivals.off))
    return float(ceil(settle)), float(ceil(measured))


def phases(scenario: Scenario, capacity: float) -> list[Phase]:
    """Describe a scenario's own timeline."""
    found: list[Phase] = []
    at = 0.0
    for phase in scenario.phases:
        kind: Kind = "start"
        if found:
            before = found[-1]
            rises = phase.load > before.load
            kind = "device" if phase.device != before.device else "load up" if rises else "load down"
        found.append(Phase(kind, at, phase.seconds, phase.load, phase.device, phase.load * capacity))
        at += phase.seconds
    return found
