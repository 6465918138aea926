"""Times a model: sizes interleaved, cold runs separate, concurrency by throughput; and recommends from the times.

Hosts pause and speeds drift. Each round measures every size once, so a slow minute affects all alike. The minimum of
many rounds is the model's time without disturbance.
"""

from __future__ import annotations

import math
import threading
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.profiling.inflection import WORTHWHILE, inflection, may_gain_more

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from carpool.learning.latency_model import ServiceTime

LEAST_ROUNDS = 3

ALL = 0.9
"""From this share of the rows that memory allows, memory is what limits a batch."""


class Timing(NamedTuple):
    """Seconds of batches of one size. ``cold``: the first one, which may compile kernels or grow memory."""

    rows: int
    cold: float
    best: float
    middle: float
    spread: float
    """Median absolute deviation over the median, scaled to a standard deviation: robust to pauses of the host."""
    rounds: int


class Stopped(KeyboardInterrupt):
    """Ctrl-C among the rounds, after a complete one."""

    def __init__(self, timings: list[Timing]) -> None:
        super().__init__()
        self.timings = timings
        """Of the complete rounds."""


def sizes_up_to(most: int) -> list[int]:
    """Return powers of two and the largest: 1, 2, 4, ..., most."""
    return sorted({2**step for step in range(most.bit_length())} | {most})


def interleave(
    runs: Mapping[int, Callable[[], object]],
    cold: Mapping[int, float],
    *,
    rounds: int,
    budget: float,
    clock: Callable[[], float],
) -> list[Timing]:
    """Time each size in turn, ``rounds`` times or for ``budget`` seconds, at least ``LEAST_ROUNDS`` times.

    Rounds alternate up and down, so that no size always follows the largest. Raises ``Stopped``.
    """
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    started = clock()
    try:
        for number in range(rounds):
            if number >= LEAST_ROUNDS and clock() - started > budget:
                break
            for size in sorted(runs, reverse=bool(number % 2)):
                before = clock()
                runs[size]()
                seconds[size].append(clock() - before)
    except KeyboardInterrupt:
        complete = min(map(len, seconds.values()))
        if not complete:
            raise
        raise Stopped(_timings({size: found[:complete] for size, found in seconds.items()}, cold)) from None
    return _timings(seconds, cold)


def _timings(seconds: Mapping[int, list[float]], cold: Mapping[int, float]) -> list[Timing]:
    timings = []
    for size, found in sorted(seconds.items()):
        middle = median(found)
        spread = 1.4826 * median(abs(value - middle) for value in found) / middle
        timings.append(Timing(size, cold[size], min(found), middle, spread, len(found)))
    return timings


def throughputs(
    run: Callable[[], object], most: int, *, seconds: float, trials: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Measure batches per second with 1 to ``most`` callers at once: the best of interleaved trials."""
    best = dict.fromkeys(range(1, most + 1), 0.0)
    for _ in range(trials):
        for callers in best:
            best[callers] = max(best[callers], _throughput(run, callers, seconds, clock))
    return best


def _throughput(run: Callable[[], object], callers: int, seconds: float, clock: Callable[[], float]) -> float:
    """Count batches completed by callers that each send the next when the last was answered."""
    finished: list[int] = []
    failures: list[Exception] = []
    started = clock()

    def call() -> None:
        count = 0
        try:
            while not count or clock() - started < seconds:
                run()
                count += 1
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread below
            failures.append(error)
        finished.append(count)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(finished) / (clock() - started)


def executors_of(rates: dict[int, float]) -> int:
    """Return how many batches are computed at once: the best throughput as a whole multiple of a single caller's.

    Less than 0.7 of one more is overlap (decoding, the network), not server concurrency.
    """
    return max(math.floor(max(rates.values()) / rates[1] + 0.3), 1)


class Advice(NamedTuple):
    """The recommendation from a curve. ``gain``: device time per row at batch 1 over that at ``max_batch``."""

    max_batch: int
    gain: float
    rows_per_second: float
    fits: bool
    """Whether a request that just missed a batch is still answered in time: two service times within the SLO."""
    text: str


def advise(curve: ServiceTime, *, slo: float, limit: int | None) -> Advice:
    """Recommend a batch size for a p99 (seconds) and, if memory limits it, the limit in rows.

    At full load a request waits for the batch before its own: twice the batch latency must be within the SLO.
    """
    top = min(curve.largest_measured, limit or curve.largest_measured)
    sizes = range(1, top + 1)
    cheapest = inflection(curve, top)
    allowed = [rows for rows in sizes if rows <= cheapest and 2 * curve.time(rows) <= slo]
    best = max(allowed, default=1)
    gain = curve.per_row(1) / curve.per_row(best)
    rate = best * curve.executors / curve.time(best)
    slowest = max(sizes, key=curve.per_row)
    if not allowed:
        text = (
            f"even two batches of one row take {2 * curve.time(1) * 1e3:.3g} ms: under load this p99 can't be met; "
            "serve single rows and keep the utilization low, or relax it"
        )
    elif cheapest == 1 and top > 1:
        loss = curve.per_row(slowest) / curve.per_row(1)
        worse = f"; a row in a batch of {slowest} costs {loss:.2g} times as much" if loss > WORTHWHILE else ""
        text = f"don't batch: a row never costs less in a batch{worse}"
    elif best < cheapest:
        text = f"max_batch {best}: the p99 leaves no room for {cheapest}, where a row would be cheapest"
    elif top < curve.largest_measured and best >= ALL * top:
        text = f"max_batch {best}, all that memory allows"
    elif top == curve.largest_measured and may_gain_more(curve):
        text = f"max_batch {best}: a row still gets cheaper at {top}, the largest measured; larger ones may gain more"
    else:
        text = f"max_batch {best}: larger batches gain little"
    return Advice(best, gain, rate, bool(allowed), text)
