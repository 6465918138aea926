from __future__ import annotations

import json
import shlex

import pytest

from carpool_operator.api.model import Target
from carpool_operator.injector.bypass import NAMES, bypasses, named_ports
from carpool_operator.injector.decide import InjectorSettings, decide
from carpool_operator.injector.patch import patch
from carpool_operator.workloads.registry import BY_NAME


def injected(*ports, spec=None, **annotations):
    written = {"carpool.dev/inject": "true", **{f"carpool.dev/{name}": value for name, value in annotations.items()}}
    pod = {
        "metadata": {"labels": {"app": "resnet"}, "annotations": written},
        "spec": spec or {"containers": [{"name": "server", "ports": list(ports)}]},
    }
    settings = InjectorSettings(image="i", version="1", public_key="ab" * 32)
    decision = decide(pod, Target("models", "Deployment", "resnet"), settings)
    return patch(pod, decision, settings, "0123456789abcdef")


def service(*ports, selector=None):
    return {
        "metadata": {"namespace": "models", "name": "resnet"},
        "spec": {"selector": {"app": "resnet"} if selector is None else selector, "ports": list(ports)},
    }


NAMED = injected({"name": "http", "containerPort": 9000}, {"name": "metrics", "containerPort": 9001})


def test_a_name_leads_to_the_sidecar_and_a_number_past_it():
    ports = ({"port": 80, "targetPort": "http"}, {"port": 81, "targetPort": 9000}, {"port": 82, "targetPort": 9001})
    (found,) = bypasses(service(*ports), NAMED)
    assert (found.port, found.by, found.name, found.named) == (81, "number", "http", True)
    assert shlex.split(found.command) == [
        *("kubectl", "-n", "models", "patch", "service", "resnet", "--type=json", "-p"),
        '[{"op":"replace","path":"/spec/ports/1/targetPort","value":"http"}]',
    ]


def test_another_name_of_the_model_s_port_leads_past_it():
    pod = injected({"name": "http", "containerPort": 9000}, {"name": "alt", "containerPort": 9000})
    (found,) = bypasses(service({"port": 80, "targetPort": "alt"}, {"port": 81, "targetPort": "http"}), pod)
    assert (found.port, found.by, found.name, found.named) == (80, "name alt", "http", True)
    pod["spec"]["containers"].insert(0, {"name": "logs", "ports": [{"name": "alt", "containerPort": 24224}]})
    assert bypasses(service({"port": 80, "targetPort": "alt"}), pod) == [], "the first container of that name counts"


@pytest.mark.parametrize("target", ["quic", 9000])
def test_what_is_no_tcp_leads_to_the_model_as_before(target):
    pod = injected({"name": "http", "containerPort": 9000}, {"name": "quic", "containerPort": 9000, "protocol": "UDP"})
    assert bypasses(service({"port": 443, "protocol": "UDP", "targetPort": target}), pod) == []
    pod["spec"]["containers"].append({"name": "other", "ports": [{"name": "quic", "containerPort": 24224}]})
    assert bypasses(service({"port": 443, "targetPort": "quic"}), pod) == [], "a name is one of its protocol"


def test_without_a_target_port_it_is_the_port():
    assert [found.port for found in bypasses(service({"port": 9000}), NAMED)] == [9000]


def test_a_port_without_a_name_gets_one_first():
    for pod in (injected({"containerPort": 9000}), injected(port="9000")):
        (found,) = bypasses(service({"port": 9000}), pod)
        assert (found.name, found.named) == ("http", False)
        first, then, last = found.command.split(" && ")
        assert shlex.split(first)[-1] == (
            '{"spec":{"template":{"spec":{"containers":[{"name":"server","ports":[{"containerPort":9000,"name":"http"}]}]}}}}'
        )
        assert then == "kubectl -n models rollout status deployment/resnet"
        assert "patch service resnet" in last


HTTP = {"name": "http", "containerPort": 8081}
GATEWAY, PROXY = {"name": "gateway", "ports": [HTTP]}, {"name": "proxy", "restartPolicy": "Always", "ports": [HTTP]}


@pytest.mark.parametrize(
    ("own", "others", "name"),
    [
        ([], {"containers": [GATEWAY]}, "http-model"),
        ([], {"initContainers": [PROXY]}, "http-model"),
        ([HTTP], {}, "http-model"),
        # The API server refuses a name twice in one container, whatever the protocols.
        ([{**HTTP, "protocol": "UDP"}], {}, "http-model"),
        ([HTTP, {"name": "http-model", "containerPort": 8082}], {}, "http-carpool"),
        ([{"name": name, "containerPort": 8081} for name in (*NAMES, "http-2")], {}, "http-3"),
    ],
)
def test_a_port_without_a_name_gets_one_that_no_port_of_the_pod_has(own, others, name):
    def pod(**named):
        server = {"name": "server", "ports": [{"containerPort": 9000, **named}, *own]}
        containers = [*others.get("containers", ()), server]
        return injected(container="server", port="9000", spec={**others, "containers": containers})

    (found,) = bypasses(service({"port": 80, "targetPort": 9000}), pod())
    assert found.name == name
    assert f'"name":"{name}"' in found.command
    assert f'"value":"{name}"' in found.command

    done = pod(name=name)
    assert bypasses(service({"port": 80, "targetPort": name}), done) == []
    assert named_ports(done)[name] == 14080


SERVER = {"name": "server", "image": "i"}
ELSEWHERE = {
    "a port without a name": (
        "Rollout",
        {"template": {"spec": {"containers": [{"name": "logs"}, {**SERVER, "ports": [{"containerPort": 9000}]}]}}},
        "/spec/template/spec/containers/1",
        {"op": "add", "path": "/spec/template/spec/containers/1/ports/0/name", "value": "http"},
    ),
    "another port": (
        "LeaderWorkerSet",
        {"leaderWorkerTemplate": {
            "leaderTemplate": {"spec": {"containers": [{**SERVER, "ports": [{"containerPort": 7}]}]}},
            "workerTemplate": {"spec": {"containers": [SERVER]}},
        }},
        "/spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0",
        {
            "op": "add",
            "path": "/spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/ports/-",
            "value": {"containerPort": 9000, "name": "http"},
        },
    ),
    "no ports": (
        "InferenceService",
        {"predictor": {"model": {"modelFormat": {"name": "onnx"}}}},
        None,
        {"op": "add", "path": "/spec/predictor/model/ports", "value": [{"containerPort": 9000, "name": "http"}]},
    ),
}  # fmt: skip


def of_kind(kind):
    pod = injected({"containerPort": 9000})
    annotations = {**pod["metadata"]["annotations"], "carpool.dev/target": f"{kind}/resnet"}
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


@pytest.mark.parametrize(("kind", "spec", "tested", "change"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_workload_of_another_project_gets_the_name_by_a_json_patch(kind, spec, tested, change):
    """A strategic merge is for built-in kinds, and so is `kubectl rollout status`."""
    (found,) = bypasses(service({"port": 9000}), of_kind(kind), {"spec": spec})

    named, service_s = found.command.split("; when its pods have rolled, ")
    words = shlex.split(named)
    assert words[:4] == ["kubectl", "-n", "models", "patch"]
    assert words[4] == BY_NAME[kind].resource("resnet")
    assert words[5] == "--type=json"
    *tests, last = json.loads(words[7])
    assert all(each["op"] == "test" for each in tests)
    assert last == change
    if tested is not None:
        assert tests[0] == {"op": "test", "path": f"{tested}/name", "value": "server"}
    assert service_s.startswith("kubectl -n models patch service resnet ")


@pytest.mark.parametrize("manifest", [None, {"spec": {"workloadRef": {"kind": "Deployment", "name": "resnet"}}}])
def test_where_the_positions_are_not_known_it_says_what_to_write(manifest):
    (found,) = bypasses(service({"port": 9000}), of_kind("Rollout"), manifest)

    assert found.command.startswith(
        "name port 9000 of container server http in it: kubectl -n models edit rollout.argoproj.io/resnet; when its "
        "pods have rolled, kubectl -n models patch service resnet "
    )


def test_others_are_none_of_ours():
    port = {"port": 80, "targetPort": 9000}
    assert bypasses(service(port, selector={"app": "other"}), NAMED) == []
    assert bypasses(service(port, selector={}), NAMED) == []
    assert bypasses(service(port), {"metadata": {"labels": {"app": "resnet"}}, "spec": {}}) == []


@pytest.mark.parametrize(
    "written",
    ["", "{", "[]", '{"container": 7}', '{"port": "9000"}', '{"port": 0}', '{"container": "gone", "port": 9000}'],
)
def test_a_status_that_anybody_wrote_costs_no_more_than_its_own_line(written):
    metadata = {**NAMED["metadata"], "annotations": {"carpool.dev/status": written}}
    found = bypasses(service({"port": 9000}), {**NAMED, "metadata": metadata})
    assert [each.port for each in found] == ([9000] if "gone" in written else [])
