from __future__ import annotations

import json

import pytest
from msgspec import structs

from carpool_operator.api.model import Target
from carpool_operator.injector.decide import Inject, InjectorSettings, decide, target_of
from carpool_operator.injector.patch import ASK_TIMEOUT, patch, unpatch
from carpool_operator.injector.quotas import Surroundings
from carpool_operator.injector.reasons import NOTES, REASONS, Note, Reason, Skip
from carpool_operator.injector.resources import Resources
from carpool_sidecar.config.settings import Upstream, parse

MI = 2**20

SETTINGS = InjectorSettings(image="carpool-sidecar", version="1", public_key="ab" * 32)
TARGET = Target("models", "Deployment", "resnet")
HTTP = {"name": "http", "containerPort": 9000}


def pod(*, annotations=None, ports=(HTTP,), spec=None, **container):
    server = {"name": "server", "image": "model", "ports": list(ports), **container}
    written = {"carpool.dev/inject": "true", **(annotations or {})}
    return {"metadata": {"annotations": written}, "spec": {"containers": [server], **(spec or {})}}


def port(*annotation, ports=(HTTP,), **container):
    written = {"carpool.dev/port": annotation[0]} if annotation else {}
    decision = decide(pod(annotations=written, ports=ports, **container), TARGET, SETTINGS)
    return decision.port if isinstance(decision, Inject) else decision.reason


def decided(namespace, own):
    """Decide on a pod and its namespace, with our annotations by their last names."""
    of_namespace, of_pod = ({f"carpool.dev/{name}": value for name, value in each.items()} for each in (namespace, own))
    return decide(pod(annotations=of_pod), TARGET, SETTINGS, around=Surroundings(of_namespace))


SKIPPED = {
    Reason.DISABLED: pod(annotations={"carpool.dev/inject": "false"}),
    Reason.ALREADY_INJECTED: pod(spec={"initContainers": [{"name": "carpool"}]}),
    Reason.UNKNOWN_CONTAINER: pod(annotations={"carpool.dev/container": "sever"}),
    Reason.NO_PORT: pod(ports=()),
    Reason.UNKNOWN_PORT: pod(annotations={"carpool.dev/port": "grpc"}),
    Reason.NOT_TCP: pod(ports=({"containerPort": 53, "protocol": "UDP"},)),
    Reason.NOT_HTTP: pod(ports=({"name": "grpc-infer", "containerPort": 8001},)),
    Reason.PORT_TAKEN: pod(ports=(HTTP, {"containerPort": 14090})),
    Reason.NAME_TAKEN: pod(spec={"volumes": [{"name": "carpool-change"}]}),
    Reason.HOST_NETWORK: pod(spec={"hostNetwork": True}),
    Reason.WINDOWS: pod(spec={"nodeSelector": {"kubernetes.io/os": "windows"}}),
    Reason.NOT_OPTED_IN: {"metadata": {}, "spec": {"containers": [{"name": "server", "ports": [HTTP]}]}},
    Reason.BAD_ANNOTATION: pod(annotations={"carpool.dev/inject": "yes"}),
}


@pytest.mark.parametrize("reason", SKIPPED)
def test_each_reason_is_given(reason):
    decision = decide(SKIPPED[reason], TARGET, SETTINGS)
    assert isinstance(decision, Skip)
    assert decision.reason == reason
    assert str(decision).startswith(f"{reason}: ")


def test_every_code_has_its_page():
    assert set(REASONS) == set(Reason)
    assert set(NOTES) == set(Note)


def test_pods_that_did_not_ask_for_a_sidecar_are_not_annotated_as_skipped():
    quiet = {reason for reason in Reason if not Skip(reason, "").is_annotated}
    assert quiet == {Reason.NOT_OPTED_IN, Reason.DISABLED, Reason.ALREADY_INJECTED}


@pytest.mark.parametrize(
    "annotation",
    [
        {"carpool.dev/sidecar-cpu": "two"},
        {"carpool.dev/sidecar-cpu": "0m"},
        {"carpool.dev/sidecar-memory": "1G1"},
        {"carpool.dev/sidecar-memory": "64Mi"},
        {"carpool.dev/port": "70000"},
    ],
)
def test_a_bad_annotation_is_named(annotation):
    decision = decide(pod(annotations=annotation), TARGET, SETTINGS)
    assert decision.reason == Reason.BAD_ANNOTATION
    assert next(iter(annotation)) in decision.message


@pytest.mark.parametrize(
    ("annotations", "chart", "said"),
    [
        ({"data-port": "14090"}, {}, "carpool.dev/data-port and the chart's sidecar.ports.admin are both 14090"),
        ({}, {"admin_port": 14080}, "the chart's sidecar.ports.data and the chart's sidecar.ports.admin are both"),
        (
            {"data-port": "9", "admin-port": "9"}, {}, "carpool.dev/data-port is '9': write a number from 1024 to 65535"
        ),
        (
            {"data-port": "2000", "admin-port": "2000"},
            {},
            "carpool.dev/data-port and carpool.dev/admin-port are both 2000",
        ),
    ],
)  # fmt: skip
def test_ports_that_are_the_same_are_named_by_where_they_come_from(annotations, chart, said):
    written = {f"carpool.dev/{name}": value for name, value in annotations.items()}
    decision = decide(pod(annotations=written), TARGET, structs.replace(SETTINGS, **chart))
    assert decision.message.startswith(said)


@pytest.mark.parametrize(
    ("namespace", "own", "becomes"),
    [
        ({"sidecar-cpu-limit": "1"}, {"sidecar-cpu": "2"}, {"cpu": (2000, 2000)}),
        ({"sidecar-cpu-limit": "1"}, {"sidecar-cpu": "250m"}, {"cpu": (250, 1000)}),
        ({"sidecar-cpu": "1", "sidecar-cpu-limit": "1"}, {"sidecar-cpu": "2"}, {"cpu": (2000, 2000)}),
        ({"sidecar-memory": "1Gi", "sidecar-memory-request": "512Mi"}, {"sidecar-memory": "256Mi"},
         {"memory": (256 * MI, 256 * MI)}),
        ({"sidecar-memory-request": "256Mi"}, {"sidecar-memory": "1Gi"}, {"memory": (256 * MI, 1024 * MI)}),
        # A value that the pod overrides need not be valid.
        ({"sidecar-cpu": "much"}, {"sidecar-cpu": "2"}, {"cpu": (2000, None)}),
    ],
)  # fmt: skip
def test_a_namespace_s_default_yields_to_the_pod_s_own(namespace, own, becomes):
    found = decided(namespace, own)
    assert {name: found.resources.named()[name] for name in becomes} == becomes


@pytest.mark.parametrize(
    ("memory", "own", "limit"), [("1Gi", {}, 256), ("256Mi", {}, 128), ("1Gi", {"sidecar-memory": "256Mi"}, 128)]
)
def test_a_namespace_s_largest_body_is_one_that_the_memory_holds(memory, own, limit):
    assert decided({"max-body": "256Mi", "sidecar-memory": memory}, own).max_body == limit * MI


@pytest.mark.parametrize(
    ("namespace", "own", "said"),
    [
        ({"sidecar-cpu": "much"}, {}, "sidecar-cpu on the Namespace is 'much'"),
        ({"sidecar-memory": "1Mi"}, {}, "sidecar-memory on the Namespace is 1Mi"),
        ({"capture": "yes"}, {}, "capture on the Namespace is 'yes'"),
        ({"max-body": "1"}, {}, "max-body on the Namespace is 1"),
        ({"data-port": "9"}, {}, "data-port on the Namespace is '9'"),
        ({"data-port": "2000"}, {"admin-port": "2000"},
         "data-port on the Namespace and carpool.dev/admin-port are both 2000"),
        ({"sidecar-cpu": "2", "sidecar-cpu-limit": "1"}, {}, "sidecar-cpu-limit on the Namespace is 1, less than"),
        ({"sidecar-cpu": "2"}, {"sidecar-cpu-limit": "1"},
         "sidecar-cpu-limit is 1, less than the request, 2: raise it, or lower carpool.dev/sidecar-cpu on the Names"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_where_it_is(namespace, own, said):
    found = decided(namespace, own)
    assert found.reason == Reason.BAD_ANNOTATION
    assert found.message.startswith(f"carpool.dev/{said}")


CALL = {"httpGet": {"path": "/", "port": 14090}}


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ({"livenessProbe": CALL}, True),
        ({"startupProbe": {"tcpSocket": {"port": 14080}}}, True),
        ({"lifecycle": {"postStart": CALL}}, True),
        ({"livenessProbe": {"httpGet": {"path": "/", "port": 14091}}}, False),
        ({"livenessProbe": {"httpGet": {"path": "/", "port": "http"}}}, False),
        ({"lifecycle": {"preStop": {"httpGet": {"host": "registry", "port": 14090}}}}, False),
        ({"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}}, False),
    ],
)
def test_a_port_that_only_calls_of_the_kubelet_name_is_in_use(other, taken):
    server = {"name": "server", "ports": [HTTP]}
    one = {"metadata": {"annotations": {"carpool.dev/inject": "true"}}}
    decision = decide({**one, "spec": {"containers": [server, {"name": "helper", **other}]}}, TARGET, SETTINGS)
    assert isinstance(decision, Skip) == taken
    assert not taken or decision.reason is Reason.PORT_TAKEN


@pytest.mark.parametrize("written", ["9000", "09000", "0" * 5000 + "9000"])
def test_a_number_with_zeros_before_it_is_the_port_that_it_names(written):
    found = decide(pod(annotations={"carpool.dev/port": written}), TARGET, SETTINGS)
    assert (found.port, found.declared) == (9000, 0)
    patched = patch(pod(), found, SETTINGS, "0123456789abcdef")
    assert Note.PORT_UNNAMED not in json.loads(patched["metadata"]["annotations"]["carpool.dev/status"])["notes"]


@pytest.mark.parametrize("written", ["8" * 5000, "²", "٣", "-1", "0"])
def test_what_is_no_port_is_a_reason_and_no_error(written):
    expected = {Reason.BAD_ANNOTATION, Reason.UNKNOWN_PORT}
    assert port(written) in expected
    assert decide(pod(annotations={"carpool.dev/data-port": written}), TARGET, SETTINGS).reason in expected


def terms(*expressions, key="kubernetes.io/os"):
    written = [
        {
            "matchExpressions": [
                {"key": key, "operator": operator, "values": values},
                {"key": "gpu", "operator": "Exists"},
            ]
        }
        for operator, values in expressions
    ]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": written}}}
    }


@pytest.mark.parametrize(
    ("spec", "windows"),
    [
        ({"os": {"name": "windows"}}, True),
        ({"os": {"name": "linux"}}, False),
        ({"nodeSelector": {"beta.kubernetes.io/os": "windows"}}, True),
        ({"nodeSelector": {"kubernetes.io/os": "linux"}}, False),
        (terms(("In", ["windows"])), True),
        (terms(("In", ["windows"]), key="beta.kubernetes.io/os"), True),
        (terms(("NotIn", ["linux"])), True),
        (terms(("In", ["windows"]), ("NotIn", ["linux"])), True),
        (terms(("In", ["windows", "linux"])), False),
        (terms(("In", ["windows"]), ("In", ["linux"])), False),
        (terms(("In", ["windows"]), key="example.com/os"), False),
        ({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}}}, False),
        ({"affinity": {"podAntiAffinity": {}}}, False),
    ],
)
def test_a_pod_for_windows_is_left_alone_wherever_it_says_so(spec, windows):
    found = decide(pod(spec=spec), TARGET, SETTINGS)
    assert (isinstance(found, Skip) and found.reason == Reason.WINDOWS) == windows


def test_the_port_is_the_first_that_may_speak_http():
    grpc, metrics = {"name": "grpc", "containerPort": 1}, {"name": "metrics", "containerPort": 2}
    dns = {"name": "http", "containerPort": 53, "protocol": "UDP"}
    assert port(ports=(grpc, metrics, dns, HTTP)) == 9000
    assert port(ports=({"containerPort": 7}, {"containerPort": 6})) == 7
    assert port(ports=({"containerPort": 7}, HTTP)) == 9000  # what is known comes first
    assert port(ports=({"name": "h2o", "containerPort": 7},)) == 7
    # What is named by hand may have any name
    assert port("metrics", ports=(grpc, metrics, HTTP)) == 2
    assert port("2", ports=(grpc, metrics, HTTP)) == 2
    # a number need not be declared
    assert port("8080") == 8080
    assert port("53", ports=(dns,)) == Reason.NOT_TCP
    assert port("14080") == Reason.PORT_TAKEN


@pytest.mark.parametrize("probe", [{"httpGet": {"port": "http", "scheme": "HTTPS"}}, {"grpc": {"port": 9000}}])
def test_a_liveness_probe_shows_what_a_port_speaks(probe):
    assert port("http", livenessProbe=probe) == Reason.NOT_HTTP
    other = {key: {**value, "port": 7} for key, value in probe.items()}
    assert port("http", livenessProbe=other) == 9000


def test_the_container_is_the_one_with_a_known_port():
    given = pod()
    given["spec"]["containers"].insert(0, {"name": "logs"})
    assert decide(given, TARGET, SETTINGS).container == "server"
    given["metadata"]["annotations"]["carpool.dev/container"] = "logs"
    assert decide(given, TARGET, SETTINGS).reason == Reason.NO_PORT


def test_only_where_somebody_tunes():
    assert decide(pod(), None, SETTINGS).reason == Reason.UNKNOWN_OWNER
    unkeyed = InjectorSettings(image="i", version="1")
    assert decide(pod(), TARGET, unkeyed).reason == Reason.NO_PUBLIC_KEY


def test_by_hand_all_but_those_that_forbid_it():
    bare = SKIPPED[Reason.NOT_OPTED_IN]
    assert decide(bare, TARGET, SETTINGS, asked=True) == Inject(
        TARGET, "server", 9000, 0, Resources(500, None, 128 * MI, 512 * MI), 14080, 14090, 64 * MI
    )
    assert decide(SKIPPED[Reason.DISABLED], TARGET, SETTINGS, asked=True).reason == Reason.DISABLED


def owned(kind, name, api="apps/v1", labels=None):
    reference = {"apiVersion": api, "kind": kind, "name": name, "controller": True}
    return {"metadata": {"generateName": f"{name}-", "labels": labels, "ownerReferences": [reference]}}


def test_whose_pod_it_is():
    hashed = {"pod-template-hash": "7c9"}
    assert target_of(owned("ReplicaSet", "resnet-50-7c9", labels=hashed), "m") == ("m", "Deployment", "resnet-50")
    assert target_of(owned("StatefulSet", "resnet"), "m") == Target("m", "StatefulSet", "resnet")
    assert target_of(owned("ReplicaSet", "resnet"), "m") == Target("m", "ReplicaSet", "resnet")
    # Others, none
    assert target_of(owned("Job", "resnet", "batch/v1"), "m") is None
    assert target_of(owned("StatefulSet", "resnet", "other/v1"), "m") is None
    assert target_of({"metadata": {"name": "resnet"}}, "m") is None


@pytest.mark.parametrize(
    ("path", "ready"),
    [
        ("healthz", "/healthz"),
        ("", "/"),
        (None, "/"),
        ("/a/b", "/a/b"),
        ("/health check", "/health%20check"),
        ("/ä?b=%20c#d", "/%C3%A4?b=%20c"),
        ("/a\r\nb", "/a%0D%0Ab"),
    ],
)
def test_the_readiness_path_is_as_the_kubelet_asks_for_it(path, ready):
    probe = {"httpGet": {"port": "http"} | ({} if path is None else {"path": path})}
    given = pod(readinessProbe=probe, lifecycle=None, spec={"terminationGracePeriodSeconds": None})
    found = decide(given, TARGET, SETTINGS)
    patched = patch(given, found, SETTINGS, "0123456789abcdef")
    config = patched["spec"]["initContainers"][-1]["env"][0]["value"].replace("$$", "$")
    assert parse(config).upstream.ready == ready


@pytest.mark.parametrize(
    ("probe", "ready"),
    [
        ({"httpGet": {"port": "http", "path": "/slow"}}, "/slow"),
        ({"httpGet": {"port": "http", "path": "/slow", "httpHeaders": [{"name": "a", "value": "b"}]}}, None),
        ({"exec": {"command": ["curl", "localhost:8080/v2/health/ready"]}}, None),
    ],
)
@pytest.mark.parametrize(("timeout", "seconds"), [(None, 5), (1, 5), (5, 5), (6, 6), (2**31 - 1, 30 * 86400)])
def test_the_sidecar_waits_for_an_answer_as_long_as_the_model_s_own_probe(probe, ready, timeout, seconds):
    """Else each question times out, and the pod is never ready: SGLang's ``/health_generate`` generates."""
    given = pod(readinessProbe={**probe, "timeoutSeconds": timeout})
    patched = patch(given, decide(given, TARGET, SETTINGS), SETTINGS, "0123456789abcdef")
    upstream = parse(patched["spec"]["initContainers"][-1]["env"][0]["value"].replace("$$", "$")).upstream
    assert (upstream.ready, upstream.ask_timeout) == (ready, seconds)
    assert Upstream(url="http://127.0.0.1:1").ask_timeout == ASK_TIMEOUT


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [
        (None, 0),
        ({"httpGet": {"port": "http"}}, 30),
        ({"tcpSocket": {"port": "http"}}, 30),
        ({"grpc": {"port": 8001}}, 30),
        ({"exec": {"command": ["true"]}, "periodSeconds": 5, "failureThreshold": 1}, 5),
        ({"exec": {"command": ["true"]}, "periodSeconds": 5, "failureThreshold": 10}, 50),
        ({"httpGet": {"port": "http", "httpHeaders": [{"name": "a", "value": "b"}]}}, 30),
        ({"httpGet": {"port": 8001}}, 30),
        ({"httpGet": {"port": "http"}, "timeoutSeconds": 20}, 60),
        ({"httpGet": {"port": "http"}, "periodSeconds": 1, "failureThreshold": 1}, 1),
        ({"httpGet": {"port": "http"}, "periodSeconds": None, "failureThreshold": 60}, 600),
        ({"httpGet": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 2**31 - 1}, 30 * 86400),
    ],
)
def test_the_pod_becomes_unready_no_sooner_than_by_the_model_s_own_probe(probe, seconds):
    """A model may say for seconds that it is not ready, while it loads another version: in all replicas at once."""
    given = pod(readinessProbe=probe)
    patched = patch(given, decide(given, TARGET, SETTINGS), SETTINGS, "0123456789abcdef")
    sidecar = patched["spec"]["initContainers"][-1]
    assert parse(sidecar["env"][0]["value"].replace("$$", "$")).upstream.patience == seconds
    # A sidecar that drains or hangs shows it at once.
    own = sidecar["readinessProbe"]
    assert own["periodSeconds"] * own["failureThreshold"] == 4


@pytest.mark.parametrize(
    ("item", "fits"),
    [
        ({"max": {"nvidia.com/gpu": 8}}, False),
        ({"max": {"nvidia.com/gpu": "8"}, "default": {"nvidia.com/gpu": "0"}}, True),
        ({"min": {"nvidia.com/gpu": "1"}}, False),
        ({"defaultRequest": {"hugepages-2Mi": "4Mi"}}, False),
        ({"max": {"ephemeral-storage": "8Gi"}}, True),
    ],
)
def test_a_sidecar_that_a_limit_range_would_give_devices_is_left_out(item, fits):
    around = Surroundings(
        limit_ranges=({"metadata": {"name": "gpus"}, "spec": {"limits": [{"type": "Container", **item}]}},)
    )
    found = decide(pod(), TARGET, SETTINGS, around=around)
    assert isinstance(found, Inject) if fits else (found.reason == Reason.NO_ROOM and "gpus" in found.message)


@pytest.mark.parametrize(
    ("profile", "own"),
    [
        ({"type": "Localhost", "localhostProfile": "model"}, {"type": "RuntimeDefault"}),
        ({"type": "Unconfined"}, None),
        (None, None),
    ],
)
def test_an_apparmor_profile_that_was_written_for_the_model_is_not_the_sidecar_s(profile, own):
    given = pod(annotations={"carpool.dev/capture": "true"}, spec={"securityContext": {"appArmorProfile": profile}})
    patched = patch(given, decide(given, TARGET, SETTINGS), SETTINGS, "0123456789abcdef")
    added = patched["spec"]["initContainers"]
    assert [each["name"] for each in added] == ["carpool-capture", "carpool"]
    assert [each["securityContext"].get("appArmorProfile") for each in added] == [own, own]


def test_a_pod_that_a_quota_would_count_for_its_sidecar_alone_is_left_as_it_is():
    quota = {"metadata": {"name": "burst"}, "spec": {"scopes": ["NotBestEffort"], "hard": {"limits.memory": "64Gi"}}}
    around = Surroundings(quotas=(quota,))
    found = decide(pod(), TARGET, SETTINGS, around=around)
    assert (found.reason, "limits.memory of every container" in found.message) == (Reason.NO_ROOM, True)
    # A pod's class is by its CPU and memory alone.
    uncounted = {"limits": {"nvidia.com/gpu": 1, "ephemeral-storage": "1Gi"}, "requests": {"cpu": "0"}}
    assert decide(pod(resources=uncounted), TARGET, SETTINGS, around=around) == found
    named = {"limits": {"cpu": "1", "memory": "1Gi"}}
    assert isinstance(decide(pod(resources=named), TARGET, SETTINGS, around=around), Inject)
    counted = {**quota, "spec": {**quota["spec"], "hard": {"pods": "10"}}}
    assert isinstance(decide(pod(), TARGET, SETTINGS, around=Surroundings(quotas=(counted,))), Inject)


@pytest.mark.parametrize(
    ("own", "becomes"),
    [
        ({}, ["ours", "theirs"]),
        ({"imagePullSecrets": None}, ["ours", "theirs"]),
        ({"imagePullSecrets": []}, ["ours", "theirs"]),
        ({"imagePullSecrets": [{"name": "own"}]}, ["own", "ours", "theirs"]),
        ({"imagePullSecrets": [{"name": "theirs"}, {"name": "own"}]}, ["theirs", "own", "ours"]),
        ({"imagePullSecrets": [{"name": "own"}, {"name": "own"}]}, ["own", "own", "ours", "theirs"]),
    ],
)
def test_the_secrets_that_the_sidecar_s_image_is_pulled_with_come_behind_the_pod_s_own(own, becomes):
    settings = structs.replace(SETTINGS, pull_secrets=("ours", "theirs", "ours"))
    given = pod(spec=own)
    before = json.dumps(given)
    patched = patch(given, decide(given, TARGET, settings), settings, "0123456789abcdef")
    assert [each["name"] for each in patched["spec"]["imagePullSecrets"]] == becomes
    assert json.dumps(unpatch(json.loads(json.dumps(patched)))) == before
    without = patch(given, decide(given, TARGET, SETTINGS), SETTINGS, "0123456789abcdef")
    assert without["spec"].get("imagePullSecrets") == own.get("imagePullSecrets")


def fitted(resources, *items, **hard):
    """Return the resources of a sidecar beside a model with ``resources``, or why there is none."""
    ranges = tuple({"metadata": {"name": f"l{index}"}, "spec": {"limits": [each]}} for index, each in enumerate(items))
    quotas = ({"metadata": {"name": "q"}, "spec": {"hard": hard}},) if hard else ()
    found = decide(pod(resources=resources), TARGET, SETTINGS, around=Surroundings({}, ranges, quotas))
    return found.resources.written() if isinstance(found, Inject) else found.message


def storage(found):
    return {kind: found[kind].get("ephemeral-storage") for kind in ("requests", "limits")}


BOTH = {"requests": {"ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "1Gi"}}
OF_CONTAINER = {"type": "Container", "default": {"ephemeral-storage": "1Gi"}}
OF_POD = {"type": "Pod", "max": {"ephemeral-storage": "1.5Gi"}}


@pytest.mark.parametrize(
    ("items", "hard", "requested", "limit"),
    [
        ([OF_CONTAINER, OF_POD], {}, "64Mi", "64Mi"),
        ([OF_CONTAINER], {"limits.ephemeral-storage": "1.5Gi"}, "64Mi", "64Mi"),
        ([{"type": "Container", "min": {"ephemeral-storage": "128Mi"}}], {}, "128Mi", None),
        ([{"type": "Container", "defaultRequest": {"ephemeral-storage": "1Gi"}}], {}, "64Mi", None),
        ([{"type": "Container", "max": {"ephemeral-storage": "1Gi"}}], {}, "64Mi", "64Mi"),
        ([{"type": "Container", "maxLimitRequestRatio": {"ephemeral-storage": "1"}}], {}, "64Mi", "64Mi"),
        # A limit of its own would be one of the whole pod.
        ([OF_POD], {"requests.ephemeral-storage": "1Gi", "ephemeral-storage": "1Gi"}, None, None),
        ([{"type": "Container", "default": {"cpu": "1"}}], {}, None, None),
    ],
)
def test_storage_is_named_where_a_limit_range_names_it_for_containers(items, hard, requested, limit):
    assert storage(fitted(BOTH, *items, **hard)) == {"requests": requested, "limits": limit}


@pytest.mark.parametrize(
    ("item", "notes"),
    [
        ({"default": {"ephemeral-storage": "1Gi"}}, ()),
        ({"min": {"ephemeral-storage": "128Mi"}}, ()),
        ({"max": {"memory": "256Mi"}}, (Note.RESOURCES_FITTED,)),
    ],
)
def test_storage_that_is_named_for_a_limit_range_is_no_change_of_what_is_set(item, notes):
    ranges = ({"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", **item}]}},)
    assert decide(pod(), TARGET, SETTINGS, around=Surroundings(limit_ranges=ranges)).notes == notes


def test_without_room_for_its_logs_there_is_no_sidecar():
    tight = {"type": "Pod", "max": {"ephemeral-storage": "1050Mi"}}
    assert "needs 64Mi of ephemeral-storage; with its other containers, LimitRange l1 leaves it 26Mi" in fitted(
        BOTH, OF_CONTAINER, tight
    )
    assert "raise the quota" in fitted(BOTH, OF_CONTAINER, **{"limits.ephemeral-storage": "1050Mi"})
    small = {"type": "Container", "max": {"ephemeral-storage": "32Mi"}}
    assert "LimitRange l0 leaves it 32Mi" in fitted({}, small)


def test_two_limit_ranges_are_met_both_or_there_is_no_sidecar():
    memory = {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    least, most = {"type": "Container", "min": {"memory": "1Gi"}}, {"type": "Pod", "max": {"memory": "1.5Gi"}}
    assert "no memory for a sidecar fits LimitRange l0 and all others" in fitted(memory, least, most)
    assert fitted(memory, most)["limits"]["memory"] == "512Mi"


def test_the_limits_of_a_pod_reach_its_minimum_also_where_the_sidecar_s_is_the_only_one():
    least = {"type": "Pod", "min": {"memory": "1Gi"}}
    assert fitted({"requests": {"memory": "2Gi"}}, least)["limits"]["memory"] == "1Gi"
    assert fitted({"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}, least)["limits"]["memory"] == "512Mi"
