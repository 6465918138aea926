"""Port capture, by annotation: who gets it, who gets a sidecar without it, and what is left of it afterwards."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from carpool_operator.api.injection import injection_of
from carpool_operator.api.model import Target
from carpool_operator.injector.bypass import bypasses
from carpool_operator.injector.decide import Inject, InjectorSettings, decide
from carpool_operator.injector.patch import patch, unpatch
from carpool_operator.injector.quotas import Surroundings
from carpool_operator.injector.reasons import Note, Reason

SETTINGS = InjectorSettings(image="carpool-sidecar:1", version="1", public_key="ab" * 32)
TARGET = Target("models", "Deployment", "resnet")
SERVER = {"carpool.dev/container": "server"}
PROBE = {"httpGet": {"path": "/v2/health/ready", "port": "http"}}


def pod(capture="true", *, labels=None, probe=PROBE, init=(), beside=(), annotations=None, port=None):
    server = {"name": "server", "image": "model", "ports": [port or {"name": "http", "containerPort": 8000}]}
    return {
        "metadata": {
            "annotations": {"carpool.dev/inject": "true", "carpool.dev/capture": capture, **(annotations or {})},
            "labels": {"app": "resnet", **(labels or {})},
        },
        "spec": {
            "securityContext": {"runAsNonRoot": True},
            "initContainers": [{"name": "download", "image": "loader"}, *init],
            "containers": [{**server, "readinessProbe": probe}, *beside],
        },
    }


def exporter(port, name="http", own=8001):
    """Another container, with a ``tcpSocket`` probe of ``port``, and a port of its own."""
    ports = [{"name": name, "containerPort": own}]
    return {"name": "exporter", "image": "exporter", "ports": ports, "livenessProbe": {"tcpSocket": {"port": port}}}


def injected(given, around=None, settings=SETTINGS):
    around = Surroundings() if around is None else around
    decision = decide(given, TARGET, settings, around=around)
    assert isinstance(decision, Inject), decision
    return patch(given, decision, settings, "0123456789abcdef", around=around)


def status(changed):
    return json.loads(changed["metadata"]["annotations"]["carpool.dev/status"])


def capturing(changed):
    return [each for each in changed["spec"]["initContainers"] if each["name"] == "carpool-capture"]


def test_an_init_container_with_one_capability_redirects_before_the_sidecar_starts():
    changed = injected(pod())

    assert [each["name"] for each in changed["spec"]["initContainers"]] == ["download", "carpool-capture", "carpool"]
    (init,) = capturing(changed)
    assert (init["image"], init["command"]) == ("carpool-sidecar:1", ["carpool-capture"])
    assert init["args"] == ["--optional", "8000=14080"]
    assert init["securityContext"] == {
        "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False, "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert "restartPolicy" not in init


def test_callers_and_probes_need_no_change_so_the_model_s_container_has_none():
    given = pod()
    changed = injected(given)

    (before,), (after,) = given["spec"]["containers"], changed["spec"]["containers"]
    assert {key: value for key, value in after.items() if key != "lifecycle"} == before
    assert status(changed)["capture"] is True
    assert status(changed)["notes"] == []
    by_number = {
        "metadata": {"namespace": "models", "name": "resnet"},
        "spec": {"selector": {"app": "resnet"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    assert bypasses(by_number, changed) == []
    assert injection_of(changed["metadata"]["annotations"]).capture


def test_a_port_without_a_name_needs_none():
    assert status(injected(pod(port={"containerPort": 8000})))["notes"] == []


def test_it_asks_for_no_more_than_the_sidecar_so_the_pod_costs_the_same():
    (init,) = capturing(injected(pod(annotations={"carpool.dev/sidecar-cpu": "2"})))

    assert init["resources"]["requests"]["cpu"] == "2"


def test_taken_back_every_byte_is_as_it_was():
    given = pod()

    assert unpatch(injected(given)) == given


MESHES = {
    "istio's label": pod(labels={"sidecar.istio.io/inject": "true"}),
    "istio's revision": pod(labels={"istio.io/rev": "1-24"}),
    "istio's container": pod(init=[{"name": "istio-proxy", "image": "proxyv2", "restartPolicy": "Always"}]),
    "ambient": pod(labels={"istio.io/dataplane-mode": "ambient"}),
    "linkerd's annotation": pod(annotations={"linkerd.io/inject": "enabled"}),
    "kuma's label": pod(labels={"kuma.io/sidecar-injection": "true"}),
    "consul's annotation": pod(annotations={"consul.hashicorp.com/connect-inject": "true"}),
}
NAMESPACES = {
    "istio": Surroundings(labels={"istio-injection": "enabled"}),
    "ambient": Surroundings(labels={"istio.io/dataplane-mode": "ambient"}),
    "linkerd": Surroundings({"linkerd.io/inject": "enabled"}),
}
WITHOUT = {
    **{name: (given, Surroundings(), Note.CAPTURE_IN_MESH) for name, given in MESHES.items()},
    **{f"a namespace of {name}": (pod(), around, Note.CAPTURE_IN_MESH) for name, around in NAMESPACES.items()},
    **{
        level: (pod(), Surroundings(labels={"pod-security.kubernetes.io/enforce": level}), Note.CAPTURE_FORBIDDEN)
        for level in ("baseline", "restricted")
    },
    "a namespace that can't be read": (pod(), Surroundings(labels=None), Note.CAPTURE_FORBIDDEN),
    "a probe of the port itself": (
        pod(probe={"tcpSocket": {"port": "http"}}), Surroundings(), Note.CAPTURE_TCP_PROBE,
    ),
    "the same by number": (pod(probe={"tcpSocket": {"port": 8000}}), Surroundings(), Note.CAPTURE_TCP_PROBE),
    "a probe of the port by another container": (
        pod(beside=[exporter(8000)], annotations=SERVER), Surroundings(), Note.CAPTURE_TCP_PROBE,
    ),
    "the same by a name of its own": (
        pod(beside=[exporter("model", "model", 8000)], annotations=SERVER), Surroundings(), Note.CAPTURE_TCP_PROBE,
    ),
    "a probe of the port by an init container": (
        pod(init=[{**exporter(8000), "restartPolicy": "Always"}]), Surroundings(), Note.CAPTURE_TCP_PROBE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "around", "note"), WITHOUT.values(), ids=WITHOUT)
def test_who_can_not_have_it_has_a_sidecar_without_it_and_a_note(given, around, note):
    changed = injected(given, around)

    assert capturing(changed) == []
    assert status(changed)["notes"] == [note]
    assert changed["spec"]["containers"][0]["ports"][0] == {"name": "http", "containerPort": 14080}


OPT_OUT = {
    "istio's label": (pod(labels={"sidecar.istio.io/inject": "false"}), NAMESPACES["istio"]),
    "istio's annotation": (pod(annotations={"sidecar.istio.io/inject": "no"}), NAMESPACES["istio"]),
    "the namespace's revision": (
        pod(labels={"sidecar.istio.io/inject": "false"}), Surroundings(labels={"istio.io/rev": "1-24"}),
    ),
    "a label before an annotation": (
        pod(labels={"sidecar.istio.io/inject": "false"}, annotations={"sidecar.istio.io/inject": "true"}),
        NAMESPACES["istio"],
    ),
    "linkerd's annotation": (pod(annotations={"linkerd.io/inject": "disabled"}), NAMESPACES["linkerd"]),
    "ambient's label": (
        pod(labels={"istio.io/dataplane-mode": "none"}), Surroundings(labels={"istio.io/dataplane-mode": "ambient"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "around"), OPT_OUT.values(), ids=OPT_OUT)
def test_a_pod_that_opted_out_of_its_namespace_s_mesh_is_in_none(given, around):
    assert capturing(injected(given, around))


STAYS = {
    "istio's proxy is there": pod(labels={"sidecar.istio.io/inject": "false"}, init=[{"name": "istio-proxy"}]),
    "an empty label": pod(labels={"sidecar.istio.io/inject": ""}, annotations={"sidecar.istio.io/inject": "false"}),
    "another mesh": pod(annotations={"linkerd.io/inject": "disabled"}),
}


@pytest.mark.parametrize("given", STAYS.values(), ids=STAYS)
def test_what_is_no_opting_out_of_istio(given):
    assert status(injected(given, NAMESPACES["istio"]))["notes"] == [Note.CAPTURE_IN_MESH]


def test_opting_out_of_istio_s_sidecar_is_not_opting_out_of_ambient():
    around = Surroundings(labels={"istio.io/dataplane-mode": "ambient"})
    without = pod(labels={"sidecar.istio.io/inject": "false"})

    assert status(injected(without, around))["notes"] == [Note.CAPTURE_IN_MESH]


def test_a_platform_that_assigns_users_admits_none_that_is_0():
    assert status(injected(pod(), settings=replace(SETTINGS, user=None)))["notes"] == [Note.CAPTURE_FORBIDDEN]


@pytest.mark.parametrize("label", [{}, {"pod-security.kubernetes.io/enforce": "privileged"}])
def test_where_everything_is_admitted_it_is_captured(label):
    assert capturing(injected(pod(), Surroundings(labels=label)))


def test_probes_of_another_port_or_another_kind_do_not_prevent_capture():
    assert capturing(injected(pod(probe={"tcpSocket": {"port": 8001}})))
    assert capturing(injected(pod(probe={"exec": {"command": ["true"]}})))
    # The name is that of another port in this container.
    assert capturing(injected(pod(beside=[exporter("http")], annotations=SERVER)))


def test_a_namespace_may_ask_for_all_pods_in_it_and_a_pod_may_decline():
    around = Surroundings({"carpool.dev/capture": "true"})
    silent = pod()
    del silent["metadata"]["annotations"]["carpool.dev/capture"]

    assert capturing(injected(silent, around))
    assert not capturing(injected(pod("false"), around))


@pytest.mark.parametrize("value", ["yes", "True", ""])
def test_another_value_is_named(value):
    skip = decide(pod(value), TARGET, SETTINGS)

    assert skip.reason is Reason.BAD_ANNOTATION
    assert "carpool.dev/capture" in skip.message


def test_a_container_of_that_name_is_somebody_else_s():
    skip = decide(pod(init=[{"name": "carpool-capture", "image": "mine"}]), TARGET, SETTINGS)

    assert skip.reason is Reason.NAME_TAKEN


def test_a_guaranteed_pod_stays_one():
    given = pod()
    amounts = {"cpu": "2", "memory": "4Gi"}
    for each in (*given["spec"]["initContainers"], *given["spec"]["containers"]):
        each["resources"] = {"requests": amounts, "limits": amounts}
    (init,) = capturing(injected(given))

    assert init["resources"]["requests"] == init["resources"]["limits"]
