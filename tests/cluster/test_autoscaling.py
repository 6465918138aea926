"""A real HPA controller goes by Carpool's load, which a small server offers as external metric.

The server stands for prometheus-adapter or KEDA: it answers what they would have read, here what the operator's own
arithmetic makes of the pods' counters.
"""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from minicluster.controlplane import ADDRESS
from minicluster.pki import Authority

from carpool.batching.counters import ModelStats
from carpool.policy.parameters import Parameters
from carpool_cli.planning import autoscaling
from carpool_cli.planning.autoscaling import STEP
from carpool_cli.planning.replica import Replica
from carpool_operator.tuning.capacity import TargetLoad
from carpool_operator.tuning.evidence import Rates, Sample

EXAMPLE = Path(__file__).parents[2] / "examples/autoscaling/hpa.yaml"
CAPACITY = 100.0
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"


class Metrics:
    """`external.metrics.k8s.io`: one metric, as the last reading of the pods has it."""

    def __init__(self, folder):
        certificate, key = Authority(folder).issue("metrics", hosts=[ADDRESS])
        self.value = 1.0
        self.asked = []
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = metrics.answer(self.path)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer((ADDRESS, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path):
        if "/namespaces/" not in path:
            return json.dumps(
                {"kind": "APIResourceList", "groupVersion": f"{GROUP}/{VERSION}", "resources": []}
            ).encode()
        self.asked.append(path)
        item = {
            "metricName": "carpool_load", "metricLabels": {}, "timestamp": "2026-01-01T00:00:00Z",
            "value": f"{round(1000 * self.value)}m",
        }  # fmt: skip
        listed = {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [item],
        }
        return json.dumps(listed).encode()

    def carry(self, rate, pods):
        """Offer the load of so many requests per second over some pods."""
        load = TargetLoad()
        uids = [str(index) for index in range(pods)]
        samples = [
            Sample(
                uid=uid, generation=1, seconds=20.0, stalled=False,
                models={"m": ModelStats(arrivals=round(20 * rate / pods))}, passing={}, queued_rows=0,
                capacities={"m": Rates(CAPACITY, CAPACITY, CAPACITY, CAPACITY)},
            )
            for uid in uids
        ]  # fmt: skip
        load.observe(0.0, samples, uids)
        self.value = load.now.load


@pytest.fixture
def metrics(api, cluster, tmp_path, namespace):
    server = Metrics(tmp_path)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics"},
        "spec": {"ports": [{"port": 443}]},
    }
    ends = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "metrics-1", "labels": {"kubernetes.io/service-name": "metrics"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
        "ports": [{"name": "", "port": server.port, "protocol": "TCP"}],
    }
    old = {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": "metrics"},
        "subsets": [{"addresses": [{"ip": ADDRESS}], "ports": [{"port": server.port}]}],
    }
    api.apply(service, ends, old, namespace=namespace)
    api.apply(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": "metrics", "namespace": namespace, "port": 443},
            },
        }
    )  # fmt: skip
    yield server
    api.delete("apiservices", f"{VERSION}.{GROUP}")
    server.server.shutdown()
    server.server.server_close()


def test_an_hpa_follows_carpools_load_as_the_simulation_does(api, namespace, metrics):
    labels = {"app": "resnet"}
    container = {"name": "c", "image": "python", "command": ["sleep", "3600"]}
    api.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "resnet"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
                },
            },
        },
        namespace=namespace,
    )
    hpa = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    # Nobody waits five minutes here: the window is the controller's own, and tested in the simulation.
    hpa["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    scaler = autoscaling.read(hpa)
    rates = (90.0, 240.0, 250.0, 500.0, 60.0)
    table = Replica(
        CAPACITY, (CAPACITY, 2 * CAPACITY), (1.0, 1.0), (0.0, 0.5), (Parameters(), Parameters()), 1 / CAPACITY
    )
    replicas = 1
    metrics.carry(rates[0], replicas)
    api.apply(hpa, namespace=namespace)
    for rate in rates:
        metrics.carry(rate, replicas)
        steps = autoscaling.play(scaler, table, [CAPACITY * replicas * 0.9, *[rate] * 20], cold_start=STEP, seed=1)
        wanted = steps.replicas[-1]
        since = len(metrics.asked)
        api.until("deployments", namespace, lambda found, n=wanted: found[0]["spec"]["replicas"] == n, name="resnet")
        replicas = wanted
        # It stays: the controller has looked again since, and wanted nothing else.
        api.until(
            "horizontalpodautoscalers",
            namespace,
            lambda found, n=wanted, since=since: (
                found[0]["status"].get("desiredReplicas") == n and len(metrics.asked) > since
            ),
            name="resnet",
        )
    assert replicas == 1
    assert all("labelSelector=target%3Dresnet" in path for path in metrics.asked)
