"""The verification of one form of a model's requests: its state, the next trial, and its result. Pure.

A form is everything except rows, sizes and headers: a protocol, a target, parameters, requested outputs. Its requests
are not batched until ``LONE`` of their answers had the right number of rows, and ``TRIALS`` batches gave each row the
answer that it got without batching. A trial has requests with different answers, the first of them three times, as in
A B A A or A B C D A A. It reveals a cumulative sum, statistics over the batch, sorting, reversal, a state, and a
constant number of rows; with more requests also dependence on single values.

If all traffic is one repeated request, as from a load generator, there is no B. A trial of A A A A then allows
merging requests with A's rows, and no others.

If the policy names a sequence axis, requests of different lengths are padded in these trials. They share batches
once ``TRIALS`` such trials agreed. A trial that did not agree ends padding, but does not affect rows of equal length.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_sidecar.axis_verification.samples import Samples, digest_of, part
from carpool_sidecar.protocols.answer_comparison import Tolerance
from carpool_sidecar.protocols.common import Message, Portion, longest

if TYPE_CHECKING:
    from carpool.policy.spec import SequenceAxis
    from carpool_sidecar.axis_verification.samples import Sample, Shelf
    from carpool_sidecar.protocols.answer_comparison import Difference
    from carpool_sidecar.protocols.common import Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts

LONE = 8
"""Requests answered without batching before a trial."""

SEEN = 4
"""Times that a request was answered without batching before it is merged with equal ones."""

TRIALS = 2
"""Trials that have to agree."""

LEAST_ROWS, TRIAL_ROWS = 4, 16
"""Least and most rows of a trial: those of A B A A, if batches may be so large."""

TRIAL_BYTES = 4 * 2**20
"""Most bytes of its requests and their answers, unless two requests already have more."""

COPIES_BYTES = 32 * 2**20
"""Most bytes of a batch of copies."""

SPAN = 4
"""Most rows of a request whose answer in a batch is compared later."""

REJECTIONS = 2
"""Trials that get an error, with requests that got answers without batching, before batches count as refused."""

EVERY_BATCHES, EVERY_SECONDS = 1000, 60.0
"""A batch is checked after so many others, or so many seconds; the first ones sooner: after 1, 2, 4, 8, ... others."""

LOOK_AFTER = 0.1
"""Seconds between two checks of the rows of answers, once batches were verified."""

MAX_PAUSE = 60.0
"""Longest pause between trials that fail, seconds."""


class Kind(StrEnum):
    """The content of a trial."""

    MIXED = "mixed"
    """Several requests that were answered without batching."""
    SAME = "same"
    """One such request, repeated."""
    LIVE = "live"
    """Rows that were answered in a batch, sent alone."""
    COPIES = "copies"
    """One request's rows, repeated up to a batch size that the load does not fill, to measure its latency."""


class Trial(NamedTuple):
    """A call that the sidecar makes itself. ``expected``: the answer that each of the portions got before."""

    kind: Kind
    portions: list[Portion]
    expected: list[Message]
    facts: Facts
    padded: bool = False
    """Whether rows in it, or in the batch that it checks, were padded."""

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return sum(portion.stop - portion.start for portion in self.portions)


class Pace:
    """When answers are checked, and when trials are sent: one at a time, with pauses if they fail."""

    __slots__ = ("answers", "failures", "look_at", "looks", "try_at", "under_way")

    def __init__(self) -> None:
        self.answers = 0
        """Answers to unbatched requests that had the right rows."""
        self.looks = 0
        self.look_at = 0.0
        self.failures = 0
        """Inconclusive trials in a row."""
        self.try_at = 0.0
        self.under_way = False

    def looked(self, now: float, *, settled: bool) -> None:
        """Plan the next check: first every answer, then fewer and fewer."""
        self.looks += 1
        self.look_at = now + (LOOK_AFTER if settled else min(0.001 * max(self.looks - LONE, 0), 1.0))

    def failed(self, now: float) -> None:
        """Plan the next trial after an inconclusive one."""
        self.failures += 1
        self.try_at = now + min(2.0 ** (self.failures - 1), MAX_PAUSE)


class Live:
    """Which batches of live traffic are checked: the first of each size, by powers of two, and some of the others.

    ``padded``: the upper end of the length bucket of a batch with padded rows, 0 for all others.
    """

    __slots__ = ("batches", "checked_at", "every", "sizes")

    def __init__(self) -> None:
        self.sizes = set[tuple[int, int]]()
        """(bucket, n): a batch of more than 2^(n-1) and up to 2^n rows was checked."""
        self.batches = 0
        """Since the last check."""
        self.every = 1
        self.checked_at = 0.0

    def due(self, rows: int, now: float, padded: int = 0) -> bool:
        """Count a batch, and return whether to check it."""
        self.batches += 1
        return (
            (padded, (rows - 1).bit_length()) not in self.sizes
            or self.batches >= self.every
            or now - self.checked_at >= EVERY_SECONDS
        )

    def begun(self, rows: int, now: float, padded: int = 0) -> None:
        """Note that a batch is checked."""
        self.sizes.add((padded, (rows - 1).bit_length()))
        self.batches = 0
        self.every = min(2 * self.every, EVERY_BATCHES)
        self.checked_at = now


class Padding:
    """Whether requests of different lengths share batches. ``axis``: along which the policy lets them be padded."""

    __slots__ = ("agreed", "axis", "refuted", "verified")

    def __init__(self, axis: SequenceAxis | None) -> None:
        self.axis = axis
        self.agreed = 0
        """Trials of padded rows that agreed."""
        self.verified = False
        """Whether they share batches."""
        self.refuted = ""
        """Why they never do, once that is known."""

    @property
    def settled(self) -> bool:
        """Whether no trial of padded rows is left to send."""
        return self.axis is None or self.verified or bool(self.refuted)

    def has_agreed(self) -> None:
        """Note a trial that gave every padded row its previous answer."""
        self.agreed += 1
        self.verified = self.agreed >= TRIALS and not self.refuted

    def refute(self, why: str) -> None:
        """Note that padded rows got other answers."""
        self.refuted = why
        self.verified = False

    def evidence(self, trouble: str) -> str:
        """Return a sentence on it; "" without a sequence axis."""
        if self.axis is None:
            return ""
        if self.refuted:
            return f"refuted, so only requests of equal length share a batch: {self.refuted}"
        if self.verified:
            return f"verified: {TRIALS} batches with padded rows gave every row the same answer as a single request"
        if trouble:
            return f"not verified yet: {trouble}"
        return (
            f"not verified yet: {self.agreed} of {TRIALS} trial batches agreed; a trial needs two requests of one "
            "length bucket that differ in length and answer"
        )


class Check:
    """One form of a model's requests. ``asserted``: the policy allows merging; they are only checked live.

    ``sequence``: along which axis the policy lets them be padded.
    """

    __slots__ = (
        "agreed", "asserted", "live", "only", "pace", "padding", "rejected", "samples", "tolerance", "trouble",
        "verified",
    )  # fmt: skip

    def __init__(
        self, tolerance: float, shelf: Shelf, *, asserted: bool = False, sequence: SequenceAxis | None = None
    ) -> None:
        self.tolerance = Tolerance(tolerance)
        self.samples = Samples(shelf, padded=sequence is not None)
        self.pace = Pace()
        self.live = Live()
        self.asserted = asserted
        self.verified = asserted
        """Whether requests with any rows are merged."""
        self.only: tuple[bytes, bytes] | None = None
        """The key and digest of the one request that is merged with equal ones, if no other was seen."""
        self.agreed = 0
        """Trials of two requests that agreed."""
        self.rejected = 0
        """Trials answered with an error."""
        self.trouble = ""
        """Why it can't be verified, if that is known."""
        self.padding = Padding(sequence)

    @property
    def settled(self) -> bool:
        """Whether no trial is left to send."""
        return self.verified and self.padding.settled

    def key_of(self, parsed: Parsed[Any]) -> bytes | None:
        """Return the key under which a request may be merged; None: not at all."""
        if self.verified:
            fit = parsed.fit
            return parsed.key if fit is None or fit.key is None or not self.padding.verified else fit.key
        if self.only is not None and self.only[0] == parsed.key and self.only[1] == digest_of(parsed):
            return parsed.key + self.only[1]
        return None

    def looks(self, now: float) -> bool:
        """Whether the next answer to an unbatched request is checked."""
        return now >= self.pace.look_at

    def answered_alone(self, sample: Sample) -> Difference | None:
        """Take an answer with as many rows as its request; return a difference from an earlier one to the same rows."""
        self.pace.answers += 1
        return self.samples.add(sample, self.tolerance)

    def next_trial(self, now: float, *, cap: int, room: int) -> Trial | None:
        """Return the next trial, if any: batches have at most ``cap`` rows, all further trials at most ``room``."""
        pace = self.pace
        if self.settled or pace.under_way or now < pace.try_at or cap < 2 or pace.answers < LONE:
            return None
        group = self.samples.of_several_lengths() if self.samples.padded else []
        trial = None
        # The second trial begins with another request: with two requests, they swap their parts.
        if len(group) > 1:
            first, second, *rest = group
            trial = _composed(Kind.MIXED, [second, first, *rest] if self.padding.agreed else group, cap)
        elif self.verified:
            return None
        elif len(group := self.samples.group()) > 1:
            middle = len(group) // 2 if self.agreed else 0
            trial = _composed(Kind.MIXED, group[middle:] + group[:middle], cap)
        elif self.only is None and (same := self.samples.repeated()) is not None and same.seen >= SEEN:
            trial = _composed(Kind.SAME, [same, same], cap)
        if trial is None or trial.rows > room:
            return None
        pace.under_way = True
        return trial

    def live_trial(
        self, portion: Portion, piece: Piece, facts: Facts, now: float, *, rows: int, room: int, padded: int = 0
    ) -> Trial | None:
        """Return rows of a just answered batch of ``rows`` to send without batching; ``padded`` as for ``Live``."""
        span = min(portion.stop - portion.start, SPAN)
        if self.pace.under_way or now < self.pace.try_at or span > room:
            return None
        self.pace.under_way = True
        self.live.begun(rows, now, padded)
        expected = part(portion.parsed, piece, 0, span)
        # A copy, so that the whole batch's answer is not kept in memory for a part of it.
        expected = Message(expected.headers, [b"".join(expected.parts)])
        rows_again = [Portion(portion.parsed, portion.start, portion.start + span)]
        return Trial(Kind.LIVE, rows_again, [expected], facts, padded > 0)

    def copies(self, portion: Portion, piece: Piece, facts: Facts, now: float, *, rows: int, room: int) -> Trial | None:
        """Return a batch of ``rows``, all of them of a request that was just answered; ``None``: not now."""
        span = portion.stop - portion.start
        pace = self.pace
        # There must still be room for a live check.
        if not self.verified or pace.under_way or now < pace.try_at or rows + SPAN > room:
            return None
        if portion.parsed.size * rows > COPIES_BYTES * portion.parsed.rows:
            return None
        pace.under_way = True
        sizes = [span] * (rows // span) + [rows % span] * (rows % span > 0)
        portions = [Portion(portion.parsed, portion.start, portion.start + size) for size in sizes]
        expected = {size: part(portion.parsed, piece, 0, size) for size in set(sizes)}
        return Trial(Kind.COPIES, portions, [expected[size] for size in sizes], facts)

    def said_nothing(self, why: str, now: float) -> None:
        """Note an inconclusive trial: it is sent again later."""
        self.pace.under_way = False
        self.pace.failed(now)
        self.trouble = why

    def was_rejected(self, why: str, now: float) -> bool:
        """Note a trial answered with an error; True: there were too many."""
        self.said_nothing(why, now)
        self.rejected += 1
        return self.rejected >= REJECTIONS

    def has_agreed(self, trial: Trial) -> bool:
        """Note a trial that gave every row its previous answer; True: more requests may now be merged."""
        self.pace.under_way = False
        self.pace.failures = 0
        self.rejected = 0
        self.trouble = ""
        if trial.kind is Kind.SAME:
            parsed = trial.portions[0].parsed
            self.only = (parsed.key, digest_of(parsed))
        elif trial.kind is Kind.MIXED:
            before = (self.verified, self.padding.verified)
            self.agreed += 1
            if trial.padded:
                self.padding.has_agreed()
            if self.agreed >= TRIALS:
                self.verified = True
                self.only = None
            if self.settled:
                self.samples.clear()
            return (self.verified, self.padding.verified) != before
        return False

    def pads_no_more(self, why: str, now: float) -> None:
        """Stop padding: padded rows got other answers. Rows of equal length are not affected."""
        self.pace.under_way = False
        self.pace.try_at = now
        self.padding.refute(why)
        self.samples.padded = False
        self.agreed = self.rejected = 0
        self.live = Live()  # batches without padding are checked again
        if self.settled:
            self.samples.clear()

    @property
    def evidence(self) -> str:
        """A sentence on the evidence so far."""
        if self.verified:
            return f"{TRIALS} batches gave every row the same answer as a single request"
        if self.trouble:
            return f"not verified yet: {self.trouble}"
        if self.pace.answers < LONE:
            return f"not verified yet: {self.pace.answers} of {LONE} single requests were answered with success"
        if self.only is not None:
            return "only identical requests are merged: others whose answers differ were not seen yet"
        if len(self.samples.group()) < 2:
            if len(self.samples.kept) > 1:
                what = "no two of the requests could share a batch: they differ in a header or in their shape"
            else:
                what = "every answer was the same, so a merged batch would show nothing"
            return f"not verified yet: {self.pace.answers} answers had the right rows, but {what}"
        return f"not verified yet: {self.agreed} of {TRIALS} trial batches agreed"


def _composed(kind: Kind, samples: list[Sample], cap: int) -> Trial:
    """Make a batch in the order A B C ... A A: rows from the beginning of each, and at the end the last rows of A."""
    first = samples[0]
    few = TRIAL_BYTES // max(sample.size for sample in samples)
    distinct = max(min(len(samples), cap - 2, TRIAL_ROWS - 2, few), 2)
    span = max(min(cap, TRIAL_ROWS) // (distinct + 2), 1)
    portions: list[Portion] = []
    expected: list[Message] = []
    for sample, from_end in [*((each, False) for each in samples[:distinct]), (first, False), (first, True)][:cap]:
        rows = sample.parsed.rows
        size = min(rows, span)
        start = rows - size if from_end else 0
        portions.append(Portion(sample.parsed, start, start + size))
        expected.append(sample.part(start, start + size))
    return Trial(kind, portions, expected, first.facts, longest(portions) > 0)
