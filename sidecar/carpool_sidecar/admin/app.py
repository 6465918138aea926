"""The admin port: probes, metrics, reports, explanations, drain and signed changes; and who may use them."""

from __future__ import annotations

import asyncio
import hmac
import re
from ipaddress import ip_address
from time import time
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from urllib.parse import parse_qs

import msgspec

from carpool.exchange import report
from carpool.policy.plain import to_plain
from carpool_sidecar.admin.metrics import Exposition
from carpool_sidecar.admin.signatures import SCHEME, Refused
from carpool_sidecar.generation.reporting import report_of
from carpool_sidecar.http1.messages import find
from carpool_sidecar.protocols.headers import advice
from carpool_sidecar.tuning.replica_load import ModelLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.model_state import ModelState
    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.models import Entry
    from carpool_sidecar.sidecar import Sidecar

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Routes: TypeAlias = "dict[tuple[bytes, bytes], Callable[[AdminApp, Exchange], None]]"
"""Handlers by method and path; their docstrings stand in the reference."""

JSON = [(b"content-type", b"application/json")]
TEXT = [(b"content-type", b"text/plain; charset=utf-8")]


class AdminApp:
    """The application of the admin port's server.

    Probes and metrics are open. All else needs ``Authorization: Bearer <key>`` if a key is configured; without one
    it is served only if the port is ``local``, on a loopback address. If a public key is configured, a ticket also
    allows reading, and a signature allows a change without any other credential: the change itself is signed. The
    drain key allows draining.
    """

    def __init__(self, sidecar: Sidecar, key: str | None, *, local: bool) -> None:
        self._sidecar = sidecar
        self._key = key
        self._local = local
        self._exposition: Exposition | None = None
        self._scrapes: set[asyncio.Task[bytes]] = set()
        self._draining: asyncio.Task[None] | None = None

    def head(self, exchange: Exchange) -> None:
        """Buffer the body, which is small or absent."""

    def request(self, exchange: Exchange) -> None:
        """Answer."""
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        route = (method, exchange.path)
        if (handle := self.OPEN.get(route)) is not None:
            handle(self, exchange)
        elif (handle := self.READ.get(route)) is not None:
            if self._may_read(exchange):
                handle(self, exchange)
        elif (handle := self.DRAIN.get(route)) is not None:
            if self._may_drain(exchange):
                handle(self, exchange)
        elif (handle := self.CHANGE.get(route)) is not None:
            if self._sidecar.versions.changes is not None or self._admits(exchange):
                handle(self, exchange)
        elif methods := [method for method, path in self.ROUTES if path == exchange.path]:
            allowed = b", ".join(sorted({*methods, b"HEAD"} if b"GET" in methods else methods))
            text = f"{exchange.path.decode('latin-1')} takes {allowed.decode()} only"
            exchange.fail(405, "method", text, [(b"allow", allowed)])
        else:
            paths = sorted({path.decode() for _, path in self.ROUTES})
            exchange.fail(404, "path", f"the admin port serves {', '.join(paths)}")

    def sent(self, exchange: Exchange) -> None:
        """Do nothing: no work is left."""

    def disconnected(self, exchange: Exchange) -> None:
        """Do nothing: there is no work to undo."""

    def refused(self, error: HttpError) -> None:
        """Do nothing: there is no work to undo."""

    def _may_read(self, exchange: Exchange) -> bool:
        given = find(exchange.headers, b"authorization") or b""
        changes = self._sidecar.versions.changes
        if changes is None or not given.startswith(SCHEME):
            return self._admits(exchange)
        try:
            changes.authority.admit(given, time())
        except Refused as refused:
            exchange.fail(403, refused.reason, str(refused))
            return False
        return True

    def _may_drain(self, exchange: Exchange) -> bool:
        key, given = self._sidecar.versions.config.drain_key, find(exchange.headers, b"x-carpool-drain")
        if key is not None and given is not None:
            if hmac.compare_digest(given, key.encode()):
                return True
            exchange.fail(403, "drain-key", "x-carpool-drain is not this pod's drainKey: the pod's preStop hook has it")
            return False
        return self._admits(exchange)

    def _admits(self, exchange: Exchange) -> bool:
        if self._key is not None:
            given = find(exchange.headers, b"authorization") or b""
            if hmac.compare_digest(given, b"Bearer " + self._key.encode()):
                return True
            exchange.fail(
                401, "key", "send the admin key: Authorization: Bearer ...", [(b"www-authenticate", b"Bearer")]
            )
            return False
        if self._local:
            if not _is_from_a_web_page(exchange):
                return True
            exchange.fail(
                403, "web-page", "a web page of another site may not do this: call 127.0.0.1 or localhost by itself"
            )
            return False
        ticket = (
            "" if self._sidecar.versions.changes is None else ", or send a ticket signed by the holder of publicKey"
        )
        exchange.fail(
            403, "key", f"without apiKeyFile this is served on loopback addresses only: set one, or admin{ticket}"
        )
        return False

    # Open

    def _metrics(self, exchange: Exchange) -> None:
        """Write the metrics for Prometheus to scrape."""
        if self._exposition is None:
            self._exposition = Exposition(self._sidecar)
        content_type = [(b"content-type", self._exposition.content_type)]

        def written(scrape: asyncio.Task[bytes]) -> None:
            self._scrapes.discard(scrape)
            if scrape.cancelled():
                return
            if (error := scrape.exception()) is not None:
                self._sidecar.log.error("metrics can't be written", exc_info=error)
                exchange.fail(500, "metrics", "metrics can't be written: the sidecar's log has the error")
                return
            exchange.respond(200, content_type, scrape.result())

        scrape = asyncio.get_running_loop().create_task(self._exposition.text())
        self._scrapes.add(scrape)
        scrape.add_done_callback(written)

    def _live(self, exchange: Exchange) -> None:
        """Answer 200 while the process does; says nothing of the model."""
        exchange.respond(200, TEXT, b"ok\n")

    def _ready(self, exchange: Exchange) -> None:
        """Answer 200 while new requests should come here, else 503; the body says why."""
        sidecar = self._sidecar
        exchange.respond(200 if sidecar.ready else 503, TEXT, sidecar.readiness.encode() + b"\n")

    def _capacity(self, exchange: Exchange) -> None:
        """Say how full this replica is: `load` for autoscalers, 1 where it serves all that it can within the SLO.

        503 while requests come and neither a batch has been measured nor enough token streams have ended.
        """
        now = self._sidecar.streams.added_to(self._sidecar.control.load())
        exchange.respond(503 if now.load is None else 200, JSON, msgspec.json.encode(now) + b"\n")

    # Closed

    def _drain(self, exchange: Exchange) -> None:
        """Answer once nothing is left to lose: a preStop hook holds the model's container up until then."""

        def drained(_: asyncio.Task[None]) -> None:
            exchange.respond(200, TEXT, b"drained\n")

        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._sidecar.drain())
        self._draining.add_done_callback(drained)

    def _config(self, exchange: Exchange) -> None:
        """Show the configuration in force, its generation, and what is wrong with the newest version of the file.

        ``data`` is the address of the data port.
        """
        sidecar = self._sidecar
        config = to_plain(sidecar.versions.config)
        if "drainKey" in config:
            config["drainKey"] = "(set)"  # a reader may not drain
        _respond(
            exchange,
            {
                "generation": sidecar.versions.generation,
                "running": sidecar.running,
                "error": sidecar.versions.file.error,
                "tuned": sidecar.control.tunes,
                "data": sidecar.data.address,
                "parameters": {state.name: to_plain(state.in_force) for state in sidecar.batcher.models()},
                "config": config,
            },
        )

    def _change(self, exchange: Exchange) -> None:
        """Apply a signed change: a JSON body, its Ed25519 signature (base64) in `x-carpool-signature`; no other key."""
        sidecar = self._sidecar
        if sidecar.versions.changes is None:
            exchange.fail(403, "read-only", "no publicKey is configured: change the configuration file instead")
            return
        try:
            sidecar.versions.changes.take(bytes(exchange.body), find(exchange.headers, b"x-carpool-signature") or b"")
        except Refused as refused:
            exchange.fail(400 if refused.reason == "content" else 403, refused.reason, str(refused))
        else:
            _respond(exchange, {"generation": sidecar.versions.generation, "running": sidecar.running})

    def _stats(self, exchange: Exchange) -> None:
        """Everything counted, and the state of each model; ``?arrivals=N`` adds the last N arrivals of each model."""
        text = parse_qs(exchange.query.decode("latin-1")).get("arrivals", ["0"])[-1]
        arrivals = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
        exchange.respond(200, JSON, report.encode(_report(self._sidecar, arrivals)) + b"\n")

    def _explain(self, exchange: Exchange) -> None:
        """List the last 50 decisions of the tuner: when, what, why, what was forecast, and what keeps it from going on.

        ``lastBusy`` has what was observed in the last minute in which requests came, by model, and its forecast.
        """
        control = self._sidecar.control
        _respond(
            exchange,
            {
                "tuned": control.tunes,
                "tunerPid": control.link.pid,
                "decisions": list(control.decisions.recent),
                "lastBusy": control.busy.last(),
            },
        )

    OPEN: ClassVar[Routes] = {
        (b"GET", b"/metrics"): _metrics,
        (b"GET", b"/livez"): _live,
        (b"GET", b"/readyz"): _ready,
        (b"GET", b"/startupz"): _live,
        (b"GET", b"/capacity"): _capacity,
    }
    READ: ClassVar[Routes] = {
        (b"GET", b"/v1/config"): _config,
        (b"GET", b"/v1/stats"): _stats,
        (b"GET", b"/v1/explain"): _explain,
    }
    DRAIN: ClassVar[Routes] = {
        (b"GET", b"/drain"): _drain,  # a preStop hook can only GET
        (b"POST", b"/drain"): _drain,
    }
    CHANGE: ClassVar[Routes] = {(b"PUT", b"/v1/config"): _change}
    ROUTES: ClassVar[Routes] = {**OPEN, **DRAIN, **READ, **CHANGE}


def _report(sidecar: Sidecar, arrivals: int) -> report.Report:
    """Build the report, with ``arrivals`` of the last arrivals."""
    batcher, changes, now = sidecar.batcher, sidecar.versions.changes, sidecar.clock()
    loads = sidecar.control.load().models
    return report.Report(
        stats=batcher.stats(now),
        uptime_seconds=now - sidecar.started_at,
        ready=sidecar.ready,
        readiness=sidecar.readiness,
        target=sidecar.versions.config.target,
        generation=sidecar.versions.generation,
        running=sidecar.running,
        rolled_back=list(sidecar.control.in_force.rollback.rolled_back.values()),
        change_error=None if changes is None else changes.error,
        rejected={} if changes is None else dict(changes.rejected),
        slo_seconds=sidecar.driver.terms.due,
        queue=report.Queue(
            rows=batcher.queued_rows,
            bytes=sum(state.load.size for state in batcher.models()),
            in_flight=batcher.in_flight,
            slots=batcher.slots,
        ),
        lanes={state.name: _lane(sidecar, state, loads.get(state.name), arrivals) for state in batcher.models()},
        models=[_entry(sidecar, entry) for entry in sidecar.models],
        alone=[
            report.Alone(*cause, requests, sidecar.driver.counts.why.get(cause, ""))
            for cause, requests in sidecar.driver.counts.alone.items()
        ],
        forwarded=[
            report.Forwarded(
                method=method, path=path, requests=counts.requests, hits=counts.hits, durations=list(counts.durations)
            )
            for (method, path), counts in sidecar.forwarded.paths.items()
        ],
        token_streams=report_of(sidecar.streams),
        jobs=None if sidecar.jobs is None else sidecar.jobs.report(),
        stalls=report.Stalls(sidecar.stalls.count, sidecar.stalls.total),
    )


def _lane(sidecar: Sidecar, state: ModelState, load: ModelLoad | None, arrivals: int) -> report.Lane:
    """Return the state of a model's requests; ``load``: ``None`` for a model that is new."""
    estimate, load = state.belief.estimate, load or ModelLoad(rate=0.0)
    return report.Lane(
        parameters=state.in_force,
        pass_through=state.passing,
        queued_requests=state.load.requests,
        cap=state.cap,
        ceiling=state.limits.ceiling,
        quarantined=state.isolation.quarantined,
        service_seconds=None if estimate is None else estimate.times,
        service_noise=None if estimate is None else estimate.noise,
        executors=None if estimate is None else estimate.executors,
        forecast_alarm=sidecar.control.decisions.alarms.get(state.name, ""),
        capacity=load.capacity,
        capacity_lower=load.capacity_lower,
        capacity_zero_wait=load.capacity_zero_wait,
        capacity_alone=load.capacity_alone,
        capacity_by_hand=load.capacity_by_hand,
        replaced=sidecar.control.observer.replaced(state.name),
        arrivals=list(state.counters.recent)[-arrivals:] if arrivals else [],
    )


def _entry(sidecar: Sidecar, entry: Entry) -> report.ModelEntry:
    verifier = sidecar.driver.verifier
    verified, evidence = verifier.state(entry)
    return report.ModelEntry(
        name=entry.model,
        version=entry.version,
        lane=entry.lane,
        merges=verifier.merges(entry),
        max_batch=entry.max_batch,
        axis=sidecar.models.reason(entry),
        verified=verified.value,
        evidence=evidence,
        padding=_padding(sidecar, entry),
        trouble=sidecar.driver.counts.failed_all(entry.lane) or advice(entry.headers.own),
    )


def _padding(sidecar: Sidecar, entry: Entry) -> str:
    """Return a sentence on padding: its share of the tokens sent, and what was not padded."""
    driver = sidecar.driver
    sentence = driver.verifier.padding(entry)
    if not sentence:
        return ""
    own, added = driver.counts.tokens.get(entry.lane, (0, 0))
    if added:
        sentence += f"; {added / (own + added):.1%} of {own + added} tokens sent were padding"
    kept = [f"{count} {reason}" for (lane, reason), count in driver.counts.unpadded.items() if lane == entry.lane]
    return f"{sentence}; requests kept to their own length: {', '.join(kept)}" if kept else sentence


def _respond(exchange: Exchange, plain: dict[str, Any]) -> None:
    exchange.respond(200, JSON, msgspec.json.encode(plain, enc_hook=str) + b"\n")


def _is_from_a_web_page(exchange: Exchange) -> bool:
    """Whether a browser sends the request for a page of another site.

    Such a page reaches the loopback addresses of anyone who looks at it, also under a name of its own (DNS rebinding).
    """
    if find(exchange.headers, b"sec-fetch-site") in {b"cross-site", b"same-site"}:
        return True
    host = (find(exchange.headers, b"host") or b"").decode("latin-1")
    name = re.sub(r":[0-9]*$", "", host).strip("[]")
    try:
        ip_address(name)
    except ValueError:
        return name not in {"", "localhost"} and not name.endswith(".localhost")
    return False
