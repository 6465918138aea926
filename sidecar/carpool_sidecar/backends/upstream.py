"""A model server beside this process, over pooled HTTP/1.1 connections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_sidecar.backends.base import Document
from carpool_sidecar.http1.client import Pool
from carpool_sidecar.http1.forward import Forwarding
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import content_length, encode_request_head, size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.config import Upstream
    from carpool_sidecar.http1.calls import Call, Receiver, UpstreamError
    from carpool_sidecar.http1.exchange import Exchange
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.protocols.models import Axis

ASK_TIMEOUT = 5.0
"""Seconds that a question about the server or a model may take."""


class UpstreamBackend:
    """Sends batches and forwards the rest; questions go over connections of their own, which load can't delay."""

    def __init__(self, config: Upstream, *, max_answer: int, clock: Callable[[], float]) -> None:
        host, port, path = config.address
        self._timeout = float(config.timeout)
        self.readiness = config.ready.encode()
        self._pool = Pool(
            host,
            port,
            path=path,
            max_connections=config.max_connections,
            connect_timeout=config.connect_timeout,
            limits=ClientLimits(max_body_bytes=max_answer),
            clock=clock,
        )
        self._questions = Pool(host, port, path=path, max_connections=2, connect_timeout=2.0, clock=clock)

    def send(self, target: bytes, headers: Headers, body: Body, receiver: Receiver) -> Call:
        """Post a request for inference over an idle connection or a new one."""
        head = encode_request_head(b"POST", target, headers, (content_length(size_of(body)),))
        # A connection that the upstream closed while it was idle says nothing of the request: that one is sent again,
        # and so, once, is one that the upstream died over: from here they look the same.
        return self._pool.send(head, body, receiver, timeout=self._timeout, retry_stale=True)

    def forward(self, exchange: Exchange) -> Forwarding:
        """Stream anything else both ways."""
        return Forwarding(exchange, self._pool, self._timeout)

    def axis(self, model: str) -> Axis | None:  # noqa: ARG002 - the port's signature
        """Say nothing: the server says it."""
        return None

    async def ask(self, target: bytes) -> Document:
        """Get a document."""
        headers = [(b"host", self._questions.authority), (b"user-agent", b"carpool"), (b"accept", b"application/json")]
        question = _Question()
        head = encode_request_head(b"GET", target, headers)
        call = self._questions.send(head, b"", question, timeout=ASK_TIMEOUT, retry_stale=True)
        try:
            return await question.answer
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()
        await self._questions.close()


class _Question:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Document] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: Headers, body: bytes) -> None:  # noqa: ARG002 - the receiver's signature
        if not self.answer.done():
            self.answer.set_result(Document(status, body))

    def failed(self, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_result(Document(0, reachable=error.kind not in {"refused", "reset"}))
