"""A port: a server, and where it listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.http1.server.server import Server


class Port:
    """One of the sidecar's ports. ``name``: its field in the configuration, which is also its flag."""

    def __init__(self, name: str, server: Server, where: tuple[str, int], backlog: int) -> None:
        self.server = server
        self._name, self._where, self._backlog = name, where, backlog

    @property
    def address(self) -> str:
        """``host:port``, once it listens."""
        return "{}:{}".format(*self.server.addresses[0][:2])

    async def listen(self) -> None:
        """Listen; raises ``OSError`` naming the field if the address is not available."""
        try:
            await self.server.listen(*self._where, backlog=self._backlog)
        except OSError as error:
            # Only the system's own words are kept of the loop's message.
            why = str(error.strerror).rpartition(": ")[2]
            host, port = self._where
            name = self._name
            raise OSError(
                f"{name}: {host}:{port}: {why}: name another address, in the file or with --{name}"
            ) from error

    def close(self) -> None:
        """Accept nothing more, and cut off what is under way."""
        self.server.stop_accepting()
        self.server.abort()
