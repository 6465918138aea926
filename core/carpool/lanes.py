"""A lane is what the Batcher knows of one model; a queue is what waits in it under one key."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from carpool.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from carpool.policy import Parameters
    from carpool.riding import Estimate, Request

EXTRA_ROWS = 64
"""Rows that may be served again in search of a culprit before the share below counts."""
EXTRA_SHARE = 0.10

PROBE_AFTER = 50
"""Full batches served at a lowered ceiling before one more row is tried; doubled whenever the try fails."""


class Queue:
    """Requests with one key, by priority class, first come, first served."""

    __slots__ = ("classes", "due_at_once", "earliest", "key", "lane", "merge", "rows", "tokens")

    def __init__(self, key: Hashable, lane: Lane, *, merge: bool) -> None:
        self.key = key
        self.lane = lane
        self.merge = merge
        self.classes: dict[int, deque[Request]] = {}
        self.rows = 0
        self.tokens = 0
        self.earliest: float | None = inf
        """Least of due time and deadline over who waits; ``None``: not known, to be looked up."""
        self.due_at_once = False
        """Work that was due when the parameters changed stays due."""

    def heads(self) -> list[Request]:
        """Return the oldest of each class."""
        return [waiting[0] for waiting in self.classes.values()]

    def __iter__(self) -> Iterator[Request]:
        for waiting in self.classes.values():
            yield from waiting

    def add(self, request: Request) -> None:
        """Append at the end of its class."""
        waiting = self.classes.get(request.priority)
        if waiting is None:
            waiting = self.classes[request.priority] = deque()
        waiting.append(request)
        self.rows += request.rows
        self.tokens += request.tokens
        if self.earliest is not None:
            limit = min(request.deadline, request.due)
            self.earliest = min(self.earliest, limit)

    def soonest(self) -> float:
        """Return the least of due time and deadline over who waits."""
        if self.earliest is None:
            self.earliest = min(min(request.due, request.deadline) for request in self)
        return self.earliest

    def first(self, now: float, ageing: float) -> deque[Request]:
        """Return the class whose head goes first: by priority, one class up for every ``ageing`` seconds waited."""
        if len(self.classes) == 1:
            return next(iter(self.classes.values()))
        return min(
            self.classes.values(),
            key=lambda waiting: (waiting[0].priority - (now - waiting[0].arrived) / ageing, waiting[0].arrived),
        )


class Lane:
    """One model: its parameters, what is believed of its service time, what went wrong with it, and its counters."""

    __slots__ = (
        "at_ceiling", "ceiling", "counters", "estimate", "extra_rows", "max_batch", "max_tokens", "name", "parameters",
        "passing", "probe_after", "quarantined", "queued", "seen", "served_rows", "shed_slo", "sheds",
    )  # fmt: skip

    def __init__(self, name: str, parameters: Parameters) -> None:
        self.name = name
        self.parameters = parameters
        self.passing = parameters.pass_through
        """Whether requests pass one by one now; a backlog ends it until the next parameters come."""
        self.estimate: Estimate | None = None
        self.max_batch: int | None = None
        """The model's own cap on rows."""
        self.max_tokens: int | None = None
        """Budget of a batch, in the requests' tokens."""
        self.shed_slo = False
        self.quarantined = False
        self.ceiling: int | None = None
        """Rows above which a batch is believed to be too large for the upstream, from size faults."""
        self.at_ceiling = 0
        self.probe_after = PROBE_AFTER
        self.extra_rows = 0
        self.served_rows = 0
        self.queued = 0
        """Requests waiting."""
        self.seen: set[tuple[int, int]] = set()
        """(bucket, rows) served at least once: the first of each is cold."""
        self.counters = Counters()

    @property
    def cap(self) -> int:
        """Rows that a batch may have now."""
        cap = self.parameters.max_batch
        if self.max_batch is not None and self.max_batch < cap:
            cap = self.max_batch
        if self.ceiling is not None and self.ceiling < cap:
            cap = self.ceiling
        return cap

    def may_serve_again(self, rows: int) -> bool:
        """Whether the budget for finding culprits covers ``rows`` more; takes them from it when it does."""
        if self.extra_rows + rows > EXTRA_ROWS + EXTRA_SHARE * self.served_rows:
            return False
        self.extra_rows += rows
        return True

    def lower_ceiling(self, rows: int) -> None:
        """Learn that more than ``rows`` is too much."""
        if self.ceiling is not None:
            self.probe_after *= 2
        self.ceiling = max(1, rows if self.ceiling is None else min(rows, self.ceiling))
        self.at_ceiling = 0

    def served(self, rows: int) -> None:
        """Count a success, and after many at the ceiling try a row more than it."""
        self.served_rows += rows
        if self.ceiling is not None and rows >= self.ceiling:
            self.at_ceiling += 1
            if self.at_ceiling >= self.probe_after:
                self.at_ceiling = 0
                self.ceiling += max(1, self.ceiling // 8)
                if self.ceiling >= self.parameters.max_batch:
                    self.ceiling = None
