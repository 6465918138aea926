"""`python benchmarks/whole_operator.py`: what an operator of a large cluster takes: CPU a pass, and memory.

The real `carpool-operator` over 1,000 policies and 5,000 pods: an API server and the pods' admin ports are faked at the
network's edge, on 127.x, in a process of their own. The first passes are the dearest: every model is searched for the
first time. What a pass costs once all have settled is for `fleet.py`. Exit code 1: beyond a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from evidence import Figure, conclude
from fleet import INTERVAL, LIMITS, LOADS, PODS, Fleets

from carpool import report as reports
from carpool.change import Change, read_change
from carpool.policy import Parameters
from carpool.report import Lane, Queue, Report, Stalls
from carpool.statistics import Stats

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "whole_operator.json"
sys.path.insert(0, str(HERE.parent / "tests" / "carpool_operator"))

NAMESPACES = 20
FILLER = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 2000}
"""What real objects carry along, and the operator is not to keep."""

LASTS = 240
"""Seconds that the operator runs."""

LOOK = 2.0
"""Seconds between looks at its metrics: seldom enough to cost nothing, often enough to tell passes apart."""


class Pods:
    """The admin ports of all pods, told apart by the address that was asked."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._fleets = Fleets(0)
        self._told: dict[str, Change] = {}
        self._counted: dict[int, tuple[int, Any]] = {}

    async def stats(self, request: web.Request) -> web.Response:
        """Answer GET /v1/stats."""
        address = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        _, *parts = address.split(".")
        number = (int(parts[1]) * 250 + int(parts[2]) - 1) // PODS
        age = time.monotonic() - self._began
        profile, tick = number % len(LOADS), int(age / INTERVAL)
        if self._counted.get(profile, (-1, None))[0] != tick:
            self._fleets._passes = tick  # noqa: SLF001 - the counters go by it
            self._counted[profile] = tick, self._fleets._counted(profile)  # noqa: SLF001 - the same as fleet.py's
        change = self._told.get(address)
        generation = 0 if change is None else change.generation
        parameters = (change and (change.parameters.get("resnet") or change.parameters.get("*"))) or Parameters()
        lane = Lane(
            parameters=parameters, pass_through=parameters.pass_through, queued_requests=0, cap=64, quarantined=False
        )
        report = Report(
            stats=Stats(tick * INTERVAL, models={"resnet": self._counted[profile][1]}),
            uptime_seconds=tick * INTERVAL,
            ready=True,
            readiness="ready",
            generation=generation,
            running=generation,
            slo_seconds=0.05,
            queue=Queue(rows=0, in_flight=1, slots=1),
            lanes={"resnet": lane},
            stalls=Stalls(0, 0.0),
        )
        return web.Response(body=reports.encode(report), content_type="application/json")

    async def config(self, request: web.Request) -> web.Response:
        """Take PUT /v1/config."""
        address = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        self._told[address] = read_change(msgspec.json.decode(await request.read()))
        return web.json_response({})


async def serve(policies: int) -> None:
    """Be the API server and the pods; prints the API server's port."""
    from fake_api import FakeApi  # noqa: PLC0415 - of the tests, and for this process only
    from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy  # noqa: PLC0415 - likewise

    fake = FakeApi()
    for number in range(policies):
        where, name = f"team-{number % NAMESPACES}", f"model-{number:04}"
        fake.put(*POLICY, policy(f"of-{name}", name), where)
        fake.put(*DEPLOYMENT, deployment(name, replicas=PODS, annotations=dict(FILLER)), where)
        for index in range(number * PODS, number * PODS + PODS):
            one = pod(f"{name}-{index % PODS}", name, ip=f"127.1.{index // 250}.{index % 250 + 1}")
            one["metadata"]["managedFields"] = [{"manager": "x" * 2000}]
            fake.put(*POD, one, where)
    pods = Pods()
    ports = web.Application()
    ports.add_routes([web.get("/v1/stats", pods.stats), web.put("/v1/config", pods.config)])
    api = web.Application(client_max_size=1 << 24)
    api.router.add_route("*", "/{path:.*}", fake._handle)  # noqa: SLF001 - the fake has no port of its own choosing
    for application, host, port in ((ports, "0.0.0.0", 15090), (api, "127.0.0.1", 0)):  # noqa: S104 - 5,000 of 127.x
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    while True:
        await asyncio.sleep(10.0)
        fake.log.clear()


def metrics(port: int) -> dict[str, float]:
    """Return the operator's metrics by name; those with labels are left out."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name and name[0] != "#"
    }


def main() -> int:
    """Measure, print, and keep the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, default=1000, metavar="N", help="default: 1000, and only that is kept")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.policies))
    passes: list[float] = []
    resident = 0.0
    with tempfile.TemporaryDirectory() as folder:
        mine = [sys.executable, __file__, "--serve", "--policies", str(options.policies)]
        with subprocess.Popen(mine, stdout=subprocess.PIPE, text=True) as edge:
            assert edge.stdout is not None  # noqa: S101 - for the type checker
            server = f"http://127.0.0.1:{int(edge.stdout.readline())}"
            kubeconfig = Path(folder) / "kubeconfig"
            kubeconfig.write_bytes(
                msgspec.json.encode(
                    {
                        "current-context": "it",
                        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                        "clusters": [{"name": "it", "cluster": {"server": server}}],
                        "users": [{"name": "it", "user": {}}],
                    }
                )
            )
            command = ["carpool-operator", "--kubeconfig", str(kubeconfig), "--namespace", "team-0"]
            command += ["--metrics-host", "127.0.0.1", "--metrics-port", "18002", "--log-level", "Error"]
            command[0] = str(Path(sys.executable).with_name(command[0]))
            with subprocess.Popen(command, env={"MALLOC_ARENA_MAX": "2"}) as operator:
                try:
                    spent, acknowledged = 0.0, 0.0
                    for _ in range(round(LASTS / LOOK)):
                        time.sleep(LOOK)
                        try:
                            now = metrics(18002)
                        except OSError:
                            continue  # it starts
                        resident = max(resident, now["process_resident_memory_bytes"] / 2**20)
                        acknowledged = now["carpool_operator_pods_acknowledged"]
                        counted = now["carpool_operator_pass_cpu_seconds_total"]
                        if counted > spent:
                            passes.append(counted - spent)
                            spent = counted
                            print(f"{passes[-1]:.2f} s of CPU, {resident:.0f} MiB", flush=True)
                finally:
                    operator.terminate()
                    operator.wait(60)
                    edge.terminate()
    figures = [
        Figure("operator, dearest pass", max(passes), len(passes), {"pods acknowledged": acknowledged}),
        Figure("operator, memory", resident, 1, {"policies": float(options.policies)}),
    ]
    return conclude(figures, LIMITS, RESULTS if options.policies == 1000 else None)


if __name__ == "__main__":
    sys.exit(main())
