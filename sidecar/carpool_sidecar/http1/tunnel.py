"""Two connections spliced after a switch of protocols: bytes pass both ways and are not parsed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from carpool_sidecar.http1.sockets import keep_alive, reset

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Buffer


class Owner(Protocol):
    """The connection's protocol before the switch. It keeps track of open connections and of peers that don't read."""

    @property
    def writable(self) -> bool:
        """Whether the peer has read what was written before."""

    def write(self, pieces: list[Buffer]) -> None:
        """Hand pieces to the transport."""

    def stuck(self) -> None:
        """Take note that the peer does not read."""

    def moved(self) -> None:
        """Take note that the peer reads again."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection."""


class End(asyncio.Protocol):
    """One of the two connections. What it receives is written to the other one.

    - If a peer does not read, the other side is paused and the owner sets a deadline. Silence has no deadline.
    - The end of a peer's stream is passed on; the other direction continues.
    - If a connection is lost before that, the other is reset, so that a part is not taken for the whole.
    """

    other: End

    def __init__(self, transport: asyncio.Transport, owner: Owner) -> None:
        self._transport = transport
        self._owner = owner
        self._ended = False  # the peer has sent all
        self._lost = False

    def take(self, data: Buffer) -> None:
        """Write to this connection."""
        if data and not self._transport.is_closing():
            self._owner.write([data])

    def data_received(self, data: bytes) -> None:
        """Pass on."""
        self.other.take(data)

    def eof_received(self) -> bool:
        """Pass on the end of the peer's stream; stay open for data sent to it."""
        if not self._ended:
            self._ended = True
            self.other.end()
            if self.other._ended:  # noqa: SLF001 - the other end, of this class
                self._transport.close()
                self.other._transport.close()  # noqa: SLF001 - likewise
        return True

    def end(self) -> None:
        """Send the end of the stream to the peer, after the data that waits to be written."""
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause_writing(self) -> None:
        """Pause the other side."""
        self._owner.stuck()
        self.other.pause()

    def resume_writing(self) -> None:
        """Resume the other side."""
        self._owner.moved()
        self.other.resume()

    def pause(self) -> None:
        """Stop reading."""
        if not self._transport.is_closing() and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if not self._transport.is_closing() and not self._ended and not self._transport.is_reading():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side too; if this peer's stream was complete, only after the data that waits to be written."""
        self._lost = True
        if not self.other._lost:  # noqa: SLF001 - the other end, of this class
            self.other._cut(cleanly=self._ended)  # noqa: SLF001 - likewise
        self._owner.connection_lost(exc)

    def _cut(self, *, cleanly: bool) -> None:
        if self._transport.is_closing():
            return
        if cleanly:
            self._transport.close()
            self._owner.stuck()  # closing waits for the peer, but only for a limited time
        else:
            reset(self._transport)


def splice(
    first: asyncio.Transport, its_owner: Owner, second: asyncio.Transport, other_owner: Owner
) -> tuple[End, End]:
    """Connect two transports, and continue to read both. Their owners receive no more data."""
    one, two = End(first, its_owner), End(second, other_owner)
    one.other, two.other = two, one
    for end, transport, owner in ((one, first, its_owner), (two, second, other_owner)):
        transport.set_protocol(end)
        # Neither side has to send anything, so only the kernel can detect that a peer has vanished.
        keep_alive(transport)
        (end.other.resume if owner.writable else end.other.pause)()
    return one, two
