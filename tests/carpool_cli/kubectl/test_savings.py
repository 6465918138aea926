from __future__ import annotations

import json

import pytest

FULL = {
    "target": "Deployment/resnet", "load": 2.4, "loadUpper": 2.6, "replicas": 3, "replicasUpper": 4,
    "replicasZeroWait": 4, "replicasUnbatched": 12, "serving": 6, "requestsPerSecond": 900.0, "utilization": 0.3,
}  # fmt: skip


def test_replicas_by_each_way_and_what_zero_wait_does_not_give(kubectl):
    kubectl.holds(kubectl.policy(capacity=[FULL]))
    head, line, *_ = kubectl.run("savings", "--gpu-hour", "2").output.splitlines()
    assert head.split("  ")[0] == "NAMESPACE"
    cells = [cell for cell in line.split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "shop", "Deployment/resnet", "12", "4", "3 to 4", "6", "3 (4,380.00)", "1 (1,460.00)",
    ]  # fmt: skip


def test_several_are_summed_up_and_given_as_data(kubectl):
    spare = {
        **FULL,
        "target": "Deployment/idle",
        "replicas": 0,
        "replicasUpper": 0,
        "replicasZeroWait": 0,
        "serving": 1,
    }
    kubectl.holds(kubectl.policy(capacity=[FULL, spare]))
    assert kubectl.run("savings").output.splitlines()[-1].split()[:4] == ["in", "all", "24", "4"]
    rows = json.loads(kubectl.run("savings", "-o", "json").output)
    assert [(row["surplus"], row["beyondZeroWait"]) for row in rows] == [(3, 1), (0, 0)], "one replica always stays"
    assert rows[0]["moneySurplus"] is None
    priced = json.loads(kubectl.run("savings", "--gpu-hour", "2", "-o", "json").output)
    assert priced[0]["moneySurplus"] == pytest.approx(3 * 2 * 730)


def test_without_a_capacity_it_says_what_is_missing(kubectl):
    kubectl.holds(kubectl.policy())
    assert "no workload has a capacity yet" in kubectl.run("savings").output
    kubectl.holds()
    assert "no BatchingPolicy" in kubectl.run("savings").output
