"""The way to and from one client: what was not read yet, what it has not taken yet, and how the connection ends."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from carpool_sidecar.http1.memory import counts_itself
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from carpool_sidecar.http1.limits import ServerLimits
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Buffer


class Phase(IntEnum):
    """How far a connection is. It only moves down this list."""

    UNKNOWN = 0
    """Too little came to say whether the client speaks HTTP/1.1."""
    OPEN = 1
    """Requests are read."""
    ENDING = 2
    """What else comes in is not a request for us. What was asked is answered; then the connection closes."""
    REFUSED = 3
    """Likewise, and the client may still be sending what we refused to read."""
    LINGERING = 4
    """The last answer is written and our side has ended. What comes in is dropped until the client ends its own."""


class Wire:
    """A client's transport, and what is counted of it.

    `deadline` is when the client has to have taken some of what was written. `eof`: it has sent all.
    """

    __slots__ = (
        "_budget", "_clock", "_counted", "_limits", "_taken", "_waiting", "_waiting_since", "deadline", "eof", "phase",
        "transport", "unread", "writable", "written",
    )  # fmt: skip

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: ServerLimits,
        clock: Callable[[], float],
        budget: Budget,
        phase: Phase,
    ) -> None:
        self.transport = transport
        self._limits = limits
        self._clock = clock
        self._budget = budget
        self.phase = phase
        self.unread = b""
        """What came and was not read yet: the beginning of a head, or requests beyond the pipelining limit."""
        self.eof = False
        self.writable = True
        self.deadline = NEVER
        self.written = 0
        """Bytes handed to the transport."""
        self._counted = 0  # of these, up to the last that are counted elsewhere
        self._taken = 0  # of these, what the client had taken when last looked
        # What waits for the client, or before its turn: looked at with every tick.
        self._waiting = 0  # bytes that are counted as held
        self._waiting_since = NEVER
        transport.set_write_buffer_limits(high=limits.write_buffer_bytes)

    def write(self, pieces: list[Buffer]) -> None:
        """Hand pieces to the transport, each as it is."""
        transport = self.transport
        if transport.is_closing():
            return
        for piece in pieces:
            self.written += len(piece)
            transport.write(piece)
        if len(pieces) > 1 and counts_itself(pieces[-1]):  # before a large body goes a head
            self._counted = self.written

    @property
    def unsent(self) -> int:
        """Bytes that the system has not taken yet. What it has it sends, whatever becomes of this process."""
        return self.transport.get_write_buffer_size()

    # A client that reads slowly

    def pause(self) -> None:
        """Take note that the client reads too slowly, and give it time."""
        self.writable = False
        self.await_client()

    def resume(self) -> None:
        """Take note that it has caught up."""
        self.writable = True
        self.deadline = NEVER

    def await_client(self) -> None:
        """Give the client time to take some of what was written."""
        self._taken = self.written - self.unsent
        self.deadline = self._clock() + self._limits.write_timeout

    def is_overdue(self, now: float) -> bool:
        """Say whether the client has taken nothing for too long; one that has taken some gets more time."""
        if now < self.deadline:
            return False
        if self.phase is Phase.LINGERING or self.written - self.unsent == self._taken:
            return True
        self.await_client()
        return False

    def holds_back(self, now: float, patience: float) -> int:
        """Return the bytes held for a client that has not taken them for so long."""
        return self.unsent if now - self._waiting_since > patience else 0

    def weigh(self, now: float, early: int) -> None:
        """Count what the client does not take, and what it has sent before its turn; `early`: bytes of such answers.

        That is counted late, and without asking for room: it is here already. What could be asked for is.
        """
        unsent = self.unsent
        waiting = len(self.unread) + min(unsent, self.written - self._counted) + early
        if not unsent:
            self._waiting_since = NEVER
        elif self._waiting_since == NEVER:
            self._waiting_since = now
            if self.deadline == NEVER:
                self.await_client()
        if not unsent and self.writable and self.phase is not Phase.LINGERING and not self.transport.is_closing():
            self.deadline = NEVER
        self._budget.held += waiting - self._waiting
        self._waiting = waiting

    # The end

    def move_to(self, phase: Phase) -> None:
        """Be as far as that, at least."""
        self.phase = max(self.phase, phase)

    def close(self) -> None:
        """Close once what was written is sent."""
        self.move_to(Phase.ENDING)
        self.transport.close()
        self.await_client()

    def linger(self) -> None:
        """End our side, and read on for a moment until the client ends its own.

        Closing with input unread resets the connection, and the reset overtakes the answer.
        """
        self.phase = Phase.LINGERING
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.deadline = self._clock() + self._limits.linger_timeout

    def lost(self) -> None:
        """Take the end of the connection."""
        self.move_to(Phase.ENDING)
        self.unread = b""
        self._budget.give(self._waiting)
        self._waiting = 0
        self.writable = False
        self.deadline = NEVER
