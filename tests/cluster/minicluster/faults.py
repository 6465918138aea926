"""An API server that misbehaves on demand: a proxy in front of the real one, for the clients that are sent to it."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Self

import aiohttp
from aiohttp import web

from minicluster.controlplane import ADDRESS, SERVER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from minicluster.cluster import Cluster

READS = frozenset({"GET", "HEAD", "OPTIONS"})
# Of one connection, not of the request: never passed on.
HOP_BY_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"})
REASONS = {401: "Unauthorized", 409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
STARTS_WITHIN = 60.0


class Request(NamedTuple):
    """What a client asked: ``path`` without its query; ``watch``: to follow it."""

    method: str
    path: str
    watch: bool
    agent: str


class Fault:
    """A fault for requests (or watch events) that match: the first ``after`` go by, then it strikes ``times``.

    Attributes:
        struck: How often it has.
    """

    def __init__(self, methods: str, path: str, times: float, after: int) -> None:
        self._methods, self._path = re.compile(methods), re.compile(path)
        self._times, self._after = times, after
        self.struck = 0

    def strikes(self, request: Request) -> bool:
        """Count a request (or an event of it) and return whether the fault befalls it."""
        if not (self._methods.fullmatch(request.method) and self._path.search(request.path)):
            return False
        if self._after > 0:
            self._after -= 1
            return False
        if self.struck >= self._times:
            return False
        self.struck += 1
        return True


class _Refusal(Fault):
    status = 500
    retry_after = 0


class _Delay(Fault):
    seconds = 0.0


class _Hook(Fault):
    do: Callable[[Request], object]


class FaultProxy:
    """A proxy for the length of a ``with``; faults may be set at any time, from any thread.

    ``methods`` is a regular expression that all of a method matches, ``path`` one that is found in a path. What each
    method here returns counts how often its fault has struck.

    Attributes:
        requests: What was asked, watches included, in order.
        writes: What the API server took: requests other than reads that it answered with success.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._dropped: list[Fault] = []
        self._repeated: list[Fault] = []
        self._watches: set[asyncio.Task[None]] = set()
        self.requests: deque[Request] = deque(maxlen=100_000)
        self.writes: deque[Request] = deque(maxlen=100_000)
        self._port: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._port.result(STARTS_WITHIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STARTS_WITHIN)
        self._loop.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, reachable from pods too: KUBERNETES_SERVICE_HOST and _PORT of one that is to meet faults."""
        return ADDRESS, self._port.result(STARTS_WITHIN)

    @property
    def watching(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def kubeconfig(self, token: str, namespace: str = "default") -> Path:
        """Write a kubeconfig that leads here, with the token."""
        host, port = self.address
        return self._cluster.kubeconfig_of(token, server=f"https://{host}:{port}", namespace=namespace)

    # Faults

    def refuse(
        self,
        status: int,
        *,
        methods: str = ".*",
        path: str = "",
        times: float = 1,
        after: int = 0,
        retry_after: int = 0,
    ) -> Fault:
        """Answer with an error in the API's form (409, 410, 429, 500, ...); the API server hears nothing of it."""
        fault = _Refusal(methods, path, times, after)
        fault.status, fault.retry_after = status, retry_after
        return self._add(self._faults, fault)

    def delay(self, seconds: float, *, methods: str = ".*", path: str = "", times: float = 1, after: int = 0) -> Fault:
        """Let the API server answer, and keep the answer back for a while."""
        fault = _Delay(methods, path, times, after)
        fault.seconds = seconds
        return self._add(self._faults, fault)

    def after_write(
        self, do: Callable[[Request], object], *, methods: str = ".*", path: str = "", times: float = 1, after: int = 0
    ) -> Fault:
        """Call ``do`` when a write has gone through and before its client hears of it.

        For the moment after the n-th write: ``after=n - 1``. ``do`` runs in the proxy's thread: a ``os.kill``, no more.
        """
        fault = _Hook(methods, path, times, after)
        fault.do = do
        return self._add(self._faults, fault)

    def drop_events(self, *, path: str = "", times: float = 1, after: int = 0) -> Fault:
        """Let watch events disappear: their client gets later ones, and none of these."""
        return self._add(self._dropped, Fault(".*", path, times, after))

    def repeat_events(self, *, path: str = "", times: float = 1, after: int = 0) -> Fault:
        """Send watch events twice."""
        return self._add(self._repeated, Fault(".*", path, times, after))

    def cut_watches(self) -> None:
        """End every open watch, as the API server does now and then, and return when they have."""

        async def cut() -> None:
            watches = list(self._watches)
            for task in watches:
                task.cancel()
            if watches:
                await asyncio.wait(watches)

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(STARTS_WITHIN)

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            for faults in (self._faults, self._dropped, self._repeated):
                faults.clear()

    def _add(self, faults: list[Fault], fault: Fault) -> Fault:
        with self._lock:
            faults.append(fault)
        return fault

    def _strike(self, faults: list[Fault], request: Request, kind: type[Fault] = Fault) -> list[Fault]:
        with self._lock:
            return [fault for fault in faults if isinstance(fault, kind) and fault.strikes(request)]

    # The proxy

    async def _serve(self) -> None:
        folder = self._cluster.folder
        certificate = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.load_cert_chain(folder / "proxy.crt", folder / "proxy.key")
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=folder / "ca.crt"), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, ADDRESS, 0, ssl_context=certificate)
            await site.start()
            self._port.set_result(runner.addresses[0][1])
            await self._stop.wait()
            await runner.cleanup()
        await asyncio.sleep(0.2)  # connections over TLS close in steps; none may outlive the loop

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        watch = request.query.get("watch", "") in {"1", "true"}
        asked = Request(request.method, request.path, watch, request.headers.get("User-Agent", ""))
        self.requests.append(asked)
        for refusal in self._strike(self._faults, asked, _Refusal):
            assert isinstance(refusal, _Refusal)
            return _refusal(refusal.status, refusal.retry_after)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = await request.read()
        async with session.request(
            request.method, SERVER + request.raw_path, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            if asked.method not in READS and answer.status < 400:
                self.writes.append(asked)
                for hook in self._strike(self._faults, asked, _Hook):
                    assert isinstance(hook, _Hook)
                    hook.do(asked)
            for delay in self._strike(self._faults, asked, _Delay):
                assert isinstance(delay, _Delay)
                await asyncio.sleep(delay.seconds)
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            told = web.StreamResponse(status=answer.status, headers=passed)
            await told.prepare(request)
            if watch and answer.status == 200 and "json" in answer.content_type:
                await self._pass_on(asked, answer, told)
            else:
                async for chunk in answer.content.iter_any():
                    await told.write(chunk)
            return told

    async def _pass_on(self, asked: Request, answer: aiohttp.ClientResponse, told: web.StreamResponse) -> None:
        """Pass a watch on, event by event, until it is cut."""
        task = asyncio.ensure_future(self._events(asked, answer, told))
        self._watches.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._watches.discard(task)
            task.cancel()
        if not task.cancelled() and (error := task.exception()):
            raise error

    async def _events(self, asked: Request, answer: aiohttp.ClientResponse, told: web.StreamResponse) -> None:
        pending = b""
        async for chunk in answer.content.iter_any():
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if self._strike(self._dropped, asked):
                    continue
                times = 2 if self._strike(self._repeated, asked) else 1
                await told.write((line + b"\n") * times)


def _refusal(status: int, retry_after: int) -> web.Response:
    reason = REASONS.get(status, "InternalError")
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status,
        "reason": reason,
        "message": f"{reason}: a fault of the test's own",
    }
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=headers)
