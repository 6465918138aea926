"""Clipper's three ways to a batch size: AIMD, quantile regression, and what its code does, exploration and regression.

Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System", NSDI 2017, sections 4.3.1 (dynamic batch
size) and 4.3.2 (delayed batching); ucbrise/clipper at 9f25e3f, src/libclipper/src/containers.cpp.

Requests that are late already are dropped (src/libclipper/include/clipper/task_executor.hpp,
``remove_tasks_with_elapsed_deadlines``).

In favour of all three: as many containers as the device computes batches at once; the time a batch takes is the
device's own, without a network or a serializer; caching and ensembles play no part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from proof.rivals.fifo import Fifo, Verdict
from proof.rivals.settings import Still, half_slo_batch, setting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from random import Random

    from carpool.batching.requests import Batch
    from proof.rivals.fifo import Line
    from proof.world import Knowledge

BACKOFF = 0.9
"""A batch that took too long takes a tenth off the size (4.3.1)."""

DELAY = 0.1
"""Share of the objective that a batch is held for: the paper's 2 ms for 20 ms (4.3.2)."""

QUANTILE = 0.99
WINDOW = 256
"""Batches that the regression of a quantile looks back on; the paper does not say."""

RECENT = 32
"""Samples of each size that a regression of sizes looks back on."""

REFIT = 32
"""Batches between two regressions."""

ENOUGH = 5
"""Samples of a size before a larger one is tried: MINIMUM_BATCH_SAMPLE_SIZE."""

ADDITIVE = 10
"""Size up to which it grows by one: ADDITIVE_EXPANSION_THRESHOLD."""

GROWTH = (0.1, 0.05)
"""Mean and standard deviation of the share by which it grows from there on: explore_dist_mu_ and _std_."""

SAFETY = 0.92
"""Share of the time to the deadline that is planned with: budget_decay_."""

Z_SCORE = 3.0
"""Standard deviations over the mean that are taken for the p99: LATENCY_Z_SCORE."""


class Size(ABC):
    """The largest batch that meets the latency objective, as far as is known by now."""

    def __init__(self, objective: float, rows: int, largest: int) -> None:
        """``objective``: seconds that a batch may take; ``rows`` to begin with and at most."""
        self.rows = rows
        self._objective = objective
        self._largest = largest

    @abstractmethod
    def sample(self, rows: int, seconds: float) -> None:
        """Take in a batch of ``rows`` that took ``seconds``."""


class Aimd(Size):
    """One row more for each full batch within the objective, a tenth less for each one beyond it."""

    def sample(self, rows: int, seconds: float) -> None:
        """Grow or back off. What was not full says nothing of larger ones."""
        if seconds > self._objective:
            self.rows = max(1, floor(BACKOFF * self.rows))
        elif rows >= self.rows:
            self.rows = min(self.rows + 1, self._largest)


class Quantile(Size):
    """The largest size whose p99 is within the objective, the p99 being linear in the size."""

    def __init__(self, objective: float, rows: int, largest: int) -> None:
        super().__init__(objective, rows, largest)
        self._samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._fresh = 0
        self._tried = rows

    def sample(self, rows: int, seconds: float) -> None:
        """Take it in; every so often draw the line, and go up to twice as far along it as was ever seen."""
        self._samples.append((rows, seconds))
        self._tried = max(self._tried, rows)
        self._fresh += 1
        if self._fresh < REFIT:
            return
        self._fresh = 0
        slope, fixed = quantile_line(self._samples, QUANTILE)
        within = self._largest if slope <= 0 else floor((self._objective - fixed) / slope + 1e-9)
        if fixed > self._objective:
            within = 1
        self.rows = max(1, min(within, 2 * self._tried, self._largest))


def quantile_line(
    samples: Sequence[tuple[int, float]] | deque[tuple[int, float]], quantile: float
) -> tuple[float, float]:
    """Return (seconds a row, fixed seconds) of the line with the least pinball loss (Koenker and Bassett, 1978).

    Given the slope, the best intercept is the residuals' quantile, and the loss of that is convex in the slope: a
    golden-section search between none at all and the steepest that any two samples allow. Seconds are never taken to
    fall with rows. One size alone gives a flat line.
    """
    sizes = [rows for rows, _ in samples]
    seconds = [each for _, each in samples]
    rank = ceil(quantile * len(sizes)) - 1
    if min(sizes) == max(sizes):
        return 0.0, sorted(seconds)[rank]

    def fit(slope: float) -> tuple[float, float]:
        residuals = sorted(each - slope * rows for rows, each in samples)
        fixed = residuals[rank]
        loss = sum((quantile if each > fixed else quantile - 1) * (each - fixed) for each in residuals)
        return loss, fixed

    low, high = 0.0, max(seconds) - min(seconds)
    ratio = (sqrt(5) - 1) / 2
    one, other = high - ratio * (high - low), low + ratio * (high - low)
    (loss, _), (other_loss, _) = fit(one), fit(other)
    for _ in range(25):  # 1.618 ** -25 of the range, below 1e-5 of it
        if loss <= other_loss:
            high, other, other_loss = other, one, loss
            one = high - ratio * (high - low)
            loss = fit(one)[0]
        else:
            low, one, loss = one, other, other_loss
            other = low + ratio * (high - low)
            other_loss = fit(other)[0]
    slope = (low + high) / 2
    return slope, fit(slope)[1]


class Paper(Fifo):
    """Batches up to a size that is learned; one that is not full is held for the delay."""

    def __init__(self, *, slots: int, max_batch: int, slo: float, size: Size, delay: float) -> None:
        """Start empty. ``slo`` and ``delay`` in seconds."""
        self.size = size
        self._slo = slo
        self._delay = delay
        super().__init__(slots=slots, max_batch=max_batch)

    def decide(self, line: Line, now: float) -> Verdict:
        """Send a full batch, or what there is when the delay is over."""
        late = line.late(now - self._slo)
        rows = line.rows - late.rows
        if not rows:
            return Verdict(late=late.requests)
        most = min(self.size.rows, self.cap)
        due = line.requests[late.requests].arrived + self._delay
        if rows < most and now < due:
            return Verdict(again=due, late=late.requests)
        return Verdict(min(rows, most), late=late.requests)

    def completed(self, batch: Batch, now: float) -> None:
        """Learn from it."""
        self.size.sample(batch.rows, now - batch.dispatched)


class Code(Fifo):
    """``ModelContainer::get_batch_size`` of the time that the first request has left.

    If that is more than any batch has taken yet, it explores: the largest size, or a larger one once the largest was
    used often enough. Otherwise it takes the size from a regression of sizes on their estimated p99 (mean plus three
    pooled standard deviations).

    In its favour:

    - It begins with the regression that the true batch latencies give. So it need not explore, for which it would fill
      batches up with copies of their last request.
    - A size remembers its last samples only, where the code averages over all there ever were.
    - The ridge's penalty is left out. The code chooses it by cross-validation.
    """

    def __init__(self, *, slots: int, slo: float, times: Sequence[float], rng: Random) -> None:
        """Start empty. ``slo`` in seconds; ``times``: seconds by rows (index 0 unused), up to the largest batch."""
        self._slo = slo
        self._rng = rng
        self._samples = {
            rows: deque([seconds] * ENOUGH, maxlen=RECENT)
            for rows, seconds in enumerate(times)
            if rows and seconds <= slo
        }
        self._largest = max(self._samples, default=1)
        self._fresh = 0
        self._regress()
        super().__init__(slots=slots, max_batch=len(times) - 1)

    def decide(self, line: Line, now: float) -> Verdict:
        """Drop late requests, and send as many rows as the next request's time allows."""
        late = line.late(now - self._slo)
        rows = line.rows - late.rows
        if not rows:
            return Verdict(late=late.requests)
        budget = SAFETY * (line.requests[late.requests].due - now)
        most = self._explore() if budget > self._longest else max(1, floor(self._slope * budget + self._fixed))
        most = min(most, self.cap)
        self._largest = max(self._largest, most)
        return Verdict(min(rows, most), late=late.requests)

    def _explore(self) -> int:
        largest = self._largest
        if len(self._samples.get(largest, ())) < ENOUGH:
            return largest
        if largest < ADDITIVE:
            return largest + 1
        return floor((1 + max(0.0, self._rng.gauss(*GROWTH))) * largest)

    def completed(self, batch: Batch, now: float) -> None:
        """Take in how long it took; every so often regress anew."""
        self._samples.setdefault(batch.rows, deque(maxlen=RECENT)).append(now - batch.dispatched)
        self._fresh += 1
        if self._fresh == REFIT:
            self._regress()

    def _regress(self) -> None:
        self._fresh = 0
        self._longest = max((max(samples) for samples in self._samples.values()), default=0.0)
        self._slope, self._fixed = size_line(self._samples)


def size_line(samples: Mapping[int, Collection[float]]) -> tuple[float, float]:
    """Return (rows a second, rows at none) of the least-squares line of sizes on their estimated p99.

    ``samples``: seconds by size. A size counts once, however often it was sampled; those sampled ``ENOUGH`` times give
    the pooled variance. Without samples, one row at any time.
    """
    if not samples:
        return 0.0, 1.0
    means = {rows: sum(repeats) / len(repeats) for rows, repeats in samples.items()}
    squares = freedom = 0.0
    for rows, repeats in samples.items():
        if len(repeats) >= ENOUGH:
            squares += sum((each - means[rows]) ** 2 for each in repeats)
            freedom += len(repeats) - 1
    spread = Z_SCORE * sqrt(squares / max(freedom, 1.0))
    uppers = {rows: mean + spread for rows, mean in means.items()}
    middle = sum(uppers.values()) / len(uppers)
    rows_middle = sum(uppers) / len(uppers)
    variance = sum((upper - middle) ** 2 for upper in uppers.values())
    if not variance:
        return 0.0, rows_middle
    slope = sum((upper - middle) * (rows - rows_middle) for rows, upper in uppers.items()) / variance
    return slope, rows_middle - slope * middle


def _papers(size: Callable[[float, int, int], Size], knowledge: Knowledge) -> Still:
    begin, largest = half_slo_batch(knowledge), knowledge.limits.max_batch
    chosen = setting(knowledge, largest, DELAY * knowledge.slo)
    return Still(
        chosen,
        lambda: Paper(
            slots=chosen.parameters.max_in_flight,
            max_batch=largest,
            slo=knowledge.slo,
            # In its favour: half the SLO, since a request may have to wait for the batch before its own, and nothing
            # to find out at first.
            size=size(knowledge.slo / 2, begin, largest),
            delay=float(chosen.parameters.max_wait),
        ),
    )


def aimd(knowledge: Knowledge, _rng: Random) -> Still:
    """Do the paper's default: AIMD on what a batch takes, with delayed batching."""
    return _papers(Aimd, knowledge)


def quantile(knowledge: Knowledge, _rng: Random) -> Still:
    """Do the paper's other: quantile regression of what a batch takes on its size, with delayed batching."""
    return _papers(Quantile, knowledge)


def code(knowledge: Knowledge, rng: Random) -> Still:
    """Do as its code does: exploration and regression."""
    chosen = setting(knowledge, knowledge.limits.max_batch, 0.0)
    return Still(
        chosen,
        lambda: Code(
            slots=chosen.parameters.max_in_flight,
            slo=knowledge.slo,
            times=knowledge.service.table(knowledge.limits.max_batch),
            rng=rng,
        ),
    )
