"""Sends copies of a few requests through the Batcher, compares the answers, and acts on the result.

Callers never wait for this, and an error here affects none of their requests. ``Record.room`` bounds the model's extra
work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from carpool.policy.spec import Axis, VerificationMode
from carpool_sidecar.axis_verification.check import LONE, Kind
from carpool_sidecar.axis_verification.record import REFUTED, Record, Verified
from carpool_sidecar.axis_verification.samples import MAX_SAMPLE, Sample, Shelf, digest_of, part
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.answer_comparison import ELEMENTS, disagreement
from carpool_sidecar.protocols.common import UNREADABLE, Portion, TooLarge, WrongRows

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from carpool.policy.spec import BatchingPolicy, SequenceAxis
    from carpool_sidecar.axis_verification.check import Check, Trial
    from carpool_sidecar.dispatch.answers import UpstreamAnswer
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Buffer, Message, Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts, Headers
    from carpool_sidecar.protocols.limits import Limits

AGREED, DISAGREED, FAILED = "agreed", "disagreed", "failed"

FIRST, FORMS = 2 * LONE, 4
"""Answers of each form of requests that were examined, of so many forms at most, after which nothing waits any more for
batches to be verified."""

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


class Verifier:
    """Decides which requests may be merged, from their answers."""

    def __init__(
        self, courier: Courier, policy: BatchingPolicy, clock: Callable[[], float], log: logging.Logger
    ) -> None:
        self.results: dict[tuple[str, str], int] = {}
        """Comparisons by model and result."""
        self._courier = courier
        self._policy = policy
        self.off = _is_off(policy)
        """Whether nothing is checked."""
        self._clock = clock
        self._log = log
        self._shelf = Shelf()
        self._faults = 0
        self._wanted: dict[str, Sequence[int]] = {}
        """By lane: rows of batches of copies that show the capacity, those that show most first; one is measured."""

    # ------------------------------------------------------------------------------------------------- questions

    def admit(self, entry: Entry, parsed: Parsed[Any]) -> tuple[bytes | None, Check | None]:
        """Return the key under which a request may be merged (None: not at all), and the check for its answer."""
        fit = parsed.fit
        if self.off:
            return parsed.key if fit is None or fit.key is None else fit.key, None
        form = (parsed.endpoint.target, parsed.form, b"" if fit is None else fit.form)
        check = entry.record.checks.get(form)
        if check is None:
            check = entry.record.admit(
                form, self._share, self._shelf, asserted=_asserted(entry), sequence=_sequence(entry)
            )
        return parsed.key if check.verified and fit is None else check.key_of(parsed), check

    def state(self, entry: Entry) -> tuple[Verified, str]:
        """Return a model's verification state, and a sentence on it."""
        if self.off:
            return Verified.OFF, "the policy says verification mode Never"
        record = entry.record
        if _asserted(entry):
            if record.disagreed:
                return Verified.CONTRADICTED, f"the policy says axis {Axis.FIRST}, but {record.disagreed}"
            return Verified.ASSERTED, f"the policy says axis {Axis.FIRST}"
        if entry.alone not in {None, REFUTED} and not record.checks:
            return Verified.OFF, "its requests are not merged"
        if not self._policy.idempotent and not record.disagreed:
            return Verified.UNVERIFIED, (
                "the policy says that requests are not idempotent, so no copies are sent to verify batches: "
                f"if dim 0 of every tensor is the batch and rows do not affect each other, set axis {Axis.FIRST} for "
                "the model"
            )
        return record.state, record.evidence

    def goes_on(self, entry: Entry) -> bool:
        """Whether more of a model's requests may soon be merged: its first answers are still being compared."""
        if self.off or not self._policy.idempotent or entry.alone is not None or entry.record.disagreed:
            return False
        record, forms = entry.record, min(len(entry.record.checks), FORMS)
        return record.looks < FIRST * forms and not any(each.verified for each in record.checks.values())

    def padding(self, entry: Entry) -> str:
        """Return a sentence on whether requests of different lengths share batches; "" without a sequence axis."""
        if entry.sequence is None:
            return ""
        if self.off:
            return "not checked: the policy says verification mode Never"
        if not self._policy.idempotent:
            return "off: the policy says that requests are not idempotent, so no copies are sent to verify padding"
        if self.state(entry)[0] in {Verified.OFF, Verified.REFUTED}:
            return "off: requests of this model are not merged"
        return entry.record.padding or "not verified yet: no request came"

    def merges(self, entry: Entry) -> bool:
        """Whether any requests of a model are merged now."""
        match self.state(entry)[0]:
            case Verified.VERIFIED:
                return True  # those of one protocol, if the axis is not known for the others
            case Verified.UNVERIFIED | Verified.REFUTED:
                return False
        return entry.alone is None

    # ------------------------------------------------------------------------------------------------- observations

    def configure(self, policy: BatchingPolicy, entries: Sequence[Entry]) -> None:
        """Apply a new policy; under other rules everything is verified again."""
        before, self._policy = self._policy, policy
        self.off = _is_off(policy)
        same = (before.verification, before.idempotent) == (policy.verification, policy.idempotent)
        for entry in entries:
            checks = entry.record.checks.values()
            rules = (_asserted(entry), _sequence(entry))
            if not same or any((check.asserted, check.padding.axis) != rules for check in checks):
                if entry.record.disagreed:
                    self._courier.quarantine(entry, on=False)
                self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Verify a model again: it was replaced, or the rules changed."""
        entry.record.clear()
        entry.record = Record()
        entry.configure(entry.configured)

    def answered_alone(
        self, entry: Entry, check: Check, parsed: Parsed[Any], facts: Facts, headers: Headers, body: Buffer
    ) -> None:
        """Check a good answer to an unbatched request."""
        now = self._clock()
        if not check.looks(now) or self._refuted(entry):
            return
        check.pace.looked(now, settled=check.settled or not self._policy.idempotent)
        entry.record.looks += 1
        if (size := parsed.size + len(body)) > MAX_SAMPLE:
            return
        try:
            portions = [Portion(parsed, 0, parsed.rows)]
            (piece,) = CODECS[parsed.endpoint.protocol].split(portions, headers, body, self._courier.limits)
            if check.verified and self._copy(entry, check, portions[0], piece, facts):
                return
            if check.settled or not self._policy.idempotent:
                return  # it has its rows, and nothing else is to be checked
            difference = check.answered_alone(Sample(parsed, facts, piece, digest_of(parsed), size))
        except TooLarge as too_large:
            check.trouble = str(too_large)
        except WrongRows as error:
            if error.reason == UNREADABLE:
                check.trouble = f"answers can't be split by rows: {error}"
            else:
                self._disagrees(entry, check, f"of a request sent alone, {error}", what=UNDIVIDED)
        except Exception:  # noqa: BLE001 - a comparison that fails must not cost anybody an answer
            self._fault()
        else:
            if difference is not None:
                again = f"{difference.alone} once, {difference.batched} the next time"
                how = "padded" if check.verified else "in a batch"
                self._disagrees(
                    entry,
                    check,
                    f"two equal requests, neither {how}, had different answers: "
                    f"output {difference.output!r}, row {difference.row}: {again}",
                    padded=check.verified,
                )
            self._go_on(entry, check, now)

    def answered_together(
        self, entry: Entry, check: Check, portion: Portion, piece: Piece, facts: Facts, rows: int, *, padded: bool
    ) -> None:
        """Note a batch of ``rows`` that was answered and split; ``portion``: the one to check.

        ``padded``: whether its rows were.
        """
        now = self._clock()
        fit = portion.parsed.fit
        bucket = fit.bucket if padded and fit is not None else 0
        due = check.live.due(rows, now, bucket)
        if not self._policy.idempotent or portion.parsed.size > MAX_SAMPLE:
            return
        try:
            if self._copy(entry, check, portion, piece, facts):
                return
            parsed, start, stop = portion
            if not check.settled and not padded and stop - start == parsed.rows and check.looks(now):
                # Its rows are known to get the same answers without batching: only padding remains to be verified.
                answer = part(parsed, piece, 0, parsed.rows)
                self.answered_alone(entry, check, parsed, facts, answer.headers, b"".join(answer.parts))
            if not due:
                return
            trial = check.live_trial(portion, piece, facts, now, rows=rows, room=self._room(entry), padded=bucket)
        except Exception:  # noqa: BLE001 - likewise
            self._fault()
            return
        if trial is not None:
            self._send(entry, check, trial)

    def measure(self, lane: str, sizes: Sequence[int]) -> None:
        """Send one batch, made of copies of the next answered request; of ``sizes``, the first that does no harm."""
        if sizes:
            self._wanted[lane] = sizes
        else:
            self._wanted.pop(lane, None)

    def _copy(self, entry: Entry, check: Check, portion: Portion, piece: Piece, facts: Facts) -> bool:
        """Send a batch of copies if one is wanted; return whether it was sent."""
        record = entry.record
        if not (sizes := self._wanted.get(entry.lane)) or not self._policy.idempotent or record.disagreed:
            return False
        most = self._courier.cap(entry) if record.refused is None else min(self._courier.cap(entry), record.refused - 1)
        harmless = (n for n in sizes if n <= most and not self._courier.delays(entry, portion.parsed, n))
        if (rows := next(harmless, None)) is None:
            return False
        trial = check.copies(portion, piece, facts, self._clock(), rows=rows, room=self._room(entry))
        if trial is None:
            return False
        del self._wanted[entry.lane]
        self._send(entry, check, trial)
        return True

    def shared_out_wrong(self, entry: Entry, check: Check, error: WrongRows, *, padded: bool) -> None:
        """Note a batch whose answer could not be split."""
        if error.reason != UNREADABLE and not self._refuted(entry):
            self._disagrees(entry, check, f"of a batch, {error}", padded=padded, what=UNDIVIDED)

    # ------------------------------------------------------------------------------------------------- trials

    @property
    def _share(self) -> float:
        return self._policy.verification.tolerance_percent / 100

    def _room(self, entry: Entry) -> int:
        return entry.record.room(self._courier.served(entry))

    def _go_on(self, entry: Entry, check: Check, now: float) -> None:
        """Send the next trial, if there is one to send."""
        if entry.record.disagreed or not self._policy.idempotent:
            return
        cap = min(self._courier.cap(entry), self._courier.quick(entry))
        trial = check.next_trial(now, cap=cap, room=self._room(entry))
        if trial is not None:
            self._send(entry, check, trial)

    def _send(self, entry: Entry, check: Check, trial: Trial) -> None:
        record = entry.record
        record.rows += trial.rows
        message = CODECS[trial.portions[0].parsed.endpoint.protocol].merge(trial.portions)

        def answered(answer: UpstreamAnswer | None) -> None:
            if entry.record is record and not self._refuted(entry):  # else the model is another one by now
                try:
                    self._concluded(entry, check, trial, answer)
                except Exception:  # noqa: BLE001 - likewise
                    self._fault()
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
                    self._disagrees(entry, check, why, padded=trial.padded, what=UNDIVIDED)
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
                self._disagrees(entry, check, why, padded=trial.padded, what="the model refuses batches")
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
                self._disagrees(entry, check, f"in {self._name(trial)}, {difference}", padded=trial.padded)
                return
        self._count(entry, AGREED)
        if check.has_agreed(trial):
            self._log.info(
                "batches verified",
                extra={"model": entry.model, "version": entry.version, "detail": check.evidence}
                | ({"padding": padding} if (padding := check.padding.evidence(check.trouble)) else {}),
            )
            self._courier.merge(entry, check)
        self._go_on(entry, check, now)

    @staticmethod
    def _refuted(entry: Entry) -> bool:
        """Whether the model's requests are no longer merged: trials under way show nothing new then."""
        return entry.alone == REFUTED

    @staticmethod
    def _name(trial: Trial) -> str:
        padded = "padded " if trial.padded else ""
        if trial.kind is Kind.LIVE:
            return f"{padded}batch of live traffic"
        return f"{padded}trial batch of {trial.rows} rows"

    def _disagrees(self, entry: Entry, check: Check, why: str, *, padded: bool = False, what: str = DEPENDS) -> None:
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
        asserted = _asserted(entry)
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

    def _fault(self) -> None:
        self._faults += 1
        if self._faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th
            self._log.exception("an error in verifying batches; requests are served", extra={"count": self._faults})


def _is_off(policy: BatchingPolicy) -> bool:
    return policy.verification.mode is VerificationMode.NEVER


def _sequence(entry: Entry) -> SequenceAxis | None:
    return None if entry.sequence is None else entry.sequence.policy


def _asserted(entry: Entry) -> bool:
    return entry.configured is not None and entry.configured.axis is Axis.FIRST
