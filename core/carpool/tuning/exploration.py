"""Sizes never measured: which is worth a try though nothing measured says so, and what became of it.

t(b) may go up in steps (tiles of a matrix unit, kernels chosen by size): sizes within and just beyond the first step
say nothing of what comes after it, and rows look dearer the further one goes. What is certain is that a larger batch
takes no less time than a smaller one, which bounds what it can save: optimism in the face of uncertainty (Lai and
Robbins 1985), with the loss bounded by the upper confidence of t(b) and by how few batches a try takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.learning.change_detection import width
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.tuning.assessment import Assessor
from carpool.tuning.candidate_range import SIZES, spoken_for
from carpool.tuning.steps import ENTER_PASS_THROUGH, WORTH, gain, is_worth

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from carpool.batching.counters import ModelStats
    from carpool.policy.parameters import Limits, Parameters
    from carpool.tuning.assessment import Assessment
    from carpool.tuning.search import Choice

GAIN = 0.05
"""Share of device time, or of goodput, that a try has to be able to gain: more than what parameters are changed for."""

RISE = 1.25
"""Load, relative to that at which tries were last looked for, from which they are again: it fills other batches."""

TELLING = 3
"""Batches of a size not measured that tell what it takes."""

HURTS = 1.0
"""Seconds for which one that fails does harm: it is over with the next observation after ``TELLING`` batches."""

LOSES = 0.15
"""Share of the requests that a try beyond the capacity may lose at most while it lasts, for all that is sure of t(b): a
size far below what the load needs may cost most of them."""

LASTS = 10.0
"""Seconds after which a try that was not filled is given up; each later one of that size is put off twice as long."""


SPARED = 300.0
"""Seconds' worth of misses that the SLO allows, and were not made, that are kept for tries."""


class _Try(NamedTuple):
    beyond: int
    """Rows of the next smaller batch measured before."""
    until: float
    size: int
    left: int = TELLING
    """Batches between these to be seen yet."""


class Dares:
    """Which sizes never measured were tried, and what is being tried now. Times in seconds."""

    def __init__(self) -> None:
        """Begin with nothing tried."""
        self._now: _Try | None = None
        self._pauses: dict[int, tuple[float, float]] = {}
        """By size: not again before, and for how long after a try that told nothing."""

    @property
    def trying(self) -> bool:
        """Whether a try is under way, so that what seems better has to wait for what it tells."""
        return self._now is not None

    def may(self, size: int, now: float) -> bool:
        """Whether a size is due for a try."""
        return self._pauses.get(size, (-inf, 0.0))[0] <= now

    def begin(self, size: int, beyond: int, now: float) -> None:
        """Note that ``size`` is put in force, while ``beyond`` is the next smaller measured."""
        _, pause = self._pauses.get(size, (0.0, LASTS / 2))
        self._pauses[size] = (inf, 2 * pause)
        self._now = _Try(beyond, now + LASTS, size)

    def observe(self, now: float, stats: ModelStats) -> bool:
        """Count what tells; return whether a try just ended."""
        current = self._now
        if current is None:
            return False
        left = current.left - sum(
            batches for _, rows, _, _, batches, *_ in stats.cells if current.beyond < rows <= current.size
        )
        self._now = current._replace(left=left)
        if left > 0 and now < current.until:
            return False
        if left > 0:
            pause = self._pauses[current.size][1]
            self._pauses[current.size] = (now + pause, pause)
        self._now = None
        return True

    def stop(self) -> None:
        """Break off: the load moved, or the SLO is not kept. What was not told may be tried again."""
        if self._now is not None:
            del self._pauses[self._now.size]
            self._now = None

    def forget(self) -> None:
        """Let everything be tried again: the model is another."""
        self._now = None
        self._pauses = {}


class Exploration:
    """What is to be tried next, and what may be lost by it."""

    def __init__(self) -> None:
        """Begin with nothing to try, and nothing spared."""
        self.tries = Dares()
        self.bold: Parameters | None = None
        """What would tell of a size never measured, if that is worth a try."""
        self.is_in_force = False
        """Whether the present parameters are a try, which is left again whatever was tried before."""
        self.spare = 0.0
        """Requests of a replica that were not late and might have been: what a try may cost."""
        self._looked_with = 0.0
        """As many when a try was last looked for."""
        self._looked_at = inf
        """Requests per second at which one was last looked for on the way to another setting."""
        self.brighter: Assessment | None = None
        """What is turned to in place of the best: as good for all that is known, and less of it is."""
        self._hopes_until = inf
        """When it is no more in place of pass-through; ``inf``: not begun; ``-inf``: over, until load or t(b) move."""

    @property
    def is_under_way(self) -> bool:
        """Whether a setting is in force to tell what it takes."""
        return self.tries.trying or self.is_in_force

    def begin_epoch(self, *, another_model: bool) -> None:
        """Break off what is under way: the load or the model moved."""
        self._hopes_until = inf
        self.tries.stop()
        if another_model:
            self.tries.forget()

    def earn(self, budget: float, hits: int, late: float, replicas: int, rate: float) -> None:
        """Count the misses that the SLO allows, and that were not made; those of the last ``SPARED`` seconds count."""
        self.spare += (2 * budget * (hits + late) - late) / replicas
        self.spare = min(max(self.spare, 0.0), 2 * budget * SPARED * rate)

    def hope_ends(self, now: float) -> bool:
        """Return whether the time for what may turn out better than passing through is just over."""
        over = now >= self._hopes_until > -inf
        if over:
            self._hopes_until = -inf
        return over

    def is_affordable(self) -> bool:
        """Whether so much more is spared than when a try was last looked for that it is worth another look."""
        return self.spare >= 2 * max(self._looked_with, 1.0) and not self.tries.trying

    def is_due(self, rate: float, *, leaves: bool) -> bool:
        """Whether a try would be on the way: to another setting, or to a higher load."""
        due = leaves or rate >= RISE * self._looked_at
        if due:
            self._looked_at = rate
        return due

    def look(
        self, assessor: Assessor, choice: Choice, avoid: Collection[Parameters], *, moving: bool, now: float
    ) -> None:
        """Ask which size never measured is worth a try, for as much as may be lost by it."""
        self.bold = bolder(
            assessor, choice, avoid, moving=moving, spare=self.spare, may=lambda size: self.tries.may(size, now)
        )

    def begin(self, size: int, beyond: int, now: float) -> None:
        """Note that what tells of ``size`` is put in force, while ``beyond`` is the next smaller measured."""
        self.bold = None
        self.tries.begin(size, beyond, now)

    def give_up_looking(self) -> None:
        """Try nothing: there is nothing to be gained, or no forecast to go by."""
        self.bold, self._looked_with = None, self.spare

    def hope_beside_passing(
        self, assessor: Assessor, best: Assessment, passing: Assessment, avoid: Collection[Parameters], now: float
    ) -> Assessment | None:
        """Return what may turn out better than passing through, from where nothing tells what company would cost.

        A wait that saves nothing is not for long.
        """
        if self._hopes_until == -inf:
            return None
        found = brighter(assessor, best, passing, ENTER_PASS_THROUGH, avoid)
        if found is not None:
            self._hopes_until = min(self._hopes_until, now + LASTS)
        return found


def bolder(
    assessor: Assessor,
    choice: Choice,
    avoid: Collection[Parameters],
    *,
    moving: bool,
    spare: float = 0.0,
    may: Callable[[int], bool] = lambda _: True,
) -> Parameters | None:
    """Return what would tell of the most promising size never measured that ``may`` be tried; ``None``: nothing would.

    Of twice the largest size measured, and of those left out between the sizes measured: batches are mostly full near
    the capacity, so nobody meets them by chance. Worth it: were the larger batch as quick as the next smaller measured,
    a request would cost ``GAIN`` less; in overload the SLO would be kept, or ``GAIN`` more be answered in time.
    Bearable, where the SLO is kept: at the upper confidence of t(b) it stays so; where there is no room for more load
    anyway, for as long as a try can do harm, or with no more late ones than ``spare``: as many as a replica might have
    had by the SLO, and had not (Wu et al., "Conservative Bandits", ICML 2016: who explores spends what was saved).
    Where there is, a try is made only on the way from one configuration to another, or at a higher load (``moving``):
    at rest, one that saves nothing would have to be taken back.
    """
    service, limits = assessor.situation.service, assessor.situation.limits
    roomy = choice.best.holds_now and choice.best.holds_ahead
    if roomy and not moving:
        return None
    largest = service.largest_measured
    sizes = _left_out(service, limits)
    farthest = spoken_for(service, limits)
    # Where the search leads there anyway it is turned to, not tried: unless it is too unsure of t(b) for that.
    heading = choice.best.parameters.max_batch if is_worth(choice.best, choice.current) else 0
    if max(largest, heading) < farthest:
        sizes.append(farthest)
    cheapest = min(service.per_row(rows) for rows in range(1, largest + 1))
    for cost, size in sorted((_quick(service, size) / size, size) for size in sizes if may(size)):
        if cost > (1 - _gain(service)) * cheapest:
            break
        point = _try_of(assessor, choice, size, avoid, spare)
        if point is not None:
            return point
    return None


def brighter(
    assessor: Assessor, best: Assessment, beside: Assessment, least: float, avoid: Collection[Parameters]
) -> Assessment | None:
    """Return, of sizes as good as ``beside`` for all that is known, the one that may turn out to save the most.

    If that is ``least`` of its device time; ``best`` is what they are to be alike in all else. A few lucky or unlucky
    batches stand behind most sizes, and who rests at the best of these, or lets requests pass, runs no other: so one is
    turned to, on the way, that may be better still.
    """
    limits, service = assessor.situation.limits, assessor.situation.service
    if not best.holds_ahead:
        return None
    doubt = 0.0 if beside.parameters.pass_through else width(service, beside.parameters.max_batch)
    found, most = None, least
    for size in SIZES:
        point = replace(best.parameters, max_batch=size)
        if size not in service.sizes or not limits.min_batch <= size <= limits.max_batch or point in avoid:
            continue
        if width(service, size) <= doubt or not (one := assessor.assess(point)).holds_ahead:
            continue
        if not _tells_soon(one):
            continue
        more = gain(one, beside)
        promised = more.share + 2 * more.error
        if more.share >= -WORTH and most < promised < inf:
            found, most = one, promised
    return found


def _tells_soon(one: Assessment) -> bool:
    """Whether so many full batches come within ``LASTS`` that they tell what they take."""
    situation, mix = one.situation, one.outlook.mix
    full = sum(part[one.parameters.max_batch] for part in mix)
    requests = sum(rows * count for part in mix for rows, count in part.items()) / situation.rows
    return full * LASTS * situation.process.rate >= TELLING * requests


def _gain(service: ServiceTime) -> float:
    """Return what a try has to be able to gain: less than what chance makes of so few batches would not show."""
    return max(GAIN, service.noise / sqrt(TELLING))


def below(service: ServiceTime, size: int) -> int:
    """Return the largest size below another that was measured, within what was measured at all well enough to tell."""
    return service.largest_measured if size > service.largest_measured else _well_known(service, size)


def _quick(service: ServiceTime, size: int) -> float:
    """Return what a size may take, were more rows no slower: what fewer do, as they are known.

    The upper confidence of the largest below it that was measured well enough to tell, and no less than any measured at
    all surely takes: a step behind which two batches were seen is no place to hope for.
    """
    seen = service.sizes[max(bisect_right(service.sizes, size) - 1, 0)]
    return max(service.upper(_well_known(service, size)), service.lower(min(seen, size)))


def _well_known(service: ServiceTime, size: int) -> int:
    """Return the largest size below another that was measured well enough to tell."""
    told = service.told(TELLING)
    index = bisect_left(told, size)
    return told[index - 1] if index else service.sizes[0]


def _left_out(service: ServiceTime, limits: Limits) -> list[int]:
    """List the sizes usually tried, below the largest measured, that were not, or too seldom to tell."""
    low, high = max(service.sizes[0], limits.min_batch), min(service.largest_measured, limits.max_batch)
    told = service.told(TELLING)
    return [size for size in SIZES if low < size < high and size not in told]


def _try_of(
    assessor: Assessor, choice: Choice, size: int, avoid: Collection[Parameters], spare: float
) -> Parameters | None:
    """Return the configuration that would tell of a size, if what that may bring is worth what it may cost."""
    situation, best = assessor.situation, choice.best
    gain = _gain(situation.service)
    assess = Assessor(replace(situation, service=_hopeful(situation.service, size))).assess
    # Near the capacity and beyond it what has come may be enough to fill it; else it has to be waited for.
    waits = {best.parameters.max_wait}
    if best.holds_now:
        waits.add(Duration(situation.limits.max_wait))
    if not best.holds_ahead:
        waits.add(Duration(situation.limits.min_wait))
    for wait in sorted(waits, reverse=True):
        point = replace(best.parameters, max_batch=size, max_wait=Duration(wait), pass_through=False)
        promised = assess(point)
        # Who would not be filled tells nothing.
        if point in avoid or promised.now.mean_batch <= below(situation.service, size) / 2:
            continue
        if not best.holds_now:
            if assessor.assess(point).outlook.excess > best.outlook.excess + LOSES:
                continue
            # Where nobody is answered in time, a batch that takes no less time is no way out.
            if promised.holds_now or promised.now.goodput > (1 + gain) * best.now.goodput:
                return point
            continue
        if not promised.holds_ahead or promised.device_time > (1 - gain) * best.device_time:
            continue
        if best.holds_ahead:
            if assessor.risk(point) <= situation.budget:
                return point
        else:
            exposed = HURTS * situation.process.rate
            if assessor.risk(point, within=HURTS) * exposed <= max(spare, situation.budget * exposed):
                return point
    return None


def _hopeful(service: ServiceTime, size: int) -> ServiceTime:
    """Return t(b) with ``size`` as quick as what was well measured below it surely is.

    What noise leaves open of that is told by more of its like, not by larger ones.
    """
    quick = _quick(service, size)
    mix = tuple((share, _hopeful(each, size)) for share, each in service.mix)
    # What was measured too seldom to tell, between what was and this, tells nothing.
    largest = service.largest_measured
    measured = [*service.told(TELLING), largest] if size < largest else service.told(TELLING)
    seconds = {rows: service.time(rows) for rows in measured or service.sizes[:1]}
    curve = ServiceTime.measured(seconds | {size: quick}, noise=service.noise)
    return replace(curve, executors=service.executors, largest_in_flight=service.largest_in_flight, mix=mix)
