"""Server concurrency: the number of batches at once for which the times of equal batches differ least."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from carpool.batching.counters import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


def added(one: Sample, other: Sample) -> Sample:
    """Sum up two samples as one of the first's kind."""
    return Sample(*one[:4], one.batches + other.batches, one.busy + other.busy, one.busy_squared + other.busy_squared)


def own_times(samples: Iterable[Sample], executors: int) -> dict[int, Sample]:
    """Sum up, by rows, the times of batches from when they would begin with that server concurrency."""
    sizes: dict[int, Sample] = {}
    for s in samples:
        # If the server has a free place at dispatch, all of the observed time is the batch's own.
        if s.executors == (executors if s.in_flight > executors else 0):
            sizes[s.rows] = added(sizes[s.rows], s) if s.rows in sizes else s
    return sizes


def most_in_flight(samples: Iterable[Sample], often: float) -> int:
    """Return the most batches in flight that were seen at least ``often`` times."""
    seen: dict[int, float] = {}
    for s in samples:
        if s.executors == 0:
            seen[s.in_flight] = seen.get(s.in_flight, 0.0) + s.batches
    return max((k for k, batches in seen.items() if batches >= often), default=1)


def fit_executors(samples: Sequence[Sample], known: int | None) -> tuple[int, bool]:
    """Return the server concurrency for which the service times of equal batches differ least.

    The second value: whether the samples contradict a higher one, or leave that open.

    If the assumed number is too low, some batches seem to begin late and to be fast; if too high, to begin at once and
    to be slow. Samples show nothing beyond the most batches seen in flight: the result is at most that number.
    """
    most = most_in_flight(samples, _BY_ACCIDENT)
    if most == 1:
        return known or 1, True
    counted = {s.executors for s in samples if 0 < s.executors < s.in_flight}
    seen = [s for s in samples if not s.executors]
    floor = _ROUGHLY**2 * sum(s.busy for s in seen) / sum(s.batches for s in seen)
    numbers = sorted({*(e for e in counted if e < most), most})
    spreads = {executors: _squares(own_times(samples, executors).values()) for executors in numbers}
    spreads = {executors: spread for executors, spread in spreads.items() if spread[1] >= _BY_ACCIDENT}
    if not spreads:
        return known or 1, False
    # A difference of spread within chance does not distinguish candidates: the lowest is then the safe choice for
    # capacity, unless one of them is known from before.

    @cache
    def off(executors: int, beyond: int) -> float:
        return abs(_late(samples, executors, beyond=beyond))

    ascending = sorted(spreads, key=lambda executors: spreads[executors][0] / spreads[executors][1])
    best = next((one for one in ascending if not any(_outlies(off, one, other) for other in spreads)), ascending[0])
    likely = [one for one in spreads if one == best or _alike(samples, spreads, off, one, best, floor)]
    executors = known if known is not None and (known in likely or (known > most and most in likely)) else likely[0]
    return executors, executors >= likely[-1]


def _outlies(off: Callable[[int, int], float], one: int, other: int) -> bool:
    """Whether the means rule out one server concurrency against another; ``off``: by how much, by (number, beyond)."""
    beyond = min(one, other)
    return off(one, beyond) > _OUTLIES * max(off(other, beyond), 1.0)


def _squares(sizes: Iterable[Sample]) -> tuple[float, float]:
    """Sum of the variances over means of service times of equal batches, in seconds, and the repeats behind it.

    Variance over mean, since several services taken for one have the same; their relative spread would be less.
    """
    repeated = [s for s in sizes if s.batches > 1 and s.busy > 0]
    squares = sum(max(s.busy_squared * s.batches / s.busy - s.busy, 0.0) for s in repeated)
    return squares, sum(s.batches - 1 for s in repeated)


def _alike(
    samples: Sequence[Sample], spreads: Mapping[int, tuple[float, float]], off: Callable[[int, int], float], one: int,
    other: int, floor: float,
) -> bool:  # fmt: skip
    """Whether two server concurrencies explain the times equally well, judged by the batches that they differ in.

    Both explain batches equally that had at most the smaller number in flight. The spread of these is no
    evidence, and a thousand of them must not outweigh the hundred batches that are evidence.
    """
    both = min(one, other)
    squares, freedom = _squares(own_times([s for s in samples if s.in_flight <= both], both).values())
    evidence = spreads[other][1] - freedom
    if evidence < _BY_ACCIDENT or spreads[one][1] - freedom < _BY_ACCIDENT:
        return True
    if _outlies(off, one, other):
        return False
    # One slow batch that only one of them counts makes the other's spread look small; it affects the means less.
    if off(other, both) > _DOUBTFUL * max(off(one, both), 1.0):
        return True
    mine, theirs = ((spreads[e][0] - squares) / (spreads[e][1] - freedom) + floor for e in (one, other))
    error = _CHANCE / math.sqrt(evidence)
    alike, errors = (_ALIKE_IN_ORDER, 4) if one == 1 and _is_in_order(samples) else (_ALIKE, 2)
    return mine <= max(alike + error, math.exp(errors * error)) * theirs


def _is_in_order(samples: Iterable[Sample]) -> bool:
    """Whether few batches overtook others; those do that are computed at once, and whose times vary."""
    overtook = sum(s.batches for s in samples if s.executors == s.in_flight)
    together = sum(s.batches for s in samples if not s.executors and s.in_flight > 1)
    return overtook <= _BY_ACCIDENT + _SELDOM * together


def _late(samples: Sequence[Sample], executors: int, *, beyond: int) -> float:
    """Return, in standard errors, how much longer batches took with more than ``beyond`` in flight than equal ones.

    Summed up over sizes. At the true concurrency both take equally long. With noisy batches the mean shows that sooner
    than the spread.
    """
    alone = own_times([s for s in samples if s.in_flight <= beyond], beyond)
    among = own_times([s for s in samples if s.in_flight > beyond], executors)
    difference = variance = 0.0
    for rows, one in among.items():
        other = alone.get(rows)
        if other is None or min(one.batches, other.batches) < _BY_ACCIDENT:
            continue
        means = one.busy / one.batches, other.busy / other.batches
        spread = max(other.busy_squared / other.batches - means[1] ** 2, (_ROUGHLY * means[1]) ** 2)
        difference += one.batches * (means[0] - means[1])
        variance += one.batches**2 * spread * (1 / one.batches + 1 / other.batches)
    return difference / math.sqrt(variance) if variance else 0.0


CONCLUSIVE = 30.0
"""After so many batches beyond the known server concurrency, a refutation of a higher one is final."""
INCONCLUSIVE = 300.0
"""The same if the samples leave it open: on a noisy device that is seldom full, few batches show whether
they are computed at once or one after the other."""
_BY_ACCIDENT = 3.0
"""A kind counts as seen from so many batches."""
_ROUGHLY = 0.02
"""Spread of service times that every model has."""
_OUTLIES = 4.0
"""Means rule a number out if they are off by so many standard errors, and by so many times as many as another's."""
_DOUBTFUL = 2.0
"""If means are off by so many standard errors, and so many times as many as another's, spread is no evidence."""
_ALIKE, _ALIKE_IN_ORDER, _SELDOM = 1.25, 5.0, 0.2
"""Ratios of equal spreads; the second for one batch at a time, if answers come in order: late notice of an answer
spreads short times more. The share of batches that may overtake others there: new connections take longer."""
_CHANCE = 2.0
"""Times 1/sqrt(n): what chance may add to the ratio of two spreads of n noisy batches. It is also the standard error of
the ratio's logarithm: three batches may change the ratio tenfold (two standard errors)."""
