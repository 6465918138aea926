"""What tests of forecasts and decisions begin from: a reference curve, its limits, and configurations written short."""

from __future__ import annotations

from msgspec.structs import replace

from carpool.arrivals import Poisson
from carpool.latency import ServiceTime
from carpool.policy import Duration, Limits, Parameters
from carpool.tuning import Situation

LIMITS = Limits(1, 64, 0.0, 0.025, 1, 8)
# One executor, and known to be: eight batches were seen in flight.
CURVE = replace(ServiceTime.measured({rows: 0.005 + 0.0005 * rows for rows in range(1, 65)}), largest_in_flight=8)


def situation(rate, **changes):
    return replace(
        Situation(process=Poisson(rate), service=CURVE, target=0.050, budget=0.005, limits=LIMITS), **changes
    )


def parameters(batch=64, wait=0.0, flights=1, *, passing=False):
    return Parameters(max_batch=batch, max_wait=Duration(wait), max_in_flight=flights, pass_through=passing)
