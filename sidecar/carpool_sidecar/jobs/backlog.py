"""What waits in the store: single jobs, and lines of batches, which share the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.jobs.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool_sidecar.jobs.records import Outcome, Rest, Task
    from carpool_sidecar.jobs.storage.batches import Batches
    from carpool_sidecar.jobs.storage.jobs import JobStore


class Backlog:
    """Tasks that wait, single ones first. No more are started once the store has ``max_bytes``."""

    def __init__(self, store: JobStore, batches: Batches, max_bytes: int) -> None:
        self._store, self._batches, self._max_bytes = store, batches, max_bytes
        self._places = 0
        """Tasks started since batches last had their share."""

    @property
    def waits(self) -> bool:
        """Whether a task waits."""
        return bool(self._store.totals["queued"] or self._store.totals["lines"])

    # Called in the writer's thread

    def exchange(self, outcomes: Iterable[Outcome], room: int, rest: Rest, now: float) -> list[Task]:
        """Store outcomes, and return up to ``room`` tasks that may begin; ``rest``: how many on paths that refused."""
        for outcome in outcomes:
            (self._batches if isinstance(outcome.of, Place) else self._store).finish(outcome, now)
        if not room or self._store.totals["bytes"] >= self._max_bytes:
            return []
        # Jobs leave batches one place in four.
        self._places += room
        share = min(room, self._places // 4)
        self._places -= 4 * share
        tasks = self._batches.claim(share, now, rest) if share else []
        tasks += self._store.claim(room - len(tasks), now, rest)
        if len(tasks) < room:
            tasks += self._batches.claim(room - len(tasks), now, rest)
        return tasks

    def sweep(self, now: float) -> bool:
        """Delete what was kept long enough; return whether there is more."""
        return self._store.sweep(now) | self._batches.sweep(now)
