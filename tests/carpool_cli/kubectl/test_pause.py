"""``pause`` and ``resume``."""

from __future__ import annotations


def test_there_and_back(kubectl):
    kubectl.holds(kubectl.policy(annotations={"other": "kept"}))
    paused = kubectl.run("pause", "resnet", "-n", "shop")
    assert paused.output == (
        "resnet is paused: its parameters stay until kubectl carpool resume resnet --namespace shop\n"
    )
    assert kubectl.annotations == [{"other": "kept", "carpool.dev/paused": "true"}]
    assert kubectl.run("pause", "resnet").output == "resnet is paused already\n"
    assert kubectl.run("resume", "resnet").output == "resnet is tuned again\n"
    assert kubectl.annotations == [{"other": "kept"}]
    assert kubectl.run("resume", "resnet").output == "resnet is not paused\n"
    assert sum(asked[0] == "annotate" for asked in kubectl.asked) == 2


def test_the_policy_that_annotations_made(kubectl):
    kubectl.holds(kubectl.policy("other", targets=["bert"]), kubectl.policy("deployment-resnet"))
    assert kubectl.run("pause", "deploy/resnet").exit_code == 0
    assert kubectl.annotations[1] == {"carpool.dev/paused": "true"}
