from __future__ import annotations

import asyncio
from base64 import b64encode
from random import Random

import aiohttp
import msgspec
import pytest
from aiohttp import web
from fake_pod import WALL
from things import as_kept, pod, policy

from carpool_operator.cluster.objects import RawPod, RawPolicy
from carpool_operator.cluster.writing import Backoff
from carpool_operator.delivery.signing import new_key
from carpool_operator.tuning.sources.choice import SECRETS, Sources
from carpool_operator.tuning.sources.sidecar import Sidecars


@pytest.fixture
async def sources(writer, signer, clock):
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Sources(
            writer, signer, Sidecars(session, asyncio.Semaphore(4), clock), session,
            Backoff(Random(1)), clock=clock, wall=lambda: WALL,
        )  # fmt: skip


def at(sidecar, **fields):
    return msgspec.structs.replace(as_kept(RawPod, pod()), admin_port=sidecar.port, **fields)


async def test_sidecars_are_asked_themselves(sources, sidecar):
    there = [at(sidecar), at(sidecar, uid="b", ip=""), at(sidecar, uid="c", deleting=True)]

    readings = await sources.read(as_kept(RawPolicy, policy()), there, fleet=3)

    assert list(readings) == ["uid-web-1"]
    assert readings["uid-web-1"].report == sidecar.report()


async def test_one_that_fails_keeps_its_error_and_is_asked_later(sources, sidecar, clock):
    sidecar.status = 500
    one, wanted = at(sidecar), as_kept(RawPolicy, policy())
    for _ in range(5):
        readings = await sources.read(wanted, [one], fleet=1)
        assert readings[one.uid].error == "it answers 500: no"
    assert sidecar.asked == 1

    clock.now += 2.0
    sidecar.status = 200
    assert (await sources.read(wanted, [one], fleet=1))[one.uid].report is not None
    assert (await sources.read(wanted, [one], fleet=1))[one.uid].report is not None
    assert sidecar.asked == 3


async def test_one_that_is_gone_is_forgotten(sources, sidecar):
    sidecar.status = 500
    one, wanted = at(sidecar), as_kept(RawPolicy, policy())
    await sources.read(wanted, [one], fleet=1)

    sources.forget(set(), set())
    await sources.read(wanted, [one], fleet=1)

    assert sidecar.asked == 2


class Prometheus:
    """Answers that it has nothing, if the request has the token."""

    def __init__(self):
        self.asked = []
        self.runner = None

    async def start(self):
        application = web.Application()
        application.add_routes([web.post("/api/v1/query", self._query)])
        self.runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def _query(self, request):
        self.asked.append(request.headers.get("authorization"))
        kind = "matrix" if "vllm" in (await request.post())["query"] else "vector"
        return web.json_response({"status": "success", "data": {"resultType": kind, "result": []}})


@pytest.fixture
async def prometheus():
    one = await Prometheus().start()
    yield one
    await one.runner.cleanup()


def by_prometheus(url):
    body = policy()
    auth = {"bearer": {"name": "credentials", "key": "token"}}
    body["spec"]["metrics"] = {
        "source": "Prometheus", "staleAfter": "60s", "prometheus": {"url": url, "interval": "15s", "auth": auth}
    }  # fmt: skip
    return as_kept(RawPolicy, body)


def secret(api, token):
    api.put("v1", "secrets", {"metadata": {"name": "credentials"}, "data": {"token": b64encode(token).decode()}})


async def test_a_prometheus_is_asked_instead_as_often_as_it_scrapes(api, sources, sidecar, prometheus, clock):
    secret(api, b"first")
    wanted, one = by_prometheus(prometheus.url), at(sidecar)
    told = []
    for _ in range(20):
        told += (await sources.read(wanted, [one], fleet=1)).values()
        clock.now += 2.0

    assert sidecar.asked == 0
    assert ["podMonitor" in each.error for each in told] == [True] * 3
    assert prometheus.asked == ["Bearer first"] * 3  # 40 s
    assert api.log == ["GET /api/v1/namespaces/ns/secrets/credentials"]


async def test_a_prometheus_is_not_asked_about_no_pods(sources, sidecar, prometheus, api):
    secret(api, b"token")
    wanted = by_prometheus(prometheus.url)
    assert await sources.read(wanted, [at(sidecar, ip="")], fleet=1) == {}
    assert (prometheus.asked, api.log) == ([], [])

    await sources.read(wanted, [at(sidecar)], fleet=1)
    assert prometheus.asked == ["Bearer token"]  # at once: asking nothing was no asking


async def test_engines_have_a_turn_of_their_own(api, sources, sidecar, prometheus, clock):
    secret(api, b"token")
    wanted, one = by_prometheus(prometheus.url), at(sidecar)
    found = []
    for _ in range(20):
        await sources.read(wanted, [one], fleet=1)
        found.append(await sources.engines(wanted, ["llama-1"]))
        clock.now += 2.0
    assert len(prometheus.asked) == 6
    assert ["no metrics of vLLM" in each["llama-1"] for each in found if each is not None] == [True] * 3
    assert await sources.engines(wanted, []) is None


async def test_new_credentials_are_found(api, sources, sidecar, prometheus, clock):
    wanted, one = by_prometheus(prometheus.url), at(sidecar)
    readings = await sources.read(wanted, [one], fleet=1)
    assert "no Secret credentials with the key token" in readings[one.uid].error
    assert prometheus.asked == []

    for token in (b"first", b"second"):
        secret(api, token)
        clock.now += SECRETS
        await sources.read(wanted, [one], fleet=1)
    assert prometheus.asked == ["Bearer first", "Bearer second"]


async def test_the_key_that_signs_is_nobody_s_password(api, sources, sidecar, prometheus):
    """The operator may read it, and in its own namespace there may be policies, too."""
    data = {"privateKey.pem": b64encode(new_key()).decode(), "name": b64encode(b"me").decode()}
    api.put("v1", "secrets", {"metadata": {"name": "carpool-signing-key"}, "data": data})
    keys = {"username": "name", "password": "privateKey.pem"}
    basic = {name: {"name": "carpool-signing-key", "key": key} for name, key in keys.items()}
    body = policy()
    body["spec"]["metrics"] = {"source": "Prometheus", "prometheus": {"url": prometheus.url, "auth": {"basic": basic}}}
    one = at(sidecar)

    readings = await sources.read(as_kept(RawPolicy, body), [one], fleet=1)

    assert "no Secret carpool-signing-key" in readings[one.uid].error
    assert prometheus.asked == []


async def test_a_certificate_may_stand_in_a_configmap(api, sources, sidecar, clock):
    body = policy()
    api.put("v1", "configmaps", {"metadata": {"name": "ca"}, "data": {"ca.crt": "no certificate"}})
    body["spec"]["metrics"] = {
        "source": "Prometheus",
        "staleAfter": "60s",
        "prometheus": {"url": "https://127.0.0.1:1", "tls": {"ca": {"configMap": {"name": "ca", "key": "ca.crt"}}}},
    }
    one = at(sidecar)

    readings = await sources.read(as_kept(RawPolicy, body), [one], fleet=1)

    assert "no certificates in PEM" in readings[one.uid].error
