"""The open connections of a pool, and which of them are idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.upstream import Upstream


class PoolConnections:
    """The connections that are `open`. Those without a call are `idle`, the one used last at the end of the list.

    At most `limit` connections may be open or being opened; `setting` names the setting that raises the limit. An idle
    connection closes after `idle_timeout` seconds. For `fresh` seconds it may serve a call that can't be sent again.
    """

    __slots__ = ("_fresh", "_idle_timeout", "idle", "limit", "open", "setting")

    def __init__(self, limit: int, setting: str, idle_timeout: float, fresh: float) -> None:
        self._idle_timeout = idle_timeout
        self._fresh = fresh
        self.limit = limit
        self.setting = setting
        self.open: set[Upstream] = set()
        self.idle: list[Upstream] = []

    def discard(self, link: Upstream) -> bool:
        """Take note that a connection is gone; return whether it was open until now."""
        if link not in self.open:
            return False
        self.open.discard(link)
        if link in self.idle:
            self.idle.remove(link)
        return True

    def make_idle(self, link: Upstream, now: float) -> None:
        """Keep a connection for the next call."""
        link.deadline = now + self._idle_timeout
        self.idle.append(link)

    def is_fresh(self, link: Upstream, now: float) -> bool:
        """Whether an idle connection was used so recently that the upstream has hardly closed it since."""
        return now - (link.deadline - self._idle_timeout) < self._fresh

    def close_idle(self) -> None:
        """Close the connections without a call."""
        for link in tuple(self.idle):
            link.close()

    def expire(self, now: float) -> None:
        """Act on the deadlines that have passed, and count the bytes that the upstream has not read."""
        for link in tuple(self.open):
            link.weigh()
            if now >= link.deadline:
                link.expire()

    def abandon_all(self, text: str) -> None:
        """Cut all connections; their calls fail with "reset"."""
        for link in tuple(self.open):
            link.abandon(text)

    def taken(self, also: str = "") -> str:
        """Return the error if the limit is reached; `also`: what else is full."""
        return f"all {self.limit} connections to the upstream are taken{also}; raise {self.setting} or replicas"
