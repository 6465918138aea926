"""A pool of keep-alive connections to one upstream, and the calls made through it."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.calls import Call, Receiver, StreamReceiver, Upload, UpstreamError
from carpool_sidecar.http1.client.connector import Connector
from carpool_sidecar.http1.client.upstream import Tunnel, Upstream
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.timing import NEVER, Ticker, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.messages import Body


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
        self._max_connections = max_connections
        self._max_waiting = max_waiting
        self._max_wait = max_wait
        self._setting = setting
        self._idle_timeout = idle_timeout
        self.reuse = reuse
        self._loop = asyncio.get_running_loop()
        self.limits = limits or ClientLimits()
        self.clock = clock or self._loop.time
        self.budget = budget or Budget(NEVER)
        self.turns = turns or Turns(self.limits.turn, self.clock)
        self.shared = shared
        self._open: set[Upstream] = set()
        self._idle: list[Upstream] = []
        self.answers = 0  # complete ones, so far
        self._waiting: deque[Call] = deque()
        self._waiting_bytes = 0  # of streamed requests that wait, counted as held
        self._ticker = Ticker(self.limits.tick, self._expire, self.clock)
        self._closed = False

    @property
    def authority(self) -> bytes:
        """The value of a Host header for this upstream."""
        return self._connector.authority

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    @property
    def idle(self) -> int:
        """How many open connections have no call."""
        return len(self._idle)

    @property
    def free(self) -> bool:
        """Whether a call would get a connection without waiting for another call to end."""
        return bool(self._idle) or not self._full

    @property
    def waiting(self) -> int:
        """How many calls wait for a connection."""
        return len(self._waiting)

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
        if self._full and self._idle:
            self._idle[0].close()
        if self._closed or self._full:
            text = (
                f"all {self._max_connections} connections to the upstream are taken; raise {self._setting} or replicas"
            )
            raise UpstreamError("busy", text, answered_bytes=False)
        link = Tunnel(self, patience)
        failure = await self._connector.connect(lambda: link)
        if failure is not None:
            raise UpstreamError(*failure, answered_bytes=False)
        return link

    async def close(self) -> None:
        """Close everything; calls under way fail with "reset"."""
        self._closed = True
        self._ticker.stop()
        await self._connector.cancel()
        for call in tuple(self._waiting):
            call.fail("reset", "the pool was closed")
        self._waiting.clear()
        for link in tuple(self._open):
            link.abandon("the pool was closed")

    # Called by calls and connections

    def opened(self, link: Upstream) -> None:
        """Take a new connection."""
        self._open.add(link)
        self._ticker.start()
        self.release(link)

    def adopt(self, link: Upstream) -> None:
        """Take a new connection that serves no calls."""
        self._open.add(link)
        self._ticker.start()

    def release(self, link: Upstream) -> None:
        """Take back a connection whose call is answered."""
        if self._waiting:
            self._waiting.popleft().begin(link)
        elif not self.reuse:
            link.close()  # its call was cancelled while it was opened
        else:
            link.deadline = self.clock() + self._idle_timeout
            self._idle.append(link)

    def forget(self, link: Upstream) -> None:
        """Take note that a connection is gone."""
        if link in self._open:
            self._open.discard(link)
            if link in self._idle:
                self._idle.remove(link)
            self._connect_as_needed()

    def retry(self, call: Call) -> None:
        """Send a call again on a new connection, before all waiting calls: idle connections may be stale, too."""
        call.unlink()
        call.expires = self.clock() + self._wait(call)
        for link in tuple(self._idle):
            link.close()
        self._waiting.appendleft(call)
        self._connect_as_needed()

    def withdraw(self, call: Call) -> None:
        """Remove a cancelled call from the queue, unless the full queue had refused it."""
        with suppress(ValueError):
            self._waiting.remove(call)

    # Connections

    def _place(self, call: Call) -> Call:
        if self._idle:
            if call.retry_stale or self._fresh(self._idle[-1]):
                call.begin(self._idle.pop())
                return call
            self._idle[0].close()  # the oldest makes room for a new one
        if self._closed:
            self._loop.call_soon(call.fail, "refused", "the pool is closed")
        elif len(self._waiting) >= self._max_waiting + max(0, self._max_connections - len(self._open)):
            wait = f"{self._max_waiting:.0f} calls wait"
            text = f"all {self._max_connections} connections to the upstream are taken, and {wait}"
            self._loop.call_soon(call.fail, "busy", f"{text}; raise {self._setting} or replicas")
        else:
            call.expires = self.clock() + self._wait(call)
            self._waiting.append(call)
            self._connect_as_needed()
        return call

    def _wait(self, call: Call) -> float:
        """Return the seconds that a call may wait for a connection."""
        return min(call.timeout, self._max_wait)

    def _fresh(self, link: Upstream) -> bool:
        """Whether an idle connection was used so recently that the upstream has hardly closed it since."""
        return self.clock() - (link.deadline - self._idle_timeout) < self.limits.fresh

    @property
    def _full(self) -> bool:
        """Whether no further connection may be opened; idle ones count as open."""
        return len(self._open) + len(self._connector.attempts) >= self._max_connections

    def _connect_as_needed(self) -> None:
        attempts = self._connector.attempts
        while len(attempts) < len(self._waiting) and not self._full and not self._closed:
            attempts.add(self._loop.create_task(self._connect()))
            self._ticker.start()

    async def _connect(self) -> None:
        began = self.clock()
        failure = await self._connector.connect(lambda: Upstream(self))
        if failure is not None and self._waiting:
            # Each attempt serves one call: the calls behind it have their own attempts, or get them now. So does a call
            # that came later than the attempt began: the one it was made for got another connection.
            call = self._waiting[0]
            if call.expires <= began + self._wait(call):
                self._waiting.popleft().fail(*failure)
        self._connect_as_needed()

    def _expire(self, now: float) -> bool:
        for link in tuple(self._open):
            link.weigh()
            if now >= link.deadline:
                link.expire()
        for call in tuple(self._waiting):
            if now >= call.expires and not call.done:
                self._waiting.remove(call)
                call.fail("timeout", f"no connection to the upstream was free within {self._wait(call):g} s")
        waiting = sum(call.waiting_bytes for call in self._waiting)
        self.budget.held += waiting - self._waiting_bytes
        self._waiting_bytes = waiting
        return bool(self._open or self._waiting or self._connector.attempts)
