"""Decides which of a model's requests may be merged, from the answers to callers' requests and to trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool.policy.spec import Axis, VerificationMode
from carpool_sidecar.axis_verification.check import LONE
from carpool_sidecar.axis_verification.record import REFUTED, Record, Verified
from carpool_sidecar.axis_verification.samples import MAX_SAMPLE, Sample, Shelf, digest_of, part
from carpool_sidecar.axis_verification.trial_runner import UNDIVIDED, TrialRunner, is_asserted
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.common import UNREADABLE, Portion, TooLarge, WrongRows

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from carpool.policy.spec import BatchingPolicy, SequenceAxis
    from carpool_sidecar.axis_verification.check import Check
    from carpool_sidecar.axis_verification.trial_runner import Courier
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Buffer, Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts, Headers

FIRST, FORMS = 2 * LONE, 4
"""Answers of each form of requests that were examined, of so many forms at most, after which nothing waits any more for
batches to be verified."""


class Verifier:
    """Decides which requests may be merged, from their answers."""

    def __init__(
        self, courier: Courier, policy: BatchingPolicy, clock: Callable[[], float], log: logging.Logger
    ) -> None:
        self.trials = TrialRunner(courier, clock, log, idempotent=policy.idempotent)
        self._courier = courier
        self._policy = policy
        self.off = _is_off(policy)
        """Whether nothing is checked."""
        self._clock = clock
        self._shelf = Shelf()

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
                form, self._tolerance, self._shelf, asserted=is_asserted(entry), sequence=_sequence(entry)
            )
        return parsed.key if check.verified and fit is None else check.key_of(parsed), check

    def state(self, entry: Entry) -> tuple[Verified, str]:
        """Return a model's verification state, and a sentence on it."""
        if self.off:
            return Verified.OFF, "the policy says verification mode Never"
        record = entry.record
        if is_asserted(entry):
            if record.disagreed:
                return Verified.CONTRADICTED, f"the policy says axis {Axis.FIRST}, but {record.disagreed}"
            return Verified.ASSERTED, f"the policy says axis {Axis.FIRST}"
        # Checks may have begun before the axis was known; then only those of V1 go on, unless that is ruled out too.
        if entry.alone not in {None, REFUTED} and (not record.checks or entry.alone_by_protocol is not None):
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

    @property
    def _tolerance(self) -> float:
        return self._policy.verification.tolerance_percent / 100

    # ------------------------------------------------------------------------------------------------- observations

    def configure(self, policy: BatchingPolicy, entries: Sequence[Entry]) -> None:
        """Apply a new policy; under other rules everything is verified again."""
        before, self._policy = self._policy, policy
        self.off = _is_off(policy)
        self.trials.idempotent = policy.idempotent
        same = (before.verification, before.idempotent) == (policy.verification, policy.idempotent)
        for entry in entries:
            checks = entry.record.checks.values()
            rules = (is_asserted(entry), _sequence(entry))
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
        if not check.looks(now) or entry.alone == REFUTED:
            return
        check.pace.looked(now, settled=check.settled or not self._policy.idempotent)
        entry.record.looks += 1
        if (size := parsed.size + len(body)) > MAX_SAMPLE:
            return
        try:
            portions = [Portion(parsed, 0, parsed.rows)]
            (piece,) = CODECS[parsed.endpoint.protocol].split(portions, headers, body, self._courier.limits)
            if check.verified and self.trials.copy(entry, check, portions[0], piece, facts):
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
                self.trials.disagrees(entry, check, f"of a request sent alone, {error}", what=UNDIVIDED)
        except Exception:  # noqa: BLE001 - a comparison that fails must not cost anybody an answer
            self.trials.fault()
        else:
            if difference is not None:
                again = f"{difference.alone} once, {difference.batched} the next time"
                how = "padded" if check.verified else "in a batch"
                self.trials.disagrees(
                    entry,
                    check,
                    f"two equal requests, neither {how}, had different answers: "
                    f"output {difference.output!r}, row {difference.row}: {again}",
                    padded=check.verified,
                )
            self.trials.go_on(entry, check, now)

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
            if self.trials.copy(entry, check, portion, piece, facts):
                return
            parsed = portion.parsed
            whole = portion.stop - portion.start == parsed.rows
            if not check.settled and not padded and whole and check.looks(now):
                # Its rows are known to get the same answers without batching: only padding remains to be verified.
                answer = part(parsed, piece, 0, parsed.rows)
                self.answered_alone(entry, check, parsed, facts, answer.headers, b"".join(answer.parts))
            if not due:
                return
            trial = check.live_trial(portion, piece, facts, now, rows=rows, room=self.trials.room(entry), padded=bucket)
        except Exception:  # noqa: BLE001 - likewise
            self.trials.fault()
            return
        if trial is not None:
            self.trials.send(entry, check, trial)

    def shared_out_wrong(self, entry: Entry, check: Check, error: WrongRows, *, padded: bool) -> None:
        """Note a batch whose answer could not be split."""
        if error.reason != UNREADABLE and entry.alone != REFUTED:
            self.trials.disagrees(entry, check, f"of a batch, {error}", padded=padded, what=UNDIVIDED)


def _is_off(policy: BatchingPolicy) -> bool:
    return policy.verification.mode is VerificationMode.NEVER


def _sequence(entry: Entry) -> SequenceAxis | None:
    return None if entry.sequence is None else entry.sequence.policy
