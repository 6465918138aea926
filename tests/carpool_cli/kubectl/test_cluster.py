from __future__ import annotations

import os

import pytest

from carpool_cli.kubectl.main import COMMANDS

RESOURCE = "batchingpolicies.carpool.dev"


def test_flags_are_passed_on_from_before_and_after_the_command(kubectl):
    kubectl.holds(kubectl.policy())
    kubectl.run("--context", "far", "--kubeconfig", "/k", "-n", "a", "status", "-n", "b")
    assert kubectl.asked == [
        ["get", RESOURCE, "--output=json", "--namespace=b", "--context=far", "--kubeconfig=/k", "--request-timeout=20s"]
    ]


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ('error: the server doesn\'t have a resource type "batchingpolicies"', "helm install carpool"),
        ("Error from server (NotFound): Unable to list: the server could not find the requested resource", "install"),
        (
            'Error from server (Forbidden): batchingpolicies.carpool.dev is forbidden: User "me" cannot list resource',
            "ask for the role `view`",
        ),
        (
            'Error from server (Forbidden): User "me" cannot list resource "nodes" at the cluster scope',
            "ask for the right to list nodes in the whole cluster: a ClusterRole and its ClusterRoleBinding",
        ),
        (
            'Error from server (Forbidden): User "me" cannot list resource "pods" in the namespace "shop"',
            "ask for the right to list pods there",
        ),
        ('Error from server (Forbidden): pods "x" is forbidden: exceeded quota: q', "exceeded quota: q\n"),
        ("E1121 noise\nThe connection to the server localhost:8080 was refused - did you …?", "no API server answers"),
        ("error: You must be logged in to the server (Unauthorized)", "log in to the cluster again"),
        ('error: context "far" does not exist', 'kubectl: context "far" does not exist'),
        ("", "kubectl ended with 1"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["status", "-A"], ["explain", "x"], ["pause", "deployment/x"]])
def test_failures_name_the_fix(kubectl, command, stderr, told):
    kubectl.fails(stderr or " ")
    result = kubectl.run(*command)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert told in result.output


@pytest.mark.parametrize(
    ("held", "asked", "told"),
    [
        (["resnet", "bert"], "resmet", "no BatchingPolicy resmet in namespace shop; did you mean resnet?"),
        (["resnet", "bert"], "x", "which has resnet, bert"),
        ([], "x", "nor any other: name its namespace with -n"),
        (["resnet"], "deployment/bert", "kubectl annotate deployment/bert carpool.dev/slo-p99=50ms --namespace shop"),
        (["resnet"], "sts/resnet", "no BatchingPolicy tunes StatefulSet resnet"),
        (["resnet"], "pod/resnet", "write a policy's name, or what it tunes as deployment/NAME"),
        (["resnet", "bert"], "deploy/resnet", "is tuned by resnet, bert: name one"),
    ],
)
@pytest.mark.parametrize("command", ["status", "explain", "history", "pause", "resume"])
def test_names_that_are_not_there(kubectl, command, held, asked, told):
    kubectl.holds(*(kubectl.policy(name, []) for name in held))
    kubectl.has("deployment/bert")
    result = kubectl.run(command, asked, "-n", "shop")
    assert result.exit_code == 1
    assert told in result.output


@pytest.mark.parametrize(
    ("annotations", "told"),
    [
        ({"slo_p99": "100"}, "carpool.dev/slo-p99 is '100': write a duration"),
        ({"slo_p99": "50ms", "objectiv": "Latency"}, "did you mean carpool.dev/objective?"),
        ({"slo_p99": "50ms"}, "it has the annotations, so check that the operator runs"),
        ({}, "kubectl annotate deployment/bert carpool.dev/slo-p99=50ms"),
        (None, "there is none here: kubectl get deployment -A shows all"),
    ],
)
def test_why_a_workload_has_no_policy_is_said(kubectl, annotations, told):
    if annotations is not None:
        kubectl.has("deployment/bert", **annotations)
    result = kubectl.run("explain", "deployment/bert")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no BatchingPolicy tunes Deployment bert: ")
    assert told in result.output


def test_what_pods_without_a_policy_do_is_said(kubectl):
    def pod(name, target):
        return {"metadata": {"name": name, "annotations": {"carpool.dev/target": target}}}

    kubectl.has("deployment/bert")
    kubectl._write(pods=[pod("bert-1", "Deployment/bert"), pod("bert-2", "Deployment/bert"), pod("x", "Deployment/x")])
    told = kubectl.run("status", "deployment/bert", "-n", "shop").output
    assert "Sidecars in its pods: 2. Seconds after a policy is deleted the operator makes them pass every" in told
    assert "kubectl events --for deployment/bert --namespace shop" in told
    assert told.endswith("kubectl rollout restart deployment/bert --namespace shop\n")


def test_of_two_policies_on_a_workload_the_accepted_one_is_meant(kubectl):
    loser = kubectl.policy("late", [kubectl.condition("Accepted", "False", "Conflicted")])
    kubectl.holds(loser, kubectl.policy("first"))
    assert kubectl.run("status", "deployment/resnet").output.startswith("first in shop")


def test_without_kubectl(kubectl, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    result = kubectl.run("status")
    assert result.exit_code == 1
    assert "there is no kubectl on the PATH" in result.output


def test_what_is_no_answer(kubectl):
    kubectl.prints("{")
    assert "no object" in kubectl.run("status").output
    for text in ("{}", '{"items": 1}', '{"items": [1]}', "[" * 100_000):
        kubectl.prints(text)
        for command in ("status", "savings"):
            result = kubectl.run(command)
            assert result.exit_code == 1
            assert result.output.startswith("Error: what kubectl prints is no object: ")


def test_what_is_no_utf_8(kubectl):
    kubectl.prints("caf\udce9")
    result = kubectl.run("status")
    assert result.exit_code == 1
    assert result.output == "Error: what kubectl prints is not UTF-8 from byte 4 on\n"


def test_every_command_has_help_and_examples(kubectl):
    for name in COMMANDS:
        result = kubectl.run(name, "--help")
        assert result.exit_code == 0
        assert f"Usage: kubectl carpool {name}" in result.output
        assert "Examples:" in result.output
        assert f"kubectl carpool {name}" in result.output.partition("Examples:")[2]


def test_what_is_mistyped_is_one_line(kubectl):
    for arguments in (["statu"], ["explain"], ["status", "-o", "xml"]):
        result = kubectl.run(*arguments)
        assert result.exit_code == 2
        assert result.output.count("\n") == 1
    assert kubectl.asked == []
