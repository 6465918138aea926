"""The webhook on real sockets, its certificate changed under it."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import ssl
import time
from base64 import b64decode
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, BatchingPolicy, Latency
from carpool_operator.api.model import Target
from carpool_operator.injector.decide import InjectorSettings, decide
from carpool_operator.injector.patch import patch
from carpool_operator.injector.quotas import Surroundings
from carpool_operator.webhook import server as module
from carpool_operator.webhook.certificates import issue
from carpool_operator.webhook.server import KINDS, MAX_REVIEW, Injector
from carpool_operator.webhook.tls import ServingContext

NAME = "carpool-injector.carpool-system.svc"
SETTINGS = InjectorSettings(image="carpool-sidecar", version="1", public_key="ab" * 32)
SELF_TUNED = InjectorSettings(
    image="s", version="1", policy=BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(0.05))))
)
POD = {
    "metadata": {
        "name": "resnet-0",
        "annotations": {"carpool.dev/inject": "true"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "resnet", "controller": True}],
    },
    "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 9000}]}]},
}


def review(thing=None, kind="Pod"):
    request = {"uid": "u-1", "kind": {"kind": kind}, "namespace": "models", "object": thing or POD}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


@asynccontextmanager
async def serving(app, context=None):
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client(injector):
    async with serving(injector.webhook()) as port, serving(injector.admin()) as admin, aiohttp.ClientSession() as http:

        async def post(data):
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            async with http.post(f"http://127.0.0.1:{port}/mutate", data=io.BytesIO(body)) as answer:
                return answer.status, await answer.read(), answer.headers

        async def get(path):
            async with http.get(f"http://127.0.0.1:{admin}{path}") as answer:
                return answer.status, await answer.text()

        yield post, get


async def reviews(get):
    lines = (await get("/metrics"))[1].splitlines()
    return {line for line in lines if line.startswith("carpool_injector_reviews_total{")}


async def test_a_pod_is_patched():
    injector = Injector(SETTINGS, drain_key=lambda: "k" * 32)
    async with client(injector) as (post, get):
        status, body, _ = await post(review())
        answer = json.loads(body)
        assert (status, answer["kind"], answer["apiVersion"]) == (200, "AdmissionReview", "admission.k8s.io/v1")
        response = answer["response"]
        assert (response["uid"], response["allowed"], response["patchType"]) == ("u-1", True, "JSONPatch")
        added = {each["path"]: each["value"] for each in json.loads(b64decode(response["patch"]))}
        assert added["/spec/initContainers"][0]["name"] == "carpool"
        assert "k" * 32 in json.dumps(added["/spec/containers/0/lifecycle"])
        _, metrics = await get("/metrics")
        assert 'carpool_injector_reviews_total{kind="Pod",result="Injected"} 1.0' in metrics


async def test_faults_are_exported_from_the_start_so_that_the_first_one_is_an_increase():
    async with client(Injector(SETTINGS)) as (_, get):
        found = await reviews(get)
    assert found == {f'carpool_injector_reviews_total{{kind="{kind}",result="Fault"}} 0.0' for kind in KINDS}


async def test_each_pod_has_a_key_of_its_own():
    async with client(Injector(SETTINGS)) as (post, _):
        patches = [b64decode(json.loads((await post(review()))[1])["response"]["patch"]) for _ in range(2)]
    assert patches[0] != patches[1]


async def test_who_does_not_ask_is_let_through_untouched():
    async with client(Injector(SETTINGS)) as (post, _):
        _, body, _ = await post(review({"metadata": {}, "spec": {"containers": [{"name": "a"}]}}))
    assert json.loads(body)["response"] == {"uid": "u-1", "allowed": True}


async def test_annotations_without_effect_get_a_warning():
    template = {"metadata": {}, "spec": {"containers": [{"name": "server"}]}}
    deployment = {
        "metadata": {"name": "resnet", "annotations": {"carpool.dev/slo-p99": "50ms"}},
        "spec": {"template": template},
    }
    async with client(Injector(SETTINGS)) as (post, _):
        response = json.loads((await post(review(deployment, "Deployment")))[1])["response"]
    assert response["allowed"]
    assert response["warnings"][0].startswith("carpool: its pods will have no sidecar: NoPort: ")
    assert len(response["warnings"][0]) <= 256


@pytest.mark.parametrize(
    ("own", "template", "warnings"),
    [
        ({"carpool.dev/injct": "true"}, {}, ["carpool.dev/injct is not known: did you mean carpool.dev/inject?"]),
        (
            {"carpool.dev/slo-p99": "50ms"},
            {"carpool.dev/inject": "true", "carpool.dev/prot": "http"},
            ["carpool.dev/prot in the pod template is not known: did you mean carpool.dev/port?"],
        ),
        ({}, {"carpool.dev/inject": "true", "carpool.dev/port": "http"}, []),
    ],
)
async def test_typos_get_a_warning_though_nothing_is_changed(own, template, warnings):
    spec = {"containers": [{"name": "server", "ports": [{"containerPort": 9000, "name": "http"}]}]}
    deployment = {
        "metadata": {"name": "resnet", "annotations": own},
        "spec": {"template": {"metadata": {"annotations": template}, "spec": spec}},
    }
    async with client(Injector(SETTINGS)) as (post, _):
        response = json.loads((await post(review(deployment, "Deployment")))[1])["response"]
    assert "patch" not in response
    assert response.get("warnings", []) == [f"carpool: {each}" for each in warnings]


@pytest.mark.parametrize(
    ("own", "rolls"),
    [
        ({"slo-p99": "50"}, False),
        ({"slo-p97": "50ms"}, False),
        ({"slo-p99": "50", "slo-p50": "20ms"}, True),
        ({"slo-p99": "50ms", "max-batch": "many"}, True),
        ({"slo-p99": "50", "inject": "true"}, True),
    ],
)
async def test_pods_roll_once_an_annotation_that_asks_for_a_sidecar_is_valid(own, rolls):
    template = {"metadata": {}, "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 9000}]}]}}
    annotations = {f"carpool.dev/{name}": value for name, value in own.items()}
    deployment = {"metadata": {"name": "resnet", "annotations": annotations}, "spec": {"template": template}}
    async with client(Injector(SETTINGS)) as (post, _):
        response = json.loads((await post(review(deployment, "Deployment")))[1])["response"]
        template["metadata"]["annotations"] = {"carpool.dev/inject": "deployment"}
        later = json.loads((await post(review(deployment, "Deployment")))[1])["response"]
    assert ("patch" in response) == rolls
    assert response["warnings"]
    assert "patch" not in later  # a value that becomes invalid takes nothing out


async def test_who_replaces_a_whole_workload_takes_no_sidecar_out_by_a_typo():
    # Manifests in Git never have the annotation that the webhook writes.
    template = {"metadata": {}, "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 9000}]}]}}
    annotations = {"carpool.dev/slo-p99": "50"}
    new = {"metadata": {"name": "resnet", "annotations": annotations}, "spec": {"template": template}}
    old = copy.deepcopy(new)
    old["spec"]["template"]["metadata"]["annotations"] = {"carpool.dev/inject": "deployment"}
    async with client(Injector(SETTINGS)) as (post, _):
        body = review(new, "Deployment")
        body["request"]["oldObject"] = old
        response = json.loads((await post(body))[1])["response"]
    (patched,) = json.loads(b64decode(response["patch"]))
    assert "deployment" in json.dumps(patched["value"])


@pytest.mark.parametrize("target", [None, Target("models", "Deployment", "resnet")])
async def test_a_workload_with_a_sidecar_by_carpool_inject_rolls_no_pods(target):
    by_command = InjectorSettings(image="s", version="1", public_key="ab" * 32) if target else SELF_TUNED
    template = {"metadata": {}, "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 9000}]}]}}
    template = patch(template, decide(template, target, by_command, asked=True), by_command, "")
    deployment = {
        "metadata": {"name": "resnet", "annotations": {"carpool.dev/slo-p99": "50ms"}},
        "spec": {"template": template},
    }
    async with client(Injector(SETTINGS)) as (post, _):
        response = json.loads((await post(review(deployment, "Deployment")))[1])["response"]
    assert "patch" not in response
    warnings = response.get("warnings", [])
    assert [each.partition(": ")[2][:9] for each in warnings] == ([] if target else ["SelfTuned"])
    assert all("carpool inject --undo" in each for each in warnings)


async def test_a_fault_of_ours_holds_nobody_up(caplog):
    broken = {"metadata": {"annotations": {"carpool.dev/inject": "true"}}, "spec": {"containers": [7]}}
    async with client(Injector(SETTINGS)) as (post, get):
        status, body, _ = await post(review(broken))
        response = json.loads(body)["response"]
        assert (status, response["allowed"], "patch" in response) == (200, True, False)
        assert "u-1" in response["warnings"][0]
        assert 'result="Fault"} 1.0' in (await get("/metrics"))[1]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b'{"request": {}}',
        b'{"request": {"uid": "u", "kind": {"kind": "Pod"}, "object": null}}',
        b'{"request": {"uid": "u", "kind": {"kind": "Secret"}, "object": {"metadata": {}}}}',
        b'{"request": {"uid": "u", "kind": {"kind": ["Pod"]}, "object": {"metadata": {}}}}',
    ],
)
async def test_what_is_no_review_is_refused(body):
    async with client(Injector(SETTINGS)) as (post, get):
        before = await reviews(get)
        assert (await post(body))[0] == 400
        # Clients must not be able to make it remember what they like.
        assert await reviews(get) == before


async def test_a_review_has_bounds(monkeypatch):
    monkeypatch.setattr(module, "READ", 0.0)
    async with client(Injector(SETTINGS)) as (post, _):
        assert (await post(b" " * (MAX_REVIEW // 2)))[0] == 408
    monkeypatch.setattr(module, "READ", 60.0)
    async with client(Injector(SETTINGS)) as (post, _):
        assert (await post(b" " * (MAX_REVIEW + 1)))[0] == 413


async def test_readiness_says_what_is_missing():
    injector = Injector(InjectorSettings(image="i", version="1"))
    async with client(injector) as (post, get):
        assert (await get("/livez")) == (await get("/healthz")) == (200, "ok\n")
        assert await get("/readyz") == (503, "no certificate yet\n")
        injector.certificate = True
        assert await get("/readyz") == (503, "no public key yet: the operator makes it\n")
        injector.settings = SETTINGS
        assert await get("/readyz") == (200, "ready\n")
        assert "carpool_injector_ready 1.0" in (await get("/metrics"))[1]
        assert "Connection" not in (await post(review()))[2]
        injector.draining = True
        assert await get("/readyz") == (503, "draining\n")
        assert (await post(review()))[2]["Connection"] == "close"


async def test_a_certificate_changes_and_open_connections_stay():
    # TLS has a clock of its own, so this one is the real one.
    (first, first_ca), (second, second_ca) = (issue((NAME,), time.time()) for _ in range(2))
    tls = ServingContext()
    assert tls.load(*first)
    assert not tls.load(*first)

    async def peer(authority):
        context = ssl.create_default_context(cadata=authority.decode())
        return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)

    async def ask(reader, writer):
        body = json.dumps(review()).encode()
        writer.write(b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head.split()[1], json.loads(await reader.readexactly(length))["response"]["allowed"]

    async with serving(Injector(SETTINGS).webhook(), tls.context) as port:
        old = await peer(first_ca)
        assert await ask(*old) == (b"200", True)
        with pytest.raises(ssl.SSLError):
            tls.load(second.certificate, first.key)
        again = await peer(first_ca)
        assert await ask(*again) == (b"200", True), "what can't be loaded changes nothing"
        assert tls.load(*second)
        new = await peer(second_ca)
        assert await ask(*new) == (b"200", True)
        with pytest.raises(ssl.SSLCertVerificationError):
            await peer(first_ca)
        assert await ask(*old) == (b"200", True)
        for _, writer in (old, again, new):
            writer.close()
            await writer.wait_closed()


async def test_what_the_namespace_says_counts():
    async def around(namespace):
        assert namespace == "models"
        return Surroundings({"carpool.dev/sidecar-memory": "1Gi", "carpool.dev/container": "none"})

    async with client(Injector(SETTINGS, around=around)) as (post, _):
        body = json.loads((await post(review()))[1])
    added = {each["path"]: each["value"] for each in json.loads(b64decode(body["response"]["patch"]))}
    assert added["/spec/initContainers"][0]["resources"]["limits"] == {"memory": "1Gi"}
