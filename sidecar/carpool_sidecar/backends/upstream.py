"""A model server beside this process, over pooled HTTP/1.1 connections."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from carpool_sidecar.backends.base import Document, Traffic
from carpool_sidecar.generation.stream import Stream, Watcher
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import Added, content_length, encode_request_head, find, size_of
from carpool_sidecar.http1.relay.forward import Forwarding
from carpool_sidecar.http1.relay.passage import Passage

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Upstream
    from carpool_sidecar.generation.requests import Endpoint
    from carpool_sidecar.http1.client.calls import Call, Receiver
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.http1.timing import Turns
    from carpool_sidecar.protocols.models import Axis

PROBES = 16
"""Connections for callers' requests about health and models; their answers are short."""
QUESTIONS = 2
"""Connections for the sidecar's own requests."""
LONGEST_DOCUMENT = 16 * 2**20
"""Most bytes of an answer to one of these."""

_PROBE = re.compile(
    rb"/(?:health|healthz|livez|readyz|ping|metrics)|/v[12]/?|/v2/health/(?:live|ready)"
    rb"|/v[12]/models(?:/[^/:]+(?:/versions/[^/:]+)?(?:/(?:ready|metadata|config|stats))?)?"
)


class UpstreamBackend:
    """Sends batches and forwards the rest.

    Inference, forwarded requests, probes and the sidecar's own requests have separate connections, so none waits for
    another that hangs or is slow. ``budget`` bounds the buffered bytes of answers, ``turns`` the bytes read at a time;
    ``max_forwarded`` replaces the configured value if the process may not have as many connections.
    """

    def __init__(
        self,
        config: Upstream,
        *,
        max_answer: int,
        clock: Callable[[], float],
        budget: Budget | None = None,
        turns: Turns | None = None,
        max_forwarded: int | None = None,
    ) -> None:
        host, port, path = config.address
        limits = ClientLimits(max_body_bytes=max_answer)
        self._timeout, self._patience = config.silence(), config.silence(forwarded=True)
        self._ask_timeout = float(config.ask_timeout)

        def pool(most: int, setting: str) -> Pool:
            return Pool(
                host,
                port,
                path=path,
                max_connections=most,
                max_waiting=most,
                max_wait=self._timeout,
                setting=setting,
                connect_timeout=config.connect_timeout,
                limits=limits,
                clock=clock,
                budget=budget,
                turns=turns,
            )

        self.readiness = None if config.ready is None else config.ready.encode()
        self._inference = pool(config.max_connections, "upstream.maxConnections")
        self._forwarding = pool(max_forwarded or config.max_forwarded, "upstream.maxForwarded")
        self._probes = pool(PROBES, "upstream.maxForwarded")
        # Not in the budget: the model's readiness must not depend on the callers' buffered bytes.
        self._questions = Pool(
            host,
            port,
            path=path,
            max_connections=QUESTIONS,
            connect_timeout=2.0,
            reuse=False,
            limits=ClientLimits(max_body_bytes=LONGEST_DOCUMENT),
            clock=clock,
        )

    def send(
        self,
        target: bytes,
        headers: Headers,
        body: Body,
        receiver: Receiver,
        *,
        idempotent: bool = True,
        merged: bool = False,  # noqa: ARG002 - what the model gets is the same
    ) -> Call:
        """Post an inference request over an idle connection or a new one."""
        added: Added = (content_length(size_of(body)),)
        if find(headers, b"host") is None:  # optional in HTTP/1.0, required in HTTP/1.1
            added = ((b"host", self._inference.authority), *added)
        head = encode_request_head(b"POST", target, headers, added)
        # If the upstream closed the connection while it was idle, the request is sent again. If the upstream died
        # during the request, that looks the same here, so it is sent again once. The model may have computed it, so
        # only idempotent requests are sent again.
        return self._inference.send(head, body, receiver, timeout=self._timeout, retry_stale=idempotent)

    def forward(self, exchange: Exchange, *, inference: bool = False) -> Forwarding:
        """Stream anything both ways."""
        if self._is_probe(exchange) and self._probes.free:
            return Forwarding(exchange, self._probes, self._timeout, short=True)
        return Forwarding(exchange, self._forwarding, self._timeout if inference else self._patience)

    def generate(self, exchange: Exchange, endpoint: Endpoint, watcher: Watcher) -> Stream:
        """Forward a request to a language model, and observe its answer."""
        return Stream(exchange, self._forwarding, self._patience, watcher, endpoint)

    def passage(self, exchange: Exchange) -> Passage:
        """Forward a connection that is not HTTP/1.1."""
        return Passage(exchange, self._forwarding, self._timeout)

    @property
    def streams(self) -> bool:
        """Return True: a server takes a body of any size as it comes."""
        return True

    def _is_probe(self, exchange: Exchange) -> bool:
        """Whether an exchange asks about the health of the server or a model: such answers are short."""
        if exchange.method not in {b"GET", b"HEAD"} or exchange.length or exchange.upgrade:
            return False
        path = exchange.path
        return path == self.readiness or _PROBE.fullmatch(path) is not None

    def axis(self, model: str) -> Axis | None:  # noqa: ARG002 - the port's signature
        """Return None: the server's metadata decide."""
        return None

    @property
    def traffic(self) -> Traffic:
        """Count batches and forwarded requests, WebSockets included."""
        pools = (self._inference, self._forwarding)
        return Traffic(sum(pool.connections - pool.idle for pool in pools), sum(pool.answers for pool in pools))

    async def ask(self, target: bytes) -> Document:
        """Get a document."""
        # A connection kept for these requests would never be idle: it would occupy a server that serves one connection
        # at a time, count against its limit, and delay its shutdown.
        headers = [
            (b"host", self._questions.authority),
            (b"user-agent", b"carpool"),
            (b"accept", b"application/json"),
            (b"connection", b"close"),
        ]
        question = _Question()
        head = encode_request_head(b"GET", target, headers)
        call = self._questions.send(head, b"", question, timeout=self._ask_timeout)
        try:
            return await question.answer
        finally:
            call.cancel()

    async def connect(self) -> Document:
        """Open a connection, and close it."""
        try:
            link = await self._questions.tunnel(patience=self._ask_timeout)
        except UpstreamError as error:
            return _nobody(error)
        link.close()
        return Document(0, foreign=True)

    async def close(self) -> None:
        """Close all connections."""
        for pool in (self._inference, self._forwarding, self._probes, self._questions):
            await pool.close()


class _Question:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Document] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:  # noqa: ARG002 - the receiver's signature
        if not self.answer.done():
            self.answer.set_result(Document(status, bytes(body)))

    def failed(self, error: UpstreamError) -> None:
        if not self.answer.done():
            # TLS servers, and others that don't know the request, hang up: that is an answer, too.
            foreign = error.kind in {"protocol", "reset"}
            self.answer.set_result(Document(0, foreign=True) if foreign else _nobody(error))


def _nobody(error: UpstreamError) -> Document:
    """Return the document for a request without an answer: the server is too slow, not there, or can't be reached."""
    return Document(
        0, reachable=error.kind != "refused", why=str(error) if error.kind in {"refused", "connect"} else ""
    )
