"""What a batch's slot serves next when the batch has failed: whose fault it was, who fails, who is sent again."""

from __future__ import annotations

from typing import NamedTuple

from carpool.batching.requests import Batch, Family, Fault, FaultKind, Request, Ride


class Verdict(NamedTuple):
    """What becomes of a failed batch's requests: each is in a part that is sent again, or has failed."""

    parts: list[Batch]
    """To be served in the same slot, first to last."""
    failed: list[Request]
    unresolved: bool = False
    """The requests may not be sent again (``idempotent: false``), so innocents may be among ``failed``."""
    restarted: list[Request] = []  # noqa: RUF012 - never changed
    """Requests that are served again from their first row, each whole and in a batch of its own."""


def judge(batch: Batch, fault: Fault, *, retry_transport: bool, idempotent: bool = True) -> Verdict:
    """Decide about the requests that still wait, and note in the batch's lane what the fault says of the model.

    An innocent request never fails for another one: it is sent again, in a smaller batch or alone. What that costs is
    bounded by the batch size of its key, which ``Isolation`` lowers. ``idempotent``: whether requests may be sent
    again.
    """
    lane = batch.lane
    rides = [ride for ride in batch.rides if not ride[0].ended]
    rows = _rows(rides)
    complete = len(rides) == len(batch.rides)
    everybody = [request for request, _, _ in rides]
    several = len(batch.rides) > 1
    if fault.kind is FaultKind.TRANSPORT:
        if fault.retryable and retry_transport and batch.attempt == 1:
            again = _part(batch, rides)
            again.attempt = 2
            again.family = batch.family if complete else None
            return Verdict([again], [])
    elif fault.kind is FaultKind.SIZE:
        # A server that answers 413 has computed nothing: halves may be sent whatever the policy says.
        halves = None if lane.quarantined else _halve_rows(rides)
        if halves is not None:
            # One row can be too large by itself, and must not cost the others their batches: the ceiling waits for
            # both halves to succeed. When searching has become too expensive, the smaller batch is the safe guess.
            if not lane.may_serve_again(rows):
                lane.too_large(rows, works=rows - rows // 2)
            lane.counters.bisections += 1
            return Verdict(_family(batch, halves, complete=complete), [])
        if several:  # what made it too large has left
            return Verdict([_part(batch, [ride]) for ride in rides], [])
        if not batch.whole:  # a row of a request that was cut: whole, its answer need not be read
            return Verdict([], [], restarted=everybody)
    elif fault.kind is FaultKind.ROWS:
        if not batch.whole:
            lane.quarantined = True
            if idempotent:
                return Verdict([], [], restarted=everybody)
    elif fault.kind is FaultKind.ITEM and several:
        if not idempotent:
            return Verdict([], everybody, unresolved=True)
        lane.counters.bisections += 1
        if lane.isolate(batch.key, rows):
            middle = len(rides) // 2  # a single request is sent again too: the culprit may be the one that left
            return Verdict(_family(batch, (rides[:middle], rides[middle:]), complete=complete), [])
        return Verdict([_part(batch, [ride]) for ride in rides], [])
    return Verdict([], everybody)


def next_part(rest: list[Batch]) -> Batch | None:
    """Take the next part that somebody waits for, cut to what may be sent now; ``None``: nothing is left.

    Riders leave, caps shrink and models are quarantined while a part waits for its slot.
    """
    while rest:
        part = rest.pop(0)
        lane = part.lane
        rides = [ride for ride in part.rides if not ride[0].ended]
        if not rides:
            continue
        if lane.quarantined:
            cut = (rides[:1], rides[1:]) if len(rides) > 1 else None
        else:
            cut = _halve_rows(rides) if _rows(rides) > lane.cap else None
        if cut is not None:
            rest[:0] = [_part(part, cut[0]), _part(part, cut[1])]
        elif len(rides) < len(part.rides):
            return _part(part, rides)  # no longer of its family: who left may have been the culprit
        else:
            return part
    return None


def _rows(rides: list[Ride]) -> int:
    return sum(stop - start for _, start, stop in rides)


def _part(batch: Batch, rides: list[Ride]) -> Batch:
    part = Batch(batch.lane, batch.key, batch.bucket, rides, _rows(rides))
    part.attempt = batch.attempt
    return part


def _family(batch: Batch, halves: tuple[list[Ride], list[Ride]], *, complete: bool) -> list[Batch]:
    """Make parts of two halves; they prove a size fault only where nobody has left the batch."""
    parts = [_part(batch, half) for half in halves]
    if complete:
        family = Family(batch.rows, max(part.rows for part in parts))
        for part in parts:
            part.family = family
    return parts


def _halve_rows(rides: list[Ride]) -> tuple[list[Ride], list[Ride]] | None:
    """Split rides into two halves by rows, through a mergeable request if need be; ``None``: a single row, or whole."""
    total = _rows(rides)
    if total < 2 or not rides[0][0].mergeable:
        return None
    left: list[Ride] = []
    right: list[Ride] = []
    room = total // 2
    for request, start, stop in rides:
        cut = min(start + room, stop)
        if cut > start:
            left.append((request, start, cut))
        if cut < stop:
            right.append((request, cut, stop))
        room -= cut - start
    return left, right
