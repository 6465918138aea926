"""The greedy batcher in closed form: Poisson arrivals, no wait, one batch in flight, fixed batch latencies.

If n requests wait when a batch completes, the next batch has b = min(n, cap) of them. If none waits, it has the next
arrival alone. After that batch, n' = n - b + Poisson(rate * batch latency) requests wait: an embedded Markov chain
(Bailey 1954, Neuts 1967).

A request that arrives during a service waits for the rest of that service, and then for its own batch. The rest is
uniform, given the number of arrivals. This is exact if all waiting requests fit into the next batch. If they don't,
arrivals count as evenly spread within quarters of a service, and later batches take the mean service time.

The computation takes a few milliseconds at half load, and 50 or more beyond a load of 0.9.
"""

from __future__ import annotations

import math
from operator import mul, sub
from typing import TYPE_CHECKING, NamedTuple

from carpool.forecasting.forecast import Forecast
from carpool.policy.spec import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.learning.latency_model import ServiceTime


def greedy(rate: float, service: ServiceTime, max_batch: int, slo_target: float) -> Forecast:
    """Forecast Poisson arrivals of one row at ``rate`` per second (> 0), served with no wait, one batch in flight.

    ``noise`` plays no part. Unstable rates get no latencies (``inf``) and no goodput.
    """
    capacity = service.capacity(max_batch, 1)
    if rate / capacity >= 1:
        return Forecast(
            p50=math.inf, p90=math.inf, p95=math.inf, p99=math.inf, p999=math.inf, mean=math.inf,
            miss_fraction=1.0, shed_fraction=0.0, goodput=0.0, throughput=capacity,
            device_time=1 / capacity, mean_batch=float(max_batch), utilization=1.0, requests=0,
        )  # fmt: skip
    times = service.table(max_batch)
    arriving = [_poisson(rate * time) for time in times]
    states = _stationary(arriving, max_batch, rate / capacity)
    segments: list[_Segment] = []
    overflow = _Overflow(times, rate)
    services = batches = served = 0.0
    for waiting, mass in enumerate(states):
        size = min(max(waiting, 1), max_batch)
        batches += mass
        served += mass * size
        services += mass * times[size]
        _add_waiters(segments, mass, times, size, max(waiting - max_batch, 0), arriving[size], overflow)
    # A request that finds the device idle is served at once, by itself: one for each empty state.
    segments.append(_Segment(times[1], 1e-9, states[0]))
    (p50, p90, p95, p99, p999), late = _read(segments, slo_target)
    return Forecast(
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        mean=sum(each.weight * (each.start + each.width / 2) for each in segments)
        / sum(each.weight for each in segments),
        miss_fraction=late,
        shed_fraction=0.0,
        goodput=rate * (1 - late),
        throughput=rate,
        device_time=services / served,
        mean_batch=served / batches,
        utilization=services / (services + states[0] / rate),
        requests=0,
    )


_NEGLIGIBLE = 1e-9


class _Counts(NamedTuple):
    """A Poisson distribution where it is not negligible: probabilities of ``low``, ``low`` + 1, ..."""

    low: int
    masses: list[float]


def _poisson(mean: float) -> _Counts:
    """Probabilities of counts, from the mode outwards so that nothing underflows."""
    mode = int(mean)
    peak = math.exp(mode * math.log(mean) - mean - math.lgamma(mode + 1)) if mean > 0 else 1.0
    above, below = [peak], []
    count, mass = mode, peak
    while mass > _NEGLIGIBLE:
        count += 1
        mass *= mean / count
        above.append(mass)
    count, mass = mode, peak
    while count > 0 and mass > _NEGLIGIBLE:
        mass *= count / mean
        count -= 1
        below.append(mass)
    return _Counts(mode - len(below), below[::-1] + above)


def _stationary(arriving: Sequence[_Counts], cap: int, utilization: float) -> list[float]:
    """Find the distribution of who waits when a batch completes.

    A backlog decays geometrically, by 1/z a row with z the root above 1 of cap ln z = rate t(cap) (z - 1).
    """
    # 1. Where to cut: Newton from above, where the function is concave.
    z = 2 / utilization
    for _ in range(40):
        z -= (math.log(z) - utilization * (z - 1)) / (1 / z - utilization)
    tail = math.log(1e8) / math.log(z)
    reach = max(counts.low + len(counts.masses) for counts in arriving)
    last = reach + cap + int(tail)
    # 2. Columns: who comes from the states that one batch empties, by next state.
    columns = []
    for state in range(min(reach, last + 1)):
        column = [0.0] * (cap + 1)
        for waiting in range(cap + 1):
            low, masses = arriving[max(waiting, 1)]
            if low <= state < low + len(masses):
                column[waiting] = masses[state - low]
        columns.append(column)
    # 3. Iterate. From n > cap, n' = n - cap + arrivals: a dot product over a window of states (up to cap: zeros).
    low, masses = arriving[cap]
    backwards, width = masses[::-1], len(masses)
    left = max(low + width - 1 - cap, 0)
    offset = left + cap - low - width + 1
    before, after, missing = [0.0] * (left + cap + 1), [0.0] * cap, [0.0] * (last + 1 - len(columns))
    states = [0.0] * (last + 1)
    states[int(cap * utilization)] = 1.0
    moved, turn = 1.0, 0
    while moved > 1e-6:
        emptied, padded = states[: cap + 1], before + states[cap + 1 :] + after
        following = [sum(map(mul, emptied, column)) for column in columns] + missing
        for state in range(last + 1):
            following[state] += sum(map(mul, backwards, padded[offset + state : offset + state + width]))
        total = sum(following)
        following = [mass / total for mass in following]
        before_that, moved = moved, sum(map(abs, map(sub, following, states)))
        turn += 1
        if turn % 8 == 0 and moved < before_that:
            # What is left shrinks by the second eigenvalue a turn: add the rest of the geometric series (Aitken).
            ratio = moved / before_that
            gain = ratio / (1 - ratio)
            following = [max(new + gain * (new - old), 0.0) for new, old in zip(following, states, strict=True)]
        states = following
    return states


class _Overflow:
    """Latencies of those who come during a service and can not all be in the next batch."""

    def __init__(self, times: Sequence[float], rate: float) -> None:
        self._times = times
        self._cap = len(times) - 1
        self._more = rate * times[-1]
        self._portions: dict[tuple[int, int], float] = {}
        self._order: dict[int, list[list[float]]] = {}

    def portion(self, ahead: int, rows: int) -> float:
        """Mean service time of the batch behind ``ahead`` full ones, with ``rows`` and those that come by then."""
        if rows >= self._cap:
            return self._times[self._cap]
        if (ahead, rows) not in self._portions:
            low, masses = _poisson(self._more * ahead)
            self._portions[ahead, rows] = sum(
                mass * self._times[min(rows + more, self._cap)] for more, mass in enumerate(masses, low)
            ) / sum(masses)
        return self._portions[ahead, rows]

    def among(self, count: int) -> list[list[float]]:
        """Of the first m of ``count`` arrivals uniform over a service, how many to expect by the end of each slice.

        By slice, then m: E min(m, Binomial(count, end)), summed up as the sum over k <= m of P(Binomial >= k).
        """
        if count not in self._order:
            self._order[count] = []
            for end in range(1, SLICES):
                odds = end / SLICES / (1 - end / SLICES)
                mass = (1 - end / SLICES) ** count
                expected, at_least = [0.0], 1.0
                for k in range(count):
                    at_least -= mass
                    expected.append(expected[-1] + max(at_least, 0.0))
                    mass *= odds * (count - k) / (k + 1)
                self._order[count].append(expected)
            self._order[count].append([float(m) for m in range(count + 1)])
        return self._order[count]


SLICES = 4
"""Parts of a service in which arrivals that don't fit into the next batch are taken as evenly spread."""


def _add_waiters(
    segments: list[_Segment],
    mass: float,
    times: Sequence[float],
    size: int,
    left: int,
    counts: _Counts,
    overflow: _Overflow,
) -> None:
    """Add the latencies of those who come during one service, behind ``left`` that did not fit into it."""
    cap, time = len(times) - 1, times[size]
    for count, probability in enumerate(counts.masses, counts.low):
        weight = mass * probability
        if weight * count < _NEGLIGIBLE:
            continue
        total = left + count
        if total <= cap:
            segments.append(_Segment(times[total], time, weight * count))
            continue
        order = overflow.among(count)
        first, ahead = 0, left // cap
        while first < count:
            last = min((ahead + 1) * cap - left, count)
            after = ahead * times[cap] + overflow.portion(ahead, total - ahead * cap)
            before = 0.0
            for part, expected in enumerate(order, 1):
                upto = expected[last] - expected[first]
                share, before = upto - before, upto
                if weight * share > _NEGLIGIBLE:
                    segments.append(_Segment(after + time * (1 - part / SLICES), time / SLICES, weight * share))
            first, ahead = last, ahead + 1


class _Segment(NamedTuple):
    """Latencies uniform over [start, start + width], ``weight`` waiters strong."""

    start: float
    width: float
    weight: float


def _read(segments: Sequence[_Segment], slo_target: float) -> tuple[list[float], float]:
    """Read the quantiles and the share beyond the target from a mixture of segments, sweeping over their ends."""
    turns = [(start, weight / width) for start, width, weight in segments]
    turns += [(start + width, -weight / width) for start, width, weight in segments]
    turns.sort()
    total = sum(segment.weight for segment in segments)
    wanted = [q * total for q in PERCENTILES]
    quantiles: list[float] = []
    at = below = density = in_time = 0.0
    for turn, change in turns:
        until = below + density * (turn - at)
        while len(quantiles) < len(wanted) and until >= wanted[len(quantiles)]:
            quantiles.append(at + (wanted[len(quantiles)] - below) / density)
        if at <= slo_target < turn:
            in_time = below + density * (slo_target - at)
        at, below, density = turn, until, density + change
    if slo_target >= at:
        in_time = total
    return quantiles, max(1 - in_time / total, 0.0)
