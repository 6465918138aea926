"""`python benchmarks/whole_operator.py`: what an operator of a large cluster takes: CPU a pass, memory, time to settle.

The real `carpool-operator` over 1,000 policies and 5,000 pods, beside 10,000 old ReplicaSets of 4 KB: an API server and
the pods' admin ports are faked at the network's edge, on 127.x, in a process of their own. The first passes are the
dearest: every model is searched for the first time. It runs until all have settled, and then on for what a pass costs
that finds nothing to do. As in the image, the core is machine code, where there is a compiler. What deciding alone
costs is for `fleet.py`. Exit code 1: beyond a limit, or not settled in time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import cast

import compiled
import msgspec
from aiohttp import web
from evidence import Figure, conclude
from fleet import LIMITS, PODS
from processes import free_port
from virtual_pods import INTERVAL, VirtualPod

from carpool.exchange import report as reports
from carpool.exchange.change import read_change
from carpool_operator.cluster.sharding import Shard

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "whole_operator.json"
sys.path.insert(0, str(HERE.parent / "tests" / "carpool_operator"))

NAMESPACES = 20
FILLER = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 2000}
"""What real objects carry along, and the operator is not to keep."""

ENVIRONMENT = [{"name": f"VARIABLE_{number}", "value": "x" * 20} for number in range(40)]
"""Of a container: with it a ReplicaSet has 4 KB."""

REVISIONS = 10
"""Old ReplicaSets of each Deployment, as many as Kubernetes keeps; nothing is to be kept of them."""

LOOK = 5.0
"""Seconds between looks at its metrics. Writing them down for 1,000 policies takes it 0.1 s of CPU: with two looks a
second, a fifth of what was measured was that. Of passes that end between two looks, the mean is taken."""

CALM = 2
"""Times in a row that every pod is read and all are up to date and nothing is changed: all have settled then."""

STEADY = 5
"""Settled passes that are measured."""


class Pods:
    """All pods, by their addresses."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._pods: dict[str, VirtualPod] = {}

    def answer(self, address: str, head: bytes, body: bytes) -> bytes:
        """Answer a request to the admin port of the pod at an address: GET /v1/stats or PUT /v1/config."""
        _, _, high, low = address.split(".")
        pod = self._pods.get(address) or self._pods.setdefault(address, VirtualPod(int(high) * 250 + int(low) - 1))
        interval = int((time.monotonic() - self._began) / INTERVAL)
        if head.startswith(b"PUT /v1/config "):
            pod.receive(read_change(msgspec.json.decode(body)), interval)
            return b"{}"
        assert head.startswith(b"GET /v1/stats "), head  # noqa: S101 - it asks for nothing else
        return reports.encode(pod.report(interval))


class Port(asyncio.Protocol):
    """An admin port, for one request: a server that does more would cost as much as the operator that is measured."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connects."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer once all of the request is there."""
        self._got += data
        head, there, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if there and len(body) >= int(length[1] if length else 0):
            answer = self._pods.answer(self._transport.get_extra_info("sockname")[0], head, body)
            kind = b"content-type: application/json\r\nconnection: close"
            self._transport.write(
                b"HTTP/1.1 200 OK\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(answer), answer)
            )
            self._transport.close()


async def serve(policies: int) -> None:
    """Be the API server and the pods; prints the API server's port."""
    from fake_api import FakeApi  # noqa: PLC0415 - of the tests, and for this process only
    from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy  # noqa: PLC0415 - likewise

    fake = FakeApi()
    for number in range(policies):
        where, name = f"team-{number % NAMESPACES}", f"model-{number:04}"
        fake.put(*POLICY, policy(f"of-{name}", name), where)
        fake.put(*DEPLOYMENT, deployment(name, replicas=PODS, annotations=dict(FILLER)), where)
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": "0", "controller": True}
        for revision in range(REVISIONS):
            old = deployment(f"{name}-{revision}", replicas=0, annotations=dict(FILLER))
            old["metadata"]["ownerReferences"] = [owner]
            old["spec"]["template"]["spec"] = {"containers": [{"name": "x", "env": ENVIRONMENT}]}
            fake.put("apps/v1", "replicasets", old, where)
        for index in range(number * PODS, number * PODS + PODS):
            one = pod(f"{name}-{index % PODS}", name, ip=f"127.1.{index // 250}.{index % 250 + 1}")
            one["metadata"]["managedFields"] = [{"manager": "x" * 2000}]
            fake.put(*POD, one, where)
    pods = Pods()
    # On all of 127.x: 5,000 addresses.
    await asyncio.get_running_loop().create_server(lambda: Port(pods), "0.0.0.0", 14090, backlog=1024)  # noqa: S104
    api = web.Application(client_max_size=1 << 24)
    api.router.add_route("*", "/{path:.*}", fake._handle)  # noqa: SLF001 - the fake has no port of its own choosing
    runner = web.AppRunner(api, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    while True:
        await asyncio.sleep(10.0)
        fake.log.clear()


class Course:
    """Figures of the passes, from the operator's metrics."""

    def __init__(self, name: str, pods: int) -> None:
        self.passes: list[float] = []
        """CPU seconds of each, with all else that the process does meanwhile."""
        self.settled: list[float] = []
        """Of those after all had settled."""
        self.resident = 0.0
        """MiB, at most."""
        self.acknowledged = 0.0
        self.cpu = self.wall = 0.0
        """Seconds from the start of the process to the end of the last pass that had something to do."""
        self.pods = pods
        self._name = name
        self._began = time.monotonic()
        self._before: dict[str, float] = {}
        self._read = 0.0
        """Pods since then."""

    def look(self, now: dict[str, float]) -> None:
        """Take a look; where a pass had ended since the last one, take it down and print it."""
        self.resident = max(self.resident, now["process_resident_memory_bytes"] / 2**20)
        count = self._grown(now, "carpool_operator_pass_seconds_count")
        if not count:
            return
        took = self._grown(now, "carpool_operator_pass_cpu_seconds_total") / count
        self.passes += [took] * round(count)
        self.acknowledged = now["carpool_operator_pods_acknowledged"]
        changed = self._grown(now, "carpool_operator_writes_total") + self._grown(now, "carpool_operator_pushes_total")
        read, wall = self._grown(now, "carpool_operator_readings_total"), time.monotonic() - self._began
        if changed or self.acknowledged < self.pods:
            self.settled = []
            self._read = 0.0
            self.cpu, self.wall = now["process_cpu_seconds_total"], wall
        elif self._read >= CALM * self.pods:
            self.settled += [took] * round(count)
        else:
            self._read += read
        self._before = now
        print(
            f"{wall:5.0f} s: {self._name}pass {len(self.passes)} took {took:.2f} s of CPU; since the last look read "
            f"{read:.0f} pods, changed {changed:.0f} things; {self.acknowledged:.0f} pods up to date; "
            f"{self.resident:.0f} MiB",
            flush=True,
        )

    def _grown(self, now: dict[str, float], name: str) -> float:
        return sum(value - self._before.get(each, 0.0) for each, value in now.items() if each.partition("{")[0] == name)


def metrics(port: int) -> dict[str, float]:
    """Return the operator's metrics by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name and name[0] != "#"
    }


def kubeconfig(server: str) -> bytes:
    """Write how the operator reaches its API server."""
    return msgspec.json.encode(
        {
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": {"server": server}}],
            "users": [{"name": "it", "user": {}}],
        }
    )


def machine_code() -> str | None:
    """Return the folder with the core as images have it; ``None`` where it can't be made."""
    try:
        return str(compiled.wheel())
    except compiled.NotCompiledError as error:
        print(f"as pure Python, unlike in images: {error}")
        return None


class Operator:
    """One process, for one shard, and what its passes were like."""

    def __init__(self, shard: Shard, policies: int, kubeconfig: Path, made: str | None) -> None:
        namespaces = [f"team-{number % NAMESPACES}" for number in range(policies)]
        name = "" if shard.count == 1 else f"shard {shard}, "
        self.course = Course(name, PODS * sum(map(shard.has, namespaces)))
        self._port = free_port()
        command = [str(Path(sys.executable).with_name("carpool-operator")), "--kubeconfig", str(kubeconfig)]
        command += ["--namespace", "team-0", "--metrics-host", "127.0.0.1", "--metrics-port", str(self._port)]
        command += ["--shard", str(shard), "--log-level", "Error"]
        paths = [*filter(None, [made, os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(command, env=environment)

    @property
    def goes_on(self) -> bool:
        """Whether it has not settled long enough yet."""
        return len(self.course.settled) < STEADY

    def look(self) -> None:
        """Take a look at its metrics; ends this benchmark if it ended by itself."""
        if self._process.poll() is not None:
            sys.exit(f"carpool-operator ended by itself, with exit code {self._process.returncode}: see above")
        with suppress(OSError):  # it starts
            self.course.look(metrics(self._port))

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)


def watch(policies: int, shards: int, within: float, made: str | None) -> list[Course]:
    """Run operators until all have settled, or ``within`` seconds are over; print what their passes are like.

    ``made``: a folder with the core as machine code.
    """
    with tempfile.TemporaryDirectory() as folder:
        mine = [sys.executable, __file__, "--serve", "--policies", str(policies)]
        with subprocess.Popen(mine, stdout=subprocess.PIPE, text=True) as edge:
            assert edge.stdout is not None  # noqa: S101 - for the type checker
            config = Path(folder) / "kubeconfig"
            config.write_bytes(kubeconfig(f"http://127.0.0.1:{int(edge.stdout.readline())}"))
            until = time.monotonic() + within
            operators = [Operator(Shard(index, shards), policies, config, made) for index in range(shards)]
            try:
                while any(each.goes_on for each in operators) and time.monotonic() < until:
                    time.sleep(LOOK)
                    for each in operators:
                        each.look()
            finally:
                for each in operators:
                    each.end()
                edge.terminate()
    return [each.course for each in operators]


def main() -> int:
    """Measure, print, and keep the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, default=1000, metavar="N", help="default: 1000, and only that is kept")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="operators that divide them (default: 1)")
    parser.add_argument("--within", type=float, default=3600.0, metavar="SECONDS", help="to settle in (default: 3600)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.policies))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and its operators with it
    made = machine_code()
    courses = watch(options.policies, options.shards, options.within, made)
    acknowledged = sum(each.acknowledged for each in courses)
    if any(len(each.settled) < STEADY for each in courses):
        print(f"not settled within {options.within:g} s: {acknowledged:.0f} pods are up to date")
        return 1
    settled = [min(each.settled) for each in courses]
    parts = {"shards": float(options.shards), "machine code": float(made is not None)}
    figures = [
        Figure(
            "operator, dearest pass", max(max(each.passes) for each in courses), sum(len(c.passes) for c in courses)
        ),
        Figure("operator, settled pass", max(settled), STEADY, {"dearest": max(max(c.settled) for c in courses)}),
        Figure("operator, memory", max(c.resident for c in courses), 1, {"policies": float(options.policies)}),
        Figure("operator, CPU to settle", sum(each.cpu for each in courses), 1, parts),
        Figure("operator, time to settle", max(c.wall for c in courses), 1, {"pods up to date": acknowledged, **parts}),
    ]
    where = RESULTS if options.shards == 1 else RESULTS.with_stem(f"{RESULTS.stem}_{options.shards}_shards")
    return conclude(figures, LIMITS, where if options.policies == 1000 else None)


if __name__ == "__main__":
    sys.exit(main())
