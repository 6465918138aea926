"""Commands by which pods get their sidecars: each is one that the injector follows."""

from __future__ import annotations

import copy
import json
import shlex

import pytest
from model_in_shop import around, sent, subject

from carpool_cli.kubectl.preflight import checks, ways
from carpool_cli.kubectl.preflight.dry_run import SETTINGS, Dry, surroundings
from carpool_operator.injector.decide import Skip, decide, target_of
from carpool_operator.injector.reasons import Note

GRPC = {"readinessProbe": {"grpc": {"port": 9000}}}


def pod(*containers, **annotations):
    written = {f"carpool.dev/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return {"metadata": {"labels": {"app": "web"}, "annotations": written}, "spec": {"containers": list(containers)}}


def serves(*ports, name="server", **others):
    return {"name": name, "ports": [{"containerPort": each} for each in ports], **others}


def left_out(of, near=None):
    """Have the injector look at a pod that it leaves alone: what preflight says, and the pod that was sent."""
    asked, near = sent(of, inject=True), near or around()
    decision = decide(asked, target_of(asked, "shop"), SETTINGS, around=surroundings(near))
    assert isinstance(decision, Skip)
    stored = copy.deepcopy(asked)
    stored["metadata"]["annotations"]["carpool.dev/skipped"] = str(decision)
    (finding,) = checks.outcome(subject(), Dry(of), Dry(stored), near)
    assert finding.code == decision.reason
    return finding, asked


def followed(fix, asked):
    """Do what a command says to the annotations of a pod, and have the injector look again."""
    words = shlex.split(fix.partition(";")[0])
    assert words[:5] == ["kubectl", "-n", "shop", "patch", "deployment/web"]
    written = json.loads(words[words.index("-p") + 1])["spec"]["template"]["metadata"]["annotations"]
    asked["metadata"]["annotations"] |= written
    return decide(asked, target_of(asked, "shop"), SETTINGS), written


@pytest.mark.parametrize(
    ("refused", "fix"),
    [
        ("exceeded quota: q", "sidecar-cpu"),
        ("[container-limits] container <carpool> has no cpu limit", "sidecar-cpu-limit"),
        ("validation error: CPU and memory resource requests and limits are required", "sidecar-cpu-limit"),
        (
            "[allowedrepos] container <carpool> has an invalid image repo <x>, allowed repos are",
            "sidecar.image.repository",
        ),
        ("images may only come from our registry", "sidecar.image.repository"),
        ("no", "change what the message names"),
    ],
)
def test_refusals_by_admission_policies_come_with_the_setting_that_fixes_them(refused, fix):
    """Messages as Gatekeeper's and Kyverno's libraries have them."""
    assert fix in ways.of_refusal(subject(), refused)


@pytest.mark.parametrize(
    ("of", "near", "written"),
    [
        (pod({"name": "a"}, serves(7001, name="b")), None, {"container": "b"}),
        (pod({"name": "envoy"}, serves(7001), container="gone"), None, {"container": "server"}),
        (pod({"name": "server", "readinessProbe": {"httpGet": {"port": 9000}}}), None, {"port": "9000"}),
        (pod({"name": "server", "args": ["--host=0.0.0.0", "--http-port=9000"]}), None, {"port": "9000"}),
        (pod(serves(9000, 8080, **GRPC), port="9000"), None, {"port": "8080"}),
        (pod({"name": "server", "ports": [{"name": "grpc", "containerPort": 9000}]}), None, {"port": "9000"}),
        (pod(serves(9000), port="gone"), None, {"port": "9000"}),
        (pod(serves(9000), {"name": "envoy", "ports": [{"containerPort": 14080}]}), None, {"data-port": "24080"}),
        (pod(serves(14090, 24090)), None, {"admin-port": "25090"}),
    ],
)
def test_a_command_brings_the_sidecar(of, near, written):
    finding, asked = left_out(of, near)
    decision, done = followed(finding.fix, asked)
    assert done == {f"carpool.dev/{name}": value for name, value in written.items()}
    assert not isinstance(decision, Skip), decision


def test_a_port_that_only_a_service_names():
    service = {
        "metadata": {"name": "s"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 9000}]},
    }
    finding, asked = left_out(pod({"name": "server"}), around(services=[service]))
    decision, done = followed(finding.fix, asked)
    assert done == {"carpool.dev/port": "9000"}
    assert not isinstance(decision, Skip)


def test_where_nothing_names_a_port_the_command_opens_the_workload():
    finding, _ = left_out(pod({"name": "server"}))
    assert finding.code == "NoPort"
    assert finding.fix.startswith("kubectl -n shop edit deployment/web: ")
    assert "carpool.dev/port" in finding.fix


def test_other_candidates_are_named():
    finding, _ = left_out(pod(serves(7001, name="a"), serves(7002, name="b")))
    assert "if the model is in another, write b there" in finding.fix


def test_only_containers_that_may_be_the_model_s_are_offered():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    finding, asked = left_out(pod(serves(80, name="nginx"), {"name": "a", **gpu}, {"name": "b", **gpu}))
    assert followed(finding.fix, asked)[1] == {"carpool.dev/container": "a"}
    assert "write b there" in finding.fix
    assert "nginx" not in finding.fix


def limited(**most):
    return around(
        limit_ranges=[{"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", "max": most}]}}],
    )


def test_a_smaller_sidecar_is_offered_where_it_has_room():
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.memory": "300Mi"}}}
    near = around(quotas=[quota])
    finding, asked = left_out(pod(serves(9000, resources={"limits": {"memory": "64Mi"}})), near)
    assert finding.code == "NoRoom"
    followed(finding.fix, asked)
    assert not isinstance(decide(asked, target_of(asked, "shop"), SETTINGS, around=surroundings(near)), Skip)


@pytest.mark.parametrize(
    "near",
    [
        limited(**{"ephemeral-storage": "32Mi"}),
        limited(memory="64Mi"),
        limited(**{"nvidia.com/gpu": "8"}),
        around(quotas=[{"metadata": {"name": "q"}, "spec": {"hard": {"limits.memory": "100Mi"}}}]),
    ],
)
def test_no_command_rolls_pods_that_get_no_sidecar_then_either(near):
    finding, _ = left_out(pod(serves(9000)), near)
    assert (finding.code, finding.fix) == (
        "NoRoom",
        "do what the message says: the smallest sidecar has no room either",
    )


@pytest.mark.parametrize(
    ("note", "begins"),
    [
        (
            Note.CAPTURE_FORBIDDEN,
            "kubectl label namespace shop pod-security.kubernetes.io/enforce=privileged --overwrite;",
        ),
        (Note.CAPTURE_IN_MESH, "kubectl -n shop patch deployment/web -p "),
        (Note.CAPTURE_TCP_PROBE, "kubectl -n shop edit deployment/web: "),
    ],
)
def test_capture_has_real_commands(note, begins):
    fix = ways.of_capture(subject(), note)
    assert fix.startswith(begins)
    assert "NAMESPACE" not in fix
