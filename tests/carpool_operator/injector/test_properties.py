"""What holds of every pod: who did not ask is left alone, nothing is opened, nobody is refused, all can be undone."""

from __future__ import annotations

import copy
import json

import jsonpatch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.injector.jsonpatch import diff
from carpool_operator.injector.patch import unpatch
from carpool_operator.injector.quotas import UNKNOWN, Surroundings
from carpool_operator.injector.reasons import Reason
from carpool_operator.webhook.review import judge
from carpool_sidecar.config.settings import parse

from .admission import defaulted, everyone, refusal
from .corpus import OWNER, cases

SETTINGS = InjectorSettings(image="carpool-sidecar:test", version="test", public_key="ab" * 32)


def some(**fields):
    return st.fixed_dictionaries({}, optional=fields)


numbers = st.sampled_from([80, 3000, 4143, 7777, 8000, 8001, 9000, 14080, 14090, 15090, 65535])
port_names = st.sampled_from(["http", "grpc", "https", "metrics", "http-metrics", "predict", "x", "http-envoy-prom"])
handlers = st.one_of(
    st.fixed_dictionaries({"httpGet": st.fixed_dictionaries(
        {"port": st.one_of(numbers, port_names)},
        optional={"path": st.just("/ready"), "scheme": st.sampled_from(["HTTP", "HTTPS"])},
    )}),
    st.fixed_dictionaries({"tcpSocket": st.fixed_dictionaries({"port": st.one_of(numbers, port_names)})}),
    st.fixed_dictionaries({"grpc": st.fixed_dictionaries({"port": numbers})}),
    st.just({"exec": {"command": ["true"]}}),
)  # fmt: skip
hooks = st.one_of(
    st.fixed_dictionaries({"httpGet": st.fixed_dictionaries({"port": st.one_of(numbers, port_names)})}),
    st.just({"exec": {"command": ["true"]}}),
)
ports = st.lists(
    st.fixed_dictionaries(
        {"containerPort": numbers},
        optional={"name": port_names, "protocol": st.sampled_from(["TCP", "UDP"]), "hostPort": numbers},
    ),
    max_size=3,
)
amounts = {"cpu": st.sampled_from(["50m", "0.2", "1", "2"]), "memory": st.sampled_from(["64Mi", "256Mi", "1Gi", "2Gi"])}
storage = {"ephemeral-storage": st.sampled_from(["32Mi", "96Mi", "1Gi", "1.5Gi"])}
resources = some(
    requests=some(**amounts, **storage),
    limits=some(**amounts, **storage, **{"nvidia.com/gpu": st.sampled_from([0, 1])}),
)
names = st.sampled_from(["server", "vllm", "app", "istio-proxy", "queue-proxy", "logs", "carpool", "istio-init"])
security = some(runAsUser=st.sampled_from([0, 1000]), privileged=st.booleans(), readOnlyRootFilesystem=st.booleans())
containers = st.fixed_dictionaries(
    {"name": names, "image": st.just("x")},
    optional={
        "ports": ports,
        "resources": resources,
        "securityContext": security,
        "readinessProbe": handlers,
        "livenessProbe": handlers,
        "startupProbe": handlers,
        "lifecycle": some(preStop=hooks, postStart=hooks),
        "args": st.lists(st.sampled_from(["-d", "15090", "--inbound-ports-to-ignore", "1-9"]), max_size=3),
        "env": st.just([{"name": "ISTIO_KUBE_APP_PROBERS", "value": "[]"}]),
        "restartPolicy": st.just("Always"),
    },
)
values = st.sampled_from(
    ["true", "false", "deployment", "yes", "", "9000", "http", "server", "500m", "1Gi", "128Mi", "-1"]
)
annotations = st.dictionaries(
    st.sampled_from(
        [f"carpool.dev/{name}" for name in (
            "inject", "container", "port", "sidecar-cpu", "sidecar-cpu-limit", "sidecar-memory",
            "sidecar-memory-request", "max-body", "data-port", "admin-port", "capture", "skipped", "other",
        )]
        + ["traffic.sidecar.istio.io/excludeInboundPorts", "config.linkerd.io/skip-inbound-ports",
           "traffic.sidecar.istio.io/includeInboundPorts", "kubectl.kubernetes.io/default-container"]
    ),
    values,
    max_size=4,
)  # fmt: skip
unique = {"unique_by": lambda each: each["name"]}
specs = st.fixed_dictionaries(
    {"containers": st.lists(containers, min_size=1, max_size=3, **unique)},
    optional={
        "initContainers": st.lists(containers, max_size=2, **unique),
        "volumes": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["data", "carpool-change"])}), max_size=1),
        "hostNetwork": st.booleans(),
        "os": st.just({"name": "windows"}),
        "terminationGracePeriodSeconds": st.sampled_from([0, 5, 30, 100000]),
        "resources": some(requests=some(**amounts), limits=some(**amounts)),
        "securityContext": security,
        "shareProcessNamespace": st.booleans(),
        "overhead": st.just({"cpu": "250m"}),
    },
)
items = st.fixed_dictionaries(
    {"type": st.sampled_from(["Container", "Pod"])},
    optional={
        "max": some(**amounts, **storage),
        "min": some(**amounts, **storage),
        "default": some(**amounts, **storage),
        "defaultRequest": some(**storage),
        "maxLimitRequestRatio": some(
            cpu=st.sampled_from(["1", "3"]),
            memory=st.sampled_from(["1.5", "4"]),
            **{"ephemeral-storage": st.sampled_from(["1", "2"])},
        ),
    },
)
hard = some(**{
    f"{kind}{name}": st.sampled_from(choices)
    for kind in ("", "requests.", "limits.")
    for name, choices in {
        "cpu": ["1", "3", "8"],
        "memory": ["1Gi", "3Gi", "8Gi"],
        "ephemeral-storage": ["128Mi", "1.5Gi", "8Gi"],
    }.items()
})  # fmt: skip
surroundings = st.builds(
    lambda limits, quota, written, labels: Surroundings(
        written,
        tuple({"metadata": {"name": "l"}, "spec": {"limits": [each]}} for each in limits),
        tuple(
            {"metadata": {"name": "q"}, "spec": {"hard": each}, "status": {"hard": each, "used": {}}} for each in quota
        ),
        labels,
    ),
    st.lists(items, max_size=2),
    st.lists(hard, max_size=1),
    st.one_of(st.just({}), annotations),
    st.sampled_from([{}, None, {"pod-security.kubernetes.io/enforce": "restricted"}]),
)


sane = some(**{
    "carpool.dev/sidecar-cpu": st.sampled_from(["100m", "2"]),
    "carpool.dev/sidecar-memory": st.sampled_from(["128Mi", "2Gi"]),
    "carpool.dev/sidecar-memory-request": st.just("64Mi"),
    "carpool.dev/data-port": st.just("20000"),
    "carpool.dev/capture": st.sampled_from(["true", "false"]),
    "traffic.sidecar.istio.io/excludeInboundPorts": st.sampled_from(["", "7", "8000-9999"]),
    "carpool.dev/skipped": st.just("NoRoom: there was none"),
})  # fmt: skip


def friendly(spec):
    """Return a spec with a model that can have a sidecar, whatever else is in it."""
    model = {**spec["containers"][0], "name": "model"}
    ports = [{"containerPort": 9000, "name": "http"}, *model.get("ports", [])]
    model["ports"] = [each for each in ports if each["containerPort"] not in {14080, 14090}]
    model["resources"] = {**model.get("resources", {})}
    model["resources"]["limits"] = {**model["resources"].get("limits", {}), "nvidia.com/gpu": 1}
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        if model.get(probe, {}).get("httpGet", {}).get("scheme") == "HTTPS" or "grpc" in model.get(probe, {}):
            del model[probe]
    others = [each for each in spec["containers"][1:] if each["name"] not in {"carpool", "queue-proxy"}]
    inits = [each for each in spec.get("initContainers", []) if each["name"] != "carpool"]
    for each in (*others, *inits):
        each.pop("ports", None)
        (each.get("resources", {}).get("limits") or {}).pop("nvidia.com/gpu", None)
    kept = {key: each for key, each in spec.items() if key not in {"os", "hostNetwork", "volumes", "initContainers"}}
    return {**kept, "containers": [model, *others], **({"initContainers": inits} if "initContainers" in spec else {})}


@st.composite
def pods(draw, *, asks=None):
    """Return a pod as an API server hands it to webhooks."""
    is_friendly = draw(st.booleans())
    written = draw(sane if is_friendly else annotations)
    if asks is not None:
        written = {key: value for key, value in written.items() if key != "carpool.dev/inject"}
        written |= {"carpool.dev/inject": "true"} if asks else {}
    metadata = {"name": "web-0", "ownerReferences": [OWNER]}
    if written or draw(st.booleans()):
        metadata["annotations"] = written
    if draw(st.booleans()):
        metadata["labels"] = {"app": "web"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": draw(specs.map(friendly) if is_friendly else specs),
    }


def admit(pod, around=UNKNOWN):
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "models", "object": pod}
    return judge(request, SETTINGS, "0123456789abcdef", around=around)


def injected(answer):
    event(answer.result)
    return answer.result == "Injected"


@given(pods(asks=False), surroundings)
def test_a_pod_that_did_not_ask_is_never_changed(pod, around):
    before = copy.deepcopy(pod)
    answer = admit(pod, around)
    assert answer.changed is pod
    assert pod == before
    assert answer.result in {Reason.NOT_OPTED_IN, Reason.ALREADY_INJECTED}


@given(pods(), surroundings)
def test_the_patch_makes_what_was_decided_and_again_changes_nothing(pod, around):
    before = copy.deepcopy(pod)
    answer = admit(pod, around)
    assert pod == before
    assert jsonpatch.apply_patch(pod, list(diff(pod, answer.changed))) == answer.changed
    assert admit(answer.changed, around).changed == answer.changed


@given(pods(asks=True), surroundings)
def test_what_was_injected_can_be_taken_out(pod, around):
    answer = admit(pod, around)
    if injected(answer):
        kept = {**pod, "metadata": {**pod["metadata"]}}
        restored = unpatch(json.loads(json.dumps(answer.changed)))
        if "carpool.dev/skipped" not in pod["metadata"]["annotations"]:
            assert json.dumps(restored) == json.dumps(kept)
        assert restored == kept


@given(pods(asks=True))
def test_nothing_opens_a_pod(pod):
    answer = admit(pod)
    if not injected(answer):
        return
    before, after = pod["spec"], answer.changed["spec"]
    # 1. The pod's own rights
    ours = {"containers", "initContainers", "volumes", "terminationGracePeriodSeconds", "resources"}
    assert {key: each for key, each in after.items() if key not in ours} == {
        key: each for key, each in before.items() if key not in ours
    }
    # 2. Those of its containers
    *others, sidecar = after["initContainers"]
    if others and others[-1]["name"] == "carpool-capture":
        # One that asks for it gets one right more, in a container that ends.
        assert pod["metadata"]["annotations"]["carpool.dev/capture"] == "true"
        capture = others.pop()
        assert "restartPolicy" not in capture
        assert capture["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    for old, new in zip(
        [*before.get("initContainers", []), *before["containers"]], [*others, *after["containers"]], strict=True
    ):
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        assert changed <= {"ports", "lifecycle", "readinessProbe", "livenessProbe", "startupProbe", "args"}
        assert "args" not in changed or old["name"] == "istio-init"
        host = [port["hostPort"] for port in old.get("ports", []) if "hostPort" in port]
        assert [port["hostPort"] for port in new.get("ports", []) if "hostPort" in port] == host
    # 3. The sidecar's
    assert sidecar["name"] == "carpool"
    assert sidecar["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": 65532,
        "runAsGroup": 65532,
    }
    assert not any("hostPort" in port for port in sidecar["ports"])
    assert all(mount["readOnly"] for mount in sidecar["volumeMounts"])
    volumes = before.get("volumes") or []
    assert after["volumes"][: len(volumes)] == volumes
    (added,) = after["volumes"][len(volumes) :]
    assert set(added) == {"name", "configMap"}
    # 4. It can be read by the sidecar itself
    parse(sidecar["env"][0]["value"].replace("$$", "$"))


@settings(max_examples=400)
@given(pods(asks=True), surroundings)
def test_no_pod_is_refused_because_of_a_sidecar(pod, around):
    # Before a webhook is asked, the API server has written the defaults of LimitRanges.
    for each in everyone(pod["spec"]):
        each["resources"] = defaulted(each.get("resources") or {}, around.limit_ranges)
    event(f"bare: {refusal(pod, around) is None}")
    if refusal(pod, around) is None:
        answer = admit(pod, around)
        injected(answer)
        assert refusal(answer.changed, around) is None


LADDERS = {
    "cpu": ["50m", "100m", "0.5", "1", "1500m", "2"],
    "memory": ["64Mi", "128Mi", "512Mi", "1Gi", "1.5Gi", "2Gi"],
    "ephemeral-storage": ["32Mi", "64Mi", "96Mi", "1Gi", "1.5Gi", "2Gi"],
}


@st.composite
def confined(draw):
    """Return a pod with which nothing but its resources can be wrong, and a namespace that limits one of them."""
    name = draw(st.sampled_from(sorted(LADDERS)))
    steps = LADDERS[name]
    step = st.sampled_from(steps)
    # 1. LimitRanges, each with a minimum and a maximum that fit together
    ranges = []
    for kind in draw(st.lists(st.sampled_from(["Container", "Pod"]), min_size=1, max_size=3)):
        low, middle, high = sorted(draw(st.tuples(*[st.integers(0, len(steps) - 1)] * 3)))
        bounds = {"min": steps[low], "max": steps[high], "maxLimitRequestRatio": draw(st.sampled_from(["1", "2"]))}
        if kind == "Container":
            bounds |= {"default": steps[middle], "defaultRequest": steps[low]}
        kept = draw(st.sets(st.sampled_from(sorted(bounds)), min_size=1))
        ranges.append({"type": kind, **{bound: {name: value} for bound, value in bounds.items() if bound in kept}})
    # 2. A quota
    hard = {f"{draw(st.sampled_from(['', 'requests.', 'limits.']))}{name}": draw(step)}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {}}}
    # 3. The pod
    containers = []
    for title in draw(st.sampled_from([["model"], ["model", "logs"]])):
        low, high = sorted(draw(st.tuples(*[st.integers(0, len(steps) - 1)] * 2)))
        named = draw(st.sampled_from([(), ("limits",), ("requests",), ("limits", "requests")]))
        amounts = {"requests": {name: steps[low]}, "limits": {name: steps[high]}}
        containers.append({"name": title, "image": "x", "resources": {kind: amounts[kind] for kind in named}})
    containers[0]["ports"] = [{"containerPort": 9000, "name": "http"}]
    metadata = {"name": "web-0", "ownerReferences": [OWNER], "annotations": {"carpool.dev/inject": "true"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    limit_ranges = tuple({"metadata": {"name": "l"}, "spec": {"limits": [each]}} for each in ranges)
    return pod, Surroundings({}, limit_ranges, draw(st.sampled_from([(), (quota,)])))


@settings(max_examples=400)
@given(confined())
def test_no_pod_that_a_namespace_has_room_for_is_refused_with_a_sidecar(case):
    pod, around = case
    for each in pod["spec"]["containers"]:
        each["resources"] = defaulted(each["resources"], around.limit_ranges)
    event(f"bare: {refusal(pod, around) is None}")
    if refusal(pod, around) is None:
        answer = admit(pod, around)
        injected(answer)
        assert refusal(answer.changed, around) is None


def test_the_rules_of_the_corpus_are_those_of_the_server():
    for case in cases():
        assert refusal(case.pod, case.around) is None or case.expect.get("skipped") == Reason.NO_ROOM, case.name
