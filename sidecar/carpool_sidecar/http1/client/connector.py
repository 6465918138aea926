"""Opens connections to one upstream, by TCP or by a Unix socket."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

from carpool_sidecar.http1.sockets import unix_socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.client.errors import FailureKind
    from carpool_sidecar.http1.client.upstream import Upstream

# Nothing listens there. Any other error says nothing about the upstream: no file descriptor is left, for example, or a
# name could not be resolved. None: asyncio has no number if several addresses failed.
_GONE = frozenset({errno.ECONNREFUSED, errno.ENOENT, None})


class Connector:
    """The address of an upstream, and the attempts to connect to it: `attempts`, a task for each.

    The address is a `host` and a `port`, or the `path` of a Unix socket. An attempt fails after `timeout` seconds. Once
    this is `closed`, the pool begins none.
    """

    __slots__ = ("_host", "_loop", "_path", "_port", "_timeout", "attempts", "closed")

    def __init__(self, host: str, port: int, path: str | None, timeout: float) -> None:
        self._host = host
        self._port = port
        self._path = path
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self.attempts: set[asyncio.Task[None]] = set()
        self.closed = False

    @property
    def authority(self) -> bytes:
        """The value of a Host header for this upstream."""
        if self._path is not None:
            return b"localhost"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}".encode()

    async def connect(self, made: Callable[[], Upstream]) -> tuple[FailureKind, str] | None:
        """Open a connection for what `made` returns; return the reason if that fails.

        The task that calls this is one of the `attempts` until then.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker: this is a coroutine
        self.attempts.add(task)
        try:
            return await self._open(made)
        finally:
            self.attempts.discard(task)

    async def close(self) -> None:
        """Cancel all attempts, and wait until they have ended."""
        self.closed = True
        for task in tuple(self.attempts):
            task.cancel()
        await asyncio.gather(*self.attempts, return_exceptions=True)

    async def _open(self, made: Callable[[], Upstream]) -> tuple[FailureKind, str] | None:
        try:
            async with asyncio.timeout(self._timeout):
                if self._path is not None:
                    await self._loop.create_unix_connection(made, sock=await unix_socket(self._path))
                elif self._host == "localhost":
                    await self._open_here(made)
                else:
                    await self._loop.create_connection(made, self._host, self._port)
        except TimeoutError:
            return "timeout", f"no connection to the upstream within {self._timeout:g} s"
        except OSError as error:
            return "refused" if error.errno in _GONE else "connect", f"no connection to the upstream: {error}"
        return None

    async def _open_here(self, made: Callable[[], Upstream]) -> None:
        """Connect to this machine by IPv4 or IPv6: a server at ``::`` need not listen on IPv4.

        It uses no resolver, which would take a thread for each connection.
        """
        try:
            await self._loop.create_connection(made, "127.0.0.1", self._port)
        except OSError as error:
            try:
                await self._loop.create_connection(made, "::1", self._port)
            except OSError:
                raise error from None
