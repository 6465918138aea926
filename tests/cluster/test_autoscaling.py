"""A real HPA controller goes by Carpool's load, which real sidecars say of themselves.

A small server offers it as external metric. It stands for KEDA: it reads `/capacity` of the pods behind the Service of
the example, by the trigger of the example, as KEDA's `metrics-api` scaler does (``minicluster.keda``).
"""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from minicluster import carpool, keda
from minicluster.controlplane import ADDRESS
from minicluster.pki import Authority
from minicluster.traffic import Traffic
from minicluster.waiting import eventually

from carpool.forecasting.forecaster import Situation
from carpool.tuning.objective import Aim
from carpool_cli.autoscaling import manifest
from carpool_cli.autoscaling.days import STEP, play
from carpool_cli.planning import assumptions, replica
from carpool_cli.profiling import device_profile

EXAMPLES = Path(__file__).parents[2] / "examples/autoscaling"
SLO = 0.5
WINDOW = 30
"""Seconds before scale-in, here: longer than a pod that is new takes to say how full it is."""
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"


class Metrics:
    """`external.metrics.k8s.io`: one metric, read anew whenever it is asked for; an error where there is none."""

    def __init__(self, folder, read):
        certificate, key = Authority(folder).issue("metrics", hosts=[ADDRESS])
        self.read = read
        self.asked = []
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                try:
                    status, body = 200, metrics.answer(self.path)
                except keda.ScalerError as error:
                    status, body = 500, str(error).encode()
                self.send_response(status)
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
            "value": f"{round(1000 * self.read())}m",
        }  # fmt: skip
        listed = {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [item],
        }
        return json.dumps(listed).encode()


@pytest.fixture
def metrics(api, cluster, tmp_path, namespace):
    documents = {
        each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "keda-metrics-api.yaml").read_text("utf-8"))
    }
    api.apply(documents["Service"], namespace=namespace)
    (trigger,) = documents["ScaledObject"]["spec"]["triggers"]
    asked = {**trigger["metadata"], "url": trigger["metadata"]["url"].replace(".default.", f".{namespace}.")}

    def slices(of, service):
        return reader.find("endpointslices", of, labels=f"kubernetes.io/service-name={service}")

    reader = cluster.api()
    server = Metrics(tmp_path, lambda: keda.read(asked, slices))
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
    reader.close()


def test_a_day_in_minutes_ends_with_as_many_replicas_as_the_simulation(cluster, api, namespace, metrics, tmp_path):
    # 1. A model that gains nothing from batches, behind sidecars: what it can serve does not depend on what was tried.
    documents = carpool.model("resnet", replicas=1, first=0.001, row=0.03)
    made = cluster.run(
        "carpool",
        "inject",
        "--slo-p99",
        f"{SLO:g}s",
        "-f",
        "-",
        text=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}),
    )
    api.apply(
        *(each for document in yaml.safe_load_all(made) for each in document.get("items", [document])),
        namespace=namespace,
    )
    # 2. The simulation of the same: levels in the middle between two numbers of replicas.
    hpa = yaml.safe_load((EXAMPLES / "hpa.yaml").read_text("utf-8"))
    hpa["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": WINDOW}}
    scaler = manifest.read(hpa)
    table = known(documents[0]["data"]["profile.json"], tmp_path)
    rates = [(replicas - 0.5) * scaler.metrics[0].target * table.capacity for replicas in (1, 2, 3, 1)]
    held = 8
    steps = play(scaler, table, [rate for rate in rates for _ in range(held)], cold_start=STEP, seed=1)
    wanted = steps.replicas[held - 1 :: held]
    assert wanted == [1, 2, 3, 1]
    # 3. The same with a real controller, real sidecars and real requests
    api.until_ready("resnet", namespace, timeout=120)
    body = json.dumps({"instances": [[0.5, 1.5]]}).encode()
    with Traffic(cluster.api(), "resnet", namespace, "/v1/models/standin:predict", body) as traffic:
        found = []
        for rate, replicas in zip(rates, wanted, strict=True):
            traffic.rate = rate
            if not found:
                eventually(lambda: reads(metrics), timeout=90)
                api.apply(hpa, namespace=namespace)
            api.until(
                "horizontalpodautoscalers", namespace,
                lambda seen, n=replicas: settled(seen[0].get("status", {}), n),
                name="resnet", timeout=120,
            )  # fmt: skip
            api.until_ready("resnet", namespace, timeout=120)
            found.append(api.get("deployments", "resnet", namespace)["spec"]["replicas"])
    assert found == wanted
    assert all("labelSelector=target%3Dresnet" in path for path in metrics.asked)


def settled(status, replicas):
    """Whether a controller wants so many replicas, and has them."""
    return status.get("desiredReplicas") == status.get("currentReplicas") == replicas


def reads(metrics):
    """Whether there is a value: a moment after the first requests."""
    try:
        return metrics.read() > 0
    except keda.ScalerError:
        return False


def known(profile, folder):
    """Return what a replica does whose batch latency is known."""
    (folder / "profile.json").write_text(profile)
    policy = assumptions.slo_policy(SLO, largest_batch=64)
    situation = Situation(
        process=assumptions.process_of(1.0, 1.0),
        service=assumptions.known(device_profile.load(folder / "profile.json")),
        target=policy.slo.due,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
    )
    return replica.tuned(situation, Aim.of(policy))
