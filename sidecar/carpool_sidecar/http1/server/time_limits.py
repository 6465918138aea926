"""The time limits for what a client sends, and for what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.parsing import HttpError
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.limits import ServerLimits


class TimeLimits:
    """The time that a client has for its next request, its head, or its body.

    `deadline` is when that is over; moving it is an assignment. While a body is not read, only the client's own time
    counts, so there is none.
    """

    __slots__ = ("_body_since", "_limits", "_paused_at", "deadline")

    def __init__(self, limits: ServerLimits, now: float) -> None:
        self._limits = limits
        self._body_since = 0.0  # when it began, later by the time for which reading was paused
        self._paused_at = 0.0
        self.deadline = now + limits.idle_timeout

    def await_request(self, now: float) -> None:
        """Start the time until the next request."""
        self.deadline = now + self._limits.idle_timeout

    def await_protocol(self, now: float) -> None:
        """Start the time until the protocol is known."""
        self.deadline = min(self.deadline, now + self._limits.head_timeout)

    def await_head(self, now: float) -> None:
        """Start the time for a head."""
        self.deadline = now + self._limits.head_timeout

    def await_body(self, now: float) -> None:
        """Start the time for a body."""
        self._body_since = self._paused_at = now  # reading may be paused already: a body before it was the last read
        self.deadline = now + self._limits.body_timeout

    def pause(self, now: float) -> None:
        """Note that reading of a body pauses."""
        self._paused_at = now
        self.deadline = NEVER

    def resume(self, now: float) -> None:
        """Note that reading resumes."""
        self._body_since += now - self._paused_at
        self.deadline = now + self._limits.body_timeout

    def head_is_late(self) -> HttpError:
        """Return the error if the time for a head is over."""
        text = f"the head took over {self._limits.head_timeout:g} s; raise head_timeout"
        return HttpError(408, "head-timeout", text)

    def body_is_late(self, now: float, size: int) -> HttpError | None:
        """Return the error if the time for a body is over; None: its `size` so far allows more time."""
        limits = self._limits
        earned = self._body_since + limits.body_timeout + size / limits.min_body_rate
        if now < earned:
            self.deadline = earned
            return None
        return HttpError(
            408,
            "body-timeout",
            f"the body took over {limits.body_timeout:g} s at {limits.min_body_rate:g} bytes/s; "
            "raise body_timeout or lower min_body_rate",
        )

    def body_takes(self, now: float) -> float:
        """Return the seconds since the body began."""
        return now - self._body_since

    def used_by_head(self, now: float) -> float:
        """Return the used share of the time for a head."""
        return 1.0 - (self.deadline - now) / self._limits.head_timeout

    def used_between(self, now: float, *, first: bool) -> float:
        """Return the used share of the time until the next request; that until the `first` one is shorter."""
        limits = self._limits
        idle = now - (self.deadline - limits.idle_timeout)
        return idle / (limits.head_timeout if first else limits.idle_timeout)


class WriteTimeout:
    """The time that a client has to take some of what was written or, after the last answer, to end its side.

    `deadline` is when that is over.
    """

    __slots__ = ("_clock", "_limits", "_taken", "deadline")

    def __init__(self, limits: ServerLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._taken = 0  # bytes that the client had taken when the time began
        self.deadline = NEVER

    def start(self, taken: int) -> None:
        """Start the time; the client has taken so many bytes."""
        self._taken = taken
        self.deadline = self._clock() + self._limits.write_timeout

    def restart(self, taken: int) -> bool:
        """Start the time again if the client has taken more bytes since it began; return whether it has."""
        if taken == self._taken:
            return False
        self.start(taken)
        return True

    def linger(self) -> None:
        """Start the time in which the client has to end its side."""
        self.deadline = self._clock() + self._limits.linger_timeout

    def stop(self) -> None:
        """Stop: nothing is expected of the client."""
        self.deadline = NEVER
