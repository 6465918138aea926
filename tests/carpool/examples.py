"""What tests of forecasts and decisions begin from: a reference curve, its limits, and configurations written short."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Gamma, Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters
from carpool.policy.spec import SLO, BatchingPolicy, Latency, Objective
from carpool.simulation.simulator import Device, linear

LIMITS = Limits(1, 64, 0.0, 0.025, 1, 8)
# One batch at a time, and known to be: eight batches were seen in flight.
CURVE = replace(ServiceTime.measured({rows: 0.005 + 0.0005 * rows for rows in range(1, 65)}), largest_in_flight=8)


def situation(rate, **changes):
    return replace(
        Situation(process=Poisson(rate), service=CURVE, target=0.050, budget=0.005, limits=LIMITS), **changes
    )


def parameters(batch=64, wait=0.0, flights=1, *, passing=False):
    return Parameters(max_batch=batch, max_wait=Duration(wait), max_in_flight=flights, pass_through=passing)


# A tile holds 32 rows; two of them cost hardly less a row than one, and take twice as long.
TILES = replace(ServiceTime.measured({1: 0.028, 32: 0.0286, 33: 0.0556, 64: 0.0562}), largest_in_flight=2)


def tiled(rate, target=0.150):
    limits = replace(LIMITS, max_wait=0.075)
    return Forecaster(situation(rate, process=Gamma(rate, 2.0), service=TILES, target=target, limits=limits))


def parameters_at(outcome, when, replica=0):
    """Return what a replica of a simulation ran with at a time."""
    return [setting.parameters for at, which, setting in outcome.changes if at <= when and which == replica][-1]


GPU = Device(times=linear(0.005, 0.0005))


def policy(slo=0.05, **changes):
    changes = {"objective": Objective.EFFICIENCY} | changes
    return BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(slo))), **changes).validate()


def poisson(rate, seconds, seed=1):
    return until(Poisson(rate), seconds, Random(seed))
