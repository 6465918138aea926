"""Connections that speak something else than HTTP/1.1: passed through as they are, to a connection of their own."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from carpool_sidecar.http1.calls import UpstreamError
from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.http1.parsing import TOKEN, RequestHead

if TYPE_CHECKING:
    from carpool_sidecar.http1.client import Pool
    from carpool_sidecar.http1.exchange import Exchange

PREFACE = b"PRI * HTTP/2.0\r\n"
"""What HTTP/2 begins with, where the client knows that the server speaks it (RFC 9113, 3.4)."""

FOREIGN = RequestHead(b"", b"(not HTTP/1.1)", FieldLines(), 0, False, 0, False)
"""Stands for a connection that is no request."""

_LONGEST_METHOD = 32
_METHOD = re.compile(TOKEN + rb"( |$)")


def speaks_http1(beginning: bytes) -> bool | None:
    """Say whether a connection that begins so speaks HTTP/1.1; ``None``: too little of it is here.

    A request begins with a method and a space. What begins so and is malformed is answered, not passed through.
    """
    text = beginning.removeprefix(b"\r\n")
    if text.startswith(PREFACE):
        return False
    if not text or text == b"\r" or PREFACE.startswith(text):
        return None
    method = _METHOD.match(text)
    if method is None:
        return False
    if not method[1]:
        return None if len(text) <= _LONGEST_METHOD else False
    return True


class Passage:
    """One such connection on its way to the upstream. Where that can't be reached, it is cut."""

    __slots__ = ("_exchange", "_pool", "_task", "_timeout")

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float) -> None:
        self._exchange = exchange
        self._pool = pool
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for a connection; until it is there, the client has to wait with more than it has sent."""
        if self._exchange.await_switch():
            self._task = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._exchange.abort()

    def request(self) -> None:
        """Nothing of it is read."""

    def cancel(self) -> None:
        """Give up."""
        if self._task is not None:
            self._task.cancel()

    async def _connect(self) -> None:
        try:
            link = await self._pool.tunnel(patience=self._timeout)
        except UpstreamError as error:
            self._exchange.status = error.status
            self._exchange.abort()
        else:
            self._exchange.splice(link)
