from __future__ import annotations

import json

import pytest

FULL = {
    "target": "Deployment/resnet", "load": 2.4, "loadUpper": 2.6, "replicas": 3, "replicasUpper": 4,
    "replicasZeroWait": 4, "replicasUnbatched": 12, "serving": 6, "requestsPerSecond": 900.0, "utilization": 0.3,
    "lowestUtilization": 0.1,
}  # fmt: skip


def test_replicas_by_each_way_and_what_zero_wait_does_not_give(kubectl):
    kubectl.holds(kubectl.policy(capacity=[FULL]))
    head, line, *_ = kubectl.run("savings", "--gpu-hour", "2").output.splitlines()
    assert head.split("  ")[0] == "NAMESPACE"
    cells = [cell for cell in line.split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "shop", "Deployment/resnet", "12 (17,520.00)", "4 (5,840.00)", "3 to 4 (4,380.00)", "6 (8,760.00)",
        "3 (4,380.00)", "1 (1,460.00)", "6,480, at best 2,160",
    ]  # fmt: skip


def test_what_the_policys_baseline_needs_is_a_column_of_its_own(kubectl):
    other = {**FULL, "target": "Deployment/bert", "replicasByHand": 8}
    kubectl.holds(kubectl.policy(capacity=[{**FULL, "replicasByHand": 5}, other]))
    head, line, _, total, *_ = kubectl.run("savings", "--gpu-hour", "2").output.splitlines()
    assert head.index("ZERO WAIT") < head.index("BY HAND") < head.index("CARPOOL")
    at = head.index("BY HAND")
    assert line[at:].startswith("5 (7,300.00)")
    assert total[at:].startswith("13 (18,980.00)")
    rows = json.loads(kubectl.run("savings", "--gpu-hour", "2", "-o", "json").output)
    assert [(row["byHand"], row["money"]["byHand"]) for row in rows] == [(5, 7300.0), (8, 11680.0)]


def test_no_sum_by_hand_where_one_of_them_has_no_baseline(kubectl):
    other = {**FULL, "target": "Deployment/bert", "replicasByHand": 8}
    kubectl.holds(kubectl.policy(capacity=[FULL, other]))
    head, line, second, total, *_ = kubectl.run("savings").output.splitlines()
    at = head.index("BY HAND")
    assert [each[at:].split("  ")[0] for each in (line, second, total)] == ["", "8", ""]
    kubectl.holds(kubectl.policy(capacity=[FULL]))
    assert "BY HAND" not in kubectl.run("savings").output


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
    assert rows[0]["money"] is None
    priced = json.loads(kubectl.run("savings", "--gpu-hour", "2", "-o", "json").output)
    assert priced[0]["money"]["surplus"] == pytest.approx(3 * 2 * 730)


def pod(target, node, phase="Running"):
    metadata = {"namespace": "shop", "annotations": {"carpool.dev/target": target}}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


def test_a_replica_costs_what_the_nodes_of_its_pods_do(kubectl, tmp_path):
    other = {**FULL, "target": "Deployment/bert"}
    kubectl.holds(kubectl.policy(capacity=[FULL, other]))
    nodes = [{"metadata": {"name": name, "labels": {"gpu": name}}} for name in ("a100", "t4")]
    kubectl.knows(nodes=nodes, pods=[pod("Deployment/resnet", "a100"), pod("Deployment/bert", "t4")])
    prices = tmp_path / "prices.yaml"
    prices.write_text("- {labels: {gpu: a100}, gpuHour: 4}\n")
    asked = ("savings", "--prices", str(prices), "-o", "json")
    assert "no price for node t4" in kubectl.run(*asked).output
    rows = json.loads(kubectl.run(*asked, "--gpu-hour", "0.5").output)
    assert [row["gpuHour"] for row in rows] == [4.0, 0.5]
    assert rows[0]["money"]["zeroWait"] == pytest.approx(4 * 4 * 730)
    shown = kubectl.run("savings", "--prices", str(prices), "--gpu-hour", "0.5").output
    assert "at 0.50 to 4.00 an hour" in shown
    prices.write_text("- {labels: {gpu: a100}}\n")
    assert "gpuHour" in kubectl.run(*asked).output
    for text in ("{", "[" * 100_000):
        prices.write_text(text)
        assert kubectl.run(*asked).exit_code == 2
    prices.write_bytes(b"- \xff")
    latin = kubectl.run("savings", "--prices", str(prices))
    assert "prices.yaml: byte 3 is not UTF-8: save the file as UTF-8" in latin.output
    missing = kubectl.run("savings", "--prices", "nowhere.yaml")
    assert (missing.exit_code, missing.output) == (2, "Error: nowhere.yaml: No such file or directory\n")
    for nothing in ("0", "-1", ".inf", ".nan"):
        prices.write_text(f"- {{gpuHour: {nothing}}}\n")
        assert "is no price" in kubectl.run(*asked).output


def test_pods_that_ended_cost_nothing(kubectl, tmp_path):
    kubectl.holds(kubectl.policy(capacity=[FULL]))
    ended = [pod("Deployment/resnet", node, phase) for node in ("t4", "gone") for phase in ("Failed", "Succeeded")]
    nodes = [{"metadata": {"name": name, "labels": {"gpu": name}}} for name in ("a100", "t4")]
    kubectl.knows(nodes=nodes, pods=[*ended, pod("Deployment/resnet", "a100")])
    prices = tmp_path / "prices.yaml"
    prices.write_text("- {labels: {gpu: a100}, gpuHour: 2.5}\n- {labels: {gpu: t4}, gpuHour: 0.4}\n")
    (row,) = json.loads(kubectl.run("savings", "--prices", str(prices), "-o", "json").output)
    assert row["gpuHour"] == 2.5


def test_without_a_capacity_it_says_what_is_missing(kubectl):
    kubectl.holds(kubectl.policy())
    assert "no workload has a capacity yet" in kubectl.run("savings").output
    kubectl.holds()
    assert "no BatchingPolicy" in kubectl.run("savings").output


def test_a_workload_whose_slo_no_number_of_replicas_meets_is_named(kubectl):
    reason = "one request alone takes 22ms, longer than the SLO"
    never = [{"target": "Deployment/bert", "model": "bert", "reason": reason}]
    line = f"shop Deployment/bert: no number of replicas meets the SLO of model bert: {reason}"
    kubectl.holds(kubectl.policy(capacity=[FULL], noCapacity=never))
    assert kubectl.run("savings").output.splitlines()[-1] == line
    assert json.loads(kubectl.run("savings", "-o", "json").stdout)[0]["target"] == "Deployment/resnet"
    assert line in kubectl.run("savings", "-o", "json").stderr
    kubectl.holds(kubectl.policy(noCapacity=never))
    assert kubectl.run("savings").output.splitlines() == [line]
