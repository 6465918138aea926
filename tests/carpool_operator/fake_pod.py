"""A sidecar's admin port at the network's edge, on addresses of 127/8: what the operator asks and sends is checked as a
real one does."""

from __future__ import annotations

from aiohttp import web

from carpool.batching.counters import Stats
from carpool.exchange.report import Lane, Queue, Report, encode
from carpool.policy.parameters import Parameters
from carpool_sidecar.admin.signatures import Authority, Refused

WALL = 1_800_000_000.0


class FakePod:
    """``changes``: those it took, in order."""

    def __init__(self, public_key="", target="ns/Deployment/web"):
        self.changes = []
        self.asked = 0
        self.connections = set()
        self.status = 200
        """Answers this instead, where it isn't 200."""
        self.body = b""
        self.stall = None
        self.port = 0
        self.wall = WALL
        """What its clock says."""
        self.public_key = public_key
        self._target = target
        self._runner = None

    async def start(self):
        application = web.Application(client_max_size=2**24)
        application.add_routes([web.get("/v1/stats", self._stats), web.put("/v1/config", self._config)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self):
        await self._runner.cleanup()

    @property
    def generation(self):
        return self.changes[-1].generation if self.changes else 0

    def report(self):
        running = self.changes[-1].parameters.get("*", Parameters()) if self.changes else Parameters()
        lane = Lane(parameters=running, pass_through=False, queued_requests=0, cap=1, quarantined=False)
        return Report(
            stats=Stats(at=float(self.asked)), uptime_seconds=1.0, ready=True, readiness="ready", target=self._target,
            generation=self.generation, running=self.generation,
            slo_seconds=3600.0 if running.pass_through else 0.05,
            queue=Queue(rows=0, in_flight=0, slots=1), lanes={"m": lane},
        )  # fmt: skip

    async def _fault(self):
        if self.stall is not None:
            await self.stall.wait()
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        return None

    async def _stats(self, request):
        self.asked += 1
        self.connections.add(request.transport)
        if (fault := await self._fault()) is not None:
            return fault
        try:
            if self.public_key:
                Authority(self.public_key, self._target).admit(request.headers["authorization"].encode(), self.wall)
        except Refused as refused:
            return web.Response(status=401, text=str(refused))
        return web.Response(body=self.body or encode(self.report()), content_type="application/json")

    async def _config(self, request):
        if (fault := await self._fault()) is not None:
            return fault
        body = await request.read()
        try:
            change = Authority(self.public_key, self._target).change(
                body, request.headers["x-carpool-signature"].encode(), self.wall
            )
        except Refused as refused:
            return web.Response(status=403, text=str(refused))
        if change.generation > self.generation:
            self.changes.append(change)
        return web.json_response({"generation": self.generation})
