"""The objective: which setting is chosen among those that meet the SLO now and at 1.25x the load.

- *Balanced*: the lowest mean latency that keeps utilization at or below the target. If no setting keeps it, the least
  device time.
- *Efficiency*: the least device time, at low load too.
- *Latency*: the lowest p99.

If no setting meets the SLO at 1.25x the load: the one that loses least of it. If none meets it now: the most goodput.
Beside other models each batch is all that waits (``Situation.is_crowded``): then only the wait is chosen.

Utilization is the used share of the device's capacity, over all batches that it can compute at once. It includes other
models behind the same sidecar, and other users of a shared device.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.forecaster import Assessment, Forecaster, Situation
from carpool.learning import batchable_share
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters
from carpool.policy.spec import BatchingPolicy, Objective, PassThroughMode
from carpool.tuning.candidates import SIZES, Grid, known_flights, largest_reliable, productive_sizes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool.learning.latency_model import ServiceTime

SLACK = 0.02
"""Utilization beyond the target that the setting in force may have: a hysteresis, so that a load at the edge does not
change settings back and forth. After a jump, while there are few arrivals to go by, it is up to three times as much."""

FASTER = 0.05
"""Relative gain of latency for which settings are changed."""

ALIKE = 0.02
"""Relative difference of latency below which pass-through is preferred: it merges and copies nothing."""

PASSING_IN_FLIGHT = 4
"""Requests passed through at once if the device computes fewer at once: it has its own queue."""

PASSING_LOAD = 0.7
"""Share of the device's capacity up to which requests may be sent one by one: above it there is mostly a backlog."""

ENTER_PASS_THROUGH = 0.05
LEAVE_PASS_THROUGH = 0.08
"""Saving of device time by batching below which *Efficiency* passes requests through; above it, it batches."""

MOSTLY_ALONE = 1.2
"""Mean batch, in requests, up to which a forecast of pass-through counts as sending requests one by one."""

OCTAVES, STEPS = 8, 4
"""*Balanced* compares waits down to the longest over 2**8, with 4 steps an octave: neighbours differ by 19 %."""

FINE = 400
"""Misses beyond the capacity are compared in steps of 1/400: 0.25 % of the requests."""

LEAST = 0.003
"""Relative difference of device time that counts as none: forecasts of 4,000 requests don't show less, and a change is
a message to every replica."""

SMALLEST = 5
"""Sizes compared, of those that can keep the target, besides the largest and the one in force."""


class Aim(Struct, frozen=True):
    """A policy's objective."""

    objective: Objective = Objective.EFFICIENCY
    target: float = 1.0
    """Utilization, 0 to 1, up to which latency comes first."""
    share: float = 1.0
    """Share of the device for the models behind this sidecar."""
    slack: float = SLACK
    """Utilization beyond the target that the setting in force may have."""

    @classmethod
    def of(cls, policy: BatchingPolicy, error: float = 0.0) -> Self:
        """Return a policy's aim; ``error``: relative standard error of the rate."""
        target = policy.target_utilization_percent / 100 if policy.objective is Objective.BALANCED else 1.0
        slack = min(max(SLACK, error * target), 3 * SLACK)
        return cls(policy.objective, target, policy.device_share_percent / 100, slack)

    @property
    def is_for_latency(self) -> bool:
        """Whether latency comes first while the target is kept."""
        return self.objective is not Objective.EFFICIENCY

    def utilization(self, one: Assessment) -> float:
        """Return the used share of the device's capacity, 0 to 1, under a setting, others included."""
        rest = one.situation.rest
        return min((rest * one.utilization + (1 - rest)) / self.share, 1.0)

    def latency(self, one: Assessment) -> float:
        """Return the latency (seconds) to minimize: the mean, or the p99."""
        return one.now.p99 if self.objective is Objective.LATENCY else one.mean

    def keeps_target(self, one: Assessment, slack: float = 0.0) -> bool:
        """Whether utilization is at or below the target."""
        return self.objective is Objective.LATENCY or self.utilization(one) <= self.target + slack


class Choice(Struct, frozen=True):
    """The best settings at the present load."""

    target: Assessment
    """By the objective."""
    efficient: Assessment
    """With the least device time; if none meets the SLO, with the least loss."""
    is_fast: bool = False
    """Whether ``target`` was chosen for its latency."""
    takes_all: bool = False
    """Whether its batches are all that waits: that needs no forecast, and shows batch latency without exploration."""


def choose(
    forecaster: Forecaster, aim: Aim, current: Parameters, mode: PassThroughMode,
    avoid: Collection[Parameters] = (), sizes: Sequence[int] | None = None,
) -> Choice:  # fmt: skip
    """Choose a setting; ``current`` is in force, ``avoid`` is left out; only ``sizes``, if given, are compared."""
    situation = forecaster.situation
    if situation.is_crowded:
        sizes = sizes or (all_that_waits(situation).max_batch,)
    sizes = sizes or productive_sizes(situation.service, situation.limits, also=current.max_batch)
    efficient = most_efficient(forecaster, current, sizes, avoid)
    if mode is PassThroughMode.ALWAYS or situation.share <= batchable_share.NONE:
        # Nothing is batched, so no request is held: all are forwarded as if there were no sidecar. In an overload they
        # wait here, where they can be refused. Only one waits at the server, so that it is never idle.
        limits, flights = situation.limits, situation.limits.max_in_flight
        if mode is not PassThroughMode.ALWAYS and not efficient.holds_now and forecaster.single_load() > 1:
            flights = max(limits.min_in_flight, min(flights, situation.service.executors_for(flights) + 1))
        passes = flights == limits.max_in_flight and mode is not PassThroughMode.NEVER
        point = replace(efficient.parameters, max_wait=Duration(0.0), max_in_flight=flights, pass_through=passes)
        return Choice(forecaster.assess(point), efficient)
    if situation.is_crowded and not efficient.holds_now:
        return Choice(forecaster.assess(all_that_waits(situation)), efficient, takes_all=True)
    if aim.is_for_latency and efficient.holds_ahead:
        fast = _fastest(forecaster, aim, efficient, current, mode, sizes, avoid)
        if fast is not None:
            return Choice(fast, efficient, is_fast=True)
    if mode is PassThroughMode.NEVER:
        return Choice(efficient, efficient)
    return Choice(_pass_or_batch(forecaster, efficient, current), efficient)


def all_that_waits(situation: Situation) -> Parameters:
    """Return the setting whose batches are all that waits, up to sizes that cost more per row, or miss the SLO alone.

    Of all models together as many are in flight as the server computes at once, or twice that if it may be more.
    """
    service, limits = situation.service, situation.limits
    largest = productive_sizes(service, limits, also=1)[-1]
    if largest >= largest_reliable(service, limits):
        largest = max(largest, Parameters().max_batch)  # as without a tuner, until larger ones are measured
    fit = (size for size in SIZES if size <= largest and situation.rest * service.time(size) <= situation.target)
    flights = math.ceil(situation.rest * known_flights(service, limits, 2))
    return limits.clamp(Parameters(max(fit, default=1), Duration(limits.min_wait), flights))


def rank(one: Assessment) -> tuple[float, ...]:
    """Return a key to sort settings by, the best first: by device time where the SLO is met with headroom."""
    if one.holds_ahead:
        return (0, one.device_time)
    lost_ahead = round(one.lost_ahead * FINE)
    if one.holds_now:
        # Without headroom, of settings that lose as much, the one with the shorter wait: the load fills its batches.
        return (1, round(one.glance.miss_fraction * FINE), lost_ahead, one.parameters.max_wait, one.device_time)
    if one.situation.is_out_of_reach:
        return (3, one.mean, -one.parameters.max_batch)  # none can be in time: then as soon as possible
    # If no request is in time, small batches, as many at once as can be computed, show soonest whether any can be.
    point = one.parameters
    return (2, round(one.lost * FINE), lost_ahead, point.max_wait, point.max_batch, -point.max_in_flight)


def is_better(one: Assessment, other: Assessment, share: float) -> bool:
    """Whether ``one`` is better than ``other`` by more than ``share``, in the figure that ranks them."""
    mine, theirs = rank(one), rank(other)
    if mine[0] != theirs[0]:
        return mine[0] < theirs[0]
    for place, (left, right) in enumerate(zip(mine[1:], theirs[1:], strict=True)):
        # Misses are counted in steps, and a few are no difference; then only the wait decides, without headroom.
        least = FINE / 4 if mine[0] == 2 or (mine[0] == 1 and place != 2) else 0.0
        if left < right - share * max(right, least):
            return True
        if left > right:
            return False
    return False


def most_efficient(
    forecaster: Forecaster, current: Parameters, sizes: Sequence[int], avoid: Collection[Parameters] = ()
) -> Assessment:
    """Return the setting with the least device time that meets the SLO now and at 1.25x the load; else the least loss.

    It has as many batches in flight as the known server concurrency, or as are in force.
    """
    situation = forecaster.situation
    flights = {known_flights(situation.service, situation.limits)}
    if not current.pass_through:
        flights.add(current.max_in_flight)
    grids = [Grid(forecaster, sizes, number, avoid) for number in sorted(flights)]
    found = [one for grid in grids for one in grid.with_headroom()]
    if not found:
        found = _least_loss([one for grid in grids for one in grid.unheld()])
        best = min(found, key=rank, default=forecaster.assess(current))
        if situation.service.executors > 1 and best.least_loss <= 0:
            # A backlog fills batches without a wait. But if the SLO leaves no time for a backlog, and several batches
            # are computed at once, a short wait keeps one of them free.
            found = _least_loss([best, *(one for grid in grids for one in grid.held(best.parameters.max_batch))])
    best = min(found, key=rank, default=forecaster.assess(current))
    # Of settings with equal device time, the one with the lowest latency.
    alike = [one for one in found if one.holds_ahead and one.device_time <= (1 + LEAST) * best.device_time]
    return min(alike, key=lambda one: one.mean, default=best)


def _least_loss(found: Sequence[Assessment]) -> list[Assessment]:
    """Return the settings with the least loss, by ``rank``; forecast only those that can be among them.

    A forecast with refusals takes 20 times as long as one without. Most of 20 sizes can't carry as much as the best.
    """
    if found and found[0].situation.is_out_of_reach:
        return [*found]
    if holding := [one for one in found if one.holds_now]:
        fewest = min(round(one.glance.miss_fraction * FINE) for one in holding)
        return [one for one in holding if round(one.glance.miss_fraction * FINE) == fewest]
    least = FINE
    best: list[Assessment] = []
    for one in sorted(found, key=lambda one: one.least_loss):
        if round(one.least_loss * FINE) > least:
            break
        lost = round(one.lost * FINE)
        if lost <= least:
            best = [*best, one] if lost == least else [one]
            least = lost
    return best


# ------------------------------------------------------------------------------------------------- pass-through


def passing(parameters: Parameters, service: ServiceTime, limits: Limits) -> Parameters:
    """Return the pass-through parameters in place of ``parameters``."""
    # Twice as many as were ever computed at once show whether more can be.
    flights = min(max(service.executors_for(2 * service.executors), PASSING_IN_FLIGHT), limits.max_in_flight)
    return replace(parameters, max_wait=Duration(0.0), max_in_flight=flights, pass_through=True)


def _passing(forecaster: Forecaster, parameters: Parameters) -> Assessment:
    return forecaster.assess(passing(parameters, forecaster.situation.service, forecaster.situation.limits))


def _pass_or_batch(forecaster: Forecaster, efficient: Assessment, current: Parameters) -> Assessment:
    """Return the setting with the least device time, or pass-through if batching saves too little of that."""
    through = _passing(forecaster, efficient.parameters)
    if not through.holds_ahead or forecaster.single_load() > PASSING_LOAD:
        return efficient
    enough = LEAVE_PASS_THROUGH if current.pass_through else ENTER_PASS_THROUGH
    if forecaster.saving(efficient, through) >= enough:
        return efficient
    # If a backlog soon ends pass-through, the forecast is one of batching without a wait.
    single = forecaster.situation.rows / forecaster.load().scale
    return through if through.now.mean_batch <= MOSTLY_ALONE * single else efficient


# ------------------------------------------------------------------------------------------------- latency first


def _fastest(
    forecaster: Forecaster, aim: Aim, efficient: Assessment, current: Parameters, mode: PassThroughMode,
    sizes: Sequence[int], avoid: Collection[Parameters],
) -> Assessment | None:  # fmt: skip
    """Return the setting with the least latency that keeps the utilization target and the SLO; ``None``: none does."""
    best = fastest_batching(forecaster, aim, efficient, current, sizes, avoid)
    slack = SLACK if current.pass_through else 0.0
    if mode is PassThroughMode.NEVER or forecaster.single_load() > PASSING_LOAD + 2 * slack:
        return best
    situation, service = forecaster.situation, forecaster.situation.service
    through = _passing(forecaster, (best or forecaster.assess(current)).parameters)
    # A backlog is forecast as batching; requests that come alone are forecast from single requests.
    flights = known_flights(service, situation.limits, 2)
    alone = forecaster.assess(Parameters(situation.usual_rows, Duration(0.0), flights))
    if not (alone.holds_ahead and aim.keeps_target(alone, slack)):
        return best
    limit = 1 + (FASTER if current.pass_through else ALIKE)
    if service.largest_measured <= situation.usual_rows:
        # Batch latency is unknown. If requests seldom overlap it hardly matters; if they do, those that overlap are
        # batched without a wait, and show it.
        if alone.mean <= limit * service.time(situation.usual_rows):
            return through
        size = current.max_batch if current.max_batch > situation.usual_rows and not current.pass_through else 0
        pairs = Parameters(size or 2 * situation.usual_rows, Duration(0.0), flights)
        return forecaster.assess(situation.limits.clamp(pairs))
    if best is None:
        return through
    is_alike = aim.latency(alone) <= limit * aim.latency(best) and alone.now.p99 <= (1 + FASTER) * limit * best.now.p99
    return through if is_alike else best


def fastest_batching(
    forecaster: Forecaster, aim: Aim, efficient: Assessment, current: Parameters, sizes: Sequence[int],
    avoid: Collection[Parameters] = (),
) -> Assessment | None:  # fmt: skip
    """Return the setting with the least latency that keeps the target, of those that batch requests."""
    flights = known_flights(forecaster.situation.service, efficient.situation.limits, 2)
    found = _least_waits(forecaster, aim, current, sizes, flights)
    found = sorted((one for one in found if one.parameters not in avoid), key=aim.latency)
    best = next((one for one in found if one.holds_ahead), None)
    if best is None:
        return None
    # Among equals the size in force stays: at low load all sizes are equal.
    alike = sorted(
        (one for one in found if aim.latency(one) <= (1 + ALIKE / 2) * aim.latency(best)),
        key=lambda one: (
            one.parameters.max_batch != current.max_batch,
            one.parameters.max_in_flight != current.max_in_flight,
            round(one.device_time, 6),
            -one.parameters.max_batch,
        ),
    )
    return next(one for one in alike if one.holds_ahead)


def _least_waits(
    forecaster: Forecaster, aim: Aim, current: Parameters, sizes: Sequence[int], flights: int
) -> list[Assessment]:
    """Assess for each size, largest first, the shortest wait that keeps the target; smaller ones need none shorter."""
    waits = forecaster.situation.limits.waits((0.0, *(2 ** (-step / STEPS) for step in range(OCTAVES * STEPS + 1))))

    def at(size: int, wait: int) -> Assessment:
        return forecaster.assess(Parameters(size, waits[wait], flights))

    found: list[Assessment] = []
    shortest, last = 0, len(waits) - 1
    for size in reversed(_able(forecaster, aim, current, sizes, flights)):

        def keeps_target(wait: int, size: int = size) -> bool:
            return aim.keeps_target(at(size, wait))

        if not keeps_target(shortest):
            if size == 1 or not keeps_target(last):
                continue
            shortest = bisect_left(range(last), True, shortest + 1, key=keeps_target)
        found.append(at(size, shortest))
    return found


def _able(forecaster: Forecaster, aim: Aim, current: Parameters, sizes: Sequence[int], flights: int) -> list[int]:
    """List sizes, ascending, that keep the target if all batches are full: the smallest, the largest, that in force."""
    situation = forecaster.situation
    service, rows = situation.service, situation.process.rate * situation.rows
    concurrency, rest = min(service.executors, flights), situation.rest
    room = (aim.share * aim.target if aim.objective is Objective.BALANCED else 1.0) - (1 - rest)
    cheapest = accumulate(map(service.per_row, sizes), min)
    able = [size for size, least in zip(sizes, cheapest, strict=True) if rows * rest * least <= room * concurrency]
    return sorted({*able[:SMALLEST], *able[-1:], *({current.max_batch} & {*able})})
