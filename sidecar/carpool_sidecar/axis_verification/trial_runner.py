"""Sends copies of a few requests through the Batcher, compares the answers, and acts on the result.

Callers never wait for this, and an error here affects none of their requests. ``Record.room`` bounds the model's extra
work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from carpool.policy.spec import Axis
from carpool_sidecar.axis_verification.check import Kind
from carpool_sidecar.axis_verification.record import REFUTED
from carpool_sidecar.axis_verification.samples import part
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.answer_comparison import ELEMENTS, disagreement
from carpool_sidecar.protocols.common import UNREADABLE, TooLarge, WrongRows

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from carpool_sidecar.axis_verification.check import Check, Trial
    from carpool_sidecar.dispatch.answers import UpstreamAnswer
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Message, Parsed, Piece, Portion
    from carpool_sidecar.protocols.headers import Facts
    from carpool_sidecar.protocols.limits import Limits

AGREED, DISAGREED, FAILED = "agreed", "disagreed", "failed"

DEPENDS, UNDIVIDED = "a row's answer depends on its batch", "an answer can't be divided by rows"
"""What a comparison shows."""

REFUSED = frozenset({400, 405, 413, 415, 422, 500})
"""Statuses of a trial that may mean that the model refuses batches; others are temporary, or about the caller."""


class Courier(Protocol):
    """Sends trials: the interface that the driver implements."""

    @property
    def limits(self) -> Limits:
        """Limits of what is read of answers."""

    def carry(
        self, entry: Entry, trial: Trial, message: Message, answered: Callable[[UpstreamAnswer | None], None]
    ) -> None:
        """Send a copy; ``answered`` is called with the upstream's answer, or None if there was none."""

    def cap(self, entry: Entry) -> int:
        """Return the rows that a batch of a model may have."""

    def quick(self, entry: Entry) -> int:
        """Return the rows of a trial that delays other requests only shortly."""

    def delays(self, entry: Entry, parsed: Parsed[Any], rows: int) -> bool:
        """Whether a batch of copies of a request would delay others for too long."""

    def served(self, entry: Entry) -> int:
        """Return the rows that a model has served."""

    def quarantine(self, entry: Entry, *, on: bool) -> None:
        """Stop merging a model's requests, waiting ones included; or merge them again."""

    def merge(self, entry: Entry, check: Check) -> None:
        """Merge those of a model's requests that wait to be sent alone because ``check`` had not ended."""


class TrialRunner:
    """Sends trials, and acts on what they show. ``idempotent``: whether copies of requests may be sent."""

    def __init__(self, courier: Courier, clock: Callable[[], float], log: logging.Logger, *, idempotent: bool) -> None:
        self.results: dict[tuple[str, str], int] = {}
        """Comparisons by model and result."""
        self.idempotent = idempotent
        self._courier = courier
        self._clock = clock
        self._log = log
        self._faults = 0
        self._wanted: dict[str, Sequence[int]] = {}
        """By lane: rows of batches of copies that show the capacity, those that show most first; one is measured."""

    def measure(self, lane: str, sizes: Sequence[int]) -> None:
        """Send one batch, made of copies of the next answered request; of ``sizes``, the first that does no harm."""
        if sizes:
            self._wanted[lane] = sizes
        else:
            self._wanted.pop(lane, None)

    def copy(self, entry: Entry, check: Check, portion: Portion, piece: Piece, facts: Facts) -> bool:
        """Send a batch of copies if one is wanted; return whether it was sent."""
        record = entry.record
        if not (sizes := self._wanted.get(entry.lane)) or not self.idempotent or record.disagreed:
            return False
        most = self._courier.cap(entry) if record.refused is None else min(self._courier.cap(entry), record.refused - 1)
        harmless = (n for n in sizes if n <= most and not self._courier.delays(entry, portion.parsed, n))
        if (rows := next(harmless, None)) is None:
            return False
        trial = check.copies(portion, piece, facts, self._clock(), rows=rows, room=self.room(entry))
        if trial is None:
            return False
        del self._wanted[entry.lane]
        self.send(entry, check, trial)
        return True

    def room(self, entry: Entry) -> int:
        """Return the rows that trials may have now."""
        return entry.record.room(self._courier.served(entry))

    def go_on(self, entry: Entry, check: Check, now: float) -> None:
        """Send the next trial, if there is one to send."""
        if entry.record.disagreed or not self.idempotent:
            return
        cap = min(self._courier.cap(entry), self._courier.quick(entry))
        trial = check.next_trial(now, cap=cap, room=self.room(entry))
        if trial is not None:
            self.send(entry, check, trial)

    def send(self, entry: Entry, check: Check, trial: Trial) -> None:
        """Send a trial; its answer is compared when it is there."""
        record = entry.record
        record.rows += trial.rows
        message = CODECS[trial.portions[0].parsed.endpoint.protocol].merge(trial.portions)

        def answered(answer: UpstreamAnswer | None) -> None:
            # Otherwise the model is another one by now, or refuted already.
            if entry.record is record and entry.alone != REFUTED:
                try:
                    self._concluded(entry, check, trial, answer)
                except Exception:  # noqa: BLE001 - likewise
                    self.fault()
                    check.said_nothing("comparing answers failed: the sidecar's log says why", self._clock())

        self._courier.carry(entry, trial, message, answered)

    def _concluded(self, entry: Entry, check: Check, trial: Trial, answer: UpstreamAnswer | None) -> None:
        """Compare a trial's answer with the previous answers to its rows."""
        now = self._clock()
        rejected = ""
        if answer is None:
            self._count(entry, FAILED)
            check.said_nothing("the last trial was not answered", now)
            return
        if not 200 <= answer.status < 300:
            rejected = f"status {answer.status}"
        else:
            codec = CODECS[trial.portions[0].parsed.endpoint.protocol]
            try:
                pieces = codec.split(trial.portions, answer.headers, answer.body, self._courier.limits)
            except TooLarge as too_large:
                self._count(entry, FAILED)
                check.said_nothing(str(too_large), now)
                return
            except WrongRows as error:
                if error.reason != UNREADABLE:
                    why = f"of a {self._name(trial)}, {error}"
                    self.disagrees(entry, check, why, padded=trial.padded, what=UNDIVIDED)
                    return
                rejected = str(error)
        if rejected:
            why = f"a {self._name(trial)}, made of requests that were answered, was answered with {rejected}"
            if trial.kind is Kind.COPIES and answer.status in REFUSED:
                # It may be too large for this model, which is no evidence about its rows.
                entry.record.refused = min(trial.rows, entry.record.refused or trial.rows)
            counts = trial.kind not in {Kind.LIVE, Kind.COPIES} and (answer.status in REFUSED or answer.status < 300)
            if not counts:
                check.said_nothing(why, now)
            elif check.was_rejected(why, now):
                self.disagrees(entry, check, why, padded=trial.padded, what="the model refuses batches")
                return
            self._count(entry, FAILED)
            return
        # 2. The answers, row by row
        for portion, before, piece in zip(trial.portions, trial.expected, pieces, strict=True):
            after = part(portion.parsed, piece, 0, portion.stop - portion.start)
            alone, batched = (after, before) if trial.kind is Kind.LIVE else (before, after)
            elements = ELEMENTS // len(trial.portions)
            difference = disagreement(portion.parsed.endpoint.protocol, alone, batched, check.tolerance, elements)
            if difference is not None:
                self.disagrees(entry, check, f"in {self._name(trial)}, {difference}", padded=trial.padded)
                return
        self._count(entry, AGREED)
        if check.has_agreed(trial):
            self._log.info(
                "batches verified",
                extra={"model": entry.model, "version": entry.version, "detail": check.evidence}
                | ({"padding": padding} if (padding := check.padding.evidence(check.trouble)) else {}),
            )
            self._courier.merge(entry, check)
        self.go_on(entry, check, now)

    @staticmethod
    def _name(trial: Trial) -> str:
        padded = "padded " if trial.padded else ""
        if trial.kind is Kind.LIVE:
            return f"{padded}batch of live traffic"
        return f"{padded}trial batch of {trial.rows} rows"

    def disagrees(self, entry: Entry, check: Check, why: str, *, padded: bool = False, what: str = DEPENDS) -> None:
        """Stop merging at once, or padding if rows were padded; if the policy asserts the axis, only report it."""
        self._count(entry, DISAGREED)
        if padded:
            if check.padding.refuted:
                check.said_nothing("", self._clock())
            else:
                check.pads_no_more(why, self._clock())
                self._log.warning(
                    "a row's answer depends on its padding: only requests of equal length share a batch",
                    extra={"model": entry.model, "version": entry.version, "detail": why},
                )
            return
        check.said_nothing(why, self._clock())
        asserted = is_asserted(entry)
        if not entry.record.disagreed:
            entry.record.disagreed = why
            merged = asserted and what == DEPENDS
            effect = "merged anyway, because the policy says axis First" if merged else "requests are sent alone"
            self._log.warning(
                f"{what}: {effect}",
                extra={"model": entry.model, "version": entry.version, "detail": why},
            )
        if not asserted:
            entry.record.clear()
            entry.configure(entry.configured)
            self._courier.quarantine(entry, on=True)

    def _count(self, entry: Entry, result: str) -> None:
        key = (entry.lane, result)
        self.results[key] = self.results.get(key, 0) + 1

    def fault(self) -> None:
        """Log the exception that is handled: an error of the sidecar's own."""
        self._faults += 1
        if self._faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th
            self._log.exception("an error in verifying batches; requests are served", extra={"count": self._faults})


def is_asserted(entry: Entry) -> bool:
    """Whether the policy says that a model's requests may be merged."""
    return entry.configured is not None and entry.configured.axis is Axis.FIRST
