"""Requests that were answered alone, kept to be compared with their rows in a batch. Bounded in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.agreement import ELEMENTS, disagreement
from carpool_sidecar.protocols.common import Piece, Portion

if TYPE_CHECKING:
    from carpool_sidecar.protocols.agreement import Difference, Tolerance
    from carpool_sidecar.protocols.common import Message, Parsed
    from carpool_sidecar.protocols.headers import Facts

MAX_SAMPLES = 8
"""Requests kept of one check."""

MAX_BYTES = 16 * 2**20
"""Bytes kept of all checks together, requests with their answers."""

MAX_SAMPLE = MAX_BYTES // 2
"""Bytes of one request with its answer: a trial needs two."""

COMPARED = 16
"""Rows of a request that are compared at most."""


@dataclass(slots=True, eq=False)
class Sample:
    """A request with the answer that it got alone. ``digest`` is of its rows; ``size`` in bytes, with its answer."""

    parsed: Parsed[Any]
    facts: Facts
    answer: Piece
    digest: bytes
    size: int
    seen: int = 1
    """How often a request with these rows was answered alone."""

    def part(self, start: int, stop: int) -> Message:
        """Return the answer to some of its rows."""
        return part(self.parsed, self.answer, start, stop)


def part(parsed: Parsed[Any], answer: Piece, start: int, stop: int) -> Message:
    """Return some rows of an answer, as an answer of its own."""
    piece = Piece(answer.answer, answer.start + start, answer.start + stop)
    return CODECS[parsed.endpoint.protocol].assemble(parsed, [piece])


def digest_of(parsed: Parsed[Any]) -> bytes:
    """Return a digest of the rows of a request: equal for equal rows, whatever the request is called."""
    digest = blake2b(digest_size=16)
    for piece in CODECS[parsed.endpoint.protocol].merge([Portion(parsed, 0, parsed.rows)]).parts:
        digest.update(piece)
    return digest.digest()


class Shelf:
    """The room that all samples share. Where it is full, those make room that were begun first."""

    def __init__(self, room: int = MAX_BYTES) -> None:
        self.room = room
        self.held = 0
        self._users: dict[Samples, None] = {}

    def take(self, samples: Samples, size: int) -> bool:
        """Give room for one more sample; False where it is larger than all that others could give up."""
        if size > self.room - samples.size:
            return False
        while self.held + size > self.room:
            next(each for each in self._users if each is not samples).clear()
        self.held += size
        self._users.setdefault(samples)
        return True

    def leave(self, samples: Samples, size: int) -> None:
        """Take room back."""
        self.held -= size
        if not samples.kept:
            self._users.pop(samples, None)


class Samples:
    """What one check keeps: among requests that could share a batch, those whose answers differ.

    A trial of two requests with equal answers would agree whatever the model does with rows, so of these one is kept.
    """

    __slots__ = ("kept", "padded", "shelf", "size")

    def __init__(self, shelf: Shelf, *, padded: bool = False) -> None:
        self.kept: list[Sample] = []
        self.padded = padded
        """Whether requests could share a batch that differ in length."""
        self.shelf = shelf
        self.size = 0
        """Bytes."""

    def add(self, sample: Sample, tolerance: Tolerance) -> Difference | None:
        """Take a sample, unless it shows nothing new; a difference between the answers to equal rows, both alone."""
        mates = [each for each in self.kept if self._key(each) == self._key(sample)]
        for mate in mates:
            if mate.digest == sample.digest:
                mate.seen += 1
                return _difference(mate, sample, tolerance)
        if any(_difference(mate, sample, tolerance) is None for mate in mates):
            return None
        while self.kept and (len(self.kept) >= MAX_SAMPLES or self.size + sample.size > MAX_BYTES):
            self._drop(self.kept[0])
        if sample.size <= MAX_SAMPLE and self.shelf.take(self, sample.size):
            self.kept.append(sample)
            self.size += sample.size
        return None

    def group(self) -> list[Sample]:
        """Return the most samples that could share a batch."""
        return max(self._groups(), key=len, default=[])

    def of_several_lengths(self) -> list[Sample]:
        """Return the most that could share a batch and differ in length: the shortest, the longest, and so on inwards.

        So the first two differ, and whatever begins or ends with them.
        """
        groups = [each for each in self._groups() if len({sample.parsed.key for sample in each}) > 1]
        most: list[Sample] = max(groups, key=len, default=[])
        ascending = sorted(most, key=_length)
        middle = -(-len(ascending) // 2)
        outer, inner = ascending[:middle], ascending[middle:][::-1]
        return [each for pair in zip_longest(outer, inner) for each in pair if each is not None]

    def _groups(self) -> list[list[Sample]]:
        groups: dict[bytes, list[Sample]] = {}
        for each in self.kept:
            groups.setdefault(self._key(each), []).append(each)
        return list(groups.values())

    def _key(self, sample: Sample) -> bytes:
        fit = sample.parsed.fit
        return sample.parsed.key if not self.padded or fit is None or fit.key is None else fit.key

    def repeated(self) -> Sample | None:
        """Return the request that was answered alone most often."""
        return max(self.kept, key=lambda each: each.seen, default=None)

    def clear(self) -> None:
        """Let go of all."""
        while self.kept:
            self._drop(self.kept[0])

    def _drop(self, sample: Sample) -> None:
        self.kept.remove(sample)
        self.size -= sample.size
        self.shelf.leave(self, sample.size)


def _length(sample: Sample) -> int:
    return 0 if sample.parsed.fit is None else sample.parsed.fit.length


def _difference(one: Sample, other: Sample, tolerance: Tolerance) -> Difference | None:
    rows = min(one.parsed.rows, other.parsed.rows, COMPARED)
    protocol = one.parsed.endpoint.protocol
    return disagreement(protocol, one.part(0, rows), other.part(0, rows), tolerance, ELEMENTS // MAX_SAMPLES)
