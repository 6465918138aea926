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

from carpool.batching.requests import PROBES
from carpool.learning.change_detection import width
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.tuning.assessment import Assessor
from carpool.tuning.candidate_range import SIZES, spoken_for
from carpool.tuning.search import LEAST
from carpool.tuning.steps import WORTH, gain, is_worth

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


class _Try(NamedTuple):
    beyond: int
    """Rows of the next smaller batch measured before."""
    until: float
    size: int
    left: int = TELLING
    """Batches between these to be seen yet."""


class Probe(NamedTuple):
    """A size that one batch in ``PROBES`` is to have, within the configuration in force."""

    rows: int = 0
    """0: none is worth it."""
    paid: bool = False
    """Whether an error budget pays for it: with such batches alone the SLO might not be kept."""
    batches: float = 0.0
    """As many stood behind that size when it was chosen."""

    def told(self, service: ServiceTime) -> bool:
        """Whether what it brought may have settled it."""
        return bool(self.rows) and _batches(service, self.rows) >= max(2 * self.batches, TELLING)

    def overdrawn(self, spare: float) -> bool:
        """Whether the error budget that pays for it is used up."""
        return self.paid and spare < _harm(self.rows)


class Dares:
    """Which sizes never measured were tried, and what is being tried now. Times in seconds."""

    def __init__(self) -> None:
        """Begin with nothing tried."""
        self._now: _Try | None = None
        self._pauses: dict[int, tuple[float, float]] = {}
        """By size: not again before, and for how long after a try that told nothing."""
        self._told: set[int] = set()
        """Sizes that single batches told of, which are not hoped for again though what they told fades."""

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

    def told(self, size: int) -> None:
        """Note that single batches of that size have told what they take."""
        self._told.add(size)

    def tells(self, size: int) -> bool:
        """Whether single batches of that size may tell anything: they have not yet."""
        return size not in self._told

    def stop(self) -> None:
        """Break off: the load moved, or the SLO is not kept. What was not told may be tried again."""
        if self._now is not None:
            del self._pauses[self._now.size]
            self._now = None

    def forget(self) -> None:
        """Let everything be tried again: the model is another."""
        self._now = None
        self._pauses = {}
        self._told.clear()


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


def to_probe(
    assessor: Assessor, current: Assessment, spare: float, may: Callable[[int], bool] = lambda _: True
) -> Probe:
    """Return the size that single batches had better have, within the configuration in force; see ``Probe``.

    Which of them may save the most for all that is open of t(b): ``WORTH`` of device time, or less where it is expected
    to, too little to be sure of. Who rests at one size learns nothing of any other. Single batches cost nearly nothing
    where with such alone the SLO would be kept, at the upper confidence of t(b) with no more late ones than it allows;
    and what was never measured is paid for with ``spare``: as many as might have been late, and were not. Where there
    is no room for more load, a size never measured has to promise that, or in overload more good answers. ``may``:
    which of these ``may`` be tried again.
    """
    situation, present = assessor.situation, current.parameters.max_batch
    limits, service = situation.limits, situation.service
    told = service.told(TELLING)
    cheapest = min(service.per_row(rows) for rows in range(1, present + 1))
    found, most = Probe(), 0.0
    for size in SIZES:
        hopes = size not in told
        farthest = spoken_for(service, limits) if hopes else 2 * present
        if size == present or not max(present / 2, limits.min_batch) <= size <= min(farthest, limits.max_batch):
            continue
        least = min(service.lower(size), _quick(service, size)) if hopes else service.lower(size)
        beaten = cheapest if size > present else service.per_row(present)
        if least / size >= (1 - LEAST) * beaten or (hopes and not may(size)):
            continue
        one = assessor.assess(replace(current.parameters, max_batch=size))
        harmless = one.holds_ahead and assessor.risk(one.parameters) <= 2 * situation.budget
        if not current.holds_now:
            harmless = (one.outlook.excess - current.outlook.excess) / PROBES <= GAIN
        expected = promised = 0.0
        if harmless and current.holds_ahead and _tells_soon(one):
            more = gain(one, current)
            expected, promised = more.share, more.share + 2 * more.error
        if hopes and (harmless or (current.holds_now and spare >= _harm(size))):
            promised = max(promised, _hope(assessor, current, size))
        if (promised > WORTH or expected > LEAST) and most < promised < inf:
            found, most = Probe(size, not harmless, _batches(service, size)), promised
    return found


def _hope(assessor: Assessor, current: Assessment, size: int) -> float:
    """Return what a size may bring if as quick as it may be, relative to what there is; 0 where nobody would see it."""
    hopeful = replace(assessor.situation, service=_hopeful(assessor.situation.service, size))
    hoped = Assessor(hopeful).assess(replace(current.parameters, max_batch=size))
    if not _tells_soon(hoped):
        return 0.0
    if not current.holds_now:
        return hoped.now.goodput / max(current.now.goodput, 1.0) - 1
    if not hoped.holds_ahead:
        return 0.0
    return 1 - hoped.device_time / current.device_time if current.holds_ahead else 1.0 / size


def _harm(size: int) -> int:
    """Return how many requests may be late for ``TELLING`` batches: all aboard, and as many behind them."""
    return 2 * TELLING * size


def _batches(service: ServiceTime, size: int) -> float:
    """Return how many batches stand behind a size; ``inf`` where it is known."""
    if size not in service.sizes:
        return 0.0
    return service.counts[service.sizes.index(size)] if service.counts else inf


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
