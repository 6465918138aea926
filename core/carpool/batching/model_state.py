"""A lane is what the Batcher knows of one model."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.batchable import Company
from carpool.batching.counters import Counters
from carpool.batching.isolation import EXTRA_ROWS, EXTRA_SHARE, MAX_ISOLATED, Isolation, Suspects
from carpool.batching.requests import PROBES, time_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from carpool.batching.requests import Batch, Estimate
    from carpool.policy.parameters import Parameters

HOPELESS = 1.5
"""Times what a batch seldom exceeds, from which it has waited for an executor that was only hoped for."""

SLOW = 3.0
"""Times what a batch seldom exceeds, from which a first one is slow for being the first."""

PROBE_AFTER = 50
"""Full batches served at a lowered ceiling before one more row is tried; doubled whenever the try fails."""


class Backlog:
    """What waits in all queues of a model together."""

    __slots__ = ("rows", "size", "tokens")

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self.tokens = 0


class Lane:
    """One model: its parameters, what is believed of its service time, what went wrong with it, and its counters."""

    __slots__ = (
        "at_ceiling", "backlog", "ceiling", "cold_batches", "cold_slow", "company", "counters",
        "estimate", "extra_rows", "gave_back", "hopeless", "isolated", "max_batch", "max_tokens", "most_served", "name",
        "overdue", "parameters", "passing", "probe_after", "probing", "proven", "quarantined", "queued", "seen",
        "served_rows", "shed_slo", "since_probe", "suspects", "taken",
    )  # fmt: skip

    def __init__(self, name: str, parameters: Parameters) -> None:
        self.name = name
        self.parameters = parameters
        self.passing = parameters.pass_through
        """Whether requests pass one by one now; a backlog ends it until the next parameters come."""
        self.estimate: Estimate | None = None
        self.hopeless = (0, 0)
        """Executors that were hoped for in vain, those known among them; and how many were known."""
        self.max_batch: int | None = None
        """The model's own cap on rows."""
        self.max_tokens: int | None = None
        """Budget of a batch, in the requests' tokens."""
        self.shed_slo = False
        self.quarantined = False
        self.ceiling: int | None = None
        """Rows above which a batch is believed to be too large for the upstream, from size faults."""
        self.at_ceiling = 0
        self.proven = 0
        """The ceiling before the last try of a higher one, which ``PROBE_AFTER`` batches proved; 0: none tried."""
        self.probe_after = PROBE_AFTER
        self.most_served = 0
        """Rows of the largest batch that succeeded, since one as large failed for its size."""
        self.extra_rows = 0
        self.served_rows = 0
        self.queued = 0
        """Requests waiting."""
        self.backlog = Backlog()
        self.taken = 0
        """Slots taken: by calls under way that are not overdue, and by abandoned ones that the upstream computes."""
        self.overdue = 0
        """Calls under way that gave their slots back, since they take far longer than forecast."""
        self.gave_back = 0
        """Calls that ever did so."""
        self.isolated: dict[Hashable, Isolation] = {}
        """Batch keys with poisoned requests, the latest last."""
        self.suspects = Suspects()
        self.probing = 0
        """Rows with which the next batch is full, where it is one that tells what they take; else 0."""
        self.since_probe = 0
        """Batches since the last of these."""
        self.seen: set[tuple[int, int]] = set()
        """(bucket, rows) served at least once: the first of each is cold."""
        self.cold_batches = 0
        self.cold_slow = 0
        """First batches whose time was foreseen, and those of them that took ``SLOW`` times as long."""
        self.counters = Counters()
        self.company = Company()

    def obey(self, parameters: Parameters) -> None:
        """Run with other parameters from here on; what was to be probed was chosen for those before."""
        if parameters != self.parameters:
            self.probing = 0
            if self.estimate is not None and self.estimate.probed:
                self.estimate = replace(self.estimate, probed=0)
        self.parameters = parameters
        self.passing = parameters.pass_through

    def believe(self, estimate: Estimate | None) -> None:
        """Plan by an estimate from here on, less the hope that was disappointed already."""
        self.estimate = estimate
        if estimate is None or estimate.probed != self.probing:
            self.probing = 0
        if estimate is not None and estimate.hoped:
            known = estimate.executors - estimate.hoped
            if self.hopeless == (estimate.executors, known):
                self.estimate = estimate.computed(known)

    def came(self, batch: Batch, now: float) -> None:
        """Give up hope for more executors where a batch that met others has waited for one.

        Sampling tells after dozens of batches whether there are four executors or one. By then everybody whom four
        could have answered in time has been admitted, and been late.
        """
        estimate = self.estimate
        if estimate is None or not estimate.hoped:
            return
        known = estimate.executors - estimate.hoped
        seldom = time_of(estimate.of(batch.bucket).upper, batch.rows)
        if batch.in_flight > known and now - batch.dispatched > HOPELESS * seldom:
            self.hopeless = (estimate.executors, known)
            self.estimate = estimate.computed(known)

    @property
    def picky(self) -> bool:
        """Whether sizes are slow the first time, as where kernels are chosen or compiled for each shape."""
        return self.cold_slow > 1 and 2 * self.cold_slow > self.cold_batches

    def familiar(self, bucket: int, rows: int) -> int:
        """Return the most rows, up to ``rows``, that were served before or are worth it to be, in half octaves.

        1, 2, 3, 4, 6, 8, 12, ...: a dozen first batches up to 64 rows instead of 64, for a third of a batch left
        behind at most, and who is has waited least.
        """
        octave = 1 << (rows.bit_length() - 1)
        step = octave + octave // 2 if rows >= octave + octave // 2 else octave
        return next((size for size in range(rows, step, -1) if (bucket, size) in self.seen), step)

    def warmed(self, batch: Batch, now: float) -> float:
        """Learn how long the first batch of a size took; return seconds beyond belief, 0 where it was not ``SLOW``."""
        if self.estimate is None:
            return 0.0
        estimate = self.estimate.of(batch.bucket)
        # One that began before anything was measured is judged by what has been since.
        foreseen = batch.finish if batch.finish < inf else batch.dispatched + time_of(estimate.times, batch.rows)
        excess = now - foreseen
        slow = excess > (SLOW - 1) * time_of(estimate.upper, batch.rows)
        self.cold_batches += 1
        self.cold_slow += slow
        return excess if slow else 0.0

    @property
    def cap(self) -> int:
        """Rows that a batch may have now."""
        cap = self.parameters.max_batch
        if self.max_batch is not None and self.max_batch < cap:
            cap = self.max_batch
        if self.ceiling is not None and self.ceiling < cap:
            cap = self.ceiling
        return cap

    @property
    def full(self) -> int:
        """Rows with which the next batch is full."""
        if not self.probing:
            return self.cap
        return min(bound for bound in (self.probing, self.max_batch, self.ceiling) if bound is not None)

    def begun(self) -> None:
        """Count a batch that was composed, and say whether the next one is to tell what another size takes."""
        estimate = self.estimate
        self.probing = 0
        if estimate is None or not estimate.probed:
            return
        self.since_probe += 1
        if self.since_probe >= PROBES:
            self.since_probe = 0
            self.probing = estimate.probed

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return self.taken < self.parameters.max_in_flight

    @property
    def stuck(self) -> bool:
        """Whether its calls are not answered, so that nothing of what waits for it reaches the upstream."""
        return self.overdue > 0 and not self.free

    def isolate(self, key: Hashable, rows: int) -> bool:
        """Note that a batch of ``rows`` failed for one of its requests; return whether to search for it by halves."""
        isolation = self.isolated.pop(key, None) or Isolation()
        self.isolated[key] = isolation
        if len(self.isolated) > MAX_ISOLATED:
            del self.isolated[next(iter(self.isolated))]
        return isolation.failed(rows)

    def may_serve_again(self, rows: int) -> bool:
        """Whether the budget for finding a size that fits covers ``rows`` more; takes them from it when it does."""
        if self.extra_rows + rows > EXTRA_ROWS + EXTRA_SHARE * self.served_rows:
            return False
        self.extra_rows += rows
        return True

    def too_large(self, rows: int, *, works: int) -> None:
        """Learn that ``rows`` at once is too much, while ``works`` is not.

        What was served before works too, until as much fails: halves of the first to fail may be half of what fits.
        """
        if rows <= self.most_served:
            self.most_served = works
        works = max(works, self.most_served)
        if 0 < self.proven < rows:
            # The try of a row more failed: back to where it started, and longer until the next.
            self.ceiling = self.proven
            self.probe_after *= 2
        else:
            self.ceiling = works if self.ceiling is None else min(works, self.ceiling)
            self.proven = 0
        self.at_ceiling = 0

    def served(self, key: Hashable, rows: int) -> None:
        """Count a success, and after many at the ceiling try a row more than it."""
        self.served_rows += rows
        if self.isolated and (isolation := self.isolated.get(key)) is not None:
            isolation.succeeded(rows)
            if isolation.over(self.cap):
                del self.isolated[key]
        self.most_served = max(self.most_served, rows)
        if self.ceiling is not None and rows >= self.ceiling:
            self.at_ceiling += 1
            if self.at_ceiling >= self.probe_after:
                self.at_ceiling = 0
                self.proven = self.ceiling
                self.ceiling += max(1, self.ceiling // 8)
                if self.ceiling >= self.parameters.max_batch:
                    self.ceiling = None

    def forget(self) -> None:
        """Forget what was learned of the model: its server was replaced."""
        self.seen.clear()
        self.cold_batches = self.cold_slow = 0
        self.estimate = None
        self.probing = 0
        self.hopeless = (0, 0)
        self.ceiling = None
        self.at_ceiling = self.proven = self.most_served = 0
        self.probe_after = PROBE_AFTER
        self.quarantined = False
        self.isolated.clear()
