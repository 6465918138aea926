"""A real Prometheus scrapes a real sidecar under load: what is read back equals what the sidecar says itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import generate_latest

from carpool.batching.counters import ModelStats
from carpool.exchange.report import decode
from carpool_operator.api.model import Pod, Policy, Target
from carpool_operator.api.spec import Prometheus as Settings
from carpool_operator.api.spec import read_policy
from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.reporting.metrics import OperatorMetrics
from carpool_operator.tuning.evidence import Evidence
from carpool_operator.tuning.sources.endpoint import endpoint
from carpool_operator.tuning.sources.prometheus import Prometheus, open_session
from carpool_operator.webhook.server import Injector

PATIENCE = 60.0

pytestmark = pytest.mark.real


POD = Pod(
    namespace="shop", name="resnet-0.a", uid="u1", target=Target("shop", "Deployment", "resnet"), ip="127.0.0.1",
    admin_port=0, ready=True, deleting=False, template_hash="h",
)  # fmt: skip


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def processes():
    started = []

    def start(*command, **options):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)  # noqa: S603 - our own, and Prometheus
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
    for process in reversed(started):
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def answers(http, url):
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def source():
    async with open_session() as session:

        def made(port, **options):
            options = {"stale_after": 30.0, **options}
            return Prometheus(endpoint(Settings(url=f"http://127.0.0.1:{port}"), {}), session, **options)

        yield made


def sidecar(processes, tmp_path, model, name="sidecar", slo=None):
    data, admin = free_port(), free_port()
    config = tmp_path / f"{name}.json"
    config.write_text(
        json.dumps(
            {
                "listen": f"127.0.0.1:{data}", "admin": f"127.0.0.1:{admin}",
                "upstream": {"url": f"http://127.0.0.1:{model}"}, "shutdown": {"lame": "0s"},
                "policy": {"slo": slo or {"latency": {"p99": "5s"}}},
                "parameters": {"*": {"maxBatch": 8, "maxWait": "2ms", "maxInFlight": 2}},
            }
        )
    )  # fmt: skip
    process = processes(
        sys.executable, "-m", "carpool_sidecar.main", "--config", str(config), stderr=subprocess.DEVNULL
    )
    return process, data, admin


def prometheus(program, processes, tmp_path, admin, others=(), rules=()):
    """Start one that scrapes a sidecar, and ``others`` with their labels: pairs of port and labels."""
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                "scrape_configs": [
                    {
                        "job_name": "carpool",
                        "static_configs": [
                            {
                                "targets": [f"127.0.0.1:{admin}"],
                                "labels": {
                                    "namespace": POD.namespace,
                                    "pod": POD.name,
                                    "container": "carpool",
                                    "target": "Deployment/resnet",
                                },
                            }
                        ],
                    },
                    *(
                        {
                            "job_name": f"other-{number}",
                            "static_configs": [{"targets": [f"127.0.0.1:{other}"], "labels": labels}],
                        }
                        for number, (other, labels) in enumerate(others)
                    ),
                ],
                "rule_files": [str(each) for each in rules],
            }
        )
    )
    process = processes(
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error", env={**os.environ, "GOMAXPROCS": "1"},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return process, port


async def load(http, url, requests):
    async def one(number):
        async with http.post(f"{url}/v1/models/m:predict", json={"instances": [[number, 1.5]]}) as response:
            await response.read()
            return response.status

    for start in range(0, requests, 20):
        assert set(await asyncio.gather(*(one(number) for number in range(start, start + 20)))) == {200}


async def said(http, admin):
    async with http.get(f"http://127.0.0.1:{admin}/v1/stats") as response:
        return decode(await response.read())


@pytest.fixture
async def model(processes, tmp_path, http):
    """The port of a model that answers at once."""
    port = free_port()
    profile = tmp_path / "tiny.json"
    profile.write_text(
        json.dumps({"name": "m", "source": "synthetic", "executors": 2, "rows": [1, 8], "seconds": [0.001, 0.002]})
    )
    processes(
        sys.executable, "-m", "carpool_cli", "standin", "--profile", str(profile), "--port", str(port),
        "--model", "m", stdout=subprocess.DEVNULL,
    )  # fmt: skip
    await answers(http, f"http://127.0.0.1:{port}/v2/health/ready")
    return port


async def test_it_reads_what_the_sidecar_counted(program, processes, tmp_path, http, source, model):
    first, data, admin = sidecar(processes, tmp_path, model)
    server, port = prometheus(program, processes, tmp_path, admin)
    await answers(http, f"http://127.0.0.1:{admin}/readyz")
    await answers(http, f"http://127.0.0.1:{port}/-/ready")
    reader = source(port)

    async def reading(until, now=100.0):
        async with asyncio.timeout(PATIENCE):
            while True:
                found = (await reader.read(POD.namespace, [POD], now)).get(POD.uid)
                if found is not None and until(found):
                    return found
                await asyncio.sleep(0.1)

    # 1. Under load, then at rest: every counter equals the sidecar's own
    async with http.post(f"http://127.0.0.1:{data}/v1/completions", json={"model": "m", "prompt": "x"}) as response:
        assert response.status == 404  # of the stand-in, which speaks V1 and V2
    await load(http, f"http://127.0.0.1:{data}", 400)
    before = await said(http, admin)
    async with asyncio.timeout(PATIENCE):  # the window of the last arrival closes with the next one's
        while (own := await said(http, admin)).stats.models["m"].windows < before.stats.models["m"].windows + 2:  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.1)
    found = await reading(
        lambda reading: (
            reading.report is not None and reading.report.stats.models["m"].windows >= own.stats.models["m"].windows
        )
    )
    read, written = found.report.stats.models["m"], own.stats.models["m"]
    assert read.arrivals == 400
    for name in set(ModelStats.__struct_fields__) - {"windows", "cells"}:
        assert getattr(read, name) == getattr(written, name), name
    assert sorted(read.samples()) == sorted(written.samples())
    assert read.cells
    streamed = found.report.token_streams
    assert (streamed.arrivals, [each.ends for each in streamed.models]) == (1, [{"404": 1}])
    assert [(each.ttft, each.tpot) for each in streamed.models] == [
        (each.ttft, each.tpot) for each in own.token_streams.models
    ]
    assert found.report.stats.device_busy == own.stats.device_busy
    assert (found.report.generation, found.report.running) == (own.generation, own.running)
    assert found.report.ready
    assert found.report.uptime_seconds > 0
    assert found.report.lanes["m"].parameters == own.lanes["m"].parameters
    assert 100.0 - 5 < found.at <= 100.0

    # 2. What is between two readings is what was counted between two scrapes
    await load(http, f"http://127.0.0.1:{data}", 100)
    later = await reading(
        lambda reading: reading.report is not None and reading.report.stats.models["m"].served == 500, now=200.0
    )
    since = later.report.stats.since(found.report.stats)
    assert since.models["m"].arrivals == 100
    assert sum(since.models["m"].durations) == 100
    assert later.report.stats.at > found.report.stats.at
    evidence = Evidence(str(POD.target))
    evidence.turn([POD])
    evidence.gather(100.0, [POD], {POD.uid: found}, 30.0)
    (sample,) = evidence.gather(200.0, [POD], {POD.uid: later}, 30.0).samples
    assert (sample.generation, sample.models["m"].hits) == (own.running, 100)
    assert sample.seconds == pytest.approx(later.report.stats.at - found.report.stats.at)
    assert later.report.lanes["m"].pass_through == own.lanes["m"].pass_through

    # 3. A server that hangs costs no more than was said
    server.send_signal(signal.SIGSTOP)
    # Until all its threads have stopped: one may answer meanwhile.
    await asyncio.to_thread(os.waitpid, server.pid, os.WUNTRACED)
    try:
        quick = source(port, timeout=0.5)
        stopped = (await quick.read(POD.namespace, [POD], 100.0))[POD.uid]
    finally:
        server.send_signal(signal.SIGCONT)
    assert stopped.report is None
    assert "did not answer within 500ms" in stopped.error

    # 4. The sidecar gone: nothing is read of it any more, and the error names the question
    first.send_signal(signal.SIGTERM)
    first.wait(20)
    gone = await reading(lambda reading: reading.report is None)
    assert 'has no carpool_config_generation{namespace="shop",pod=~"resnet-0[.]a"}' in gone.error
    assert "podMonitor" in gone.error


MONITORING = Path(__file__).parents[4] / "charts" / "carpool" / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
QUERIES = {
    f"{panel['title']} {each['refId']}": each["expr"] for panel in DASHBOARD["panels"] for each in panel["targets"]
}
QUERIES |= {each["name"]: each["expr"] for each in DASHBOARD["annotations"]["list"]}
QUIET = {
    "Misses, by reason A", "Headers that keep requests apart A", "Not batched, by reason A", "Roll-backs",
    "Operator: what went wrong A", "Operator: what went wrong B", "Operator: what went wrong C",
    "Token streams: how fast the error budget burns A",
}  # fmt: skip
"""What is empty where nothing goes wrong, or needs targets for five minutes: valid, which is all that is asked."""

ENGINE = {
    "name": "fast", "source": "synthetic", "kvTokens": 10_000, "maxRunning": 8,
    "step": {"form": "linear", "base": 0.001, "sequence": 1e-5, "kvToken": 1e-9, "promptToken": 1e-6},
}  # fmt: skip


@pytest.fixture
async def engine(processes, tmp_path, http):
    """The port of a stand-in for an engine."""
    port, profile = free_port(), tmp_path / "engine.json"
    profile.write_text(json.dumps(ENGINE))
    processes(
        sys.executable, "-m", "carpool_cli", "standin", "--profile", str(profile), "--port", str(port),
        "--model", "llm", stdout=subprocess.DEVNULL,
    )  # fmt: skip
    await answers(http, f"http://127.0.0.1:{port}/health")
    return port


async def stream(http, url):
    asked = {"model": "llm", "prompt": "x" * 40, "max_tokens": 5, "stream": True}
    async with http.post(f"{url}/v1/completions", json=asked) as response:
        await response.read()
        assert response.status == 200


async def test_every_panel_of_the_dashboard_shows_something(program, processes, tmp_path, http, model, engine):
    operator, injector = OperatorMetrics(), Injector(InjectorSettings(image="", version=""))
    status = {
        "conditions": [{"type": "SLOMet", "status": "False", "reason": "Missed"}],
        "lastDecision": {"action": "Applied", "reason": "LessDeviceTime", "at": "2026-01-01T00:00:00Z"},
    }
    spec = read_policy({"spec": {"targetRefs": [{"name": "resnet"}], "slo": {"latency": {"p99": "5s"}}}})
    policy = Policy(namespace="shop", name="resnet", uid="u", generation=1, created=0.0, spec=spec,
                    error="", status=status)  # fmt: skip
    operator.read_policies(lambda: [policy])
    for name, value in (("leader", 1), ("pods_acknowledged", 1), ("pods_missed", 0)):
        operator.set(name, value)
    operator.set("objects", 1, "pods")

    async def metrics(_):
        operator.count("decisions", "Applied", "LessDeviceTime")
        injector.reviews.labels("Pod", "Injected").inc()
        return web.Response(body=operator.text() + generate_latest(injector.registry))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _, data, admin = sidecar(processes, tmp_path, model)
    targets = {"ttft": {"p99": "20s"}, "tpot": {"p99": "10s"}}
    _, streams, streams_admin = sidecar(processes, tmp_path, engine, "streams", targets)
    others = [
        (runner.addresses[0][1], {"namespace": "carpool-system", "pod": "operator-1"}),
        (streams_admin, {"namespace": "shop", "pod": "llm-0", "target": "Deployment/llm"}),
    ]
    _, port = prometheus(program, processes, tmp_path, admin, others, [MONITORING / "alerts.yaml"])
    for each in (admin, streams_admin):
        await answers(http, f"http://127.0.0.1:{each}/readyz")
    await answers(http, f"http://127.0.0.1:{port}/-/ready")

    async def result(expression):
        text = re.sub(r"\$__rate_interval", "30s", re.sub(r"\$(namespace|target|model)\b", ".*", expression))
        async with http.post(f"http://127.0.0.1:{port}/api/v1/query", data={"query": text}) as response:
            answer = await response.json()
        assert answer["status"] == "success", (expression, answer)
        return [each for each in answer["data"]["result"] if each["value"][1] != "NaN"]

    empty = set(QUERIES)
    try:
        async with asyncio.timeout(PATIENCE):
            while empty - QUIET:
                await load(http, f"http://127.0.0.1:{data}", 20)
                await stream(http, f"http://127.0.0.1:{streams}")
                empty = {name for name in sorted(empty) if not await result(QUERIES[name])}
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"nothing in {sorted(empty - QUIET)}")
    finally:
        await runner.cleanup()
    async with http.get(f"http://127.0.0.1:{port}/api/v1/rules") as response:
        groups = (await response.json())["data"]["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert set(health.values()) == {"ok"}, health
