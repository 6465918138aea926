"""How long a client may take over what it has to send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.parsing import HttpError
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.limits import ServerLimits


class Patience:
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
        """Give the client time until its next request."""
        self.deadline = now + self._limits.idle_timeout

    def await_protocol(self, now: float) -> None:
        """Give the client time to say which protocol it speaks."""
        self.deadline = min(self.deadline, now + self._limits.head_timeout)

    def await_head(self, now: float) -> None:
        """Give the client time for a head that has begun."""
        self.deadline = now + self._limits.head_timeout

    def await_body(self, now: float) -> None:
        """Give the client time for a body that begins."""
        self._body_since = now
        self.deadline = now + self._limits.body_timeout

    def pause(self, now: float) -> None:
        """Take note that a body is not read from now on."""
        self._paused_at = now
        self.deadline = NEVER

    def resume(self, now: float) -> None:
        """Take note that it is read again."""
        self._body_since += now - self._paused_at
        self.deadline = now + self._limits.body_timeout

    def head_is_late(self) -> HttpError:
        """Say what is wrong where the time for a head is over."""
        text = f"the head took over {self._limits.head_timeout:g} s; raise head_timeout"
        return HttpError(408, "head-timeout", text)

    def body_is_late(self, now: float, size: int) -> HttpError | None:
        """Say what is wrong where the time for a body is over; None: by its `size` so far it has earned more."""
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
        """Return the share that is used of the time for a head."""
        return 1.0 - (self.deadline - now) / self._limits.head_timeout

    def used_between(self, now: float, *, first: bool) -> float:
        """Return the share that is used of the time until the next request; until the `first` one that is shorter."""
        limits = self._limits
        idle = now - (self.deadline - limits.idle_timeout)
        return idle / (limits.head_timeout if first else limits.idle_timeout)
