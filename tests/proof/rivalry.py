"""What the tests of rivals share: a device of 5 ms + 0.5 ms a row, an SLO of 50 ms, and requests made by hand."""

from __future__ import annotations

from math import inf

from proof.world import Knowledge

from carpool.batching.counters import ModelStats, Stats
from carpool.batching.requests import Batch, Refusal, Request
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits


def service(rows):
    return 0.005 + 0.0005 * rows


def known(*, slo=0.05, largest=64, in_flight=8, executors=1, noise=0.0, times=service):
    limits = Limits(1, largest, 0.0, slo / 2, 1, in_flight)
    measured = {rows: times(rows) for rows in range(1, largest + 1)}
    return Knowledge(slo, limits, ServiceTime.measured(measured, noise=noise, executors=executors), executors, 1)


def request(arrived=0.0, *, rows=1, slo=0.05, deadline=inf, key=0):
    return Request(key=key, arrived=arrived, due=arrived + slo, rows=rows, deadline=deadline)


def come(dispatcher, times, **details):
    """Let requests arrive and return the actions of all of them."""
    actions = []
    for time in times:
        actions += dispatcher.arrive(request(time, **details), time)
    return actions


def batches(actions):
    return [action for action in actions if isinstance(action, Batch)]


def sizes(actions):
    return [batch.rows for batch in batches(actions)]


def refusals(actions):
    return [action.reason for action in actions if isinstance(action, Refusal)]


def counted(at, *, arrivals, hits, missed=0, busy=0.0):
    """Counters of one replica that has answered all that arrived."""
    model = ModelStats(arrivals=arrivals, served=hits + missed, hits=hits, misses={"late": missed})
    return Stats(at, busy, {"": model})
