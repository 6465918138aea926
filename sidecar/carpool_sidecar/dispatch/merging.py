"""Which requests may be merged; those that may not are counted and logged."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final

from carpool_sidecar.axis_verification.record import REFUTED, UNVERIFIED
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.headers import advice
from carpool_sidecar.protocols.padding import TOO_LARGE, Fit

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.batching.model_state import ModelState
    from carpool_sidecar.axis_verification.check import Check
    from carpool_sidecar.axis_verification.verifier import Verifier
    from carpool_sidecar.dispatch.request_counts import RequestCounts
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Parsed

NOTE_INTERVAL = 1.0
"""Seconds between two log lines on requests that are not batched."""

UNCHARGED: Final = 8192
"""Bytes that a request may take beside its body without being counted: each takes a few kilobytes anyway."""

QUARANTINED = "an answer to a batch could not be divided by rows"
"""Why the Batcher sends a mergeable request alone."""


class Merging:
    """Decides under which key a request may be merged; counts and logs requests that may not."""

    def __init__(
        self, verifier: Verifier, counts: RequestCounts, clock: Callable[[], float], log: logging.Logger
    ) -> None:
        self._verifier = verifier
        self._counts = counts
        self._clock = clock
        self._log = log
        self._noted_at = -inf

    def key(
        self, exchange: Exchange, entry: Entry, parsed: Parsed[Any], state: ModelState
    ) -> tuple[bool, bytes | None, Check | None]:
        """Return whether a request may be merged, under which key, and the check that examines its answer."""
        reason = parsed.alone or (entry.alone_by_protocol if parsed.first_by_protocol else entry.alone)
        key: bytes | None = parsed.key
        check: Check | None = None
        if entry.sequence is not None and parsed.alone is None:
            parsed.fit = CODECS[parsed.endpoint.protocol].fit(parsed, entry.sequence)
        if reason is None:
            key, check = self._verifier.admit(entry, parsed)
            if key is None:
                reason = UNVERIFIED
            elif parsed.fit is not None:
                key = self._padded_key(exchange, entry, parsed, parsed.fit, key, check)
        if reason is not None:
            self._note_alone(entry, reason, parsed.why)
        elif state.isolation.quarantined:
            self._note_alone(entry, "quarantined", QUARANTINED)
        elif (exchange.peer, key) in state.isolation.suspects.left:
            self._counts.apart_at[entry.lane] = self._clock()
        return reason is None, key, check

    def _padded_key(
        self, exchange: Exchange, entry: Entry, parsed: Parsed[Any], fit: Fit, key: bytes, check: Check | None
    ) -> bytes:
        """Return the key of a mergeable request: the key of its length bucket if there is memory to pad it."""
        if key is fit.key:
            if fit.growth <= UNCHARGED or exchange.charge(fit.growth):
                return key
            fit.refuse(TOO_LARGE)
            key = parsed.key
        reason = fit.why or ("padding-refuted" if check is not None and check.padding.refuted else "padding-unverified")
        self._counts.not_padded(entry.lane, reason)
        return key

    def _note_alone(self, entry: Entry, reason: str, why: str) -> None:
        count = self._counts.not_merged(entry.lane, reason, why)
        # Log the 1st, 10th, 100th, ..., at most one a second: a line for every request would cost too much.
        now = self._clock()
        if str(count).strip("0") == "1" and now - self._noted_at >= NOTE_INTERVAL:
            self._noted_at = now
            # The entry's reason only explains problems with the axis.
            if reason in {UNVERIFIED, REFUTED}:
                detail = self._verifier.state(entry)[1]
            else:
                detail = entry.reason if reason.startswith("axis-") else why
            self._log.warning(
                "a request is not batched",
                extra={"model": entry.lane, "reason": reason, "count": count} | ({"detail": detail} if detail else {}),
            )

    def note_fragments(self, entry: Entry, key: bytes) -> None:
        """Count the headers in which a request differs from the one before it."""
        self._counts.separated(entry.headers.note(key))
        own = entry.headers.own
        if own and not entry.headers.reported:
            entry.headers.reported = True
            self._log.warning("requests share no batches", extra={"model": entry.lane, "detail": advice(own)})
