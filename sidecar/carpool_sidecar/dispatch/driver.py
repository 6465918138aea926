"""The Batcher's adapter to the event loop: exchanges in, upstream calls out, answers back.

The Batcher decides; here its actions are done. One timer stands for ``wake_at()``. All runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any

from carpool.batching.counters import CANCELLED, FAILED, REJECTED
from carpool.batching.requests import (
    Abort,
    Batch,
    Failure,
    Fault,
    FaultKind,
    Finish,
    Priority,
    Refusal,
    Request,
    time_of,
)
from carpool_sidecar.dispatch.answers import (
    REFUSALS,
    UNRESOLVED,
    UpstreamAnswer,
    callers_fault,
    fault_kind,
    retry_after,
    shareable,
    without_text,
)
from carpool_sidecar.dispatch.request_counts import RequestCounts
from carpool_sidecar.http1.calls import UpstreamError
from carpool_sidecar.http1.messages import forwardable, parts_of, size_of
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.common import UNREADABLE, Portion, TooLarge, WrongRows, alone, last_padded, longest
from carpool_sidecar.protocols.headers import Reader, differing
from carpool_sidecar.protocols.limits import DEFAULT
from carpool_sidecar.protocols.padding import TOO_LARGE, Fit
from carpool_sidecar.verification.check import LEAST_ROWS, TRIAL_ROWS, Kind
from carpool_sidecar.verification.record import REFUTED, UNVERIFIED
from carpool_sidecar.verification.verifier import Verifier

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable

    from carpool.batching.batcher import Batcher
    from carpool.batching.counters import Counters
    from carpool.batching.requests import Action
    from carpool.policy.spec import BatchingPolicy
    from carpool_sidecar.backends.base import Backend, Call
    from carpool_sidecar.http1.exchange import Exchange
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.models import Entry, ModelTable
    from carpool_sidecar.protocols.common import Endpoint, Message, Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts
    from carpool_sidecar.verification.check import Check, Trial

RESOLUTION = 0.001
"""Seconds: what uvloop's timers are whole numbers of. A timer rounded down to none would turn the loop in vain."""

NOTE_INTERVAL = 1.0
"""Seconds between two log lines on requests that are not batched."""

UNCHARGED = 8192
"""Bytes that a request may be held in beside its body without being counted: each has a few kilobytes of its own."""

KEPT_APART = {
    "quarantined": "an answer to a batch had another number of rows",
    "failing-caller": "an earlier request of this caller failed by itself",
}
"""Reasons for which the Batcher merges nothing of a request that may be merged, and what each means."""


class Waiter:
    """One caller on the way: the payload of the Batcher's request.

    An exchange's context is that request, and nothing here points back at it: once the exchange lets go of it, all of
    it is freed at once. Left to the garbage collector, bodies of a megabyte would pile up.
    """

    __slots__ = (
        "answer", "answered", "check", "counters", "entry", "exchange", "facts", "headers", "parsed", "pieces",
        "status",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange | Shadow,
        entry: Entry,
        counters: Counters,
        facts: Facts,
        parsed: Parsed[Any],
        check: Check | None,
    ) -> None:
        self.exchange = exchange
        self.entry = entry
        self.check = check
        """Who looks at its answer."""
        self.counters = counters
        self.facts = facts
        self.parsed = parsed
        self.answer: UpstreamAnswer | None = None
        """The upstream's answer to this request alone."""
        self.headers: Headers = []
        """Of the last batch that it was in, like the status."""
        self.status = 200
        self.pieces: list[tuple[int, Piece]] = []
        """Its rows' answers by first row, as they came in."""
        self.answered = False
        """Whether it got an answer of the upstream's, to be counted once it is sent."""


class Shadow:
    """Stands in for the exchange of a request of the sidecar's own: a trial's."""

    __slots__ = ("_answered", "body", "headers")

    def __init__(self, message: Message, facts: Facts, answered: Callable[[UpstreamAnswer | None], None]) -> None:
        self.body: Body = message.parts
        self.headers: Headers = [*facts.shared, *message.headers]
        self._answered = answered

    def respond(self, status: int, headers: Headers, body: Body = b"") -> None:
        """Take the upstream's answer."""
        self._answered(UpstreamAnswer(status, headers, b"".join(parts_of(body))))

    def fail(self, status: int, reason: str, error: str, headers: Headers | None = None) -> None:  # noqa: ARG002 - an exchange's signature
        """Take that there is none."""
        self._answered(None)


class Flight:
    """One batch with the upstream, and who receives its answer."""

    __slots__ = ("_alone", "_batch", "_driver", "_portions", "_sent", "call")

    def __init__(self, driver: Driver, batch: Batch, portions: list[Portion]) -> None:
        self._driver = driver
        self._batch = batch
        self._portions = portions
        self._sent = batch.slices
        """What the call was made of; the Batcher may take a request out of the batch meanwhile."""
        self._alone = len(batch.slices) == 1
        """Whether all of it is one request's, so that an error is its own."""
        self.call: Call | None = None

    @property
    def entry(self) -> Entry:
        """The model version that it calls."""
        entry: Entry = self._sent[0][0].payload.entry
        return entry

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Share out an answer, or find out whose fault it is that there is none to share."""
        batch, driver, fault = self._batch, self._driver, None
        first: Waiter = self._sent[0][0].payload
        check = first.check
        pieces: list[Piece] = []
        kind = fault_kind(status)
        if status in {401, 403} and self._portions and driver.reader.across:
            kind = FaultKind.ITEM  # the batch was sent with one caller's credentials: the others' may be good
        if kind is not None:
            answer = UpstreamAnswer(status, headers, body)
            fault = Fault(kind, detail=answer if self._alone else without_text(answer))
        elif not self._portions:
            first.answer = UpstreamAnswer(status, headers, body)
            if batch.halves is not None and not driver.can_be_shared(first.parsed, headers, body):
                # Alone it passes as it is, but that proves nothing of the size of the batch that failed.
                batch.halves = None
        else:
            codec = CODECS[first.parsed.endpoint.protocol]
            try:
                pieces = codec.split(self._portions, headers, body, driver.limits)
            except TooLarge as too_large:
                fault = Fault(driver.too_large, detail=too_large)
            except WrongRows as error:
                # No JSON, as with a NaN in it: one waiter's rows may be why, and alone its answer passes as it is.
                # Padded rows may be why, too: then those of equal length have nothing to do with it.
                padded = longest(self._portions) > 0
                kind = FaultKind.UNREADABLE if padded or error.reason == UNREADABLE else FaultKind.ROWS
                fault = Fault(kind, detail=error)
                if check is not None:
                    driver.verifier.shared_out_wrong(first.entry, check, error, padded=padded)
            else:
                shared = shareable(headers)
                for (request, start, _), piece in zip(self._sent, pieces, strict=True):
                    waiter = request.payload
                    waiter.pieces.append((start, piece))
                    waiter.headers, waiter.status = shared, status
        driver.landed(batch, status, fault)
        # The callers have their answers: now there is time to look whether they were right.
        if check is not None and fault is None:
            if not self._portions:
                driver.verifier.answered_alone(first.entry, check, first.parsed, first.facts, headers, body)
            elif len(self._portions) > 1:
                at, padded = last_padded(self._portions)
                last: Waiter = self._sent[at][0].payload
                driver.verifier.answered_together(
                    first.entry, check, self._portions[at], pieces[at], last.facts, batch.rows, padded=padded
                )

    def failed(self, error: UpstreamError) -> None:
        """Take a failure of the upstream's."""
        driver = self._driver
        kind = driver.too_large if error.kind == "too-large" else FaultKind.TRANSPORT
        driver.landed(self._batch, 0, Fault(kind, retryable=not error.answered_bytes, detail=error))


class Driver:
    """Drives a Batcher for one upstream. ``clock`` gives monotonic seconds, as the Batcher's ``now``.

    ``largest(model)``: rows that parameters may ever give a batch. ``limits`` bounds what is read of bodies, and
    ``reader`` reads headers; both may be replaced. ``stalled(start, end)`` says whether this host paused in between.
    ``unreachable`` is called when a call finds nobody there.
    """

    def __init__(
        self,
        batcher: Batcher,
        backend: Backend,
        models: ModelTable,
        policy: BatchingPolicy,
        *,
        clock: Callable[[], float],
        largest: Callable[[str], int],
        stalled: Callable[[float, float], bool],
        unreachable: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self.batcher = batcher
        self.due = policy.slo.due
        """Seconds from arrival to due time: the SLO's target."""
        self.timeout = policy.admission.seconds(policy.slo.due)
        """Seconds that the policy lets a request wait."""
        self.reader = Reader()
        self.limits = DEFAULT
        self.counts = RequestCounts()
        self.verifier = Verifier(self, policy, clock, log)
        self._backend = backend
        self._models = models
        self._clock = clock
        self._largest = largest
        self._stalled = stalled
        self._unreachable = unreachable
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._flights: dict[Batch, Flight] = {}
        self._to_do: deque[Action] = deque()
        self._doing = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf
        self._noted_at = -inf

    @property
    def too_large(self) -> FaultKind:
        """Whose fault an answer is that is too large to be read."""
        # A smaller batch has a smaller answer; but this one was computed already.
        return FaultKind.SIZE if self.batcher.idempotent else FaultKind.ROWS

    # ------------------------------------------------------------------------------------------------- requests

    def infer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Take a request for inference whose body is complete."""
        now = self._clock()
        # A caller who sends the same head again need not have it read again.
        known: Facts | None = exchange.headers.facts
        if known is None or known.reader is not self.reader:
            known = exchange.headers.facts = self.reader.read(exchange.headers)
        facts = known
        parsed = CODECS[endpoint.protocol].parse(endpoint, facts, exchange.body, self.limits)
        if parsed.expansion > UNCHARGED and not exchange.charge(parsed.expansion):
            why = f"body: {parsed.expansion} bytes more to read it, and bodies.maxBuffered leaves no room"
            parsed = alone(endpoint, facts, exchange.body, "limits", why)
        entry = self._models.entry(endpoint)
        # 1. May it be merged?
        reason = parsed.alone or (entry.alone_by_protocol if parsed.first_by_protocol else entry.alone)
        key: bytes | None = parsed.key
        check: Check | None = None
        bucket = 0
        if entry.sequence is not None and parsed.alone is None:
            fit = parsed.fit = CODECS[endpoint.protocol].fit(parsed, entry.sequence)
            bucket = fit.bucket
        if reason is None:
            key, check = self.verifier.admit(entry, parsed)
            if key is None:
                reason = UNVERIFIED
            elif parsed.fit is not None:
                key = self._padded_key(exchange, entry, parsed, parsed.fit, key, check)
        state = self.batcher.model(entry.lane)
        if reason is not None:
            self._note_alone(entry, reason, parsed.why)
        elif apart := state.isolation.keeps_apart(exchange.peer, parsed.rows, state.cap):
            self._note_alone(entry, apart, KEPT_APART[apart])
        if facts.key != entry.headers:
            self._note_fragments(entry, facts.key)
        # 2. By when? The least of what the caller says and the policy. Whoever fills the headroom has time, and no SLO.
        waits = facts.batch
        timeout = inf if waits else self.timeout
        if facts.deadline_s is not None and facts.deadline_s < timeout:
            timeout = facts.deadline_s
        if parsed.timeout_s and parsed.timeout_s < timeout:
            timeout = parsed.timeout_s
        entry.waiters += 1
        arrived = exchange.received_at
        request = exchange.context = Request(
            key=key,
            arrived=arrived,
            due=inf if waits else arrived + self.due,
            rows=parsed.rows,
            deadline=arrived + timeout,
            model=entry.lane,
            priority=(
                Priority.LOW if waits else min(parsed.priority, Priority.LOW) if parsed.priority else Priority.NORMAL
            ),
            shadow=waits,
            size=parsed.size,
            tokens=parsed.tokens,
            bucket=bucket,
            mergeable=reason is None,
            caller=exchange.peer,
            payload=Waiter(exchange, entry, state.counters, facts, parsed, check),
        )
        self.do(self.batcher.arrive(request, now))

    def sends_alone(self, endpoint: Endpoint) -> bool:
        """Whether requests of a model go to the upstream one by one now, and nobody has set parameters for them."""
        entry = self._models.entry(endpoint)
        return self.batcher.undecided > 0 and (entry.alone is not None or self.batcher.model(entry.lane).passing)

    def carry(
        self, entry: Entry, trial: Trial, message: Message, answered: Callable[[UpstreamAnswer | None], None]
    ) -> None:
        """Send a trial through the Batcher, as a request that nobody waits for and that counts as none."""

        def ended(answer: UpstreamAnswer | None) -> None:
            self._models.left(entry)
            answered(answer)

        now = self._clock()
        parsed = trial.portions[0].parsed
        entry.waiters += 1
        shadow = Shadow(message, trial.facts, ended)
        request = Request(
            key=parsed.key,
            arrived=now,
            due=now + self.due,
            rows=trial.rows,
            deadline=now + self.timeout,
            model=entry.lane,
            # Before all others: until a trial is answered none of them can share a batch.
            priority=Priority.NORMAL if trial.kind is Kind.LIVE else Priority.HIGH,
            size=size_of(message.parts),
            bucket=0 if parsed.fit is None else parsed.fit.bucket,
            mergeable=False,
            shadow=True,
            payload=Waiter(shadow, entry, self.batcher.model(entry.lane).counters, trial.facts, parsed, None),
        )
        self.do(self.batcher.arrive(request, now))

    def cap(self, entry: Entry) -> int:
        """Return the rows that a batch of a model may have, whatever the tuner makes of it now."""
        limits = self.batcher.model(entry.lane).limits
        return min(bound for bound in (self._largest(entry.lane), limits.max_rows, limits.ceiling) if bound is not None)

    def quick(self, entry: Entry) -> int:
        """Return the rows of a trial that takes half the SLO at most, as far as batch latency is known; at least 4."""
        estimate, rows = self.batcher.model(entry.lane).belief.estimate, TRIAL_ROWS
        while estimate is not None and rows > LEAST_ROWS and time_of(estimate.times, rows) > self.due / 2:
            rows -= 1
        return rows

    def served(self, entry: Entry) -> int:
        """Return the rows that a model has served."""
        return self.batcher.model(entry.lane).limits.served_rows

    def quarantine(self, entry: Entry, *, on: bool) -> None:
        """Merge nothing of a model, what waits already included; or merge it again."""
        self.batcher.model(entry.lane).isolation.quarantined = on

    def sent(self, exchange: Exchange) -> None:
        """Count an answer whose last byte is with the transport."""
        request: Request = exchange.context
        waiter: Waiter = request.payload
        status = exchange.status
        model = self._models.label(request.model)
        if waiter.answered and not request.shadow:
            self.counts.took(model, exchange.sent_at - request.arrived)
            failure = REJECTED if callers_fault(status) else FAILED
            waiter.counters.answered(request.arrived, request.due, exchange.sent_at, 200 <= status < 300, failure)
        self.counts.answered(model, waiter.parsed.endpoint.protocol, status)
        self._models.left(waiter.entry)
        exchange.context = None

    def disconnected(self, exchange: Exchange) -> None:
        """Forget a caller who left before the answer was complete."""
        request: Request = exchange.context
        if not request.ended:
            self.do(self.batcher.cancel(request, self._clock()))
        elif request.payload.answered and not request.shadow:
            request.payload.counters.missed(CANCELLED)
        self._models.left(request.payload.entry)
        exchange.context = None

    def forget(self, model: str) -> None:
        """Forget a model that does not exist."""
        self.batcher.forget(model)
        self.counts.forget(model)

    def can_be_shared(self, parsed: Parsed[Any], headers: Headers, body: bytes | memoryview) -> bool:
        """Say whether rows can be told apart in an answer to one request, or only its size stands against that."""
        try:
            CODECS[parsed.endpoint.protocol].split([Portion(parsed, 0, parsed.rows)], headers, body, self.limits)
        except TooLarge:
            return True
        except WrongRows:
            return False
        return True

    # ------------------------------------------------------------------------------------------------- actions

    def do(self, actions: Iterable[Action]) -> None:
        """Do what the Batcher asks for, and be back when it needs to be asked again."""
        self._to_do.extend(actions)
        if self._doing:
            return  # an action had consequences at once: they are done behind it, not inside it
        self._doing = True
        try:
            while self._to_do:
                action = self._to_do.popleft()
                match action:
                    case Batch():
                        self._send(action)
                    case Finish():
                        for request in action.requests:
                            self._answer(request, action.batch)
                    case Failure():
                        for request in action.requests:
                            self._fail(request.payload, action.fault, unresolved=action.unresolved)
                        if action.unresolved and isinstance(action.fault.detail, WrongRows):
                            # Finding out whose rows made it so was too dear: this model's answers can't be merged.
                            self.batcher.model(action.requests[0].model).isolation.quarantined = True
                    case Refusal():
                        self._refuse(action)
                    case Abort():
                        flight = self._flights.pop(action.batch)
                        if flight.call is not None:
                            flight.call.cancel()
        finally:
            self._doing = False
        wake = self.batcher.wake_at()
        # A timer that is early finds nothing due and is set anew: cheaper than moving it with every request.
        if wake < self._armed:
            self._arm(wake)

    def landed(self, batch: Batch, status: int, fault: Fault | None) -> None:
        """Take the outcome of a batch that was sent."""
        flight = self._flights.pop(batch)
        flight.call = None
        now = self._clock()
        entry = flight.entry
        if fault is None:
            entry.proven = True
        elif isinstance(fault.detail, UpstreamError) and fault.detail.kind == "refused":
            self._unreachable()  # a reset is one connection's end: servers recycle workers, and odd requests kill them
        self.do(self.batcher.complete(batch, now, fault=fault, stalled=self._stalled(batch.dispatched, now)))
        if status == 404:
            self._models.missing(entry)

    def _send(self, batch: Batch) -> None:
        first: Waiter = batch.slices[0][0].payload
        portions: list[Portion] = []
        if not batch.whole or first.parsed.fit is not None:
            portions = [Portion(request.payload.parsed, start, stop) for request, start, stop in batch.slices]
        if first.parsed.fit is not None and not self._padding_holds(batch.model, first, portions):
            self._flights[batch] = Flight(self, batch, [])
            self.landed(batch, 0, Fault(FaultKind.UNREADABLE))
            return
        self.counts.sent(batch.model, batch.rows)
        body: Body
        headers: Headers
        try:
            if batch.whole:
                portions = []  # its answer is not shared out
                body = first.exchange.body
                headers = forwardable(first.exchange.headers)
                if first.check is not None:  # its answer has to be read, so it may not be compressed
                    headers = [field for field in headers if field[0].lower() != b"accept-encoding"]
            else:
                message = CODECS[first.parsed.endpoint.protocol].merge(portions)
                body = message.parts
                headers = [*first.facts.shared, *message.headers]
            flight = self._flights[batch] = Flight(self, batch, portions)
            call = self._backend.send(
                first.parsed.endpoint.target,
                headers,
                body,
                flight,
                idempotent=self.batcher.idempotent,
                # Of requests that are merged with their equals alone nothing says that rows are independent.
                merged=not batch.whole and (first.check is None or first.check.verified),
            )
        except Exception:  # noqa: BLE001 - whatever it is, it must cost the culprit alone: it is searched for
            self._log.exception("a batch could not be sent", extra={"model": batch.model, "rows": batch.rows})
            self._flights[batch] = Flight(self, batch, portions)
            self.landed(batch, 0, Fault(FaultKind.ITEM))
            return
        if batch in self._flights:
            flight.call = call

    def _padding_holds(self, model: str, first: Waiter, portions: list[Portion]) -> bool:
        """Count a batch's tokens; False: it must not be padded any more, so its requests have to go one by one.

        They waited for others under a key that was good when they came.
        """
        length = longest(portions)
        if length and first.check is not None and first.check.unpadded:
            return False
        own = added = 0
        for parsed, start, stop in portions:
            if parsed.fit is not None:
                own += (stop - start) * parsed.fit.length
                added += (stop - start) * (length - parsed.fit.length) if length else 0
        self.counts.padded(model, own, added)
        return True

    def _answer(self, request: Request, batch: Batch) -> None:
        waiter: Waiter = request.payload
        waiter.answered = True
        if waiter.answer is not None:
            status, headers, body = waiter.answer
            headers = forwardable(headers)
            parts: Body = body
        else:
            pieces = waiter.pieces
            if len(pieces) > 1:
                pieces.sort(key=_first_row)
            try:
                message = CODECS[waiter.parsed.endpoint.protocol].assemble(
                    waiter.parsed, [piece for _, piece in pieces]
                )
            except WrongRows as error:
                self._fail(waiter, Fault(FaultKind.ROWS, detail=error), unresolved=False)
                return
            status, headers, parts = waiter.status, [*waiter.headers, *message.headers], message.parts
        if waiter.facts.debug:
            waited = (batch.dispatched - request.arrived) * 1e3
            headers = [
                *headers,
                (b"x-carpool-batch-size", b"%d" % batch.rows),
                (b"x-carpool-queue-ms", b"%.3f" % max(waited, 0.0)),
            ]
        waiter.exchange.respond(status, headers, parts)

    def _fail(self, waiter: Waiter, fault: Fault, *, unresolved: bool) -> None:
        waiter.answered = True
        exchange = waiter.exchange
        marks = [UNRESOLVED] if unresolved else []
        match fault.detail:
            case UpstreamAnswer(status=status, headers=headers, body=body):
                exchange.respond(status, [*forwardable(headers), *marks], body)
            case UpstreamError() as error:
                exchange.fail(error.status, error.reason, str(error), [retry_after(1.0)])
            case WrongRows(reason=reason) as error:
                exchange.fail(502, reason, f"the model's answer can't be split by rows: {error}", marks)
            case None if fault.kind is FaultKind.ROWS:
                exchange.fail(502, "wrong-rows", "the model does not answer row by row; it is no longer batched")
            case _:
                exchange.fail(500, "internal", "the sidecar could not handle this request; its log says why", marks)

    def _refuse(self, refusal: Refusal) -> None:
        status, text = REFUSALS[refusal.reason]
        exchange: Exchange | Shadow = refusal.request.payload.exchange
        exchange.fail(status, refusal.reason.value, text, [retry_after(refusal.retry_after)])

    # ------------------------------------------------------------------------------------------------- the timer

    def _arm(self, wake: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = wake
        self._timer = self._loop.call_later(max(wake - self._clock(), RESOLUTION), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._armed = inf
        self.do(self.batcher.poll(self._clock()))

    def stop(self) -> None:
        """Let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------------------------------------- notes

    def _note_alone(self, entry: Entry, reason: str, why: str) -> None:
        count = self.counts.not_merged(entry.lane, reason, why)
        # The 1st, 10th, 100th, ..., at most one a second: a log line a request would be a load of its own.
        now = self._clock()
        if str(count).strip("0") == "1" and now - self._noted_at >= NOTE_INTERVAL:
            self._noted_at = now
            # What is known of the axis explains nothing else.
            if reason in {UNVERIFIED, REFUTED}:
                detail = self.verifier.state(entry)[1]
            else:
                detail = entry.reason if reason.startswith("axis-") else why
            self._log.warning(
                "a request is not batched",
                extra={"model": entry.lane, "reason": reason, "count": count} | ({"detail": detail} if detail else {}),
            )

    def _padded_key(
        self, exchange: Exchange, entry: Entry, parsed: Parsed[Any], fit: Fit, key: bytes, check: Check | None
    ) -> bytes:
        """Return the key of a request that may be merged: that of its bucket if there is room to pad it."""
        if key is fit.key:
            if fit.growth <= UNCHARGED or exchange.charge(fit.growth):
                return key
            fit.refuse(TOO_LARGE)
            key = parsed.key
        reason = fit.why or ("padding-refuted" if check is not None and check.unpadded else "padding-unverified")
        self.counts.not_padded(entry.lane, reason)
        return key

    def _note_fragments(self, entry: Entry, key: bytes) -> None:
        if entry.headers is not None:
            self.counts.separated(differing(entry.headers, key))
        entry.headers = key


def _first_row(part: tuple[int, Piece]) -> int:
    return part[0]
