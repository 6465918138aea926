"""A pool of keep-alive connections to one upstream, and the calls made through it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.calls import Call, Receiver, StreamReceiver, Upload
from carpool_sidecar.http1.client.connections import PoolConnections
from carpool_sidecar.http1.client.connector import Connector
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.client.upstream import Tunnel, Upstream
from carpool_sidecar.http1.client.waiting import WaitingCalls
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.messages import size_of
from carpool_sidecar.http1.timing import NEVER, Ticker, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.messages import Body, Buffer


class Pool:
    """Connections to one upstream, by TCP (`host`, `port`) or by a Unix socket (`path`).

    The connection used last is used first, so that surplus connections fall idle and close. A connection is opened
    when a call finds none idle. At the cap, calls wait, first come, first served: at most `max_waiting` calls, each for
    at most `max_wait` seconds.
    Times are seconds of `clock`, by default the running loop's. `setting` names the setting that allows more
    connections. `budget` limits the bytes of answers in memory, `turns` how much of them is read at a time. Without
    `reuse`, every call has a connection of its own, which closes after the answer. `shared`: the calls belong to
    several callers, and none may get another's answer. So a connection is closed if the upstream may have left a
    request's body unread on it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        path: str | None = None,
        max_connections: int = 256,
        max_waiting: float = NEVER,
        max_wait: float = NEVER,
        setting: str = "max_connections",
        connect_timeout: float = 5.0,
        idle_timeout: float = 30.0,
        reuse: bool = True,
        limits: ClientLimits | None = None,
        clock: Callable[[], float] | None = None,
        budget: Budget | None = None,
        turns: Turns | None = None,
        shared: bool = True,
    ) -> None:
        self._connector = Connector(host, port, path, connect_timeout)
        self.reuse = reuse
        self._loop = asyncio.get_running_loop()
        self.limits = limits or ClientLimits()
        self.clock = clock or self._loop.time
        self.budget = budget or Budget(NEVER)
        self.turns = turns or Turns(self.limits.turn, self.clock)
        self.shared = shared
        self._connections = PoolConnections(max_connections, setting, idle_timeout, self.limits.fresh)
        self._waiting = WaitingCalls(max_waiting, max_wait, self.budget)
        self.answers = 0  # complete ones, so far
        self._ticker = Ticker(self.limits.tick, self._expire, self.clock)

    @property
    def authority(self) -> bytes:
        """The value of a Host header for this upstream."""
        return self._connector.authority

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections.open)

    @property
    def idle(self) -> int:
        """How many open connections have no call."""
        return len(self._connections.idle)

    @property
    def free(self) -> bool:
        """Whether a call would get a connection without waiting for another call to end."""
        return bool(self._connections.idle) or not self._full

    @property
    def waiting(self) -> int:
        """How many calls wait for a connection."""
        return len(self._waiting.queue)

    def send(
        self,
        head: bytes,
        body: Body | Upload,
        receiver: Receiver,
        *,
        timeout: float = 60.0,
        retry_stale: bool = False,
    ) -> Call:
        """Send a request; the answer is buffered and delivered in one piece. Never blocks, never raises.

        `timeout` limits the upstream's silence and the wait for a connection, in seconds. With `retry_stale`, a request
        whose reused connection ends before any byte of an answer is sent once more on a new one. The upstream may have
        closed the idle connection while the request was on its way. The request may then be served twice. Without it, a
        request only uses a connection that is new or was used recently (`ClientLimits.fresh`).
        """
        return self._place(Call(self, head, body, receiver, None, timeout=timeout, retry_stale=retry_stale))

    def stream(
        self,
        head: bytes,
        body: Body | Upload,
        receiver: StreamReceiver,
        *,
        timeout: float = 60.0,
        retry_stale: bool = False,
        upgrade: bool = False,
    ) -> Call:
        """Send a request as `send` does; the answer is delivered piece by piece, unless it arrives in one.

        `upgrade`: the request offers to switch protocols; an upstream that does so unasked breaks the protocol.
        """
        return self._place(
            Call(self, head, body, receiver, receiver, timeout=timeout, retry_stale=retry_stale, upgrade=upgrade)
        )

    async def tunnel(self, *, patience: float) -> Upstream:
        """Open a connection for bytes that are not parsed here; the caller passes them on, and closes it.

        At the cap, the oldest idle connection closes to make room; the call fails ("busy") if there is none.
        ``patience``: seconds that the upstream may take to read data sent to it. Raises ``UpstreamError``.
        """
        connections = self._connections
        if self._full and connections.idle:
            connections.idle[0].close()
        if self._connector.closed or self._full:
            raise UpstreamError("busy", connections.taken(), answered_bytes=False)
        link = Tunnel(self, patience)
        failure = await self._connector.connect(lambda: link)
        if failure is not None:
            raise UpstreamError(*failure, answered_bytes=False)
        return link

    async def close(self) -> None:
        """Close everything; calls under way fail with "reset"."""
        self._ticker.stop()
        await self._connector.close()
        text = "the pool was closed"
        self._waiting.fail_all(text)
        self._connections.abandon_all(text)

    # Called by calls and connections

    def opened(self, link: Upstream) -> None:
        """Take a new connection."""
        self._connections.open.add(link)
        self._ticker.start()
        self.release(link)

    def adopt(self, link: Upstream) -> None:
        """Take a new connection that serves no calls."""
        self._connections.open.add(link)
        self._ticker.start()

    def release(self, link: Upstream) -> None:
        """Take back a connection whose call is answered."""
        if self._waiting.queue:
            self._waiting.take().begin(link)
        elif not self.reuse:
            link.close()  # its call was cancelled while it was opened
        else:
            self._connections.make_idle(link, self.clock())

    def forget(self, link: Upstream) -> None:
        """Take note that a connection is gone."""
        if self._connections.discard(link):
            self._connect_as_needed()

    def retry(self, call: Call) -> None:
        """Send a call again on a new connection, before all waiting calls: idle connections may be stale, too."""
        call.unlink()
        self._connections.close_idle()
        self._waiting.prepend(call, self.clock())
        self._connect_as_needed()

    def keep(self, pieces: list[Buffer]) -> None:
        """Count pieces of a body that a waiting call keeps."""
        self._waiting.count(size_of(pieces))

    def withdraw(self, call: Call) -> None:
        """Remove a cancelled call from the queue, unless the full queue had refused it."""
        self._waiting.remove(call)

    # Connections

    def _place(self, call: Call) -> Call:
        connections, waiting = self._connections, self._waiting
        idle = connections.idle
        if idle:
            if call.retry_stale or connections.is_fresh(idle[-1], self.clock()):
                call.begin(idle.pop())
                return call
            idle[0].close()  # the oldest makes room for a new one
        if self._connector.closed:
            self._loop.call_soon(call.fail, "refused", "the pool is closed")
        elif waiting.is_full(max(0, connections.limit - len(connections.open))):
            self._loop.call_soon(call.fail, "busy", connections.taken(f", and {waiting.limit:.0f} calls wait"))
        else:
            waiting.append(call, self.clock())
            self._connect_as_needed()
        return call

    @property
    def _full(self) -> bool:
        """Whether no further connection may be opened; idle ones count as open."""
        return len(self._connections.open) + len(self._connector.attempts) >= self._connections.limit

    def _connect_as_needed(self) -> None:
        attempts = self._connector.attempts
        while len(attempts) < len(self._waiting.queue) and not self._full and not self._connector.closed:
            attempts.add(self._loop.create_task(self._connect()))
            self._ticker.start()

    async def _connect(self) -> None:
        began = self.clock()
        failure = await self._connector.connect(lambda: Upstream(self))
        queue = self._waiting.queue
        if failure is not None and queue:
            # Each attempt serves one call: the calls behind it have their own attempts, or get them now. So does a call
            # that came later than the attempt began: the one it was made for got another connection.
            call = queue[0]
            if call.expires <= began + self._waiting.longest_wait(call):
                self._waiting.take().fail(*failure)
        self._connect_as_needed()

    def _expire(self, now: float) -> bool:
        self._connections.expire(now)
        self._waiting.expire(now)
        return bool(self._connections.open or self._waiting.queue or self._connector.attempts)
