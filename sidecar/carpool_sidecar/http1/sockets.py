"""Operations on the socket itself, below the transport."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct

ANYWHERE = "*"
"""As a host to listen on: every address, of IPv4 and of IPv6."""

_TCP_CLOSED = 7  # the state in TCP_INFO's first byte (Linux, net/tcp_states.h: TCP_CLOSE)
_QUEUE_FULL = 0.01  # seconds between two attempts to connect to a Unix socket
_LINGER_NOT = struct.pack("ii", 1, 0)  # struct linger: on, for 0 seconds


def reset(transport: asyncio.Transport) -> None:
    """Cut a connection with a reset, so that the peer can't take the end of the stream for the end of a message."""
    connected = transport.get_extra_info("socket")
    if connected is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    transport.abort()


def keep_alive(transport: asyncio.Transport) -> None:
    """Have the kernel check that the peer still exists: after 60 s of silence, three times in a minute."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # macOS has another name for the first one
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def peer_has_reset(transport: asyncio.Transport) -> bool:
    """Whether a TCP connection that is no longer read was reset; the transport does not report that."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family == socket.AF_UNIX:  # there, writing to a closed peer fails at once
        return False
    info: bytes = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] == _TCP_CLOSED


def everywhere(port: int) -> list[socket.socket]:
    """Return sockets bound to every address at one port: of IPv4, and of IPv6 if the system has it.

    Raises OSError if the port is not available.
    """
    bound: list[socket.socket] = []
    try:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - what is asked for
            try:
                listening = socket.socket(family, socket.SOCK_STREAM)
                bound.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # IPv4 callers use the other socket, so their addresses are not mapped to IPv6.
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((host, port))
                port = listening.getsockname()[1]
            except OSError as error:
                if family != socket.AF_INET6 or error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                    raise
                if len(bound) > 1:
                    bound.pop().close()
    except OSError:
        for one in bound:
            one.close()
        raise
    return bound


async def unix_socket(path: str) -> socket.socket:
    """Return a socket connected to a Unix socket; a path that begins with NUL is abstract, not a file (unix(7)).

    It waits for as long as the other side's queue is full. Raises OSError if nothing listens. uvloop itself can't
    connect to an abstract path.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.setblocking(False)
    try:
        while True:
            try:
                connected.connect(path)
            except BlockingIOError:  # the kernel does not report when the queue has room again
                await asyncio.sleep(_QUEUE_FULL)
            else:
                return connected
    except BaseException:
        connected.close()
        raise
