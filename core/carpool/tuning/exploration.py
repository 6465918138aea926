"""Exploration: a setting is put in force for a few batches, because its latency can only be measured that way.

The choice is made a second time with an optimistic estimate: a size never measured takes no longer than the next
smaller well measured one, a size measured a few times has its lower confidence, and the server concurrency is as high
as not refuted. A setting chosen that way that saves enough is explored if it makes no requests late at the upper
confidence of batch latency, or no more than the unused part of the error budget covers. (Optimism in the face of
uncertainty: Lai and Robbins 1985; limited by savings: Wu et al., "Conservative Bandits", ICML 2016.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.forecasting.forecaster import Assessment, Forecaster
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters
from carpool.tuning.candidates import SIZES, known_flights, largest_reliable, productive_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool.batching.counters import ModelStats

BATCHES = 3
UNSURE = 0.06
"""Relative error at which a size's latency is known: 3 batches, and more of a noisy model; 28 at a CV of 30 %."""

GAIN = 0.05
"""Share of device time, or of goodput, that an unmeasured size must be able to save or gain."""

SPENDS = 0.05
"""Share of the credit that one exploration may use: 0.15 s of requests, if none was late for 5 minutes."""

LEAST_CREDIT = 3.0
"""Requests that may be late in an exploration that was forecast to make none late."""

LOSES = 3.0
"""Seconds' worth of requests that exploration beyond the capacity may lose at most."""

LASTS = 20.0
"""Seconds after which an exploration ends without a result; the next one of that setting waits twice as long."""

EXPOSED = 1.0
"""Seconds that a failing exploration makes requests late: it ends at the next observation after ``BATCHES`` batches."""

SAVED = 300.0
"""The unused error budget of so many seconds can be used."""

TAKES = 2 / 3
"""Share of the SLO that the latency of a batch of copies may use."""

DEARER = 1.5
"""Times the cost per row of the cheapest size up to which a size may matter for the capacity."""

RISE = 1.25
"""Factor on the load of the last search for candidates that starts another: a higher load fills other batches."""


class _Trial(NamedTuple):
    parameters: Parameters
    beyond: int
    """Rows of the largest well measured batch below the explored size."""
    until: float
    credit: float
    """Requests that may still be late."""
    more_in_flight: bool
    """Whether it measures server concurrency instead of a size's latency."""
    left: float
    """Batches still needed."""
    served: float
    """When that many may have ended, one after the other."""


class Exploration:
    """Present and past explorations, and the credit for them. Times in seconds."""

    def __init__(self) -> None:
        self.candidate: Parameters | None = None
        """The setting worth exploring; ``None``: none."""
        self.spare = 0.0
        """Credit: requests that exploration may make late at a replica that explores."""
        self._trial: _Trial | None = None
        self._pauses: dict[tuple[int, int], tuple[float, float]] = {}
        """By size and batches in flight: when it may be explored again, and the pause after one without a result."""
        self._looked_at = inf
        """Requests per second at the last search for candidates on the way to another setting."""

    @property
    def is_under_way(self) -> bool:
        """Whether the setting in force is explored, so that better ones have to wait."""
        return self._trial is not None

    @property
    def measured(self) -> int | None:
        """Rows of the largest well measured batch below the explored size; ``None``: no size is explored."""
        trial = self._trial
        return trial.beyond if trial is not None and not trial.more_in_flight else None

    def begin(self, parameters: Parameters, before: Parameters, service: ServiceTime, now: float) -> None:
        """Note that ``parameters`` are put in force to be explored, in place of those ``before``."""
        key = parameters.max_batch, parameters.max_in_flight
        self._pauses[key] = (inf, 2 * self._pauses.get(key, (0.0, LASTS / 2))[1])
        # As many may be in force already, and never have been in flight: then only a new size shows anything sooner.
        is_known = parameters.max_batch in service.measured_sizes(batches_needed(service))
        more = parameters.max_in_flight > max(service.executors, service.largest_in_flight) and (
            is_known or parameters.max_in_flight > before.max_in_flight
        )
        credit, left = max(SPENDS * self.spare, LEAST_CREDIT), batches_needed(service)
        served = now + left * service.time(parameters.max_batch)
        self._trial = _Trial(parameters, below(service, parameters.max_batch), now + LASTS, credit, more, left, served)
        self.candidate = None

    def observe(
        self, now: float, stats: ModelStats, late: float, service: ServiceTime, *, misses: bool = False
    ) -> bool:
        """Count batches that measure the setting, and ``late`` requests; return whether the exploration ended.

        ``misses``: no setting meets the SLO. Then requests are late anyway until a size has had its batches.
        """
        trial = self._trial
        if trial is None:
            return False
        size, flights = trial.parameters.max_batch, trial.parameters.max_in_flight
        if trial.more_in_flight:
            left = 0 if service.largest_in_flight >= flights else trial.left
        else:
            sizes = (cell[4] for cell in stats.cells if not cell[3] and trial.beyond < cell[1] <= size)
            left = trial.left - sum(sizes)
        spent = 0.0 if misses and not trial.more_in_flight and now < trial.served else late
        self._trial = trial._replace(left=left, credit=trial.credit - spent)
        if left > 0 and now < trial.until and self._trial.credit > 0:
            return False
        if left > 0:
            self.interrupt(now)
        self._trial = None
        return True

    def interrupt(self, now: float) -> None:
        """End it without a result. The same setting is not explored again for a while, longer each time."""
        if self._trial is not None:
            key = self._trial.parameters.max_batch, self._trial.parameters.max_in_flight
            pause = self._pauses[key][1]
            self._pauses[key] = (now + pause, pause)
            self._trial = None

    def stop(self, *, forgets: bool = False) -> None:
        """Break off, after another load or misses; it may be explored again. ``forgets``: so may every other."""
        if self._trial is not None:
            self._pauses.pop((self._trial.parameters.max_batch, self._trial.parameters.max_in_flight), None)
            self._trial = None
        if forgets:
            self._pauses = {}

    def earn(self, budget: float, hits: int, late: float, explorers: int, rate: float) -> None:
        """Add the unused error budget to the credit; the ``explorers`` share that of all replicas."""
        self.spare += (2 * budget * (hits + late) - late) / explorers
        self.spare = min(max(self.spare, 0.0), 2 * budget * SAVED * rate)

    def is_due(self, rate: float, *, leaves: bool) -> bool:
        """Whether to look for a candidate while the SLO is met: on the way to another setting, or at a higher load."""
        due = (leaves or rate >= RISE * self._looked_at) and not self.is_under_way
        self._looked_at = rate if due else self._looked_at
        return due

    def look(self, forecaster: Forecaster, best: Assessment, current: Assessment, *, moving: bool, now: float) -> None:
        """Look for a candidate; ``moving``: whether the setting in force changes anyway.

        Nothing is explored beside other models, and when nothing changes with headroom: what saves nothing is undone.
        """
        self.candidate = None
        situation = forecaster.situation
        if situation.is_crowded or (best.holds_ahead and not moving):
            return
        best_case = optimistic(situation.service, largest_reliable(situation.service, situation.limits))
        for point in _candidates(best, best_case):
            until = self._pauses.get((point.max_batch, point.max_in_flight), (-inf, 0.0))[0]
            if point == current.parameters or until > now:
                continue
            service = replace(best_case, executors=best_case.executors_for(point.max_in_flight))
            possible = Forecaster(replace(situation, service=service)).assess(point)
            if is_worth_exploring(possible, best) and self._is_bearable(forecaster, point, best):
                self.candidate = point
                return

    def _is_bearable(self, forecaster: Forecaster, point: Parameters, best: Assessment) -> bool:
        """Whether a setting does no harm at the upper confidence of batch latency, or what can be paid for."""
        situation, service, one = forecaster.situation, forecaster.situation.service, forecaster.assess(point)
        # That no more are computed at once shows with the first batch that waits for it: it costs a few batches.
        more = point.max_in_flight > service.executors
        if not best.holds_now:
            # A backlog fills its batches, and then it ends: six of 0.2 s lose the requests of 1.2 s at most.
            lasts = min(batches_needed(service) * service.upper(point.max_batch), LASTS)
            return more or (one.lost_ahead - best.lost_ahead) * lasts <= LOSES
        # In the first ``EXPOSED`` seconds after an empty queue fewer are late: a backlog takes time to grow.
        count = ceil(EXPOSED * situation.process.rate) if more else 0
        risk = min(one.risk, forecaster.glance(one.effective, count=count, upper=True).miss_fraction)
        return risk <= situation.budget or risk * EXPOSED * situation.process.rate <= SPENDS * self.spare


def is_worth_exploring(possible: Assessment, best: Assessment) -> bool:
    """Whether a setting gains enough by the optimistic estimate, and can be measured soon."""
    if not best.holds_now:
        gains = possible.holds_now or possible.now.goodput > (1 + GAIN) * best.now.goodput
    elif possible.is_overload_ahead:
        gains = False
    else:
        saves = possible.first.device_time <= (1 - GAIN) * best.device_time
        gains = (saves or not best.holds_ahead) and possible.holds_ahead
    more = possible.parameters.max_in_flight > best.parameters.max_in_flight
    return gains and (more or _is_filled(possible, below(best.situation.service, possible.parameters.max_batch)))


def _is_filled(possible: Assessment, beyond: int) -> bool:
    """Whether enough batches of more than ``beyond`` rows come within half of an exploration's time."""
    sizes, situation = possible.batches, possible.situation
    count = sum(size * situation.rows > beyond for size in sizes)
    return count * LASTS / 2 >= batches_needed(situation.service) * sum(sizes) / situation.process.rate


def _candidates(best: Assessment, best_case: ServiceTime) -> Iterator[Parameters]:
    """Yield settings that would measure something new: other sizes, the cheapest first, and more in flight."""
    situation, known = best.situation, best.parameters
    service, limits = situation.service, situation.limits
    waits = {known.max_wait}
    if best.holds_now or (service.executors > 1 and best.least_loss <= 0):
        waits.update(limits.waits((1 / 16, 0.25, 0.5, 1)))
    if not best.holds_ahead:
        waits.add(Duration(limits.min_wait))
    flights, executors = known.max_in_flight, service.executors
    if executors >= service.largest_in_flight:
        # With 29 ms batches within 50 ms, four on a device that computes two would be late, and three are not.
        numbers = {min(more, limits.max_in_flight) for more in (executors + 1, 2 * executors, 4 * executors)}
        for more in sorted((more for more in numbers if more > executors), reverse=True):
            yield replace(known, max_in_flight=more, pass_through=False)
    known_well = service.measured_sizes(batches_needed(service))
    largest = largest_reliable(service, limits)
    sizes = [size for size in SIZES if limits.min_batch <= size <= largest and size not in known_well]
    for size in sorted(sizes, key=lambda size: (best_case.per_row(size), size)):
        # With more in flight than are computed at once, the device has the backlog that would fill batches.
        for number in sorted({flights, known_flights(service, limits)}):
            for wait in sorted(waits):
                yield Parameters(size, wait, number)


def optimistic(service: ServiceTime, largest: int) -> ServiceTime:
    """Return an optimistic estimate of batch latency.

    Well measured sizes keep their latency; a size measured seldom gets its lower confidence; a size never measured
    takes no longer than the next smaller well measured one.
    """
    known_well = service.measured_sizes(batches_needed(service)) or list(service.sizes[:1])
    seconds = {size: service.time(size) for size in known_well}
    for size in SIZES:
        if known_well[0] < size <= largest and size not in seconds:
            least = service.lower(service.sizes[max(bisect_right(service.sizes, size) - 1, 0)])
            seconds[size] = max(service.upper(_well_known(service, size)), least)
            if size in service.sizes:
                seconds[size] = max(service.lower(size), seconds[known_well[0]])
    rising = 0.0
    for size in sorted(seconds):
        rising = seconds[size] = max(rising, seconds[size])
    curve = ServiceTime.measured(seconds, noise=service.noise)
    mix = tuple((share, optimistic(each, largest)) for share, each in service.mix)
    return replace(curve, executors=service.executors, largest_in_flight=service.largest_in_flight, mix=mix)


def to_measure(service: ServiceTime, limits: Limits, target: float) -> tuple[int, ...]:
    """Return the rows of batches of copies that would show the capacity, those that show most first.

    At low load no batch is as large as those of a full replica. The least known size comes first: its latency lies
    between the optimistic estimate and that of the next larger measured one. At most twice the largest known size; its
    latency at most ``TAKES`` of ``target`` (seconds), since requests that come meanwhile wait, and surely within it.
    """
    best_case = optimistic(service, largest_reliable(service, limits))

    def least(size: int) -> float:
        return best_case.time(size) if size <= service.largest_measured else service.lower(size)

    def doubt(size: int) -> tuple[float, int]:
        above = min((each for each in service.sizes if each >= size), default=size)
        return service.upper(above) / best_case.time(size), size

    sizes = productive_sizes(service, limits, also=1, least=least)
    able = [size for size in sizes if service.time(size) <= TAKES * target and service.upper(size) <= target]
    # A capacity rests on sizes that fit twice into the SLO, if any do: a request may wait for the batch before.
    fit = [size for size in able if 2 * service.time(size) <= target] or able
    cheap = DEARER * min((service.per_row(size) for size in fit), default=0.0)
    known = service.measured_sizes(batches_needed(service))
    matter = (size for size in able if size not in known and least(size) <= cheap * size)
    return tuple(sorted(matter, key=doubt, reverse=True))


def batches_needed(service: ServiceTime) -> float:
    """Return how many batches are needed for the latency of a size."""
    return BATCHES + (service.noise / UNSURE) ** 2


def below(service: ServiceTime, size: int) -> int:
    """Return the largest measured size below another, among sizes up to the largest well measured one."""
    return service.largest_measured if size > service.largest_measured else _well_known(service, size)


def _well_known(service: ServiceTime, size: int) -> int:
    """Return the largest size below another that was measured well enough."""
    known_well = service.measured_sizes(batches_needed(service))
    index = bisect_left(known_well, size)
    return known_well[index - 1] if index else service.sizes[0]
