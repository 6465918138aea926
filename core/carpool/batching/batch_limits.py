"""How many rows a batch of a model may have: the configured limit, and the one that HTTP 413 answers show."""

from __future__ import annotations

from carpool.batching.isolation import EXTRA_ROWS, EXTRA_SHARE

PROBE_AFTER = 50
"""Full batches served at a lowered ceiling before one more row is tried; doubled whenever that fails."""


class BatchLimits:
    """The limits of one model's batches beside ``max_batch``."""

    __slots__ = (
        "_at_ceiling", "_largest_served", "_probe_after", "_proven", "again_rows", "ceiling", "max_rows", "served_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.max_rows: int | None = None
        """The model's own limit."""
        self.again_rows = 0
        """Rows that were served again in search of a size that fits."""
        self.served_rows = 0
        self.forget()

    def forget(self) -> None:
        """Forget what failures have shown: the server was replaced."""
        self.ceiling: int | None = None
        """Rows above which a batch is believed to be too large for the upstream."""
        self._at_ceiling = 0
        """Batches of that size that succeeded."""
        self._proven = 0
        """The ceiling before the last attempt at a higher one, proved by ``PROBE_AFTER`` batches; 0: none was made."""
        self._probe_after = PROBE_AFTER
        self._largest_served = 0
        """Rows of the largest batch that succeeded, since one as large failed for its size."""

    def may_serve_again(self, rows: int) -> bool:
        """Whether the budget for finding a size that fits covers ``rows`` more; if so, they are taken from it."""
        if self.again_rows + rows > EXTRA_ROWS + EXTRA_SHARE * self.served_rows:
            return False
        self.again_rows += rows
        return True

    def too_large(self, rows: int, *, works: int) -> None:
        """Learn that ``rows`` in one batch are too many, and that ``works`` rows are not.

        Sizes served before also work until one of them fails: half of a failed batch may be half of what fits.
        """
        if rows <= self._largest_served:
            self._largest_served = works
        works = max(works, self._largest_served)
        if 0 < self._proven < rows:
            self.ceiling = self._proven
            self._probe_after *= 2
        else:
            self.ceiling = works if self.ceiling is None else min(works, self.ceiling)
            self._proven = 0
        self._at_ceiling = 0

    def served(self, rows: int, max_batch: int) -> None:
        """Count a success, and after many at the ceiling raise it by an eighth."""
        self.served_rows += rows
        self._largest_served = max(self._largest_served, rows)
        if self.ceiling is not None and rows >= self.ceiling:
            self._at_ceiling += 1
            if self._at_ceiling >= self._probe_after:
                self._at_ceiling = 0
                self._proven = self.ceiling
                self.ceiling += max(1, self.ceiling // 8)
                if self.ceiling >= max_batch:
                    self.ceiling = None
