"""Cost of following pods in the operator: its own watch compared with kopf's event handler (decision 30).

`python benchmarks/watches.py`: 400 pods, of 8 KB of JSON each; writes results/watches.json.

Each way runs in a process of its own against an API server in memory, lists all pods, and then takes a change of each.
Both keep the same value of a pod. CPU seconds are those of that process, without its start. Bytes are of a pod as the
watch keeps it, and as the dictionary that kopf hands on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import kopf
import kubernetes.client
import msgspec
from aiohttp import web

from carpool_operator.cluster.handlers import credentials, settings
from carpool_operator.cluster.kinds import KINDS, PODS
from carpool_operator.cluster.kube import Kube
from carpool_operator.cluster.watching import LeftOut, Listing, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RESULTS = Path(__file__).parent / "results" / "watches.json"
COUNT = 400
WAYS = ("own watch", "kopf")


def pod(number: int, version: int) -> dict[str, Any]:
    """Return a pod with its sidecar, about as large as real ones are with managed fields and variables."""
    variables = [{"name": f"VARIABLE_{index}", "value": "x" * 60} for index in range(60)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"model-{number}", "namespace": f"team-{number % 50}", "uid": f"uid-{number}",
            "resourceVersion": str(version), "creationTimestamp": "2026-11-21T12:00:00Z",
            "labels": {"app": "model", "carpool.dev/injected": "true", "pod-template-hash": "7d9c"},
            "annotations": {
                "carpool.dev/target": f"Deployment/model-{number // 5}",
                "carpool.dev/status": '{"version": "0.1.0", "container": "server", "port": 9000, "notes": []}',
            },
            "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{index}": {} for index in range(150)}}],
        },
        "spec": {"containers": [{"name": name, "image": name, "env": variables} for name in ("server",)]},
        "status": {
            "phase": "Running", "podIP": "10.244.0.9", "conditions": [{"type": "Ready", "status": "True"}],
        },
    }  # fmt: skip


async def serve(ready: asyncio.Future[int]) -> None:
    """Answer lists and watches of pods, and what kopf asks at its start."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path, query = request.path, request.query
        if path in {"/apis", "/api"}:
            return web.json_response({"groups": [], "versions": ["v1"]})
        if path == "/api/v1":
            verbs = ["get", "list", "watch", "patch"]
            kinds = (("pods", "Pod", True), ("namespaces", "Namespace", False), ("events", "Event", True))
            found = [
                {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": inside, "verbs": verbs}
                for name, kind, inside in kinds
            ]
            return web.json_response({"resources": found})
        if "watch" not in query:
            begin, limit = int(query.get("continue") or 0), int(query.get("limit") or COUNT)
            meta = {"resourceVersion": str(COUNT)}
            if begin + limit < COUNT:
                meta["continue"] = str(begin + limit)
            items = [pod(number, number + 1) for number in range(begin, min(begin + limit, COUNT))]
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(COUNT):
            event = {"type": "MODIFIED", "object": pod(number, COUNT + number + 1)}
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(3600)
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.set_result(runner.addresses[0][1])
    await asyncio.sleep(3600)


class Follower:
    """Hands what a watch reports to ``seen``."""

    def __init__(self, seen: Callable[[object, int, object], None]) -> None:
        self.seen = seen

    def listed(self, items: Mapping[object, tuple[int, object]], _version: int) -> None:
        """Take the first list."""
        for key, item in items.items():
            self.seen(key, *item)

    def alive(self) -> None:
        """Do nothing: the measurement ends by itself."""


def measure(way: str, port: int) -> float:
    """Follow the pods in this process until a change of each has come."""
    configuration = kubernetes.client.Configuration()
    configuration.host = f"http://127.0.0.1:{port}"
    kube, kept = Kube(configuration), KINDS[PODS].kept
    held: dict[str, Any] = {}
    changed, done = [0], threading.Event()
    before = resource.getrusage(resource.RUSAGE_SELF)

    def seen(key: object, version: int, value: object) -> None:
        held[str(key)] = value
        changed[0] += version > COUNT
        if changed[0] == COUNT:
            done.set()

    if way == "kopf":
        handlers = kopf.OperatorRegistry()

        @kopf.on.login(registry=handlers)
        def login(**_: object) -> kopf.ConnectionInfo:
            return credentials(kube)

        @kopf.on.event("", "v1", "pods", registry=handlers, labels={"carpool.dev/injected": "true"})
        async def changed_pod(event: kopf.RawEvent, **_: object) -> None:
            raw = msgspec.convert(event["object"], kept.one.type)
            seen(raw.metadata.key, raw.metadata.version, kept.keep(raw))

        stop = threading.Event()
        operator = kopf.operator(
            registry=handlers, settings=settings(), standalone=True, clusterwide=True, stop_flag=stop
        )
        threading.Thread(target=asyncio.run, args=(operator,), daemon=True).start()
    else:
        Watch(
            kube, Listing("/api/v1/pods", KINDS[PODS].query, kept, LeftOut(PODS)), Follower(seen),
            log=logging.getLogger("w"), random=Random(0),
        ).start()  # fmt: skip
    if not done.wait(300):
        raise SystemExit(f"{way}: {changed[0]} of {COUNT} changes came")
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def kept_bytes() -> dict[str, int]:
    """Return what a pod takes while it is held, either way."""
    kept = KINDS[PODS].kept
    bodies = [json.dumps(pod(number, 1)).encode() for number in range(200)]
    found = {}
    for way, read in (("own watch", lambda body: kept.keep(kept.one.decode(body))), ("kopf", json.loads)):
        tracemalloc.start()
        held = [read(body) for body in bodies]
        found[way] = tracemalloc.get_traced_memory()[0] // len(held)
        tracemalloc.stop()
    return found


async def main() -> None:
    """Measure each way twice, in turn, and write the least."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(ready))
    port = await ready
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(2):
        for way in WAYS:
            child = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--child", way, str(port), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            found[way].append(json.loads((await child.communicate())[0]))
    server.cancel()
    ways = {
        way: {"cpu_seconds": round(min(runs), 3), "bytes_kept": held}
        for (way, runs), held in zip(found.items(), kept_bytes().values(), strict=True)
    }
    size = len(json.dumps(pod(0, 1)))
    RESULTS.write_text(
        json.dumps({"date": time.strftime("%F"), "pods": COUNT, "bytes_of_a_pod": size, "ways": ways}, indent=2) + "\n"
    )
    print(RESULTS.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, metavar=("WAY", "PORT"), help=argparse.SUPPRESS)
    if child := parser.parse_args().child:
        print(json.dumps(measure(child[0], int(child[1]))))
        sys.stdout.flush()
        # The threads wait for the server for ever.
        os._exit(0)
    asyncio.run(main())
