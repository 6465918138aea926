"""The transport of one client: unread and unsent data, and how the connection ends."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from carpool_sidecar.http1.memory import counts_itself
from carpool_sidecar.http1.server.time_limits import WriteTimeout
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from carpool_sidecar.http1.limits import ServerLimits
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Buffer


class Phase(IntEnum):
    """The phase of a connection. It only moves down this list."""

    UNKNOWN = 0
    """Too little data has arrived to know whether the client speaks HTTP/1.1."""
    OPEN = 1
    """Requests are read."""
    ENDING = 2
    """Further data is not read as requests. The requests so far are answered, then the connection closes."""
    REFUSED = 3
    """The same, and the client may still send data that was refused."""
    LINGERING = 4
    """The last answer is written and our side has ended. Further data is dropped until the client ends its side."""


class Wire:
    """A client's transport, and the memory counted for it. `eof`: the client has sent all."""

    __slots__ = (
        "_budget", "_counted", "_waiting", "_waiting_since", "_write_timeout", "eof", "phase", "transport", "unread",
        "writable", "written",
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
        self._budget = budget
        self._write_timeout = WriteTimeout(limits, clock)
        self.phase = phase
        self.unread = b""
        """Data that was not read yet: the start of a head, or requests beyond the pipelining limit."""
        self.eof = False
        self.writable = True
        self.written = 0
        """Bytes written to the transport."""
        self._counted = 0  # of these, up to the last that are counted elsewhere
        # What waits for the client, or before its turn: looked at with every tick.
        self._waiting = 0  # bytes that are counted as held
        self._waiting_since = NEVER
        transport.set_write_buffer_limits(high=limits.write_buffer_bytes)

    def write(self, pieces: list[Buffer]) -> None:
        """Write the pieces to the transport without copies."""
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
        """Bytes that the operating system has not accepted yet. It sends the others even if this process ends."""
        return self.transport.get_write_buffer_size()

    # A client that reads slowly

    def pause(self) -> None:
        """Note that the client reads too slowly, and start its time."""
        self.writable = False
        self.await_client()

    def resume(self) -> None:
        """Note that the client has caught up."""
        self.writable = True
        self._write_timeout.stop()

    def await_client(self) -> None:
        """Start the client's time to read some of the written data."""
        self._write_timeout.start(self.written - self.unsent)

    def is_overdue(self, now: float) -> bool:
        """Return whether the client has read nothing for too long; a client that has read some gets more time."""
        if now < self._write_timeout.deadline:
            return False
        return self.phase is Phase.LINGERING or not self._write_timeout.restart(self.written - self.unsent)

    def holds_back(self, now: float, patience: float) -> int:
        """Return the bytes held for a client that did not read them for so long."""
        return self.unsent if now - self._waiting_since > patience else 0

    def weigh(self, now: float, early: int) -> None:
        """Count unsent and unread bytes of this client; `early`: bytes of answers that wait for their turn.

        This is counted afterwards, without a check of the budget: the memory is in use already.
        """
        unsent = self.unsent
        waiting = len(self.unread) + min(unsent, self.written - self._counted) + early
        if not unsent:
            self._waiting_since = NEVER
        elif self._waiting_since == NEVER:
            self._waiting_since = now
            if self._write_timeout.deadline == NEVER:
                self.await_client()
        if not unsent and self.writable and self.phase is not Phase.LINGERING and not self.transport.is_closing():
            self._write_timeout.stop()
        self._budget.held += waiting - self._waiting
        self._waiting = waiting

    # The end

    def move_to(self, phase: Phase) -> None:
        """Move to this phase, unless the connection is beyond it."""
        self.phase = max(self.phase, phase)

    def close(self) -> None:
        """Close after all written data was sent."""
        self.move_to(Phase.ENDING)
        self.transport.close()
        self.await_client()

    def linger(self) -> None:
        """End our side, and read for a moment until the client ends its side.

        Closing with input unread resets the connection, and the reset overtakes the answer.
        """
        self.phase = Phase.LINGERING
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._write_timeout.linger()

    def lost(self) -> None:
        """Handle the end of the connection."""
        self.move_to(Phase.ENDING)
        self.unread = b""
        self._budget.give(self._waiting)
        self._waiting = 0
        self.writable = False
        self._write_timeout.stop()
