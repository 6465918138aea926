from __future__ import annotations

import json


def test_newest_first(kubectl):
    kubectl.holds(kubectl.policy())
    shown = kubectl.run("history", "resnet").output.splitlines()
    assert shown[0].split() == ["AGO", "TARGET", "MODEL", "PARAMETERS", "REASON", "GENERATION"]
    assert shown[1].split()[0] == "4m"
    assert "batch 8" in shown[1]
    assert "batch 7" in shown[2]
    assert shown[1].split()[-1] == "1795000000000"


def test_before_the_first_change(kubectl):
    kubectl.holds(kubectl.policy(history=[]), kubectl.policy("new", conditions=None))
    assert "no change yet" in kubectl.run("history", "resnet").output
    assert json.loads(kubectl.run("history", "new", "-o", "json").output) == []


def test_as_data(kubectl):
    kubectl.holds(kubectl.policy())
    assert len(json.loads(kubectl.run("history", "resnet", "-o", "json").output)) == 2
