from __future__ import annotations

import json

import pytest


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"name": "reference", "source": "s", "rows": [1, 16], "seconds": [0.0055, 0.013]}))
    return path


def test_a_profile_and_a_load_become_replicas_and_money(carpool, profile):
    asked = ("savings", "--profile", profile, "--slo-p99", "50ms", "--rate", 1500, "--gpu-hour", "2.50")
    shown = carpool(*asked)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert "beyond zero wait" in lines[1]
    assert lines[2].startswith("no batching")
    assert lines[3].startswith("zero wait")
    assert lines[3].rstrip().endswith("-")
    document = json.loads(carpool(*asked, "--json").output)
    (workload,) = document["workloads"]
    zero = next(way for way in workload["ways"] if way["name"] == "zero wait")
    assert zero["money"] == pytest.approx(zero["replicas"] * 2.5 * 730)
    assert document["total"][1]["deviceSeconds"] == zero["deviceSeconds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "name sidecars"),
        (("--profile", "p.json", ":9090"), "one of the three"),
        (("--prometheus", "http://p:9090", ":9090"), "one of the three"),
        (("--prometheus", "http://p:9090", "--rate", "5"), "Prometheus has the load"),
        (("--prometheus", "p:9090"), "not a server's base URL"),
        (("--prometheus", "http://127.0.0.1:9"), "does not answer"),
        (("--prometheus", "http://p:9090", "--since", "yesterday"), "12h or 7d"),
        ((":9090", "--rate", "5"), "go with --profile"),
        (("--profile", "p.json"), "--slo-p99"),
    ],
)
def test_what_is_missing_is_named(carpool, options, words):
    result = carpool("savings", *options)
    assert result.exit_code != 0
    assert words in result.output


def test_a_load_is_needed(carpool, profile):
    result = carpool("savings", "--profile", profile, "--slo-p99", "50ms")
    assert "--rate" in result.output
    assert result.exit_code != 0


def test_running_sidecars_bring_their_load_and_what_is_in_force(launched, echo, carpool):
    with launched("--upstream", echo, "--slo-p99", "50ms") as up:
        nobody = carpool("savings", up.admin)
        assert nobody.exit_code == 1
        assert "no request has come" in nobody.output
        done = carpool("bench", up.data, "--rate", 200, "--requests", 400, "--warm-up", "0s")
        assert done.exit_code == 0, done.output
        document = json.loads(carpool("savings", up.admin, up.admin, "--pods", 3, "--json").output)
        one, other = document["workloads"]
        assert one["rate"] == pytest.approx(600, rel=0.25), "three pods"
        assert [way["name"] for way in one["ways"]][2:] == ["in force now", "Carpool at best"]
        total = {way["name"]: way["deviceSeconds"] for way in document["total"]}
        for way, same in zip(one["ways"], other["ways"], strict=True):
            assert total[way["name"]] == pytest.approx(way["deviceSeconds"] + same["deviceSeconds"])
