"""After a batch has failed: which of its requests fail, and which are sent again in the same slot."""

from __future__ import annotations

from typing import NamedTuple

from carpool.batching.requests import Batch, Fault, FaultKind, Halves, Request, Slice


class Verdict(NamedTuple):
    """The outcome for a failed batch's requests: each is in a part that is sent again, or has failed."""

    parts: list[Batch]
    """To be served in the same slot, first to last."""
    failed: list[Request]
    unresolved: bool = False
    """The requests may not be sent again (``idempotent: false``), so innocents may be among ``failed``."""
    restarted: list[Request] = []  # noqa: RUF012 - never changed
    """Requests that are served again from their first row, each whole and in a batch of its own."""


def judge(batch: Batch, fault: Fault, *, retry_transport: bool, idempotent: bool = True) -> Verdict:
    """Decide about the requests that still wait, and learn from the fault about the model.

    An innocent request never fails for another one: it is sent again, in a smaller batch or alone. The batch size of
    its key bounds the cost; ``RetryBudget`` lowers that size. ``idempotent``: whether they may be sent again.
    """
    state = batch.state
    slices = [each for each in batch.slices if not each[0].ended]
    rows = _rows(slices)
    everybody = [request for request, _, _ in slices]
    several = len(batch.slices) > 1
    if fault.kind is FaultKind.TRANSPORT:
        if fault.retryable and retry_transport and batch.attempt == 1:
            again = _part(batch, slices)
            again.attempt = 2
            again.halves = batch.halves if rows == batch.rows else None
            return Verdict([again], [])
    elif fault.kind is FaultKind.SIZE:
        # A server that answers 413 has computed nothing: halves may be sent whatever the policy says.
        halves = None if state.isolation.quarantined else _halve_rows(slices)
        if halves is not None:
            # A single row can be too large, and must not make the others' batches smaller: the ceiling is lowered once
            # both halves succeed. When searching has become too expensive, the smaller batch is the safe guess.
            if not state.limits.may_serve_again(rows):
                state.limits.too_large(rows, works=rows - rows // 2)
            state.counters.bisections += 1
            return Verdict(_halves(batch, halves), [])
        if several:  # the rows that made it too large have left
            return Verdict([_part(batch, [each]) for each in slices], [])
        if not batch.whole:  # a row of a request that was cut: whole, its answer need not be read
            return Verdict([], [], restarted=everybody)
    elif fault.kind is FaultKind.ROWS or (fault.kind is FaultKind.UNREADABLE and not several):
        if not batch.whole:
            state.isolation.quarantined |= fault.kind is FaultKind.ROWS
            if idempotent:
                return Verdict([], [], restarted=everybody)
    elif fault.kind in {FaultKind.ITEM, FaultKind.UNREADABLE} and several:
        if not idempotent:
            return Verdict([], everybody, unresolved=True)
        state.counters.bisections += 1
        if state.isolation.failed(batch.key, rows):
            middle = len(slices) // 2  # a single request is sent again too: the culprit may be the one that left
            return Verdict(_halves(batch, (slices[:middle], slices[middle:])), [])
        return Verdict([_part(batch, [each]) for each in slices], [])
    return Verdict([], everybody)


def next_part(rest: list[Batch]) -> Batch | None:
    """Take the next part that a caller waits for, cut to the present limits; ``None``: nothing is left.

    While a part waits for its slot, requests leave, caps shrink and models are quarantined.
    """
    while rest:
        part = rest.pop(0)
        state = part.state
        slices = [each for each in part.slices if not each[0].ended]
        if not slices:
            continue
        if state.isolation.quarantined:
            cut = (slices[:1], slices[1:]) if len(slices) > 1 else None
        else:
            cut = _halve_rows(slices) if _rows(slices) > state.cap else None
        if cut is not None:
            rest[:0] = [_part(part, cut[0]), _part(part, cut[1])]
        elif len(slices) < len(part.slices):
            return _part(part, slices)  # no longer a half: the culprit may have left
        else:
            return part
    return None


def _rows(slices: list[Slice]) -> int:
    return sum(stop - start for _, start, stop in slices)


def _part(batch: Batch, slices: list[Slice]) -> Batch:
    part = Batch(batch.state, batch.key, batch.bucket, slices, _rows(slices))
    part.attempt = batch.attempt
    return part


def _halves(batch: Batch, halves: tuple[list[Slice], list[Slice]]) -> list[Batch]:
    """Make two halves into parts; they prove a size fault only if no request has left the batch."""
    parts = [_part(batch, half) for half in halves]
    if sum(part.rows for part in parts) == batch.rows:
        both = Halves(batch.rows, max(part.rows for part in parts))
        for part in parts:
            part.halves = both
    return parts


def _halve_rows(slices: list[Slice]) -> tuple[list[Slice], list[Slice]] | None:
    """Split slices into halves by rows, also within a mergeable request; ``None``: a single row, or not divisible."""
    total = _rows(slices)
    if total < 2 or not slices[0][0].mergeable:
        return None
    left: list[Slice] = []
    right: list[Slice] = []
    room = total // 2
    for request, start, stop in slices:
        cut = min(start + room, stop)
        if cut > start:
            left.append((request, start, cut))
        if cut < stop:
            right.append((request, cut, stop))
        room -= cut - start
    return left, right
