"""Only its operator can change, read or stop a running sidecar. Pods, an admin and stolen tokens try it."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from contextlib import closing
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from minicluster import carpool
from minicluster.api import ApiError
from minicluster.operated import (
    acknowledged,
    admin,
    config_map,
    counters,
    pods,
    policy,
    published,
    read,
    says,
    scale,
    signer,
    status_until,
    target,
)
from minicluster.waiting import eventually

from carpool.exchange.change import Ticket, encode
from carpool_operator.api.model import Target
from carpool_operator.delivery.signing import Signer, new_key

OURS, OTHERS = "trust-ours", "trust-others"
STILL = {"baseline": {"maxBatch": 6, "maxWait": "3ms", "maxInFlight": 2}, "tuning": {"mode": "Hold"}}
READS = ("/v1/stats", "/v1/config", "/v1/explain")
API = "https://10.244.0.1:6443"


@pytest.fixture(scope="module")
def installed(cluster, api):
    carpool.install(cluster, api)
    yield
    for namespace in (OURS, OTHERS):
        api.delete("namespaces", namespace, missing_ok=True)
    carpool.uninstall(cluster, api)


@pytest.fixture(scope="module")
def older(installed, api):
    """Two namespaces with a model and a policy; returns a document of ours that was in force before the present one."""
    for namespace in (OURS, OTHERS):
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        api.until("serviceaccounts", namespace, bool, name="default")
        model = carpool.model("resnet", **{"carpool.dev/inject": "true"})
        api.apply(*model, policy("by-hand", "resnet", **STILL), namespace=namespace)
    for namespace in (OURS, OTHERS):
        api.until_ready("resnet", namespace, timeout=120)
        status_until(api, namespace, lambda status: acknowledged(status, 2))
    before = document(api)
    api.apply(policy("by-hand", "resnet", p99="400ms", **STILL), namespace=OURS)
    eventually(lambda: generation(document(api)) > generation(before))
    assert len(state(api)) == 2
    return before


class Document(NamedTuple):
    """What a ConfigMap holds."""

    body: str
    signature: str


def document(api, namespace=OURS):
    data = api.get("configmaps", config_map("resnet"), namespace)["data"]
    return Document(data["change.json"], data["change.sig"])


def generation(one):
    return json.loads(one.body)["generation"]


def sidecars(api):
    """Our pods."""
    return pods(api, OURS, app="resnet")


def state(api):
    """What each of our sidecars has and runs; it is what was published."""
    now = published(api, OURS, "resnet")["generation"]

    def all_run():
        reports = {pod["metadata"]["name"]: read(api, pod) for pod in sidecars(api)}
        return all(each.generation == each.running == now and each.ready for each in reports.values()) and reports

    reports = eventually(all_run)
    return {
        name: (each.generation, each.slo_seconds, each.ready, {of: lane.parameters for of, lane in each.lanes.items()})
        for name, each in reports.items()
    }


# ------------------------------------------------------------------------------------------------- from a pod


class Attempt(NamedTuple):
    """A request; ``{token}`` in a header stands for the token of the pod that makes it."""

    what: str
    method: str
    url: str
    headers: dict[str, str]
    body: str = ""


THIEF = """
import json, ssl, sys, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(folder + "/token").read()
trusted = ssl.create_default_context(cafile=folder + "/ca.crt")
for what, method, url, headers, body in json.loads(sys.argv[1]):
    headers = {name: value.replace("{token}", token) for name, value in headers.items()}
    request = urllib.request.Request(url, body.encode() or None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60, context=trusted if url[:5] == "https" else None) as answer:
            print(json.dumps([what, answer.status, answer.read().decode()]))
    except urllib.error.HTTPError as answer:
        print(json.dumps([what, answer.code, answer.read().decode()]))
"""


def by_a_pod(api, namespace, attempts):
    """Make requests from a pod with its own token; returns (what, status, body) of each answer."""
    name = f"thief-{time.monotonic_ns()}"
    thief = {"name": "thief", "image": "python", "command": ["python", "-c", THIEF, json.dumps(attempts)]}
    spec = {"restartPolicy": "Never", "containers": [thief]}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)
    ended = {"Succeeded", "Failed"}
    (pod,) = api.until(
        "pods", namespace, lambda found: found and found[0]["status"]["phase"] in ended, name=name, timeout=180
    )
    said = api.logs(name, namespace)
    assert pod["status"]["phase"] == "Succeeded", said
    answers = [json.loads(line) for line in said.splitlines()]
    assert [what for what, _, _ in answers] == [attempt.what for attempt in attempts]
    return answers


def ticket(key, **fields):
    """A ticket as a key's holder signs it."""
    body = encode(Ticket(**fields))
    return {"authorization": "Carpool " + ".".join(urlsafe_b64encode(each).decode() for each in (body, key(body)))}


def test_a_pod_reads_nothing_of_a_sidecar(older, api):
    ours, thief = signer(api), Ed25519PrivateKey.generate()
    pod = sidecars(api)[0]
    wall, name = time.time(), str(target(pod))
    ticket_of_others = ours.ticket(Target(OTHERS, "Deployment", "resnet"), wall)
    document_as_ticket = ".".join(urlsafe_b64encode(each.encode()).decode() for each in document(api))
    wrong = {
        "none": {},
        "token": {"authorization": "Bearer {token}"},
        "forged": ticket(thief.sign, target=name, expires=wall + 300),
        "expired": ticket(ours._keys[0].sign, target=name, expires=wall - 3600),
        "of-another-namespace": {"authorization": ticket_of_others},
        "of-a-neighbour": {"authorization": ours.ticket(Target(OURS, "Deployment", "other"), wall)},
        "of-another-kind": {"authorization": ours.ticket(Target(OURS, "StatefulSet", "resnet"), wall)},
        "a-document": {"authorization": f"Carpool {document_as_ticket}"},
    }
    attempts = [Attempt(f"{what} {path}", "GET", admin(pod, path), wrong[what]) for what in wrong for path in READS]
    own = {"authorization": ours.ticket(target(pod), wall)}
    attempts += [Attempt(path, "GET", admin(pod, path), own) for path in READS]
    for where in (OURS, OTHERS):
        answers = by_a_pod(api, where, attempts)
        assert [(what, status) for what, status, _ in answers[-len(READS) :]] == [(path, 200) for path in READS]
        assert {(what, status) for what, status, _ in answers[: -len(READS)] if status != 403} == set()
        assert not any("maxBatch" in body for _, status, body in answers if status != 200)


def test_a_pod_changes_nothing_of_a_sidecar(older, api):
    before, now = state(api), document(api)
    pod = sidecars(api)[0]
    thief, ours = Signer(new_key()), signer(api)
    newer = json.loads(now.body) | {"generation": generation(now) + 1}
    more = json.dumps(newer)
    change = ours.read(now.body.encode(), now.signature)
    forged, forged_signature = thief.sign(change)
    wrong = {
        "unsigned": (Document(more, ""), "signature"),
        "not changed but for a number": (Document(more, now.signature), "signature"),
        "of another key": (Document(forged.decode(), forged_signature), "signature"),
        "of another namespace": (document(api, OTHERS), "target"),
        "older": (older, "older"),
    }
    headers = {"content-type": "application/json", "authorization": "Bearer {token}"}
    attempts = [
        Attempt(what, "PUT", admin(pod, "/v1/config"), {**headers, "x-carpool-signature": one.signature}, one.body)
        for what, (one, _) in wrong.items()
    ]
    rejected = read(api, pod).rejected
    answers = by_a_pod(api, OTHERS, attempts)
    said = {what: (status, json.loads(body).get("reason")) for what, status, body in answers}
    assert {reason for _, reason in said.values()} == {"signature", "target", "older"}, said
    assert {what: reason for what, (_, reason) in said.items()} == {what: why for what, (_, why) in wrong.items()}
    assert all(400 <= status < 500 for status, _ in said.values()), said
    counted = read(api, pod).rejected
    assert sum(counted.values()) == sum(rejected.values()) + len(wrong)
    assert state(api) == before
    # What is in force may come again, from anybody, and changes nothing.
    same = Attempt("same", "PUT", admin(pod, "/v1/config"), {"x-carpool-signature": now.signature}, now.body)
    assert by_a_pod(api, OTHERS, [same])[0][1] == 200
    assert state(api) == before


def drain_key(pod):
    """The secret of a pod's own hook."""
    (sidecar,) = [each for each in pod["spec"]["initContainers"] if each["name"] == "carpool"]
    (config,) = [json.loads(each["value"]) for each in sidecar["env"] if each["name"] == "CARPOOL_CONFIG"]
    return config["drainKey"]


def restarts(pod):
    """How often a pod's sidecar was started again; nothing while it is not ready."""
    (one,) = [each for each in pod["status"]["initContainerStatuses"] if each["name"] == "carpool"]
    return one["restartCount"] if one["ready"] else None


def test_nobody_drains_a_sidecar_but_its_own_hook(older, api):
    pod, sibling = sidecars(api)
    ours = signer(api).ticket(target(pod), time.time())
    wrong = {
        "none": {},
        "token": {"authorization": "Bearer {token}"},
        "ticket": {"authorization": ours},
        "a sibling's": {"x-carpool-drain": drain_key(sibling)},
    }
    url = admin(pod, "/drain")
    answers = by_a_pod(api, OURS, [Attempt(what, "GET", url, headers) for what, headers in wrong.items()])
    assert {(what, status) for what, status, _ in answers} == {(what, 403) for what in wrong}
    assert read(api, pod).ready
    answers = by_a_pod(api, OURS, [Attempt("its own", "GET", url, {"x-carpool-drain": drain_key(pod)})])
    assert answers[0][1] == 200, answers
    # Its model goes on, so there is a fresh one soon, and it runs what its siblings do.
    fresh = restarts(pod) + 1
    api.until("pods", OURS, lambda found: restarts(found[0]) == fresh, name=pod["metadata"]["name"], timeout=120)
    assert eventually(lambda: read(api, pod)).target == str(target(pod))
    api.until_ready("resnet", OURS)
    state(api)


def test_a_stolen_token_gives_nothing(older, api):
    bearer = {"authorization": "Bearer {token}"}
    patch = {**bearer, "content-type": "application/merge-patch+json"}
    policies = f"{API}/apis/carpool.dev/v1alpha1/namespaces/{OURS}/batchingpolicies/by-hand"
    maps = f"{API}/api/v1/namespaces/{OURS}/configmaps/{config_map('resnet')}"
    secrets = f"{API}/api/v1/namespaces/{carpool.SYSTEM}/secrets"
    lease = f"{API}/apis/coordination.k8s.io/v1/namespaces/{carpool.SYSTEM}/leases/carpool-operator"
    mode = json.dumps({"spec": {"tuning": {"mode": "Apply"}}})
    attempts = [
        Attempt("secrets", "GET", secrets, bearer),
        Attempt("signing key", "GET", f"{secrets}/carpool-signing-key", bearer),
        Attempt("policy", "PATCH", policies, patch, mode),
        Attempt("status", "PATCH", f"{policies}/status", patch, json.dumps({"status": {"applied": None}})),
        Attempt("configmap", "PATCH", maps, patch, json.dumps({"data": {"change.sig": ""}})),
        Attempt("lease", "DELETE", lease, bearer),
    ]  # fmt: skip
    who = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
    headers = {**bearer, "content-type": "application/json"}
    genuine = Attempt("who", "POST", f"{API}/apis/authentication.k8s.io/v1/selfsubjectreviews", headers, who)
    *answers, (_, status, body) = by_a_pod(api, OURS, [*attempts, genuine])
    assert status == 201
    assert json.loads(body)["status"]["userInfo"]["username"] == f"system:serviceaccount:{OURS}:default"
    assert {(what, status) for what, status, _ in answers} == {(attempt.what, 403) for attempt in attempts}


def test_the_operator_alone_may_read_the_key(older, api):
    key = ("secrets", "carpool-signing-key", carpool.SYSTEM)
    with closing(api.as_account("carpool-operator", carpool.SYSTEM)) as operator:
        assert operator.get(*key)
    with closing(api.as_account("carpool-injector", carpool.SYSTEM)) as injector, pytest.raises(ApiError, match="403"):
        injector.get(*key)


# ------------------------------------------------------------------------------------------------- a namespace's admin


@pytest.fixture
def boss(older, api):
    """An account that may do everything in our namespace, and nothing elsewhere."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "boss"}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "boss"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "boss", "namespace": OURS}],
    }
    api.apply(account, binding, namespace=OURS)
    one = api.as_account("boss", OURS)
    for verb in ("patch", "delete"):
        one.until_allowed(verb, "configmaps", OURS)
    yield one
    one.close()


def test_who_may_edit_the_configmap_changes_no_running_sidecar_and_it_is_put_right(older, api, boss):
    before, now = state(api), document(api)
    others = document(api, OTHERS)
    wide = json.loads(now.body)
    wide["parameters"]["*"]["maxBatch"] = 64
    scale(api, "carpool-operator", 0)  # so that all is seen before it is put right
    try:
        for one, reason in (
            (Document(json.dumps(wide), now.signature), "signature"),
            (Document(now.body, None), "content"),
            (others, "target"),
            (older, "older"),
        ):
            seen = {pod["metadata"]["name"]: read(api, pod).rejected.get(reason, 0) for pod in sidecars(api)}
            data = {"change.json": one.body, "change.sig": one.signature}
            boss.patch("configmaps", config_map("resnet"), OURS, body={"data": data})
            for pod in sidecars(api):
                told = eventually(
                    lambda pod=pod, seen=seen, reason=reason: (
                        (found := read(api, pod)).rejected.get(reason, 0) > seen[pod["metadata"]["name"]] and found
                    )
                )
                assert (told.generation, told.running) == (generation(now), generation(now))
                assert bool(told.change_error) == (reason != "older")
                assert told.slo_seconds == before[pod["metadata"]["name"]][1]
        with pytest.raises(ApiError, match="403"):
            boss.get("configmaps", config_map("resnet"), OTHERS)
        with pytest.raises(ApiError, match="403"):
            boss.get("secrets", "carpool-signing-key", carpool.SYSTEM)
    finally:
        scale(api, "carpool-operator", 1)
    # Nobody but the operator's own key says what it goes on from: the promise and the parameters are the policy's.
    eventually(lambda: generation(document(api)) >= generation(now))
    after, one = state(api), document(api)
    assert signer(api).read(one.body.encode(), one.signature)
    assert {each[1:3] for each in after.values()} == {each[1:3] for each in before.values()}
    assert json.loads(document(api).body)["parameters"]["*"] == json.loads(now.body)["parameters"]["*"]
    status_until(api, OURS, lambda status: says(status, "Ready", "Ready") and acknowledged(status, 2))


def test_while_it_runs_the_operator_puts_right_what_others_write(older, api, boss):
    operator = api.get("deployments", "carpool-operator", carpool.SYSTEM)
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    add = [{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--resync=2s"}]
    kind = "application/json-patch+json"
    api.patch("deployments", "carpool-operator", carpool.SYSTEM, body=add, content=kind)
    api.until_ready("carpool-operator", carpool.SYSTEM, timeout=120)
    try:
        eventually(lambda: counters(api, "pods_acknowledged") == 4)
        now = document(api)
        data = {"change.json": older.body, "change.sig": older.signature}
        patched = boss.patch("configmaps", config_map("resnet"), OURS, body={"data": data})
        assert patched["data"]["change.json"] == older.body
        eventually(lambda: document(api) == now)
        boss.delete("configmaps", config_map("resnet"), OURS)
        eventually(
            lambda: any(each["metadata"]["name"] == config_map("resnet") for each in api.find("configmaps", OURS))
        )
        assert document(api) == now
        state(api)
    finally:
        put_back = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
        api.patch("deployments", "carpool-operator", carpool.SYSTEM, body=put_back, content=kind)
        api.until_ready("carpool-operator", carpool.SYSTEM, timeout=120)
