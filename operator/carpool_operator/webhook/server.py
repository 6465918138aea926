"""The webhook over HTTP: AdmissionReviews in, answers out; it never blocks a request."""

from __future__ import annotations

import asyncio
import logging
import secrets
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from carpool_operator.injector.quotas import UNKNOWN
from carpool_operator.injector.reasons import Reason
from carpool_operator.webhook.review import Answer, judge, respond
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from carpool_operator.injector.decide import InjectorSettings
    from carpool_operator.injector.quotas import Surroundings

MAX_REVIEW = 4 * 2**20
"""Bytes of a review. API servers accept requests of up to 3 MiB, and store up to 1.5 MiB; the review of an update has
that twice."""
MAX_OBJECT = 2**19
"""Most bytes of an object that is read: a pod is 10 KiB. As Python objects, with their copy, it takes up to 80 times
that."""
LARGE = 64 * 2**10
"""Bytes from which a review has to wait for room."""
LARGE_AT_ONCE = 2
"""Large reviews in memory: 2 x 4 MiB of bytes, besides the one object that is being read."""
BUFFER = 16 * 2**10
"""Bytes that a connection buffers while its review waits; aiohttp holds twice that."""
READ = 5.0
"""Timeout in seconds for receiving a review; API servers wait as long for the whole call."""
TOO_LARGE = "TooLarge"
"""Result for an object that is not read."""
KINDS = (*registry.BY_NAME, "Pod")
"""Kinds that are reviewed. Anyone may call, and each kind seen is counted and remembered."""

log = logging.getLogger("carpool.injector")


class _Kind(Struct):
    kind: str


class _Question(Struct, rename="camel"):
    """The part of a review that is read."""

    uid: str
    kind: _Kind
    object: msgspec.Raw
    old_object: msgspec.Raw = msgspec.Raw(b"null")
    """Before an update."""
    namespace: str = ""


class _Review(Struct):
    request: _Question


_reviews = msgspec.json.Decoder(_Review)


class Injector:
    """Handles requests. ``settings`` may be replaced at any time; ``problem``: why it is not ready, or ``None``."""

    def __init__(
        self,
        settings: InjectorSettings,
        *,
        drain_key: Callable[[], str] = lambda: secrets.token_hex(16),
        around: Callable[[str], Awaitable[Surroundings]] | None = None,
    ) -> None:
        self.settings = settings
        self.around = around
        """Returns what is known of a namespace; ``None``: nothing is known of any."""
        self.draining = False
        self.certificate = False
        """Whether there is a certificate to serve with."""
        self._drain_key = drain_key
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "carpool_injector_reviews_total",
            "Objects admitted, by kind and by what was done or the reason why nothing was.",
            ["kind", "result"],
            registry=self.registry,
        )
        for kind in KINDS:
            # The alert asks for an increase. A series that begins with the first fault, at 1, has none.
            self.reviews.labels(kind, Reason.FAULT)
        self._seconds = Histogram(
            "carpool_injector_review_seconds",
            "Time to answer, from the last byte of the question.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=self.registry,
        )
        self.certificate_ends = Gauge(
            "carpool_injector_certificate_end_timestamp_seconds",
            "When the certificate in use ends.",
            registry=self.registry,
        )
        self.sync_failures = Counter(
            "carpool_injector_sync_failures_total",
            "Failed attempts to bring certificates and the public key up to date, or to read a namespace.",
            registry=self.registry,
        )
        Gauge("carpool_injector_ready", "Whether it can inject.", registry=self.registry).set_function(
            lambda: float(self.problem is None)
        )

    @property
    def problem(self) -> str | None:
        """Why API servers should not call yet, if so."""
        if self.draining:
            return "draining"
        if not self.certificate:
            return "no certificate yet"
        if self.settings.public_key is None:
            return "no public key yet: the operator makes it"
        return None

    def webhook(self) -> web.Application:
        """Return the application for API servers, over TLS."""
        app = web.Application()
        app.router.add_post("/mutate", self._mutate)
        return app

    def admin(self) -> web.Application:
        """Return the application for kubelets and Prometheus."""
        app = web.Application()
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _mutate(self, request: web.Request) -> web.Response:
        length = request.content_length
        if length is not None and length > MAX_REVIEW:
            raise web.HTTPRequestEntityTooLarge(MAX_REVIEW, length)
        try:
            async with asyncio.timeout(READ):
                if length is not None and length <= LARGE:
                    return await self._judged(await _body(request))
                async with self._large:
                    return await self._judged(await _body(request))
        except TimeoutError:
            return self._closed(web.Response(status=408, text="the review did not come in time\n"))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            return self._closed(web.Response(status=400, text="this is no AdmissionReview (admission.k8s.io/v1)\n"))

    async def _judged(self, body: bytearray) -> web.Response:
        """Answer a review. The namespace is read first; after that nothing is awaited.

        So only one review at a time is in memory as Python objects.
        """
        asked = _reviews.decode(body).request
        kind, started = KINDS[KINDS.index(asked.kind.kind)], perf_counter()
        question: dict[str, Any] = {"uid": asked.uid, "namespace": asked.namespace, "kind": {"kind": kind}}
        if memoryview(asked.object).nbytes > MAX_OBJECT:
            warning = f"carpool: no sidecar, because the object is larger than {MAX_OBJECT // 2**10} KiB"
            log.warning("left unchanged, because it is larger than %d bytes: %s %s", MAX_OBJECT, kind, asked.uid)
            answer = Answer(TOO_LARGE, "", question.setdefault("object", {}), (warning,))
        else:
            around = await self._around(asked.namespace)
            question["object"] = msgspec.json.decode(asked.object)
            _ = question["object"]["metadata"]
            if kind != "Pod" and memoryview(asked.old_object).nbytes <= MAX_OBJECT:
                question["oldObject"] = msgspec.json.decode(asked.old_object)
            answer = self._answer(question, around)
        self.reviews.labels(kind, answer.result).inc()
        text = msgspec.json.encode(respond(question, answer))
        self._seconds.observe(perf_counter() - started)
        return self._closed(web.Response(body=text, content_type="application/json"))

    async def _around(self, namespace: str) -> Surroundings | Exception:
        """Return what is known of a namespace, or the error of reading it."""
        try:
            return UNKNOWN if self.around is None or not namespace else await self.around(namespace)
        except Exception as error:  # noqa: BLE001 - whatever it is, the object stays as it is
            return error

    def _answer(self, question: dict[str, Any], around: Surroundings | Exception) -> Answer:
        if isinstance(around, Exception):
            return _fault(question, around)
        try:
            answer = judge(question, self.settings, self._drain_key(), around=around)
        except Exception as error:  # noqa: BLE001 - whatever it is, the object stays as it is
            return _fault(question, error)
        log.info("%s: %s", answer.result, answer.of)
        return answer

    def _closed(self, response: web.Response) -> web.Response:
        """Let API servers use another replica for their next request, while this one is shutting down."""
        if self.draining:
            response.force_close()
        return response

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.problem else 200, text=f"{self.problem or 'ready'}\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.registry), headers={"Content-Type": content_type})


def _fault(question: dict[str, Any], error: Exception) -> Answer:
    """Log an internal error, and leave the object unchanged."""
    uid = question["uid"]
    text = "left unchanged, because of an error in the injector: %s %s"
    log.error(text, question["kind"]["kind"], uid, exc_info=error)
    warning = f"carpool: no sidecar, because of an error in the injector: its log has {uid}"
    return Answer(Reason.FAULT, "", question["object"], (warning,))


async def _body(request: web.Request) -> bytearray:
    """Read a body. aiohttp's own ``read`` lets connections buffer the same amount again, and copies it.

    Raises the HTTP error that ends the request if it is too large.
    """
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_REVIEW:
            raise web.HTTPRequestEntityTooLarge(MAX_REVIEW, len(body))
    return body
