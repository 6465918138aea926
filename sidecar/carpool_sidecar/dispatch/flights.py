"""Batches at the upstream: sends them, takes their answers, and splits these among the waiting requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool.batching.requests import Batch, Fault, FaultKind
from carpool_sidecar.dispatch.answers import UpstreamAnswer, fault_kind, shareable, without_text
from carpool_sidecar.dispatch.waiters import Shadow
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.messages import find, forwardable
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.common import PARTS, UNREADABLE, Portion, TooLarge, WrongRows, last_padded, longest

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable

    from carpool.batching.batcher import Batcher
    from carpool.batching.requests import Action
    from carpool_sidecar.axis_verification.check import Check
    from carpool_sidecar.axis_verification.verifier import Verifier
    from carpool_sidecar.backends.base import Backend, Call
    from carpool_sidecar.dispatch.request_counts import RequestCounts
    from carpool_sidecar.dispatch.terms import Terms
    from carpool_sidecar.dispatch.waiters import Waiter
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.models import Entry, ModelTable
    from carpool_sidecar.protocols.common import Codec, Parsed, Piece


def _without_frames(error: WrongRows) -> WrongRows:
    """Drop the frames that an error keeps: they refer to the fault, and keep the answer until a garbage collection."""
    error.__context__ = None
    return error.with_traceback(None)


class Flight:
    """One batch at the upstream; it receives the batch's answer."""

    __slots__ = ("_alone", "_batch", "_check", "_flights", "_portions", "_sent", "call")

    def __init__(self, flights: Flights, batch: Batch, portions: list[Portion], check: Check | None = None) -> None:
        self._flights = flights
        self._batch = batch
        self._portions = portions
        self._check = check
        """The check that examines its answer."""
        self._sent = batch.slices
        """Slices that were sent; the Batcher may remove a request from the batch meanwhile."""
        self._alone = len(batch.slices) == 1
        """Whether the batch contains only one request, so that this request causes any error."""
        self.call: Call | None = None

    @property
    def entry(self) -> Entry:
        """The model version that the batch calls."""
        entry: Entry = self._sent[0][0].payload.entry
        return entry

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Split an answer among the requests, or classify the fault."""
        batch, flights, fault = self._batch, self._flights, None
        first: Waiter = self._sent[0][0].payload
        check = self._check
        pieces: list[Piece] = []
        kind = fault_kind(status)
        if status in {401, 403} and self._portions and flights.terms.reader.across:
            kind = FaultKind.ITEM  # the batch was sent with one caller's credentials: those of others may be valid
        if kind is not None:
            answer = UpstreamAnswer(status, headers, body)
            fault = Fault(kind, detail=answer if self._alone else without_text(answer))
        elif not self._portions:
            first.answer = UpstreamAnswer(status, headers, body)
            if batch.halves is not None and not flights.can_be_shared(first.parsed, headers, body):
                # Alone, its answer is passed on unchanged. That shows nothing about the size of the failed batch.
                batch.halves = None
        else:
            codec = CODECS[first.parsed.endpoint.protocol]
            try:
                pieces = codec.split(self._portions, headers, body, flights.terms.limits)
                self._check_parts(codec, pieces)
            except TooLarge as too_large:
                fault = Fault(flights.too_large, detail=_without_frames(too_large))
            except WrongRows as error:
                # The answer is not JSON, for example because it contains a NaN. One request's rows may be the cause;
                # alone, its answer is passed on unchanged. Padding may be the cause, too: then batches of rows of
                # equal length are still good.
                padded = longest(self._portions) > 0
                kind = FaultKind.UNREADABLE if padded or error.reason in {UNREADABLE, PARTS} else FaultKind.ROWS
                fault = Fault(kind, detail=_without_frames(error))
                if check is not None and error.reason != PARTS:
                    flights.verifier.shared_out_wrong(first.entry, check, error, padded=padded)
            else:
                shared = shareable(headers)
                for (request, start, _), piece in zip(self._sent, pieces, strict=True):
                    waiter = request.payload
                    waiter.pieces.append((start, piece))
                    waiter.headers, waiter.status = shared, status
        flights.landed(batch, status, fault)
        # The callers have their answers, so checking their correctness delays none of them.
        if check is not None and fault is None:
            if not self._portions:
                flights.verifier.answered_alone(first.entry, check, first.parsed, first.facts, headers, body)
            elif len(self._portions) > 1:
                at, padded = last_padded(self._portions)
                last: Waiter = self._sent[at][0].payload
                flights.verifier.answered_together(
                    first.entry, check, self._portions[at], pieces[at], last.facts, batch.rows, padded=padded
                )

    def _check_parts(self, codec: Codec, pieces: list[Piece]) -> None:
        """Raise ``WrongRows`` if a request in several batches got answers that can't be put together."""
        for (request, _, _), piece in zip(self._sent, pieces, strict=True):
            before = request.payload.pieces
            if before and not codec.agree(before[0][1], piece):
                raise WrongRows("answers to the parts of one request differ in their outputs", reason=PARTS)

    def failed(self, error: UpstreamError) -> None:
        """Handle a failure of the upstream."""
        flights = self._flights
        kind = flights.too_large if error.kind == "too-large" else FaultKind.TRANSPORT
        flights.landed(self._batch, 0, Fault(kind, retryable=not error.answered_bytes, detail=error))


class Flights:
    """All batches at the upstream. ``do`` executes the Batcher's actions after a batch has ended.

    ``stalled(start, end)`` returns whether this host paused in between. ``unreachable`` is called when the upstream
    refuses connections.
    """

    def __init__(
        self,
        batcher: Batcher,
        backend: Backend,
        models: ModelTable,
        terms: Terms,
        counts: RequestCounts,
        verifier: Verifier,
        *,
        do: Callable[[Iterable[Action]], None],
        clock: Callable[[], float],
        stalled: Callable[[float, float], bool],
        unreachable: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self.terms = terms
        self.verifier = verifier
        self._batcher = batcher
        self._backend = backend
        self._models = models
        self._counts = counts
        self._do = do
        self._clock = clock
        self._stalled = stalled
        self._unreachable = unreachable
        self._log = log
        self._under_way: dict[Batch, Flight] = {}

    def send(self, batch: Batch) -> None:
        """Send a batch; an error while it is built counts as a fault of the batch."""
        first: Waiter = batch.slices[0][0].payload
        portions: list[Portion] = []
        if not batch.whole or first.parsed.fit is not None:
            portions = [Portion(request.payload.parsed, start, stop) for request, start, stop in batch.slices]
        if first.parsed.fit is not None and not self._padding_holds(batch.model, first, portions):
            self._under_way[batch] = Flight(self, batch, [])
            self.landed(batch, 0, Fault(FaultKind.UNREADABLE))
            return
        if not isinstance(first.exchange, Shadow):
            self._counts.sent(batch.model, batch.rows)
        body: Body
        headers: Headers
        check = first.check
        try:
            if batch.whole:
                portions = []  # its answer is not split
                body = first.exchange.body
                headers = forwardable(first.exchange.headers)
                if check is not None and not check.looks(batch.dispatched):
                    check = None
                if (check is not None or batch.halves is not None) and find(headers, b"accept-encoding") is not None:
                    # Its answer has to be read, so it may not be compressed.
                    headers = [field for field in headers if field[0].lower() != b"accept-encoding"]
            else:
                message = CODECS[first.parsed.endpoint.protocol].merge(portions)
                body = message.parts
                headers = [*first.facts.shared, *message.headers]
            flight = self._under_way[batch] = Flight(self, batch, portions, check)
            call = self._backend.send(
                first.parsed.endpoint.target,
                headers,
                body,
                flight,
                idempotent=self._batcher.idempotent,
                # Requests that are merged only with equal ones don't show that their rows are independent.
                merged=not batch.whole and (first.check is None or first.check.verified),
            )
        except Exception:  # noqa: BLE001 - any error must only fail the request that causes it, which is then isolated
            self._log.exception("a batch could not be sent", extra={"model": batch.model, "rows": batch.rows})
            self._under_way[batch] = Flight(self, batch, portions)
            self.landed(batch, 0, Fault(FaultKind.ITEM))
            return
        if batch in self._under_way:
            flight.call = call

    def _padding_holds(self, model: str, first: Waiter, portions: list[Portion]) -> bool:
        """Count a batch's tokens. False: padding is no longer allowed, so its requests have to be sent one by one.

        The key under which they waited was valid when they arrived.
        """
        length = longest(portions)
        if length and first.check is not None and first.check.padding.refuted:
            return False
        own = added = 0
        for portion in portions:
            fit = portion.parsed.fit
            if fit is not None:
                rows = portion.stop - portion.start
                own += rows * fit.length
                added += rows * (length - fit.length) if length else 0
        self._counts.padded(model, own, added)
        return True

    def cancel(self, batch: Batch) -> None:
        """Cancel the call of a batch."""
        flight = self._under_way.pop(batch)
        if flight.call is not None:
            flight.call.cancel()

    def landed(self, batch: Batch, status: int, fault: Fault | None) -> None:
        """Handle the outcome of a batch that was sent."""
        flight = self._under_way.pop(batch)
        flight.call = None
        now = self._clock()
        entry = flight.entry
        if fault is None:
            entry.answered()
        elif isinstance(fault.detail, UpstreamError) and fault.detail.kind == "refused":
            self._unreachable()  # a reset only ends one connection: servers recycle workers, or one crashes
        self._do(self._batcher.complete(batch, now, fault=fault, stalled=self._stalled(batch.dispatched, now)))
        if status == 404:
            self._models.missing(entry)

    @property
    def too_large(self) -> FaultKind:
        """Classify an answer that is too large to be read."""
        # A smaller batch has a smaller answer, but the upstream has already computed this one.
        return FaultKind.SIZE if self._batcher.idempotent else FaultKind.ROWS

    def can_be_shared(self, parsed: Parsed[Any], headers: Headers, body: bytes | memoryview) -> bool:
        """Whether an answer to one request can be split by rows, or only its size prevents that."""
        try:
            CODECS[parsed.endpoint.protocol].split([Portion(parsed, 0, parsed.rows)], headers, body, self.terms.limits)
        except TooLarge:
            return True
        except WrongRows:
            return False
        return True
