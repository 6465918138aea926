"""Requests answered without batching, kept to compare with their rows in a batch. Bounded in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.answer_comparison import ELEMENTS, disagreement
from carpool_sidecar.protocols.common import Piece, Portion

if TYPE_CHECKING:
    from carpool_sidecar.protocols.answer_comparison import Difference, Tolerance
    from carpool_sidecar.protocols.common import Message, Parsed
    from carpool_sidecar.protocols.headers import Facts

MAX_SAMPLES = 8
"""Most requests kept for one check."""

MAX_BYTES = 16 * 2**20
"""Most bytes kept for all checks together, requests with their answers."""

MAX_SAMPLE = MAX_BYTES // 2
"""Most bytes of one request with its answer: a trial needs two."""

COMPARED = 16
"""Most rows of a request that are compared."""


@dataclass(slots=True, eq=False)
class Sample:
    """A request with its answer without batching. ``digest`` is of its rows; ``size`` in bytes, with its answer."""

    parsed: Parsed[Any]
    facts: Facts
    answer: Piece
    digest: bytes
    size: int
    seen: int = 1
    """How often a request with these rows was answered without batching."""

    def part(self, start: int, stop: int) -> Message:
        """Return the answer to some of its rows."""
        return part(self.parsed, self.answer, start, stop)


def part(parsed: Parsed[Any], answer: Piece, start: int, stop: int) -> Message:
    """Return some rows of an answer, as a separate answer."""
    piece = Piece(answer.answer, answer.start + start, answer.start + stop)
    return CODECS[parsed.endpoint.protocol].assemble(parsed, [piece])


def digest_of(parsed: Parsed[Any]) -> bytes:
    """Return a digest of the rows of a request: equal for equal rows, independent of the request's id."""
    digest = blake2b(digest_size=16)
    for piece in CODECS[parsed.endpoint.protocol].merge([Portion(parsed, 0, parsed.rows)]).parts:
        digest.update(piece)
    return digest.digest()


class Shelf:
    """The memory that all samples share. When it is full, the oldest sets of samples are dropped."""

    def __init__(self, room: int = MAX_BYTES) -> None:
        self.room = room
        self.held = 0
        self._users: dict[Samples, None] = {}

    def take(self, samples: Samples, size: int) -> bool:
        """Reserve room for one more sample; False if it is larger than all that others could release."""
        if size > self.room - samples.size:
            return False
        while self.held + size > self.room:
            next(each for each in self._users if each is not samples).clear()
        self.held += size
        self._users.setdefault(samples)
        return True

    def leave(self, samples: Samples, size: int) -> None:
        """Release room."""
        self.held -= size
        if not samples.kept:
            self._users.pop(samples, None)


class Samples:
    """The samples of one check: among requests that could share a batch, those with different answers.

    A trial of two requests with equal answers would agree with any model, so only one of these is kept.
    """

    __slots__ = ("kept", "padded", "shelf", "size")

    def __init__(self, shelf: Shelf, *, padded: bool = False) -> None:
        self.kept: list[Sample] = []
        self.padded = padded
        """Whether requests of different lengths could share a batch."""
        self.shelf = shelf
        self.size = 0
        """Bytes."""

    def add(self, sample: Sample, tolerance: Tolerance) -> Difference | None:
        """Add a sample if it is new; return a difference between two unbatched answers to equal rows."""
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

        So the first two differ in length in every trial of them.
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
        """Return the request that was answered without batching most often."""
        return max(self.kept, key=lambda each: each.seen, default=None)

    def clear(self) -> None:
        """Drop all samples."""
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
