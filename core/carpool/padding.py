"""Padding: length buckets, static batch sizes, the waste of both, and how many riders a token budget takes.

A model that wants equal lengths gets a batch padded to its longest row; one compiled for fixed shapes gets it padded to
the next size it knows. Both cost device time for nothing, so alike should ride with alike.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Buckets(Struct, frozen=True):
    """Length buckets by their inclusive upper ends (ascending, positive): (64, 128) is 1-64, 65-128 and beyond.

    Lengths beyond the last end share one more bucket, in which nothing is padded further than to its longest row.
    """

    ends: tuple[int, ...] = ()

    @classmethod
    def geometric(cls, shortest: int, longest: int, factor: float = 2.0) -> Buckets:
        """Let ends grow by ``factor`` (> 1) from ``shortest`` until ``longest`` is covered: at most that much padding.

        Raises ``ValueError`` when the ends would not grow.
        """
        if not 1 <= shortest <= longest or factor <= 1:
            raise ValueError(f"no buckets from {shortest} to {longest} by a factor of {factor:g}")
        ends = [shortest]
        while ends[-1] < longest:
            ends.append(min(max(int(ends[-1] * factor), ends[-1] + 1), longest))
        return cls(tuple(ends))

    @classmethod
    def explicit(cls, ends: Iterable[int]) -> Buckets:
        """Take ends as given, in any order.

        Raises ``ValueError`` for an end that is not positive.
        """
        ordered = tuple(sorted(set(ends)))
        if ordered and ordered[0] < 1:
            raise ValueError(f"a bucket can't end at {ordered[0]}: lengths start at 1")
        return cls(ordered)

    def bucket(self, length: int) -> int:
        """Index of the bucket of a length, 0 for the shortest; ``len(ends)`` beyond the last."""
        return bisect_left(self.ends, length)

    def padded(self, length: int) -> int:
        """Length after padding to the bucket's end; beyond the last bucket nothing is known to pad to."""
        index = self.bucket(length)
        return self.ends[index] if index < len(self.ends) else length


class StaticSizes(Struct, frozen=True):
    """Batch sizes that a compiled model takes (ascending, positive, at least one)."""

    sizes: tuple[int, ...]

    @classmethod
    def powers_of_two(cls, largest: int) -> StaticSizes:
        """1, 2, 4, ... and ``largest`` itself."""
        sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
        return cls((*sizes, largest))

    @property
    def largest(self) -> int:
        """Most rows a batch may have."""
        return self.sizes[-1]

    def static_size(self, rows: int) -> int:
        """Smallest size that takes ``rows``.

        Raises ``ValueError`` for more rows than the largest takes: such a batch is never composed.
        """
        if rows > self.largest:
            raise ValueError(f"{rows} rows exceed the largest static size {self.largest}")
        return self.sizes[bisect_left(self.sizes, rows)]


class Waste(Struct, frozen=True):
    """Cells computed for nothing: additive over batches and replicas. Cells are rows, or tokens where lengths count."""

    real: int = 0
    padded: int = 0
    """Added to fill up: the device computes ``real + padded``."""

    @classmethod
    def of_rows(cls, rows: int, sizes: StaticSizes) -> Waste:
        """Waste of padding a batch to a static size, in rows."""
        return cls(rows, sizes.static_size(rows) - rows)

    @classmethod
    def of_tokens(
        cls, lengths: Sequence[int], buckets: Buckets | None = None, sizes: StaticSizes | None = None
    ) -> Waste:
        """Waste of a batch of rows with these lengths (at least one), in tokens.

        Rows are padded to the longest, or to the end of its bucket, and the batch to a static size.
        """
        longest = max(lengths)
        width = buckets.padded(longest) if buckets else longest
        height = sizes.static_size(len(lengths)) if sizes else len(lengths)
        real = sum(lengths)
        return cls(real, width * height - real)

    def __add__(self, other: Waste) -> Waste:
        return Waste(self.real + other.real, self.padded + other.padded)

    @property
    def ratio(self) -> float:
        """Padding per real cell; 0 of nothing."""
        return self.padded / self.real if self.real else 0.0


def riders_within(budget: int, lengths: Iterable[int], rows: Iterable[int] | None = None) -> int:
    """Count the first riders whose batch costs at most ``budget`` tokens: its rows times its longest length.

    First come, first served: the first who does not fit ends the batch, and one always rides, or it would wait for
    ever. ``rows`` gives each rider's rows (default 1).
    """
    longest = height = riders = 0
    sizes = iter(rows) if rows is not None else None
    for length in lengths:
        longest = max(longest, length)
        height += next(sizes) if sizes is not None else 1
        if riders and longest * height > budget:
            break
        riders += 1
    return riders


class Suggestion(Struct, frozen=True):
    """Buckets for a length distribution, and the share of computed tokens that would be padding."""

    buckets: Buckets
    waste: Waste


def suggest_buckets(histogram: Mapping[int, int], count: int) -> Suggestion:
    """Choose at most ``count`` (>= 1) buckets with the least padding for a histogram of lengths (not empty).

    Every row is padded to its bucket's end. An optimal end is a length that was seen, so this is a shortest path: least
    padding of the first j lengths in k buckets, over where the last one starts. The best start never moves left as j
    grows (the padding satisfies the quadrangle inequality; Yao 1980), so halving the range of j finds all of them in
    n log n a bucket. Fewer buckets are used where more save nothing.
    """
    lengths = sorted(histogram)
    seen, tokens = [0], [0]
    for length in lengths:
        seen.append(seen[-1] + histogram[length])
        tokens.append(tokens[-1] + length * histogram[length])

    def padding(start: int, stop: int) -> int:
        """Tokens added when lengths ``start`` to ``stop`` (exclusive) share a bucket."""
        return lengths[stop - 1] * (seen[stop] - seen[start]) - (tokens[stop] - tokens[start])

    total = len(lengths)
    least = [0, *(padding(0, stop) for stop in range(1, total + 1))]
    starts: list[list[int]] = []
    while len(starts) + 1 < min(count, total) and least[total] > 0:
        following, choice = [0] * (total + 1), [0] * (total + 1)
        # Ranges of stops, each with the range its best start lies in.
        ranges = [(1, total, 0, total - 1)]
        while ranges:
            low, high, left, right = ranges.pop()
            stop = (low + high) // 2
            following[stop], choice[stop] = min(
                (least[start] + padding(start, stop), start) for start in range(left, min(right, stop - 1) + 1)
            )
            if low < stop:
                ranges.append((low, stop - 1, left, choice[stop]))
            if stop < high:
                ranges.append((stop + 1, high, choice[stop], right))
        starts.append(choice)
        least = following
    ends, stop = [], total
    for choice in reversed(starts):
        ends.append(lengths[stop - 1])
        stop = choice[stop]
    if stop:
        ends.append(lengths[stop - 1])
    return Suggestion(Buckets.explicit(ends), Waste(tokens[-1], least[total]))
