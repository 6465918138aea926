from __future__ import annotations

import yaml


def test_why_and_on_what_evidence(kubectl):
    kubectl.holds(kubectl.policy())
    shown = kubectl.run("explain", "resnet").output.splitlines()
    assert shown[0].startswith("Applied, SavesDeviceTime: device time falls 20% (Deployment/resnet, every model, 4")
    rows = {line.strip().split("   ")[0]: line.split()[-2:] for line in shown if line.startswith("  ") and line.strip()}
    assert rows["requests/s per replica"] == ["301", "300"]
    assert rows["p99"] == ["31ms", "30ms"]
    assert rows["misses"] == ["0.12%", "0.10%"]
    assert rows["rows per batch"] == ["-", "4.2"]
    assert rows["device time per request"] == ["-", "1.2ms"]
    assert "p50" not in rows
    assert "would be: batch 64, wait 20ms, 2 in flight; limited by: canary" in shown
    assert "next: batch 16, wait 2ms, 2 in flight" in shown


def test_before_the_first_decision(kubectl):
    kubectl.holds(kubectl.policy(lastDecision=None, recommendation=None))
    assert kubectl.run("explain", "resnet").output.splitlines() == [
        "nothing was decided yet",
        "applied: batch 8, wait 2ms, 2 in flight",
    ]


def test_without_a_status_it_says_where_to_look(kubectl):
    kubectl.holds(kubectl.policy(conditions=None))
    assert "check that it runs" in kubectl.run("explain", "resnet").output


def test_as_data(kubectl):
    kubectl.holds(kubectl.policy())
    read = yaml.safe_load(kubectl.run("explain", "resnet", "-o", "yaml").output)
    assert list(read) == ["lastDecision", "applied", "recommendation"]
