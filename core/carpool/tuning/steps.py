"""Steps from one configuration to another: which gain enough to be taken, how far one may go, and what it is for."""

from __future__ import annotations

from math import inf, sqrt
from statistics import stdev
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.learning.change_detection import width
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PassThroughMode
from carpool.tuning import objective
from carpool.tuning.assessment import KEPT
from carpool.tuning.search import LEAST, is_better

if TYPE_CHECKING:
    from carpool.tuning.assessment import Assessment, Assessor
    from carpool.tuning.search import Choice

WORTH = 0.02
"""Relative gain for which parameters are changed, though half of it may be chance: having changed tells."""

ENTER_PASS_THROUGH = 0.05
LEAVE_PASS_THROUGH = 0.08
"""Saving of device time by batching below which requests pass through, and above which they stop to however unsure."""

MOSTLY_ALONE = 1.2
"""Mean batch, in requests, up to which what passes through is forecast to."""

UNSURE = 0.1
"""Share of the width of t(b)'s confidence interval, relative to it, that a gain has to exceed for that."""

WIDE = 3.92
"""Standard errors from one end of a 95 % interval to the other."""


def is_clearly_worth(target: Assessment, current: Assessment) -> bool:
    """Whether the target is a gain that nobody needs to weigh: what sizes never measured may be tried on the way to."""
    doubt = width(target.situation.service, target.parameters.max_batch)
    return is_better(target, current, max(WORTH, UNSURE * doubt))


class Gain(NamedTuple):
    """What executors are spared, as a share of their time in the present configuration."""

    share: float
    error: float
    """Its standard error: of t(b) at the sizes that become more and fewer, and of no more arrivals than were played;
    ``inf`` of several length buckets' batches, of which the mix's t(b) says too little."""


def is_worth(target: Assessment, current: Assessment) -> bool:
    """Whether the target is enough of a gain to change anything for it.

    Where both hold at a higher load too, a small saving of device time is, if it exceeds what chance leaves open of it.
    """
    if is_clearly_worth(target, current):
        return True
    if not (current.holds_ahead and target.holds_ahead and is_better(target, current, LEAST)):
        return False
    found = gain(target, current)
    return found.share > max(LEAST, found.error)


def gain(target: Assessment, current: Assessment) -> Gain:
    """Compare the batches that two configurations make of the same arrivals.

    In the mean of t(b): draws of noise, one a batch, differ between them by more than a small gain. Sizes that both
    make as many of are as uncertain for both, which leaves nothing open; the others may all be off to the same side.
    """
    service = target.situation.service
    saved: list[float] = []
    before = 0.0
    differ: dict[int, int] = {}
    for mine, theirs in zip(target.outlook.mix, current.outlook.mix, strict=True):
        seconds = sum(count * service.time(rows) for rows, count in theirs.items())
        saved.append(seconds - sum(count * service.time(rows) for rows, count in mine.items()))
        before += seconds
        for rows in {*mine, *theirs}:
            differ[rows] = differ.get(rows, 0) + mine[rows] - theirs[rows]
    of_times = sum(abs(count) * (service.upper(rows) - service.lower(rows)) for rows, count in differ.items()) / WIDE
    of_arrivals = sqrt(len(saved)) * stdev(saved)
    return Gain(sum(saved) / before, inf if service.mix else sqrt(of_times**2 + of_arrivals**2) / before)


def without_vain_wait(assessor: Assessor, current: Assessment, target: Assessment) -> Assessment:
    """Return what to turn to in place of ``target`` where requests have no company: a wait that holds nothing is none.

    Sizes stay as they are then, unless others are a gain: what waits for a slot is batched all the same.
    """
    if target.parameters.pass_through or assessor.holds(target.parameters.max_wait):
        return target
    kept = target if is_worth(target, current) or current.parameters.pass_through else current
    wait = min(Duration(assessor.situation.limits.min_wait), kept.parameters.max_wait)
    return assessor.assess(replace(kept.parameters, max_wait=wait))


def pass_or_batch(assessor: Assessor, choice: Choice, mode: PassThroughMode) -> Assessment:
    """Return the setting with the least device time, or pass-through where batching saves too little of that."""
    present = choice.current.parameters
    if mode is PassThroughMode.NEVER:
        return without_vain_wait(assessor, choice.current, choice.best)
    situation = assessor.situation
    passing = assessor.assess(
        objective.passing(choice.best.parameters, situation.service, situation.limits),
        KEPT if present.pass_through else 1.0,
    )
    if mode is PassThroughMode.ALWAYS:
        return passing
    best = without_vain_wait(assessor, choice.current, choice.best)
    if not passing.holds_ahead or assessor.passing_load() > objective.PASSING_LOAD:
        return best
    saving = assessor.saving(choice.best, passing)
    enough = ENTER_PASS_THROUGH
    if present.pass_through and enough <= saving < LEAVE_PASS_THROUGH:
        # Which of the two is in force may depend on the past only as far as chance leaves it open.
        enough += gain(choice.best, passing).error
    if saving >= enough:
        return best
    # Where a backlog soon ends it, what was forecast is merging without a wait, and no passing through.
    return passing if passing.now.mean_batch <= MOSTLY_ALONE * situation.rows else best


def toward(current: Parameters, target: Parameters, factor: float, largest: int) -> Parameters:
    """Go from ``current`` towards ``target``: per step at most ``factor``, or one row, or one millisecond more.

    ``largest`` is the largest batch measured; growth stops at twice that. Downwards a step may be of any size.
    """
    size = min(target.max_batch, max(int(current.max_batch * factor), current.max_batch + 1))
    size = min(size, max(2 * largest, current.max_batch))
    wait = min(target.max_wait, max(current.max_wait * factor, current.max_wait + 0.001))
    flights = min(target.max_in_flight, max(int(current.max_in_flight * factor), current.max_in_flight + 1))
    return Parameters(
        max_batch=size,
        max_wait=Duration(whole_microseconds(wait)),
        max_in_flight=flights,
        pass_through=target.pass_through,
    )


def why(choice: Choice, target: Assessment) -> tuple[Reason, str]:
    """Say what the move to ``target`` is for."""
    current = choice.current
    if target.parameters.pass_through:
        saving = max(1 - choice.best.device_time / target.device_time, 0.0)
        return (
            Reason.PASSES_THROUGH,
            f"merging would save {saving:.1%} of the device time at this load: too little; requests pass one by one",
        )
    saving = 1 - target.now.device_time / current.now.device_time if current.now.device_time else 0.0
    times = f"{format_seconds(current.now.device_time)} to {format_seconds(target.now.device_time)} a request"
    ahead = f"p99 forecast {format_seconds(target.now.p99)} now, {format_seconds(target.ahead.p99)} at 1.25x the load"
    if target.holds_now and not current.holds_now:
        return Reason.RESTORES_SLO, f"the present configuration is forecast to miss the SLO; {ahead}"
    if target.holds_ahead and not current.holds_ahead:
        return Reason.MORE_MARGIN, f"holds at 1.25x the load too; {ahead}"
    if target.holds_ahead:
        # Executors' time may be what is saved, while at least one of them is busy all the same.
        falls = f"falls {saving:.{0 if saving >= 0.01 else 1}%}, " if saving >= LEAST else ""
        return Reason.SAVES_DEVICE_TIME, f"device time {falls}{times}; {ahead}"
    if target.holds_now:
        return Reason.MORE_MARGIN, f"no configuration holds at 1.25x the load; this one leaves the most room; {ahead}"
    if not target.now.goodput:
        return Reason.EXPLORES, "nothing measured so far is forecast to keep the SLO; a smaller batch may"
    good = f"{current.now.goodput:.0f} to {target.now.goodput:.0f} good answers/s"
    return Reason.MORE_GOODPUT, f"{shortfall(target)}; {good}, late requests are refused"


def shortfall(best: Assessment, among: str = "") -> str:
    """Say by how much the best configuration, ``among`` some, misses the SLO.

    Its p99 is of the requests that are answered, and may be inside the SLO while many are refused. The bound is the
    planning budget: half of the misses that the SLO allows.
    """
    share, budget = best.now.miss_fraction, best.situation.budget
    late = f"{share:.1%} late or refused, {budget:.1%} is the most planned for"
    return f"no configuration{among} meets the SLO at this load: {late}"
