"""A policy whose evidence comes from a Prometheus in the cluster.

Debian's is built without Kubernetes' service discovery, so the test gives it the pods, with a PodMonitor's labels.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import requests
import yaml
from minicluster import carpool
from minicluster.operated import ADMIN, ADMITS, signer, target
from minicluster.traffic import Traffic
from minicluster.waiting import eventually

from carpool_cli.demo.observed import Count
from carpool_cli.demo.saved import compared
from carpool_cli.live import running
from carpool_cli.live.admin_client import AdminClient
from carpool_cli.options import Address
from carpool_cli.planning import history
from carpool_cli.planning.prometheus import ask
from carpool_operator.api.spec import API_VERSION, KIND

DOCS = Path(__file__).parents[2] / "docs"
PATH = "/v1/models/standin:predict"
SINCE = 600
"""Seconds of history that are asked for: more than the Prometheus has."""
BODY = json.dumps({"instances": [[0.5, 1.5]]}).encode()


@pytest.fixture(scope="module")
def installed(cluster, api, program):
    program("prometheus")
    carpool.install(cluster, api)
    yield
    carpool.uninstall(cluster, api)


def block(page, word):
    """The YAML block of a page that has a word in it."""
    found = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = (each for each in found if word in each)
    return list(yaml.safe_load_all(text))


def prometheus(pods):
    """A Prometheus that scrapes the sidecars of some pods."""
    targets = [
        {
            "targets": [f"{pod['status']['podIP']}:14090"],
            "labels": {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]},
        }
        for pod in pods
    ]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "sidecars", "static_configs": targets}],
    }
    labels = {"app": "prometheus"}
    container = {
        "name": "prometheus",
        "image": "prometheus",
        "args": ["--config.file=/config/prometheus.yml", "--storage.tsdb.path=/data", "--web.listen-address=:9090"],
        "ports": [{"containerPort": 9090}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}, {"name": "data", "mountPath": "/data"}],
    }
    volumes = [{"name": "config", "configMap": {"name": "prometheus"}}, {"name": "data", "emptyDir": {}}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "prometheus"},
            "data": {"prometheus.yml": yaml.safe_dump(config)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "prometheus"},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        },
    ]


def client(api, pod):
    """A sidecar's admin port, for one with the right to read it."""
    ticket = signer(api).ticket(target(pod), time.time())
    return AdminClient(Address(pod["status"]["podIP"], ADMIN, ""), ticket=ticket)


def counted(api, pods):
    """What the sidecars have counted by now, each by its own clock."""
    found = [client(api, pod).report().stats for pod in pods]
    return [Count(each.at, 0, 0, 0.0, each.device_busy) for each in found]


def busy_by(api, pods):
    """Seconds with a batch in flight that the sidecars themselves have counted."""
    return sum(each.busy for each in counted(api, pods))


def scraped_by(url):
    """The same as a Prometheus has it."""
    query = {"query": "sum(carpool_device_busy_seconds_total)"}
    found = requests.get(f"{url}/api/v1/query", query, timeout=10).json()["data"]["result"]
    return float(found[0]["value"][1]) if found else None


@pytest.fixture
def start(api):
    """Start a Prometheus that scrapes some pods, or one anew; returns its base URL."""

    def started(pods):
        namespace, *objects = prometheus(pods)
        api.apply(namespace)
        api.until("serviceaccounts", "monitoring", bool, name="default")
        api.apply(*objects, namespace="monitoring")
        api.until_ready("prometheus", "monitoring", timeout=120)
        (pod,) = [
            pod
            for pod in api.find("pods", "monitoring", labels="app=prometheus")
            if not pod["metadata"].get("deletionTimestamp")
        ]
        return f"http://{pod['status']['podIP']}:9090"

    yield started
    api.delete("namespaces", "monitoring")


def test_it_is_tuned_by_what_prometheus_holds_and_by_nothing_else(installed, cluster, api, namespace, kubectl, start):
    def until(test, timeout=120.0):
        return api.until(
            "batchingpolicies",
            namespace,
            lambda found: found and test(found[0].get("status") or {}),
            name="resnet",
            timeout=timeout,
        )[0]["status"]

    def says(kind, status, reason="", message=""):
        def test(found):
            for each in found.get("conditions", []):
                if each["type"] == kind:
                    return each["status"] == status and reason in each["reason"] and message in each["message"]
            return False

        return test

    api.apply(*carpool.model("resnet"), namespace=namespace)
    api.until_ready("resnet", namespace)
    kubectl("annotate", "deployment", "resnet", "carpool.dev/inject=true")
    api.until("pods", namespace, lambda pods: len(pods) == 2, labels="carpool.dev/injected", timeout=180)
    api.until_ready("resnet", namespace, timeout=180)
    pods = api.find("pods", namespace, labels="carpool.dev/injected")
    url = start(pods)
    auth = {"bearer": {"name": "prometheus-token", "key": "token"}}
    scraped = {"url": url, "interval": "2s", "auth": auth}
    spec = {
        "targetRefs": [{"name": "resnet"}],
        "slo": {"latency": {"p99": "300ms"}},
        "admission": ADMITS,
        "metrics": {"source": "Prometheus", "staleAfter": "10s", "prometheus": scraped},
    }
    policy = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "resnet"}, "spec": spec}
    # What comes before the first scrape is missing in what it adds up.
    eventually(lambda: scraped_by(url) == busy_by(api, pods))
    first = busy_by(api, pods)
    with Traffic(cluster.api(), "resnet", namespace, PATH, BODY, rate=48) as traffic:
        traffic.wait_for(40)
        began = time.monotonic()
        # 1. The operator may not read Secrets, and says which Role is missing; the documented one is what it takes.
        api.apply(policy, namespace=namespace)
        until(says("MetricsAvailable", "False", "MetricsStale", "no Secret prometheus-token with the key token"))
        kubectl("create", "secret", "generic", "prometheus-token", "--from-literal=token=t")
        role, binding = block("prometheus.md", "kind: RoleBinding")
        for each in (role, binding):
            each["metadata"]["namespace"] = namespace
        api.apply(role, binding)
        until(says("MetricsAvailable", "True"), timeout=180)

        # 2. It tunes: two replicas share what is counted, and all acknowledge.
        tuned = until(
            lambda status: (
                says("Programmed", "True")(status)
                and not status["applied"]["parameters"]["passThrough"]
                and status["lastDecision"].get("observed", {}).get("rate", 0) > 20
                and status["targets"][0]["acknowledged"] == 2
            ),
            timeout=240,
        )
        assert tuned["lastDecision"]["observed"]["rate"] < 36  # of 48 in all, a replica's half
    assert not traffic.failed(began), traffic.outcomes(began)

    # 3. What `carpool savings` says was counted is what the sidecars counted.
    eventually(lambda: scraped_by(url) == pytest.approx(busy_by(api, pods)))
    busy = busy_by(api, pods) - first
    questions = history.questions(SINCE)
    (past,) = history.pasts(questions, *ask(url, questions, SINCE, time.time()))
    said = past.counted.device_seconds / 3600 * questions.step * len(past.load)
    assert said == pytest.approx(busy, rel=0.02)

    with Traffic(cluster.api(), "resnet", namespace, PATH, BODY, rate=48) as traffic:
        traffic.wait_for(40)
        began = time.monotonic()
        # 4. Prometheus gone: nothing is decided, traffic flows, the status says what is wrong.
        api.patch("deployments", "prometheus", "monitoring", body={"spec": {"replicas": 0}})
        api.until_gone("pods", "monitoring", labels="app=prometheus")
        blind = until(
            lambda status: (
                says("MetricsAvailable", "False", "MetricsStale", f"Prometheus answers at {url}")(status)
                or says("MetricsAvailable", "False", "MetricsStale", f"Prometheus at {url} did not answer")(status)
            )
        )
        before = counted(api, pods)
        api.until("events", namespace, lambda found: any(event["reason"] == "FellBack" for event in found), timeout=120)
        traffic.wait_for(1440)
        assert until(bool)["applied"] == blind["applied"]
        # What was in force all that time, as `carpool savings` forecasts it, and what the sidecars counted meanwhile,
        # by their own clocks. It was 2 % beside 16 busy processes; without: tests/carpool_cli/demo/test_saved.py.
        after = counted(api, pods)
        compares = []
        for pod, first, last in zip(pods, before, after, strict=True):
            found = running.read(client(api, pod), "standin")
            ago = found.arrivals[-1][0] + found.since_last - last.at
            compares.append(compared(found, [first, last], ago))
        forecast, found = (sum(getattr(each, name) for each in compares) for name in ("forecast", "counted"))
        assert forecast == pytest.approx(found, rel=0.1)

        # 5. Back, elsewhere: it goes on.
        scraped["url"] = start(pods)
        api.apply(policy, namespace=namespace)
        until(says("MetricsAvailable", "True"))
        until(says("Ready", "True"))
    assert not traffic.failed(began), traffic.outcomes(began)
