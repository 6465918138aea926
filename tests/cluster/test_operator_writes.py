"""The operator on a real API server: what it writes, that only one does, and that nothing keeps it from its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests
import yaml
from minicluster import carpool
from minicluster.faults import FaultProxy
from minicluster.waiting import eventually

from carpool_operator.delivery.signing import PRIVATE, PUBLIC_MAP, SECRET, Signer, new_key

CRD = Path(__file__).parents[2] / "crds" / "carpool.dev_batchingpolicies.yaml"
COMMAND = Path(sys.executable).parent / "carpool-operator"
QUIET = 10
"""Passes in which whatever is going to be written is."""


@pytest.fixture(scope="module")
def crd(api):
    api.apply(yaml.safe_load(CRD.read_text()))
    api.until_served(carpool.CRD)


@pytest.fixture
def proxies(cluster):
    """Make proxies; they are closed after all that goes through them has ended."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(FaultProxy(cluster))


@pytest.fixture
def proxy(proxies):
    return proxies()


class Process:
    """An operator that looks at one namespace, which is also its own."""

    def __init__(self, cluster, kubeconfig, namespace, identity, log, *flags):
        self.identity = identity
        self.log = log
        self._file = log.open("ab")
        self._before = self._file.tell()  # of lives before this one
        self._popen = subprocess.Popen(  # noqa: S603 - our own command
            [
                COMMAND, "--kubeconfig", kubeconfig, "--namespace", namespace, "--watch-namespace", namespace,
                "--identity", identity, "--interval", "200ms", "--resync", "2s", "--metrics-host", "127.0.0.1",
                "--metrics-port", "0", *flags,
            ],
            stderr=self._file,
            env=cluster.environment(),
        )  # fmt: skip

    def kill(self):
        self._popen.kill()
        self._popen.wait()

    def end(self):
        """Stop it; returns its exit code."""
        self._popen.send_signal(signal.SIGTERM)
        return self._popen.wait(timeout=120)

    @property
    def pid(self):
        return self._popen.pid

    @property
    def ended(self):
        return self._popen.poll() is not None

    @property
    def lines(self):
        """What it has logged, as far as the lines are whole."""
        text = self.log.read_bytes()[self._before :].decode()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]

    def passes(self):
        """How many passes it has made."""
        port = next((line["port"] for line in self.lines if line["event"] == "started"), None)
        if port is None:
            return 0.0
        text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        found = re.search(r"^carpool_operator_pass_seconds_count (.*)$", text, re.MULTILINE)
        return float(found[1])

    def ends_in_time(self):
        """Wait until it has ended, or led for so many passes that whatever it is going to write is written."""
        last = None
        while not self.ended:
            with suppress(requests.RequestException):  # it ends
                now = self.passes()
                last = now + QUIET if last is None else last
                if now >= last:
                    return False
            time.sleep(0.05)
        return True

    def close(self):
        if not self.ended:
            self.kill()
        self._file.close()


@pytest.fixture
def start(cluster, proxies, api, namespace, crd, tmp_path):
    """Start operators; those that are left are killed in the end."""
    made = []

    def begin(proxy, identity="a", *flags):
        config = proxy.kubeconfig(api.token, namespace)
        made.append(Process(cluster, config, namespace, identity, tmp_path / f"{identity}.log", *flags))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def policy(name="by-hand", target="web", p99="50ms"):
    return {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "BatchingPolicy",
        "metadata": {"name": name},
        "spec": {"targetRefs": [{"name": target}], "slo": {"latency": {"p99": p99}}},
    }


def deployment(name="web", **annotations):
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "annotations": {f"carpool.dev/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "pause"}]}},
        },
    }


def has_status(found):
    """Whether a policy's status is of its spec, and all its pods run what is published."""
    if not found or found[0].get("status", {}).get("observedGeneration") != found[0]["metadata"]["generation"]:
        return False
    status = found[0]["status"]
    targets = status.get("targets", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status["conditions"])
    return all(each["acknowledged"] == each["injected"] == each["replicas"] for each in targets) and (
        ready or not any(each["replicas"] for each in targets)
    )


def end_state(api, namespace):
    """What the operator made, without names, times and numbers that differ from life to life."""
    policies = {}
    for one in api.find("batchingpolicies", namespace):
        status = one.get("status", {})
        conditions = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", [])}
        owners = [each["name"] for each in one["metadata"].get("ownerReferences", [])]
        assert not one["metadata"].get("finalizers")
        policies[one["metadata"]["name"]] = (one["spec"], conditions, owners)
        for target in status.get("targets", []):
            assert target["acknowledged"] == target["injected"] == target["replicas"]
    maps = {}
    for one in api.find("configmaps", namespace, labels="carpool.dev/change=true"):
        change = json.loads(one["data"]["change.json"])
        assert not one["metadata"].get("finalizers")
        owners = [each["name"] for each in one["metadata"]["ownerReferences"]]
        maps[one["metadata"]["name"]] = (change["parameters"], change.get("policy"), owners)
    return {"policies": policies, "maps": maps}


def populate(api, namespace):
    """What users have: one workload with a policy by hand, whose pods may run already, and one annotated."""
    if not api.find("deployments", namespace, fields="metadata.name=web"):
        api.apply(deployment(), namespace=namespace)
    api.apply(deployment("annotated", slo_p99="80ms"), policy(), namespace=namespace)


def until_done(api, namespace):
    """Wait for both policies' statuses, and for whatever else comes of them."""
    for name in ("by-hand", "deployment-annotated"):
        api.until("batchingpolicies", namespace, has_status, name=name, timeout=120)


def until_quiet(proxy, one):
    """Wait until the one that leads has written nothing but leases for a while; returns how much it wrote in all."""
    deadline = time.monotonic() + 120
    seen, since = -1, 0.0
    while time.monotonic() < deadline:
        passes, written = one.passes(), len(written_by(proxy))
        if written != seen:
            seen, since = written, passes
        elif passes >= since + QUIET:
            return seen
        time.sleep(0.05)
    raise AssertionError(f"it writes on and on: {list(proxy.writes)[-10:]}")


def until_alike(api, namespace, expected):
    """Wait until all is as it was in another life: what was refused is tried again ever later."""

    def alike():
        assert end_state(api, namespace) == expected
        return True

    eventually(alike, timeout=120)


def written_by(proxy):
    """What was written through a proxy, but for leases."""
    return [each for each in list(proxy.writes) if not is_lease(each)]


def until_leading(proxy, one, renewed):
    """Wait until it has written its lease more than ``renewed`` times, or has ended. The time that it takes to start
    does not show what it has left to write."""
    deadline = time.monotonic() + 120
    while not one.ended and sum(map(is_lease, proxy.writes)) <= renewed:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_lease(request):
    return "/leases" in request.path


def test_a_policy_gets_a_status_an_annotation_a_policy_a_typo_an_event(start, proxy, api, namespace):
    start(proxy)
    populate(api, namespace)
    until_done(api, namespace)

    api.annotate("deployment", "annotated", namespace, slo_p99="90ms")
    api.until(
        "batchingpolicies", namespace,
        lambda found: found and found[0]["spec"]["slo"]["latency"]["p99"] == "90ms", name="deployment-annotated",
    )  # fmt: skip
    api.annotate("deployment", "annotated", namespace, slo_p99="90")
    event = wait_for_event(api, namespace, "AnnotationInvalid")
    assert event["involvedObject"]["name"] == "annotated"
    assert api.get("batchingpolicies", "deployment-annotated", namespace)["spec"]["slo"]["latency"]["p99"] == "90ms"
    api.annotate("deployment", "annotated", namespace, slo_p99=None)
    api.until_gone("batchingpolicies", namespace, name="deployment-annotated")


def wait_for_event(api, namespace, reason):
    found = api.until("events", namespace, lambda all_: any(each["reason"] == reason for each in all_))
    return next(each for each in found if each["reason"] == reason)


def test_in_the_steady_state_nothing_but_the_lease_is_written(fleet, proxy, start, api, namespace):
    one = start(proxy)
    populate(api, namespace)
    until_done(api, namespace)
    until_quiet(proxy, one)
    proxy.writes.clear()
    proxy.requests.clear()

    deadline = time.monotonic() + 120
    while sum(map(is_lease, proxy.writes)) < 8 and time.monotonic() < deadline:
        time.sleep(0.05)

    assert Counter(each.path for each in proxy.writes).keys() == {
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/carpool-operator"
    }
    assert {each.method for each in proxy.requests if not is_lease(each)} <= {"GET"}
    assert one.end() == 0
    assert api.get("leases", "carpool-operator", namespace)["spec"]["holderIdentity"] == ""


def test_all_can_be_deleted_with_and_without_an_operator(start, proxy, api, namespace):
    one = start(proxy)
    populate(api, namespace)
    until_done(api, namespace)
    api.delete("deployments", "annotated", namespace)
    api.until_gone("batchingpolicies", namespace, name="deployment-annotated", timeout=180)
    one.kill()
    api.delete("batchingpolicies", "by-hand", namespace)

    # The garbage collector looks for kinds that are new every half minute.
    api.until_gone("batchingpolicies", namespace, timeout=180)
    api.until_gone("configmaps", namespace, labels="carpool.dev/change=true", timeout=180)


def test_one_writes_and_when_it_is_killed_another_goes_on(proxies, start, api, namespace):
    first, second = proxies(), proxies()
    a = start(first, "a")
    api.until("leases", namespace, lambda found: found and found[0]["spec"]["holderIdentity"] == "a")
    start(second, "b")
    populate(api, namespace)
    until_done(api, namespace)
    until_quiet(first, a)
    assert not second.writes
    a.kill()
    before = written_by(first)  # a lease that is on its way gets there

    api.apply(policy("later", "other"), namespace=namespace)
    api.until("batchingpolicies", namespace, has_status, name="later", timeout=120)

    assert written_by(first) == before
    lease = api.get("leases", "carpool-operator", namespace)["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("b", 1)


@pytest.fixture
def fleet(cluster, api, namespace, crd, tmp_path):
    """The workload `web` with two pods whose sidecars believe the key that the namespace's operator finds."""
    pem = new_key()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}}
    api.apply({**secret, "data": {PRIVATE: b64encode(pem).decode()}}, namespace=namespace)
    (tmp_path / "key.txt").write_text(Signer(pem).public)
    bare = yaml.safe_dump_all(carpool.model("web"))
    command = ("carpool", "inject", "-f", "-", "-n", namespace, "--public-key", str(tmp_path / "key.txt"))
    injected = cluster.run(*command, text=bare)
    api.apply(*yaml.safe_load_all(injected), namespace=namespace)
    api.until_ready("web", namespace)


@pytest.fixture
def fault_free(fleet, start, proxies, api, namespace):
    """The end state of a life in which nothing goes wrong, and its number of writes; all is as before it again."""
    proxy = proxies()
    one = start(proxy, "fault-free")
    populate(api, namespace)
    until_done(api, namespace)
    writes = until_quiet(proxy, one)
    state = end_state(api, namespace)
    one.kill()
    api.delete("deployments", "annotated", namespace)
    for policy_ in api.find("batchingpolicies", namespace):
        api.delete("batchingpolicies", policy_["metadata"]["name"], namespace, missing_ok=True)
    api.delete("configmaps", PUBLIC_MAP, namespace)
    api.delete("leases", "carpool-operator", namespace, missing_ok=True)
    api.until_gone("batchingpolicies", namespace, timeout=180)
    api.until_gone("configmaps", namespace, labels="carpool.dev/change=true", timeout=180)
    return state, writes


def test_killed_after_each_write_in_turn_it_comes_to_the_same_end(fault_free, proxy, start, api, namespace):
    expected, writes = fault_free
    assert "carpool-deployment-web" in expected["maps"]
    assert writes >= 6
    populate(api, namespace)
    lives = 0
    while lives < 3 * writes:
        renewed = sum(map(is_lease, proxy.writes))
        one = start(proxy, "a")
        # The key's public half is applied at the begin of every life, mostly for nothing.
        after = min(lives, 1)
        proxy.after_write(lambda _, pid=one.pid: os.kill(pid, signal.SIGKILL), path="^(?!.*/leases)", after=after)
        until_leading(proxy, one, renewed)
        ended = one.ends_in_time()
        proxy.heal()
        if not ended:
            break  # nothing is left to write
        lives += 1
    one.kill()
    # A life gets one write further, or two that were under way together.
    assert writes / 2 <= lives < 3 * writes
    last = start(proxy, "a")
    until_done(api, namespace)
    until_quiet(proxy, last)

    until_alike(api, namespace, expected)
    assert last.end() == 0


def test_refused_slow_and_deaf_it_comes_to_the_same_end(fault_free, proxy, start, api, namespace):
    expected, _ = fault_free
    for status in (409, 429, 500):
        proxy.refuse(status, methods="PATCH|POST|PUT", times=3, retry_after=1)
        proxy.refuse(status, methods="GET", times=2, after=5, retry_after=1)
    proxy.refuse(410, path="watch|pods", times=2, after=2)
    proxy.delay(1.0, methods="PATCH", times=3)
    proxy.drop_events(times=6)
    proxy.repeat_events(times=20)
    one = start(proxy, "a")
    populate(api, namespace)
    until_done(api, namespace)
    proxy.cut_watches()
    proxy.drop_events(path="batchingpolicies", times=1)
    api.apply(policy(p99="70ms"), namespace=namespace)
    api.until("batchingpolicies", namespace, has_status, name="by-hand")
    api.apply(policy(), namespace=namespace)
    api.until("batchingpolicies", namespace, has_status, name="by-hand")
    until_quiet(proxy, one)
    asked = len(proxy.requests)

    until_alike(api, namespace, expected)
    # No hot loop: lists, renewals, retries and watches of some 30 s, not thousands.
    assert asked < 1500


def test_an_api_server_that_goes_away_for_a_while_is_waited_for(start, proxy, api, namespace):
    one = start(proxy)
    populate(api, namespace)
    until_done(api, namespace)
    gone = proxy.refuse(500, times=float("inf"))
    deadline = time.monotonic() + 60
    while gone.struck < 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    proxy.heal()
    api.apply(policy("later", "other"), namespace=namespace)

    api.until("batchingpolicies", namespace, has_status, name="later", timeout=180)
    assert not one.ended
    assert not any(line.get("exception") for line in one.lines)
