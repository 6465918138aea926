"""The webhook over HTTP: AdmissionReviews in, answers out; it never stands in anybody's way."""

from __future__ import annotations

import asyncio
import logging
import secrets
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from carpool_operator.injector.reasons import Reason
from carpool_operator.injector.review import Answer, judge, respond
from carpool_operator.injector.room import UNKNOWN
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from carpool_operator.injector.decide import Settings
    from carpool_operator.injector.room import Surroundings

MAX_REVIEW = 8 * 2**20
"""Bytes. An object has up to 1.5 MiB in etcd, more as JSON; a review of an update holds it twice."""
READ = 5.0
"""Seconds that a review may take to come in; API servers wait as long for the whole call."""
KINDS = (*registry.BY_NAME, "Pod")
"""What is reviewed. Anybody may call, and each kind that was is counted and remembered."""

log = logging.getLogger("carpool.injector")


class Injector:
    """What answers. ``settings`` may be replaced at any time; ``problem`` is why it is not ready, or ``None``."""

    def __init__(
        self,
        settings: Settings,
        *,
        drain_key: Callable[[], str] = lambda: secrets.token_hex(16),
        around: Callable[[str], Awaitable[Surroundings]] | None = None,
    ) -> None:
        self.settings = settings
        self.around = around
        """What says what a namespace has; ``None``: nothing is known of any."""
        self.draining = False
        self.certificate = False
        """Whether there is one to serve with."""
        self._drain_key = drain_key
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "carpool_injector_reviews_total",
            "Objects admitted, by kind and by what was done or the reason why nothing was.",
            ["kind", "result"],
            registry=self.registry,
        )
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
        """Why no review should come here, if so."""
        if self.draining:
            return "draining"
        if not self.certificate:
            return "no certificate yet"
        if self.settings.public_key is None:
            return "no public key yet: the operator makes it"
        return None

    def webhook(self) -> web.Application:
        """Return what API servers call, over TLS."""
        app = web.Application(client_max_size=MAX_REVIEW)
        app.router.add_post("/mutate", self._mutate)
        return app

    def admin(self) -> web.Application:
        """Return what kubelets and Prometheus call."""
        app = web.Application()
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _mutate(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(READ):
                body = await request.read()
            review = msgspec.json.decode(body)
            question = review["request"]
            # Without these there is nobody to answer.
            _ = question["uid"], question["object"]["metadata"], KINDS.index(question["kind"]["kind"])
        except TimeoutError:
            return self._closed(web.Response(status=408, text="the review did not come in time\n"))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            return self._closed(web.Response(status=400, text="this is no AdmissionReview (admission.k8s.io/v1)\n"))
        started = perf_counter()
        answer = await self._answer(question)
        self.reviews.labels(question["kind"]["kind"], answer.result).inc()
        text = msgspec.json.encode(respond(question, answer))
        self._seconds.observe(perf_counter() - started)
        return self._closed(web.Response(body=text, content_type="application/json"))

    async def _answer(self, question: dict[str, Any]) -> Answer:
        try:
            namespace = question.get("namespace", "")
            around = UNKNOWN if self.around is None or not namespace else await self.around(namespace)
            answer = judge(question, self.settings, self._drain_key(), around=around)
        except Exception:
            log.exception(
                "left unchanged, because of an error in the injector: %s %s", question["kind"]["kind"], question["uid"]
            )
            warning = f"carpool: no sidecar, because of an error in the injector: its log has {question['uid']}"
            return Answer(Reason.FAULT, "", question["object"], (warning,))
        log.info("%s: %s", answer.result, answer.of)
        return answer

    def _closed(self, response: web.Response) -> web.Response:
        """Let API servers go elsewhere with their next question, while this one is about to end."""
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
