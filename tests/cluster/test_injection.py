"""Injection on a real API server: the chart's webhook with its conditions, and pods that really run."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from itertools import product
from pathlib import Path

import pytest
import requests
from minicluster import carpool
from minicluster.traffic import Traffic
from minicluster.waiting import eventually

from carpool_operator.delivery.signing import Signer, new_key
from carpool_operator.injector.decide import ADMIN_PORT, DATA_PORT
from carpool_operator.webhook.certificates import LIFE, issue

CHART = str(Path(__file__).parents[2] / "charts" / "carpool")
HOME = "carpool-system"
PARTS = ("injector", "injector-rbac", "webhook")
INJECT = "carpool.dev/inject"
SERVER = {"name": "server", "image": "standin", "ports": [{"name": "http", "containerPort": 9000}]}


@pytest.fixture(scope="module")
def cluster(own_cluster):
    """One of this file's own, with the injector in it: there is one to a cluster."""
    return own_cluster


@pytest.fixture(scope="module")
def injector(cluster, api):
    """The injector as the chart has it, with its own rights, and without any operator."""
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}})
    only = [flag for part in PARTS for flag in ("-s", f"templates/{part}.yaml")]
    manifests = cluster.run("helm", "template", "carpool", CHART, "-n", HOME, "--kube-version", "1.35", *only)
    cluster.run("kubectl", "apply", "-f", "-", text=manifests)
    key = {"publicKey": Signer(new_key()).public}
    publish = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "carpool-public-key"}, "data": key}
    api.apply(publish, namespace=HOME)
    api.until_ready("carpool-injector", HOME)
    carpool.until_injecting(api)


def trusted(api, besides=""):
    """Wait until all webhooks name the same authority, other than ``besides``; returns it."""

    def agreed(found):
        bundles = {hook["clientConfig"].get("caBundle", "") for hook in found[0]["webhooks"]}
        return len(bundles) == 1 and not bundles & {"", besides}

    (found,) = api.until("mutatingwebhookconfigurations", "", agreed, name="carpool-injector")
    return found["webhooks"][0]["clientConfig"]["caBundle"]


def reviews(api):
    """How many objects the injectors have been asked about."""
    count = 0.0
    for pod in api.find("pods", HOME, labels="app.kubernetes.io/component=injector"):
        metrics = requests.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=10).text
        lines = [line for line in metrics.splitlines() if line.startswith("carpool_injector_reviews_total{")]
        count += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return count


def deployment(name="web", *, own=None, template=None, container=None, replicas=0):
    labels = {"app": name}
    metadata = {"labels": labels}
    if template is not None:
        metadata["annotations"] = template
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, **({} if own is None else {"annotations": own})},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": {"containers": [container or SERVER]}},
        },
    }


def pod(name="alone", annotations=None, **spec):
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}, "ownerReferences": [owner]},
        "spec": {"containers": [SERVER], **spec},
    }


def is_seen(found):
    """A test for ``until``: the controller has written the status of what is there now."""
    return found[0].get("status", {}).get("observedGeneration") == found[0]["metadata"]["generation"]


def injected(one):
    return any(each["name"] == "carpool" for each in one["spec"].get("initContainers", []))


def of_template(one):
    return one["spec"]["template"]["metadata"].get("annotations", {}).get(INJECT)


OWN = (
    None,
    {},
    {"other": "x"},
    {INJECT: "true"},
    {INJECT: "false", "carpool.dev/slo-p99": "1s"},
    {"carpool.dev/slo-p50": "1s"},
)
TEMPLATE = (None, {"other": "x"}, {INJECT: "true"}, {INJECT: "false"}, {INJECT: "deployment"})


@pytest.mark.parametrize(("own", "template"), list(product(OWN, TEMPLATE)))
def test_a_deployment_is_asked_about_to_be_changed_and_when_it_is_annotated(injector, api, own, template):
    asks = own in ({INJECT: "true"}, {"carpool.dev/slo-p50": "1s"})
    written = (template or {}).get(INJECT)
    wanted = written or "deployment" if asks else None if written == "deployment" else written
    before = reviews(api)
    made = api.create(deployment(own=own, template=template), "default", dryRun="All")
    assert of_template(made) == wanted
    # About new annotations, too, since their values may be wrong.
    assert reviews(api) - before == (wanted != written or any(name.startswith("carpool.dev/") for name in own or {}))


def test_what_has_no_annotation_of_ours_is_never_asked_about(injector, api, namespace):
    before = reviews(api)
    api.apply(deployment(), namespace=namespace)
    api.patch("deployments", "web", namespace, body={"spec": {"paused": True}})
    api.create(pod(), namespace, dryRun="All")
    api.create(pod(annotations={INJECT: "false"}), namespace, dryRun="All")
    assert reviews(api) == before
    # Nor is an annotated one about its daily changes, but about each change of an annotation of ours. Where its
    # controller writes at the same moment, the API server asks once more.
    api.until("deployments", namespace, is_seen, name="web")
    api.annotate("deployments", "web", namespace, slo_p99="50ms")
    assert reviews(api) == before + 1
    api.patch("deployments", "web", namespace, body={"spec": {"replicas": 0, "paused": False}})
    api.until("deployments", namespace, is_seen, name="web")
    assert reviews(api) == before + 1
    api.annotate("deployments", "web", namespace, slo_p99="60ms")
    assert reviews(api) == before + 2


def test_namespaces_of_the_system_and_those_that_say_so_are_left_alone(injector, api, namespace):
    label = {"metadata": {"labels": {"carpool.dev/injection": "disabled"}}}
    assert injected(api.create(pod(annotations={INJECT: "true"}), namespace, dryRun="All"))
    api.patch("namespaces", namespace, body=label)
    for where in (namespace, "kube-system"):
        api.until("serviceaccounts", where, bool, name="default")
        assert not injected(api.create(pod(annotations={INJECT: "true"}), where, dryRun="All"))


def test_annotations_without_effect_get_a_warning(injector, api, namespace, kubectl):
    nameless = {"name": "server", "image": "standin"}
    api.apply(deployment(container=nameless), namespace=namespace)
    said = kubectl("annotate", "deployment", "web", "carpool.dev/slo-p99=50", check=False)
    assert "Warning: carpool: carpool.dev/slo-p99 is '50': write a duration" in said
    assert of_template(api.get("deployments", "web", namespace)) is None  # an invalid value rolls no pods
    said = kubectl("annotate", "deployment", "web", "carpool.dev/slo-p99=50ms", "--overwrite", check=False)
    assert "Warning: carpool: its pods will have no sidecar: NoPort: container server names no port" in said
    api.patch("deployments", "web", namespace, body={"spec": {"replicas": 1}})
    (started,) = api.until("pods", namespace, bool, labels="app=web")
    assert not injected(started)
    assert started["metadata"]["annotations"]["carpool.dev/skipped"].startswith("NoPort: container server")


def test_a_workload_that_has_sidecars_gets_a_warning_of_a_wrong_value(injector, api, namespace, kubectl):
    api.apply(deployment(own={"carpool.dev/slo-p99": "50ms"}), namespace=namespace)
    api.until("deployments", namespace, is_seen, name="web")
    said = kubectl("annotate", "deployment", "web", "carpool.dev/slo-p99=60", "--overwrite", check=False)
    assert "Warning: carpool: carpool.dev/slo-p99 is '60': write a duration" in said
    assert of_template(api.get("deployments", "web", namespace)) == "deployment"  # and nothing rolls
    said = kubectl("annotate", "deployment", "web", "carpool.dev/max-batch=many", check=False)
    assert "carpool.dev/max-batch is 'many'" in said


def test_a_workload_with_sidecars_by_command_gets_a_warning_and_rolls_no_pods(
    injector, cluster, api, namespace, kubectl
):
    manifest = json.dumps(deployment(own={}))
    api.apply(
        json.loads(cluster.run("carpool", "inject", "-f", "-", "--slo-p99", "50ms", text=manifest)), namespace=namespace
    )
    api.until("deployments", namespace, is_seen, name="web")
    before = api.get("deployments", "web", namespace)["spec"]["template"]
    said = kubectl("annotate", "deployment", "web", "carpool.dev/slo-p99=50ms", check=False)
    assert "Warning: carpool: SelfTuned: " in said
    assert f"kubectl -n {namespace} get deployment/web -o yaml | carpool inject --undo -f -" in said
    assert api.get("deployments", "web", namespace)["spec"]["template"] == before
    # As the warning says
    live = kubectl("get", "deployment/web", "-o", "yaml")
    kubectl("replace", "-f", "-", text=cluster.run("carpool", "inject", "--undo", "-f", "-", text=live))
    after = api.get("deployments", "web", namespace)
    assert of_template(after) == "deployment"
    assert not injected(after["spec"]["template"])


def test_typos_get_a_warning_each_time(injector, api, namespace, kubectl):
    def said_to(manifest):
        # Nothing is kept: what controllers do to it would be asked about, too.
        return kubectl("apply", "--dry-run=server", "-f", "-", text=json.dumps(manifest), check=False)

    own = said_to(deployment(own={"carpool.dev/injct": "true"}))
    assert "Warning: carpool: carpool.dev/injct is not known: did you mean carpool.dev/inject?" in own
    of_class = said_to(deployment(own={"carpool.dev/slo-ttft-p99": "2s", "carpool.dev/slo-ttft-p99.Gold": "1s"}))
    assert "carpool.dev/slo-ttft-p99.Gold is not known: of a class there are" in of_class
    mistyped = deployment(template={INJECT: "true", "carpool.dev/contaner": "server"})
    for _ in range(2):
        assert "carpool.dev/contaner in the pod template is not known: did you mean" in said_to(mistyped)


def test_annotations_that_are_read_are_asked_about_once(injector, api, namespace):
    written = (
        "container",
        "port",
        "sidecar-cpu",
        "sidecar-cpu-limit",
        "sidecar-memory",
        "sidecar-memory-request",
        "max-body",
        "data-port",
        "admin-port",
        "status",
        "target",
        "skipped",
    )
    template = {INJECT: "true", **{f"carpool.dev/{name}": "x" for name in written}}
    own = {"carpool.dev/slo-p99": "1s", "carpool.dev/mode": "Apply", "carpool.dev/max-batch": "8"}
    own |= {"carpool.dev/slo-ttft-p99": "2s", "carpool.dev/slo-ttft-p99.gold": "1s"}
    api.apply(deployment(own=own, template=template), namespace=namespace)
    api.until("deployments", namespace, is_seen, name="web")
    before = reviews(api)
    api.patch("deployments", "web", namespace, body={"spec": {"paused": True}})
    assert reviews(api) == before


def test_a_wrong_annotation_holds_no_pod_up(injector, api, namespace):
    for wrong in ({INJECT: "yes"}, {INJECT: "true", "carpool.dev/sidecar-cpu": "lots"}):
        made = api.create(pod(annotations=wrong), namespace, dryRun="All")
        assert not injected(made)
        assert made["metadata"]["annotations"]["carpool.dev/skipped"].startswith("BadAnnotation: ")


def test_a_restricted_namespace_takes_it(injector, api, namespace):
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.patch("namespaces", namespace, body={"metadata": {"labels": enforce}})
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    server = {**SERVER, "securityContext": security}
    assert injected(api.create(pod(annotations={INJECT: "true"}, containers=[server]), namespace, dryRun="All"))


def test_the_command_does_the_same_without_a_cluster(injector, cluster, api, namespace, kubectl):
    manifest = json.dumps(deployment())
    for options in (("--slo-p99", "50ms"), ("--public-key", "ab" * 32, "-n", namespace)):
        made = cluster.run("carpool", "inject", "-f", "-", *options, text=manifest)
        server_s = json.loads(kubectl("apply", "--dry-run=server", "-o", "json", "-f", "-", text=made))
        assert injected(server_s["spec"]["template"])


def test_pods_roll_in_and_out_and_no_request_fails(injector, cluster, api, namespace, kubectl):
    api.apply(*carpool.model("resnet"), namespace=namespace)
    api.until_ready("resnet", namespace)
    body = json.dumps({"instances": [[0.5, 1.5]]}).encode()
    with Traffic(cluster.api(), "resnet", namespace, "/v1/models/standin:predict", body, rate=20) as traffic:
        traffic.wait_for(20)
        # 1. In: Services find the port by its name, which is the sidecar's now.
        kubectl("annotate", "deployment", "resnet", "carpool.dev/inject=true")
        rolled(api, namespace, with_sidecar=True)
        (one, *_) = api.find("endpointslices", namespace, labels="kubernetes.io/service-name=resnet")
        assert [port["port"] for port in one["ports"]] == [DATA_PORT]
        traffic.wait_for(40)
        # 2. A pod goes, another comes.
        first = api.find("pods", namespace, labels="app=resnet")[0]["metadata"]["name"]
        api.delete("pods", first, namespace)
        api.until_gone("pods", namespace, name=first)
        api.until_ready("resnet", namespace)
        traffic.wait_for(20)
        # 3. Out again.
        kubectl("annotate", "deployment", "resnet", "carpool.dev/inject-")
        rolled(api, namespace, with_sidecar=False)
        traffic.wait_for(20)
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


def rolled(api, namespace, *, with_sidecar):
    def done(pods):
        return len(pods) == 2 and all(injected(each) == with_sidecar for each in pods)

    api.until("pods", namespace, done, labels="app=resnet", timeout=180)
    api.until_ready("resnet", namespace)


WEDGES = """
import http.server, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Model(http.server.BaseHTTPRequestHandler):
    wedged = False
    def do_GET(self):
        self.send_response(500 if Model.wedged and self.path == "/live" else 200)
        self.send_header("content-length", "0")
        self.end_headers()
    def do_POST(self):
        Model.wedged = True
        self.do_GET()
http.server.ThreadingHTTPServer(("", 9000), Model).serve_forever()
"""
"""A model whose liveness fails after a POST."""


def test_a_model_that_the_kubelet_restarts_is_served_again(injector, api, namespace):
    model = {
        **SERVER,
        "image": "python",
        "args": ["python", "-c", WEDGES],
        "startupProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {"httpGet": {"path": "/live", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1},
    }
    api.apply(deployment(own={INJECT: "true"}, container=model, replicas=1), namespace=namespace)
    api.until_ready("web", namespace)
    (before,) = api.find("pods", namespace, labels="app=web")
    assert requests.post(f"http://{before['status']['podIP']}:{DATA_PORT}/wedge", timeout=10).status_code == 200

    def again(pods):
        # Its preStop hook drained the sidecar: that has to begin anew as well.
        statuses = [*pods[0]["status"]["containerStatuses"], *pods[0]["status"]["initContainerStatuses"]]
        return all(each["restartCount"] == 1 and each["ready"] for each in statuses)

    (after,) = api.until("pods", namespace, again, labels="app=web", timeout=120)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert requests.get(f"http://{after['status']['podIP']}:{DATA_PORT}/live", timeout=10).status_code == 200


def test_an_expired_certificate_heals(injector, api, namespace):
    before = trusted(api)
    pair, authority = issue((f"carpool-injector.{HOME}.svc",), time.time() - 2 * LIFE)
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority}
    encoded = {key: b64encode(value).decode() for key, value in data.items()}
    api.patch("secrets", "carpool-injector-cert", HOME, body={"data": encoded})
    trusted(api, besides=before)
    # Both replicas serve the new one within a look each.
    deadline = time.monotonic() + 120
    while not all(injected(api.create(pod(annotations={INJECT: "true"}), namespace, dryRun="All")) for _ in range(8)):
        assert time.monotonic() < deadline


def test_without_it_pods_start_and_nobody_waits(injector, api, namespace):
    api.patch("deployments", "carpool-injector", HOME, body={"spec": {"replicas": 0}})
    api.until_gone("pods", HOME, labels="app.kubernetes.io/component=injector")
    try:
        api.apply(deployment(own={"carpool.dev/slo-p99": "50ms"}), namespace=namespace)
        assert of_template(api.get("deployments", "web", namespace)) is None
        assert not injected(api.create(pod(annotations={INJECT: "true"}), namespace, dryRun="All"))
    finally:
        api.patch("deployments", "carpool-injector", HOME, body={"spec": {"replicas": 2}})
        api.until_ready("carpool-injector", HOME)
    carpool.until_injecting(api)
    # It is back, and so is what it does.
    api.patch("deployments", "web", namespace, body={"metadata": {"labels": {"touched": "x"}}})
    assert of_template(api.get("deployments", "web", namespace)) == "deployment"


def test_a_captured_port_leads_to_the_sidecar_even_when_called_by_number(injector, api, namespace):
    objects = carpool.model("resnet", replicas=1)
    by_number = objects[-1]
    by_number["spec"]["ports"][0]["targetPort"] = 9000
    objects[1]["spec"]["template"]["metadata"]["annotations"] = {INJECT: "true", "carpool.dev/capture": "true"}
    api.apply(*objects, namespace=namespace)
    api.until_ready("resnet", namespace, timeout=120)
    (one,) = api.find("pods", namespace, labels="app=resnet")
    where = f"http://{one['status']['podIP']}"
    body = {"instances": [[0.5, 1.5]]}

    answer = requests.post(f"{where}:9000/v1/models/standin:predict", json=body, timeout=30)

    assert answer.status_code == 200
    metrics = requests.get(f"{where}:{ADMIN_PORT}/metrics", timeout=10).text
    (counted,) = [line for line in metrics.splitlines() if line.startswith('carpool_arrivals_total{model="standin"}')]
    assert float(counted.rsplit(" ", 1)[1]) == 1.0
    (slice_, *_) = api.find("endpointslices", namespace, labels="kubernetes.io/service-name=resnet")
    assert [port["port"] for port in slice_["ports"]] == [9000]


def test_where_pod_security_forbids_it_the_sidecar_comes_without(injector, api, namespace):
    restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    api.patch("namespaces", namespace, body=restricted)
    security = {
        "runAsNonRoot": True, "runAsUser": 65532, "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    asks = {INJECT: "true", "carpool.dev/capture": "true"}
    wanted = pod(annotations=asks, containers=[{**SERVER, "securityContext": security}])

    def noted():
        made = api.create(wanted, namespace, dryRun="All")
        status = json.loads(made["metadata"]["annotations"]["carpool.dev/status"])
        return injected(made) and status["notes"] == ["CaptureForbidden"]

    eventually(noted)  # what a namespace says is kept for some seconds
