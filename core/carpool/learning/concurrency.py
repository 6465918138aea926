"""How many batches the device really computes at once: as many as make the times of equal batches differ least."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class Sample(NamedTuple):
    """Batches of one kind: how many (discounted), seconds, seconds squared; see ``CellKey``."""

    rows: int
    in_flight: int
    batches: float
    busy: float
    busy_squared: float
    executors: int = 0


def own_times(samples: Iterable[Sample], executors: int) -> dict[int, Sample]:
    """Sum up by rows what batches took from when they began, were there that many executors."""
    sizes: dict[int, Sample] = {}
    for s in samples:
        # With an executor free at dispatch, all of the time seen is the batch's own.
        if s.executors == (executors if s.in_flight > executors else 0):
            before = sizes.get(s.rows, s._replace(batches=0.0, busy=0.0, busy_squared=0.0))
            sizes[s.rows] = before._replace(
                batches=before.batches + s.batches,
                busy=before.busy + s.busy,
                busy_squared=before.busy_squared + s.busy_squared,
            )
    return sizes


def most_in_flight(samples: Iterable[Sample], often: float) -> int:
    """Most batches in flight that were seen so often."""
    seen: dict[int, float] = {}
    for s in samples:
        if s.executors == 0:
            seen[s.in_flight] = seen.get(s.in_flight, 0.0) + s.batches
    return max((k for k, batches in seen.items() if batches >= often), default=1)


def fit_executors(samples: Sequence[Sample], known: int | None) -> tuple[int, bool]:
    """Find the number of executors under which the service times of equal batches differ least.

    And whether the samples speak against there being more of them, or leave that open.

    With fewer than there are, some batches seem to have begun late and to have been quick; with more, to have begun at
    once and to have been slow. Batches never in flight together are no evidence: the answer is then how many were.
    """
    most = most_in_flight(samples, _BY_ACCIDENT)
    if most == 1:
        return known or 1, True
    counted = {s.executors for s in samples if s.executors}
    seen = [s for s in samples if not s.executors]
    floor = _ROUGHLY**2 * sum(s.busy for s in seen) / sum(s.batches for s in seen)
    spreads = {}
    for executors in sorted({*(e for e in counted if e < most), most}):
        squares, freedom = _squares(own_times(samples, executors).values())
        if freedom >= _BY_ACCIDENT:
            spreads[executors] = squares, freedom
    if not spreads:
        return known or 1, False
    # Candidates can't be distinguished by a spread that chance alone may add: then the fewest is the safe reading for
    # capacity, unless one of them is known from before.

    @cache
    def off(executors: int, beyond: int) -> float:
        return abs(_late(samples, executors, beyond=beyond))

    ascending = sorted(spreads, key=lambda executors: spreads[executors][0] / spreads[executors][1])
    best = next((one for one in ascending if not any(_outlies(off, one, other) for other in spreads)), ascending[0])
    likely = [
        executors for executors in spreads if executors == best or _alike(samples, spreads, off, executors, best, floor)
    ]
    executors = known if known is not None and (known in likely or (known > most and most in likely)) else likely[0]
    return executors, executors >= likely[-1]


def _outlies(off: Callable[[int, int], float], one: int, other: int) -> bool:
    """Whether the means rule out a number of executors beside another; ``off``: by how much, by (number, beyond)."""
    beyond = min(one, other)
    return off(one, beyond) > _OUTLIES * max(off(other, beyond), 1.0)


def _squares(sizes: Iterable[Sample]) -> tuple[float, float]:
    """Sum of the variances over means of service times of equal batches, in seconds, and the repeats behind it.

    Variance over mean: a sum of services that are taken for one has the same, relative spread would be less.
    """
    repeated = [s for s in sizes if s.batches > 1 and s.busy > 0]
    squares = sum(max(s.busy_squared * s.batches / s.busy - s.busy, 0.0) for s in repeated)
    return squares, sum(s.batches - 1 for s in repeated)


def _alike(
    samples: Sequence[Sample],
    spreads: Mapping[int, tuple[float, float]],
    off: Callable[[int, int], float],
    one: int,
    other: int,
    floor: float,
) -> bool:
    """Whether two numbers of executors explain the times equally well, by what they explain differently.

    Of batches that met as many in flight as the smaller number, or fewer, both say the same. What these spread is no
    evidence, and a thousand of them must not outweigh the hundred batches that are.
    """
    both = min(one, other)
    squares, freedom = _squares(own_times([s for s in samples if s.in_flight <= both], both).values())
    evidence = spreads[other][1] - freedom
    if evidence < _BY_ACCIDENT or spreads[one][1] - freedom < _BY_ACCIDENT:
        return True
    if _outlies(off, one, other):
        return False
    # One slow batch that was counted for one of them alone makes the other's spread look even: not so the means.
    if off(other, both) > _DOUBTFUL * max(off(one, both), 1.0):
        return True
    mine, theirs = ((spreads[e][0] - squares) / (spreads[e][1] - freedom) + floor for e in (one, other))
    error = _CHANCE / math.sqrt(evidence)
    return mine <= max(_ALIKE + error, math.exp(2 * error)) * theirs


def _late(samples: Sequence[Sample], executors: int, *, beyond: int) -> float:
    """Return how much longer batches took that met more than ``beyond`` others than equal ones did, in standard errors.

    Summed up over sizes. Were there that many executors, both would take the same: with too few supposed, those seem
    to have begun late and to have been quick; with too many, to have begun at once and to have been slow. Of noisy
    batches that is seen sooner in their mean than in how much they differ.
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
"""Batches beyond the executors known from which there being no more of them is believed, and not tried again."""
INCONCLUSIVE = 300.0
"""The same where the samples leave it open: of a noisy device that is seldom full, few show whether
batches are computed at once or one after the other."""
_BY_ACCIDENT = 3.0
"""Batches of a kind from which it counts as seen."""
_ROUGHLY = 0.02
"""Spread of service times that no model is free of."""
_OUTLIES = 4.0
"""Standard errors by which means rule a number of executors out, and times as many as another's has."""
_DOUBTFUL = 2.0
"""Standard errors by which means are off that an even spread says nothing for, and times as many as another's."""
_ALIKE = 1.25
_CHANCE = 2.0
"""Times 1/sqrt(n): what chance may add to the ratio of two spreads of n noisy batches; it is the standard error of the
ratio's logarithm as well, by which three batches may put it off tenfold (two standard errors)."""
