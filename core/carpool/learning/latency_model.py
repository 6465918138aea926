"""The latency model: batch latency by rows, t(b), and server concurrency.

It is learned from additive counters (``Sample``: batches, busy seconds, busy seconds squared by size and number in
flight at dispatch), so it sums over replicas. Accelerators have real steps, and larger batches may cost *more* per row,
so the fit only assumes that latency rises: weighted isotonic regression over the measured sizes, straight lines between
them, and beyond the largest a line with a growing interval.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from carpool.batching.counters import Sample
from carpool.batching.requests import Estimate, seldom_exceeded
from carpool.learning.concurrency import CONCLUSIVE, INCONCLUSIVE, added, fit_executors, most_in_flight, own_times
from carpool.learning.smoothing import isotonic, smoothed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Kind: TypeAlias = tuple[int, int, int, int]
"""The fields of a ``Sample`` before the sums."""

KNOWN = 1e9
"""Number of samples for a curve that was given, not learned."""

_PRIOR_NOISE = 0.2
_PRIOR_WEIGHT = 2.0
"""Spread assumed for single batches before two of a kind were seen, and its weight in repeats."""


class ServiceTime(Struct, frozen=True):
    """Seconds from dispatch to completion of a batch that need not queue at the device, as a function of its rows.

    Build with ``measured`` or ``fit``. Equal lengths: ``sizes`` (rows, ascending, at least one), ``means``, ``lowers``
    and ``uppers`` (seconds; a 95 % interval of the mean, not of single batches). ``noise`` is the coefficient of
    variation of single batches; ``executors`` the server concurrency, as seen with up to ``largest_in_flight`` batches;
    ``samples`` the number of batches, discounted by age, in the fit.
    """

    sizes: tuple[int, ...]
    means: tuple[float, ...]
    lowers: tuple[float, ...]
    uppers: tuple[float, ...]
    head_slope: float
    """Seconds a row, below the smallest size measured."""
    tail_slope: float
    """Seconds a row, beyond the largest size measured."""
    tail_error: float
    noise: float = 0.0
    executors: int = 1
    largest_in_flight: int = 1
    samples: float = KNOWN
    counts: tuple[float, ...] = ()
    """Batches, discounted by age, behind each of ``sizes``; empty where all of them are known."""

    mix: tuple[tuple[float, ServiceTime], ...] = ()
    """By length bucket, if only equal ones are batched together: share of the rows, and their own batch latency;
    empty: there is one kind."""

    def executors_for(self, in_flight: int) -> int:
        """Return the server concurrency to plan with: beyond the most ever seen in flight, as many as are in flight."""
        return max(self.executors, in_flight) if self.executors >= self.largest_in_flight else self.executors

    @classmethod
    def measured(cls, seconds: Mapping[int, float], *, noise: float = 0.0, executors: int = 1) -> ServiceTime:
        """Take times by rows as exact: a carefully measured profile, or a model's known curve."""
        sizes = tuple(sorted(seconds))
        means = tuple(seconds[size] for size in sizes)
        curve = _through(sizes, means, means, means)
        return replace(curve, noise=noise, executors=executors, largest_in_flight=executors)

    @property
    def largest_measured(self) -> int:
        """Rows of the largest batch in the fit."""
        return self.sizes[-1]

    def measured_sizes(self, batches: float) -> list[int]:
        """List the sizes with at least so many measured batches."""
        if not self.counts:
            return list(self.sizes)
        return [size for size, count in zip(self.sizes, self.counts, strict=True) if count >= batches]

    def time(self, rows: int) -> float:
        """Mean seconds for a batch of ``rows``; 0 for none."""
        return self._at(rows, self.means, self.head_slope, self.tail_slope)

    def upper(self, rows: int) -> float:
        """Upper 95 % confidence of the mean; beyond the largest measured size, rows are not assumed to be cheaper."""
        # Below the smallest size only monotony bounds the time: slope 0.
        return self._at(rows, self.uppers, 0.0, self._steepest)

    @property
    def _steepest(self) -> float:
        """Most seconds per row beyond the largest measured size: a step may follow a flat tail."""
        return max(self.tail_slope + self.tail_error, self.uppers[-1] / self.sizes[-1])

    def lower(self, rows: int) -> float:
        """Lower 95 % confidence of the mean; never negative."""
        flattest = max(self.tail_slope - self.tail_error, 0.0)
        return self._at(rows, self.lowers, self.lowers[0] / self.sizes[0], flattest)

    def slow(self, rows: int) -> float:
        """Seconds that single batches seldom exceed: two standard deviations over the upper confidence of the mean."""
        return self.upper(rows) * seldom_exceeded(self.noise)

    def _at(self, rows: int, values: tuple[float, ...], head_slope: float, tail_slope: float) -> float:
        if rows <= 0:
            return 0.0
        sizes = self.sizes
        index = bisect_left(sizes, rows)
        if index == len(sizes):
            return values[-1] + tail_slope * (rows - sizes[-1])
        above, value = sizes[index], values[index]
        if above == rows:
            return value
        if index == 0:
            # At most as long as the smallest measured size, at least in proportion to it.
            return max(min(value - head_slope * (above - rows), value), value * rows / above)
        below = sizes[index - 1]
        return values[index - 1] + (value - values[index - 1]) * (rows - below) / (above - below)

    def capacity(self, rows: int, in_flight: int) -> float:
        """Rows per second at a backlog, which is served in full batches of ``rows``.

        If large batches cost more per row, a backlog may never end that smaller batches would drain.
        """
        return rows * min(self.executors_for(in_flight), in_flight) / self.time(rows)

    def per_row(self, rows: int) -> float:
        """Device seconds a row in batches of ``rows`` (at least 1)."""
        return self.time(rows) / rows

    def table(self, max_rows: int) -> tuple[float, ...]:
        """Mean seconds by rows, 0 to ``max_rows``: a tuple to index in inner loops."""
        return tuple(self.time(rows) for rows in range(max_rows + 1))

    def believed(self, max_rows: int) -> Estimate:
        """Return the estimate for a Batcher, up to ``max_rows``."""
        upper = tuple(self.slow(rows) for rows in range(max_rows + 1))
        return Estimate(self.table(max_rows), upper, self.executors, self.noise)

    def scaled(self, factor: float) -> ServiceTime:
        """Return the same shape at another level: every time multiplied."""
        return replace(
            self,
            means=tuple(value * factor for value in self.means),
            lowers=tuple(value * factor for value in self.lowers),
            uppers=tuple(value * factor for value in self.uppers),
            head_slope=self.head_slope * factor,
            tail_slope=self.tail_slope * factor,
            tail_error=self.tail_error * factor,
            mix=tuple((share, each.scaled(factor)) for share, each in self.mix),
        )

    def pessimistic(self) -> ServiceTime:
        """Return the curve at its upper confidence, taken as exact: the risk of a step is judged with it."""
        return replace(
            self,
            means=self.uppers,
            lowers=self.uppers,
            head_slope=0.0,
            tail_slope=self._steepest,
            tail_error=0.0,
            mix=tuple((share, each.pessimistic()) for share, each in self.mix),
        )


def _through(
    sizes: tuple[int, ...], means: tuple[float, ...], lowers: tuple[float, ...], uppers: tuple[float, ...]
) -> ServiceTime:
    if len(sizes) == 1:
        # One size does not show the slope: take the middle between no cost per row and all of it.
        half = means[0] / sizes[0] / 2
        return ServiceTime(sizes, means, lowers, uppers, head_slope=half, tail_slope=half, tail_error=half)
    slope, error = _tail(sizes, means, lowers, uppers)
    head = (means[1] - means[0]) / (sizes[1] - sizes[0])
    return ServiceTime(sizes, means, lowers, uppers, head_slope=head, tail_slope=max(slope, 0.0), tail_error=error)


def _tail(
    sizes: Sequence[int], means: Sequence[float], lowers: Sequence[float], uppers: Sequence[float]
) -> tuple[float, float]:
    """Return the slope beyond the largest of two sizes or more, in seconds a row, and half of its 95 % interval.

    The line goes through as many of the largest sizes as agree on it: its slope is in the interval of each narrower
    choice (Lepski 1991). Sizes before a bend of the curve do not show how it goes on, nor do sizes more than two
    octaves below. Sizes within half an octave of the largest count together, since a single step up is no slope. If
    sizes differ from the line by more than their errors, the excess widens the slope's interval (Birge 1932).
    """
    last, floor = sizes[-1], 1e-3 * means[-1]
    total = first = second = level = product = squares = 0.0
    low, high = -math.inf, math.inf
    found = 0.0, math.inf
    for index in range(len(sizes) - 1, -1, -1):
        if index < len(sizes) - 2 and sizes[index] < last / 4:
            break
        x, y = sizes[index] - last, means[index] - means[-1]
        weight = ((uppers[index] - lowers[index]) / 2 + floor) ** -2
        total += weight
        first += weight * x
        second += weight * x * x
        level += weight * y
        product += weight * x * y
        squares += weight * y * y
        if not x or (index and sizes[index - 1] > last / _HALF_OCTAVE):
            continue
        spread = second - first * first / total
        slope = (product - first * level / total) / spread
        off = squares - level * level / total - slope * slope * spread
        freedom = len(sizes) - index - 2
        error = math.sqrt(max(1.0, 1.96**2 * off / freedom if freedom else 1.0) / spread)
        if not low <= slope <= high:
            break
        low, high = max(low, slope - error), min(high, slope + error)
        found = slope, error
    return found


def fit(samples: Sequence[Sample], known_executors: int | None = None) -> ServiceTime | None:
    """Fit batch latency and server concurrency to samples; ``None`` without any.

    ``known_executors`` is kept unless the samples contradict it: when all slots are always taken, a device with a
    concurrency of E looks the same as one with 1 that is E times as fast.
    """
    if not any(s.executors == 0 for s in samples):
        return None
    executors, refuted = fit_executors(samples, known_executors)
    # 1. By size: the batches' own times at that server concurrency.
    own = own_times(samples, executors)
    sizes = {rows: own[rows] for rows in sorted(own) if own[rows].busy > 0}
    if not sizes:
        return None
    # 2. Spread of single batches about their size's mean, pooled as a coefficient of variation.
    noise, freedom = _pooled_noise(own.values())
    doubt = math.sqrt((noise**2 * freedom + _PRIOR_NOISE**2 * _PRIOR_WEIGHT) / (freedom + _PRIOR_WEIGHT))
    # 3. Monotone means and their intervals; a monotone curve lies below every upper end to its right.
    counts = [size.batches for size in sizes.values()]
    raw = smoothed(list(sizes), [size.busy / size.batches for size in sizes.values()], counts, noise)
    means, weights = isotonic(raw, counts)
    reach = _student(freedom + _PRIOR_WEIGHT) * doubt
    halves = [mean * reach / math.sqrt(max(weight, 1.0)) for mean, weight in zip(means, weights, strict=True)]
    uppers = [mean + half for mean, half in zip(means, halves, strict=True)]
    lowers = [max(mean - half, 0.0) for mean, half in zip(means, halves, strict=True)]
    lowers, uppers = [*accumulate(lowers, max)], [*accumulate(reversed(uppers), min)][::-1]
    curve = _through(tuple(sizes), tuple(means), tuple(lowers), tuple(uppers))
    return replace(
        curve,
        noise=noise if freedom >= 1 else _PRIOR_NOISE,
        executors=executors,
        # A few accidental batches beyond the known concurrency would not show a higher one.
        largest_in_flight=max(most_in_flight(samples, CONCLUSIVE if refuted else INCONCLUSIVE), executors),
        samples=sum(s.batches for s in samples if s.executors == 0),
        counts=tuple(counts),
    )


def _pooled_noise(samples: Iterable[Sample]) -> tuple[float, float]:
    """Coefficient of variation within cells, and the repeats behind it."""
    squares = freedom = 0.0
    for s in samples:
        if s.batches > 1:
            mean = s.busy / s.batches
            # Batches that all ended before they could have begun refute the concurrency they were counted for.
            squares += max(s.busy_squared - s.busy * mean, 0.0) / mean**2 if mean else s.batches
            freedom += s.batches - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0.0)


def _student(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t, expanded in 1/freedom (Abramowitz and Stegun 26.7.5); 10 % low at 2."""
    z = 1.96
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


class _Interval(NamedTuple):
    """The result of one observation."""

    seconds: float
    samples: list[Sample]
    batches: float
    ratio: float
    """Median of observed over expected busy time; 1 where nothing was expected."""
    doubtless: float
    """The same, but for sizes never measured, times inside the confidence interval count as expected."""
    seen: float = 0.0
    expected: float = 0.0
    """Sum of the busy seconds that were compared."""


class LatencyLearner:
    """Learns batch latency from differences of counters, forgets, and detects when the whole curve moves.

    Old samples lose half their weight in ``half_life`` seconds with traffic (nothing is forgotten while nothing
    arrives) and in ``half_life_batches`` batches. If the batches of three observations in a row are all clearly
    slower or faster than the fit (a model reloaded, a noisy neighbour), all sizes move by the common ratio at once,
    and the old samples keep only the weight of a guess until measured again. One slow second alone moves nothing.
    """

    def __init__(self, half_life: float = 120.0, half_life_batches: float = 20_000.0) -> None:
        self._half_life = half_life
        self._half_life_batches = half_life_batches
        self._settled: dict[Kind, Sample] = {}
        self._rows: dict[int, float] = {}
        """Rows by length bucket, without recent ones; forgotten in the end, unlike a size's latency."""
        self._recent: deque[_Interval] = deque()
        self._executors: int | None = None
        self._most_in_flight = 1
        """Most since the curve last moved. Not forgotten as samples are, or the same would be explored again."""
        self._noise = _PRIOR_NOISE
        self._last: float | None = None
        self._estimates: dict[int | None, ServiceTime | None] = {}

    def observe(self, now: float, samples: Iterable[Sample]) -> float:
        """Learn from the counts since the last call, about a second ago.

        Returns the ratio by which the whole curve just moved, usually 1. Negative differences come from a counter that
        was reset and are ignored.
        """
        seconds = now - self._last if self._last is not None else 0.0
        self._last = now
        fresh = [
            # Times for an assumed concurrency must keep their spread: the assumptions differ by nothing else.
            s if s.executors else _without_outliers(s, self._noise)
            for s in samples
            if s.batches > 0 and s.busy_squared >= 0 and (s.busy > 0 or s.executors)
        ]
        if not fresh:
            return 1.0
        self._recent.append(self._compare(seconds, fresh))
        moved = self._moved()
        if moved != 1.0:
            self._move(moved)
        elif len(self._recent) > _IN_A_ROW:
            self._settle(self._recent.popleft())
        self._estimates.clear()
        estimate = self.estimate()
        if estimate is not None:
            self._executors, self._noise = estimate.executors, estimate.noise
            # A concurrency that was assumed and then refuted was not explored beyond.
            tried = estimate.largest_in_flight > estimate.executors
            self._most_in_flight = estimate.largest_in_flight if tried else 1
        return moved

    def estimate(self, bucket: int | None = None) -> ServiceTime | None:
        """Return the curve of one length bucket, or of the whole mix; ``None`` before any batch.

        A bucket with few batches uses the shape of the best known one, scaled to its own level.
        """
        if bucket not in self._estimates:
            self._estimates[bucket] = self._estimate(bucket)
        return self._estimates[bucket]

    def believed(self, max_rows: int) -> Estimate | None:
        """Return the estimate for a Batcher, with one for each length bucket; ``None`` before any batch."""
        mix = self.estimate()
        if mix is None:
            return None
        met = sorted({s.bucket for s in self._sums().values()})
        curves = {bucket: self.estimate(bucket) for bucket in met} if len(met) > 1 else {}
        buckets = {bucket: curve.believed(max_rows) for bucket, curve in curves.items() if curve is not None}
        return replace(mix.believed(max_rows), buckets=buckets).computed(mix.executors)

    def mixed(self) -> ServiceTime | None:
        """Return the curve of the whole mix, with those of its buckets if more than one was seen lately."""
        rows = dict(self._rows)
        for interval in self._recent:
            _count_rows(rows, interval)
        seldom = _SELDOM * sum(rows.values())
        rows = {bucket: count for bucket, count in rows.items() if count >= seldom}
        mix = self.estimate()
        if mix is None or len(rows) < 2:
            return mix
        total = sum(rows.values())
        curves = [(rows[bucket] / total, self.estimate(bucket)) for bucket in sorted(rows)]
        known = tuple((share, curve) for share, curve in curves if curve is not None)
        # Equal batches differ as much as those of one bucket; batches of all buckets also differ by their lengths.
        noise = math.sqrt(sum(share * curve.noise**2 for share, curve in known))
        return replace(mix, noise=noise, mix=known)

    def _estimate(self, bucket: int | None) -> ServiceTime | None:
        sums = self._sums()
        if bucket is None:
            return self._fit([*sums.values()])
        counts: dict[int, float] = {}
        for s in sums.values():
            if not s.executors:
                counts[s.bucket] = counts.get(s.bucket, 0.0) + s.batches
        batches = counts.get(bucket, 0.0)
        if not batches:
            return self.estimate()
        own = self._of(bucket, sums)
        best = max(counts, key=counts.__getitem__)
        shape = self._fit(self._of(best, sums))
        if shape is None or best == bucket or not batches < _ENOUGH_OWN <= counts[best]:
            return self._fit(own)
        times = own_times(own, shape.executors).values()
        level = shape.scaled(sum(s.busy for s in times) / sum(s.batches * shape.time(s.rows) for s in times))
        doubt = 2 * max(shape.noise, _PRIOR_NOISE) / math.sqrt(max(batches, 1.0))
        return replace(
            level,
            lowers=tuple(value * max(1 - doubt, 0.0) for value in level.lowers),
            uppers=tuple(value * (1 + doubt) for value in level.uppers),
            samples=batches,
        )

    def _sums(self) -> dict[Kind, Sample]:
        """Sum up old and recent samples."""
        sums = dict(self._settled)
        for interval in self._recent:
            _add(sums, interval.samples)
        return sums

    def _fit(self, samples: Sequence[Sample]) -> ServiceTime | None:
        curve = fit(samples, self._executors)
        if curve is None or curve.largest_in_flight >= self._most_in_flight:
            return curve
        if self._executors is not None and curve.executors < self._executors:
            return curve  # exploration beyond those shows nothing of these
        return replace(curve, largest_in_flight=self._most_in_flight)

    def _compare(self, seconds: float, fresh: list[Sample]) -> _Interval:
        """Compare an observation with the samples before it, bucket by bucket."""
        expected = {bucket: self._fit(self._of(bucket, self._settled)) for bucket in {s.bucket for s in fresh}}
        batches = sum(s.batches for s in fresh if not s.executors)
        samples, ratios, clear, off = [], [], [], set()
        total = foreseen = 0.0
        for s in fresh:
            samples.append(s)
            curve = expected[s.bucket]
            if curve is None or s.executors != (curve.executors if s.in_flight > curve.executors else 0) or not s.busy:
                continue
            seen = s.busy / s.batches
            ratio = doubtless = seen / curve.time(s.rows)
            if s.rows not in curve.sizes:
                # There may be a step on either side: the time agrees with the curve from that of the next smaller
                # measured size to that of the next larger one. Below the smallest, any shorter time agrees.
                index = bisect_left(curve.sizes, s.rows)
                low = curve.lower(curve.sizes[index - 1]) if index else 0.0
                high = curve.upper(curve.sizes[index] if index < len(curve.sizes) else s.rows)
                doubtless = seen / high if seen > high else seen / low if seen < low else 1.0
                if max(ratio, 1 / ratio) > _CLEARLY:
                    off.add((s.bucket, index))
            ratios.append((ratio, s.batches))
            clear.append((doubtless, s.batches))
            total += s.busy
            foreseen += s.batches * curve.time(s.rows)
            if doubtless > max(_WILD, 1 + _WILD_DEVIATIONS * curve.noise) and s.batches < 3:
                # Too few of a kind to distinguish a stall from the model, and enough to bend the curve: not learned
                # from. If the model did become that slow, the ratios show it.
                samples.pop()
        # A step explains times between two sizes that are neighbours, and not those elsewhere too.
        clear = ratios if len(off) > 1 else clear
        if not ratios:
            return _Interval(seconds, samples, batches, 1.0, 1.0)
        return _Interval(
            seconds, samples, batches, _weighted_median(ratios), _weighted_median(clear), seen=total, expected=foreseen
        )

    @staticmethod
    def _of(bucket: int, sums: Mapping[Kind, Sample]) -> list[Sample]:
        return [s for s in sums.values() if s.bucket == bucket]

    def _moved(self) -> float:
        """Return the common ratio of the last observations when all of them agree that the curve moved, else 1."""
        last = list(self._recent)[-_IN_A_ROW:]
        if len(last) < _IN_A_ROW:
            return 1.0
        clear = [interval.doubtless for interval in last]
        if not (min(clear) > _CLEARLY or max(clear) < 1 / _CLEARLY):
            return 1.0
        ratio = sorted(interval.ratio for interval in last)[_IN_A_ROW // 2]
        # A stall moves the mean and not the median; with skewed noise (exponential times) the median is 0.7 of the
        # mean without any move. A move counts if both show it.
        mean = sum(interval.seen for interval in last) / sum(interval.expected for interval in last)
        ratio = min(max(mean, 1.0), ratio) if ratio > 1 else max(min(mean, 1.0), ratio)
        # Five standard errors, so that three small samples of a noisy model don't add up to a change.
        error = max(self._noise, 0.05) / math.sqrt(sum(interval.batches for interval in last))
        return ratio if abs(math.log(ratio)) > 5 * error else 1.0

    def _move(self, ratio: float) -> None:
        """Scale the old samples and let recent ones outweigh them."""
        self._most_in_flight = 1
        # The first of the observations may straddle the change, and is no sample of either curve.
        while len(self._recent) >= _IN_A_ROW:
            self._recent.popleft()
        for key, s in self._settled.items():
            keep = min(1.0, _GUESS / s.batches)
            self._settled[key] = Sample(*key, s.batches * keep, s.busy * ratio * keep, s.busy_squared * ratio**2 * keep)

    def _settle(self, interval: _Interval) -> None:
        """Discount the old samples and add an observation that no longer counts as recent."""
        keep = 0.5 ** (interval.seconds / self._half_life + interval.batches / self._half_life_batches)
        for key, s in self._settled.items():
            # A size not seen for long stays as a guess: without it, it would be explored again every few minutes.
            kept = max(keep, min(_GUESS / s.batches, 1.0))
            self._settled[key] = Sample(*key, s.batches * kept, s.busy * kept, s.busy_squared * kept)
        for bucket in self._rows:
            self._rows[bucket] *= keep
        _count_rows(self._rows, interval)
        _add(self._settled, interval.samples)


_HALF_OCTAVE = math.sqrt(2)
_IN_A_ROW = 3
_CLEARLY = 1.25
_WILD = 4.0
_WILD_DEVIATIONS = 6.0
"""A batch or two are outliers beyond so many standard deviations: exponential service times exceed 7 once in 1,100."""
_GUESS = 2.0
"""Least weight, in batches, of a size's past samples; they are scaled when the whole curve moves."""
_ENOUGH_OWN = 20.0
_SELDOM = 0.001
"""Share of the rows below which a length bucket is left out of the mix: a forecast would have four of its requests."""


def _add(sums: dict[Kind, Sample], samples: Iterable[Sample]) -> None:
    """Add samples to those of their kind."""
    for s in samples:
        before = sums.get(s[:4])
        sums[s[:4]] = s if before is None else added(before, s)


def _count_rows(rows: dict[int, float], interval: _Interval) -> None:
    """Add the rows of an observation to those of each length bucket."""
    for s in interval.samples:
        if not s.executors:
            rows[s.bucket] = rows.get(s.bucket, 0.0) + s.rows * s.batches


def _weighted_median(values: list[tuple[float, float]]) -> float:
    values.sort()
    weights = list(accumulate(weight for _, weight in values))
    return values[bisect_left(weights, weights[-1] / 2)][0]


def _without_outliers(sample: Sample, noise: float) -> Sample:
    """Remove at most three batches from a sample whose spread exceeds the model's noise: stalls of the host.

    The sums separate one outlier x from n - 1 batches of mean m and squared CV c: (n-1)m + x = busy and
    (n-1)m^2(1+c) + x^2 = squared; eliminating x leaves a quadratic in m. In a merely mixed sample x takes little
    along (about 1/sqrt(n) of a standard deviation), so a wrong guess is harmless.
    """
    plausible = max(noise, 0.1) ** 2
    count, busy, squared = float(sample.batches), sample.busy, sample.busy_squared
    for _ in range(3):
        if count < 3 or squared * count / busy**2 - 1 <= 9 * plausible:
            break
        rest = count - 1
        a = rest * (1 + plausible) + rest**2
        root = (busy * rest) ** 2 - a * (busy**2 - squared)
        mean = (busy * rest - math.sqrt(max(root, 0.0))) / a
        outlier = busy - rest * mean
        if mean <= 0:
            break
        count, busy = rest, busy - outlier
        squared = max(squared - outlier**2, busy**2 / count)
    return Sample(*sample[:4], count, busy, squared)
