"""The data port: inference is buffered and batched, everything else is forwarded as it comes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from carpool.batching.requests import Request
from carpool.policy.durations import Quantity
from carpool_sidecar.admin.forwarded import Forwarded
from carpool_sidecar.generation import picker
from carpool_sidecar.generation.requests import recognise
from carpool_sidecar.generation.stream import Stream
from carpool_sidecar.jobs.api.handling import Aside
from carpool_sidecar.protocols import route
from carpool_sidecar.protocols.common import Endpoint

if TYPE_CHECKING:
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.dispatch.driver import Driver
    from carpool_sidecar.generation.engine_streams import Streams
    from carpool_sidecar.generation.requests import Endpoint as Generative
    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.jobs.api.app import JobsApp
    from carpool_sidecar.models import ModelTable

FORWARDED = "other"
"""The protocol, in metrics, of requests forwarded unchanged."""

JOBS = "jobs"
"""The protocol, in metrics, of requests about jobs; jobs themselves count under their own protocol."""

GENERATION = "generation"
"""The protocol, in metrics, of requests to language models."""


@lru_cache(1024)  # callers ask for few targets; decoding one costs 2 us
def _route(target: bytes) -> Endpoint | Generative | None:
    return route(target) or recognise(target)


class DataApp:
    """The application of the data port's server."""

    def __init__(
        self,
        driver: Driver,
        backend: Backend,
        models: ModelTable,
        streams: Streams,
        max_body: int,
        *,
        counts_queue: bool = True,
    ) -> None:
        self._driver = driver
        self._backend = backend
        self._models = models
        self._streams = streams
        self._max_body = max_body
        self._counts_queue = counts_queue
        self.forwarded = Forwarded()
        self.jobs: JobsApp | None = None
        """Serves the paths of jobs, if they are enabled."""

    def head(self, exchange: Exchange) -> None:
        """Decide whether a request is inference, and how its body is read."""
        if self.jobs is not None and self.jobs.serves(exchange.path):
            self.jobs.head(exchange)
            return
        endpoint = _route(exchange.target) if exchange.method == b"POST" else None
        forwards = self._backend.streams
        if endpoint is None and self._counts_queue and picker.answers(exchange, self._streams):
            exchange.context = picker.PickerMetrics(exchange, self._backend, self._streams)
            exchange.context.begin()
        elif endpoint is None or (exchange.length > self._max_body and forwards):
            self._count_unread(endpoint, too_large=True)
            self._forward(exchange, inference=isinstance(endpoint, Endpoint))
        elif isinstance(endpoint, Endpoint):
            exchange.context = endpoint
            exchange.buffer(self._max_body, self._overflow if forwards else None)
        elif forwards:
            exchange.context = self._backend.generate(exchange, endpoint, self._streams)
            exchange.buffer(self._max_body, self._overflow)
        else:
            self._forward(exchange)

    def foreign(self, exchange: Exchange) -> None:
        """Forward a connection that is not HTTP/1.1."""
        exchange.context = self._backend.passage(exchange)
        exchange.context.begin()

    def _forward(self, exchange: Exchange, *, inference: bool = False) -> None:
        """Forward a request that is no inference, or too large to be batched."""
        exchange.context = self._backend.forward(exchange, inference=inference)
        exchange.context.begin()

    def _overflow(self, exchange: Exchange, *, too_large: bool) -> bool:
        """Forward a request that is too large to be batched, or that is not batched and has no room in the buffers."""
        endpoint = exchange.context
        if not too_large and not (isinstance(endpoint, Endpoint) and self._driver.sends_alone(endpoint)):
            return False
        self._count_unread(endpoint, too_large=too_large)
        exchange.context = self._backend.forward(exchange, inference=isinstance(endpoint, Endpoint))
        exchange.context.begin(whole=False)
        return True

    def _count_unread(self, endpoint: object, *, too_large: bool) -> None:
        """Count a request for inference that is forwarded without being read."""
        if isinstance(endpoint, Endpoint):
            most = f"body: larger than bodies.maxRequest ({Quantity(self._max_body)})"
            why = most if too_large else "body: bodies.maxBuffered has no room"
            self._driver.counts.not_merged(self._models.label(endpoint.model), "limits", why)

    def request(self, exchange: Exchange) -> None:
        """Take a request whose body is complete."""
        if isinstance(exchange.context, Endpoint):
            self._driver.infer(exchange, exchange.context)
        else:
            exchange.context.request()

    def sent(self, exchange: Exchange) -> None:
        """Count an answer."""
        context = exchange.context
        if isinstance(context, Request):
            self._driver.sent(exchange)
        elif isinstance(context, Endpoint):  # refused before it could wait: malformed, too large, too slow
            self._driver.counts.answered(self._models.label(context.model), context.protocol, exchange.status)
        elif isinstance(context, Aside):
            self._driver.counts.answered("", JOBS, exchange.status)
        elif isinstance(context, Stream):
            context.sent()
            self._driver.counts.answered("", GENERATION, exchange.status)
        else:
            self._driver.counts.answered("", FORWARDED, exchange.status)
            # An answer may end before its request: it then took no time.
            began = exchange.received_at or exchange.sent_at
            seconds = exchange.sent_at - began
            self.forwarded.count(exchange.method, exchange.path, exchange.status, seconds, self._driver.terms.due)

    def disconnected(self, exchange: Exchange) -> None:
        """Cancel the work for a caller that left."""
        context = exchange.context
        if isinstance(context, Request):
            self._driver.disconnected(exchange)
        elif not isinstance(context, Endpoint):
            context.cancel()

    def refused(self, error: HttpError) -> None:
        """Count a connection that was not HTTP."""
        self._driver.counts.answered("", FORWARDED, error.status)
