"""Whether a client's data is read: its transport is paused while nothing may be read, and resumed afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from carpool_sidecar.http1.server.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.http1.server.intake import Intake
    from carpool_sidecar.http1.server.outgoing import Outgoing
    from carpool_sidecar.http1.server.time_limits import TimeLimits
    from carpool_sidecar.http1.server.wire import Wire

_LINGERING: Final = Phase.LINGERING  # looking a member of an enum up costs 0.2 us


class FlowControl:
    """Pauses and resumes the reading of a client's data.

    `yielded`: other connections have their turn before this one goes on with what is unread.
    """

    __slots__ = (
        "_clock", "_discarded", "_drain_bytes", "_intake", "_outgoing", "_reading", "_time_limits", "_wire", "yielded",
    )  # fmt: skip

    def __init__(
        self,
        clock: Callable[[], float],
        drain_bytes: int,
        wire: Wire,
        intake: Intake,
        time_limits: TimeLimits,
        outgoing: Outgoing,
    ) -> None:
        self._clock = clock
        self._drain_bytes = drain_bytes
        self._wire = wire
        self._intake = intake
        self._time_limits = time_limits
        self._outgoing = outgoing
        self._reading = True  # the transport is not paused
        self._discarded = 0  # bytes that arrived after the last request
        self.yielded = False

    @property
    def paused(self) -> bool:
        """Whether the transport is paused."""
        return not self._reading

    def discard(self, count: int) -> None:
        """Count bytes that are not read as requests; beyond `drain_bytes` the client's data is left in its socket."""
        self._discarded += count
        self.sync()

    def pause_body(self, exchange: Exchange, *, paused: bool) -> None:
        """Pause reading the body of this exchange, if it is being read; or resume it."""
        intake = self._intake
        if exchange is intake.exchange and intake.paused is not paused:
            intake.paused = paused
            self.sync()

    def sync(self) -> None:
        """Pause or resume the transport, whichever is due."""
        wire = self._wire
        want = wire.phase is _LINGERING or (
            wire.writable
            and not self._intake.paused
            and not self.yielded
            # If nothing is unread, one more read does no harm, and it detects that the client leaves.
            and (not wire.unread or len(self._outgoing.queue) < self._outgoing.limit)
            and self._discarded <= self._drain_bytes
        )
        if want is self._reading or wire.transport.is_closing():
            return
        self._reading = want
        if want:
            wire.transport.resume_reading()
        else:
            wire.transport.pause_reading()
        if self._intake.exchange is not None and wire.phase is not _LINGERING:
            # Only the client's own time counts.
            if want:
                self._time_limits.resume(self._clock())
            else:
                self._time_limits.pause(self._clock())
