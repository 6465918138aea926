"""One replica as a table: its capacity within the SLO, and its utilization and misses at each load.

Playing a day request by request takes minutes. A replica's state lasts for less than a second, and loads for minutes.
So a day is played by looking up the results for the load of the moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import Capacity, candidates, capacity, replicas
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PassThroughMode
from carpool.tuning.candidates import known_flights, largest_reliable, productive_sizes
from carpool.tuning.objective import Aim, choose
from carpool_cli.planning import assumptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from carpool.learning.arrivals import Fitted
    from carpool.policy.spec import BatchingPolicy
    from carpool_cli.profiling.device_profile import DeviceProfile

LOADS = (
    0.01, 0.02, 0.03, 0.045, 0.065, 0.1, 0.14, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.3, 1.6,
    2.0,
)  # fmt: skip
"""Played loads, as shares of the capacity. Busy time is most nonlinear at low loads: with zero wait a device may be 50
% busy at 5 % of its capacity, and a line from 2 to 10 % would be 12 % too low there."""

FEW = 4
"""Most loads of a whole fleet that are played in addition: a steady one is not interpolated."""


def situation(profile: DeviceProfile, policy: BatchingPolicy, process: Fitted, rows: float = 1) -> Situation:
    """Return what is forecast for requests of ``rows`` on a profile's device, by a policy's SLO and bounds."""
    return Situation(
        process=process,
        service=assumptions.known(profile),
        target=policy.slo.due,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
        rows=rows,
    )


class Replica(Struct, frozen=True, rename="camel"):
    """The results of one replica. Requests per second; linear between two rates."""

    capacity: float
    """The highest rate within the SLO."""
    rates: tuple[float, ...]
    busy: tuple[float, ...]
    """Share of the time in which the device computes."""
    missed: tuple[float, ...]
    """Share of the requests that are late or rejected."""
    settings: tuple[Parameters, ...]
    single: float
    """Share of the time that one request per second takes alone: the time of each at almost no load."""

    def utilization(self, rate: float) -> float:
        """Return the share of the time in which the device computes at a rate."""
        if rate < self.rates[0]:
            # Between the lowest played rate and none, the time per request is linear, and not their total.
            share = rate / self.rates[0]
            return rate * (self.single + (self.busy[0] / self.rates[0] - self.single) * share)
        return self._at(rate, self.busy) if rate <= self.rates[-1] else self.busy[-1]

    def misses(self, rate: float) -> float:
        """Return the share of the requests that are late or rejected at a rate."""
        last = self.rates[-1]
        if rate <= last:
            return self._at(rate, self.missed)
        return 1 - (1 - self.missed[-1]) * last / rate  # as many good answers as at twice the capacity

    def setting(self, rate: float) -> Parameters:
        """Return the setting at the next played rate."""
        return self.settings[min(bisect_left(self.rates, rate), len(self.rates) - 1)]

    def _at(self, rate: float, values: Sequence[float]) -> float:
        after = bisect_left(self.rates, rate)
        low, under = (self.rates[after - 1], values[after - 1]) if after else (0.0, 0.0)
        high, over = self.rates[after], values[after]
        return under + (over - under) * (rate - low) / (high - low)


def needed(rate: float, capacity: float, least: int = 1) -> int:
    """Return the number of replicas that a rate needs."""
    return max(replicas(rate / capacity), least)


def carried(situation: Situation) -> Capacity:
    """Return what one replica serves within the SLO, in batches as large as were measured: a sidecar's `/capacity`."""
    return capacity(situation, _candidates(situation))


def unmeasured_beyond(situation: Situation) -> int | None:
    """Return the rows of the largest batch measured, where larger ones may serve more; no capacity counts those."""
    largest = situation.service.largest_measured
    return largest if _sizes(situation)[-1] > largest else None


def reliable(situation: Situation, parameters: Parameters) -> int:
    """Return the largest batch, in rows, for which a forecast of ``parameters`` has measurements."""
    limits = replace(situation.limits, max_batch=parameters.max_batch)
    return min(parameters.max_batch, max(largest_reliable(situation.service, limits), situation.usual_rows))


def fixed(situation: Situation, parameters: Parameters, load: Collection[float] = ()) -> Replica:
    """Return a replica whose parameters never change; its batches are no larger than what is ``reliable``.

    Its capacity is that of batches as large as were measured. ``load``, here and below: rates of all replicas together
    that matter most.
    """
    able = replace(parameters, max_batch=reliable(situation, parameters))
    largest = max(situation.service.largest_measured, situation.usual_rows)
    measured = replace(able, max_batch=min(able.max_batch, largest))
    found = _played(situation, capacity(situation, [measured]).rate, lambda _: able, load)
    return replace(found, settings=(parameters,) * len(found.settings))


def zero_wait(situation: Situation, load: Collection[float] = ()) -> Replica:
    """Return a replica that batches only what waits anyway, with the maximum size of the highest capacity."""
    best = _unheld(situation)
    return _played(situation, best.rate, lambda _: best.parameters, load)


def unbatched(situation: Situation, load: Collection[float] = ()) -> Replica:
    """Return a replica without batching, with as many requests at once as the device computes."""
    flights = known_flights(situation.service, situation.limits)
    return fixed(situation, Parameters(max_batch=situation.usual_rows, max_in_flight=flights), load)


def tuned(
    situation: Situation,
    aim: Aim,
    mode: PassThroughMode = PassThroughMode.AUTOMATIC,
    *,
    load: Collection[float] = (),
    now: Parameters | None = None,
) -> Replica:
    """Return one that the tuner adjusts to the load; at the situation's own it has ``now``."""
    # Zero wait is one of its settings: two searches that end 1 % apart are no difference between them.
    best = max(carried(situation), _unheld(situation), key=lambda each: each.rate)

    def parameters_at(at: Situation) -> Parameters:
        if now is not None and math.isclose(at.process.rate, situation.process.rate):
            return now
        return choose(Forecaster(at), aim, best.parameters, mode).target.parameters

    return _played(situation, best.rate, parameters_at, load)


def _unheld(situation: Situation) -> Capacity:
    """Return the capacity of the best maximum size without a wait."""
    unheld = {replace(each, max_wait=Duration(situation.limits.min_wait)) for each in _candidates(situation)}
    return capacity(situation, sorted(unheld, key=lambda each: -each.max_batch))


def _candidates(situation: Situation) -> list[Parameters]:
    return candidates(situation, _sizes(situation), known_flights(situation.service, situation.limits))


def _sizes(situation: Situation) -> list[int]:
    return productive_sizes(situation.service, situation.limits, also=situation.usual_rows)


def _played(
    situation: Situation,
    most: float,
    parameters_at: Callable[[Situation], Parameters],
    load: Collection[float],
) -> Replica:
    """Simulate a replica at shares of ``most``, its highest load within the SLO, and at its part of a few loads.

    Raises ``click.ClickException`` if ``most`` is 0.
    """
    if most <= 0:
        named, alone = parameters_at(situation).describe(), situation.service.time(situation.usual_rows)
        raise click.ClickException(
            f"no rate meets an SLO of {format_seconds(situation.target)} with {named}: a request takes "
            f"{format_seconds(alone)} by itself; it needs a longer SLO, or another setting"
        )
    parts = {rate / needed(rate, most) for rate in load if rate > 0}
    rates = sorted({share * most for share in LOADS} | (parts if len(parts) <= FEW else set()))
    busy, missed, settings = [], [], []
    for rate in rates:
        at = replace(situation, process=replace(situation.process, rate=rate))
        forecaster, parameters = Forecaster(at), parameters_at(at)
        found = forecaster.forecast(forecaster.effective(parameters), shed=True)
        executors = situation.service.executors
        busy.append(min(found.utilization * min(executors, parameters.max_in_flight) / executors, 1.0))
        missed.append(found.miss_fraction)
        settings.append(parameters)
    single = situation.service.time(situation.usual_rows) / situation.service.executors
    return Replica(most, tuple(rates), tuple(busy), tuple(missed), tuple(settings), single)
