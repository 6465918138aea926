"""The transport of one connection to an upstream, and the flow control of both directions."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Buffer

_TCP: Final = frozenset({socket.AF_INET, socket.AF_INET6})
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux


class UpstreamWire:
    """An upstream's transport, and the memory counted for it.

    `writable`: the upstream has read most of what was written. `paused`: the receiver of the answer wants no more of it
    now, so nothing is read. Nothing is read either while other connections have their turn; `unread` has to be read
    before anything else then.
    """

    __slots__ = ("_budget", "_counted", "_yielded", "paused", "transport", "unread", "writable")

    def __init__(self, transport: asyncio.Transport, write_buffer_bytes: int, budget: Budget) -> None:
        self.transport = transport
        self._budget = budget
        self._counted = 0  # unsent bytes that are counted as held
        self._yielded = False
        self.paused = False
        self.unread = b""
        self.writable = True
        transport.set_write_buffer_limits(high=write_buffer_bytes)

    # Sending

    def write(self, pieces: list[Buffer]) -> None:
        """Write the pieces to the transport without copies."""
        transport = self.transport
        for piece in pieces:
            transport.write(piece)

    @property
    def unsent(self) -> int:
        """Bytes that the operating system has not accepted yet."""
        return self.transport.get_write_buffer_size()

    def weigh(self, *, kept: bool) -> None:
        """Count the unsent bytes as held, unless they are `kept`, and counted, elsewhere anyway."""
        waiting = 0 if kept else self.unsent
        self._budget.held += waiting - self._counted
        self._counted = waiting

    def let_go(self) -> None:
        """Return the counted bytes to the budget."""
        if self._counted:
            self._budget.held -= self._counted
            self._counted = 0

    # Reading

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self.paused = True
        self.sync_reading()

    def resume(self) -> None:
        """Read again."""
        self.paused = False
        self.sync_reading()

    def yield_turn(self, unread: bytes) -> None:
        """Read nothing until `take_turn`."""
        self.unread = unread
        self._yielded = True
        self.sync_reading()

    def take_turn(self) -> bytes:
        """Return what has to be read first; after that, call `sync_reading`."""
        unread, self.unread = self.unread, b""
        self._yielded = False
        return unread

    def acknowledge(self) -> None:
        """Acknowledge at once what was received: some servers send a body after its head only then.

        Those are servers that write both apart, as Python's ``http.server``, with Nagle's algorithm; an operating
        system waits up to 40 ms for something to send along.
        """
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.family in _TCP and _QUICKACK is not None:
            with suppress(OSError):  # the connection has just ended, which is reported otherwise
                connection.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def sync_reading(self) -> None:
        """Pause or resume the transport, whichever is due."""
        transport, want = self.transport, not (self.paused or self._yielded)
        if not transport.is_closing() and transport.is_reading() is not want:
            (transport.resume_reading if want else transport.pause_reading)()
