from __future__ import annotations

import json

import pytest
import yaml

from carpool_sidecar.config.settings import parse


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps({"name": "reference", "source": "synthetic", "rows": [1, 128], "seconds": [0.0055, 0.069]})
    )
    return path


def test_it_explains_and_its_configuration_can_be_pasted(carpool, profile):
    shown = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 800).output
    for part in ("- bounded by", "zero wait", "no batching", "highest load", "at 1.25x the load"):
        assert part in shown
    assert '# carpool-sidecar also needs what it serves: add `upstream: {url: "http' in shown
    pasted = shown[shown.index("policy:") :]
    config = parse(pasted + "\nupstream: {url: http://127.0.0.1:9000}\n")
    assert config.policy.baseline.describe() in shown


@pytest.mark.parametrize(
    ("served", "field"), [({"upstream": "http://127.0.0.1:9001"}, "upstream"), ({"onnx": "/models/m.onnx"}, "onnx")]
)
def test_its_configuration_serves_what_the_profile_measured(carpool, profile, served, field):
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"measured": {"command": "carpool", **served}}))
    shown = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 800).output
    config = parse(shown[shown.index("# sidecar.yaml") :])
    assert getattr(config, field) is not None
    assert served[field] in shown
    assert "also needs" not in shown


def test_json_says_the_same(carpool, profile):
    result = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 800, "--json")
    document = json.loads(result.output)
    assert document["recommendation"]["parameters"] == document["config"]["policy"]["baseline"]
    assert document["recommendation"]["holds"] is True
    assert document["recommendation"]["p99Ahead"] <= 0.05


def test_a_setting_that_equals_the_defaults_is_no_baseline(carpool, profile):
    arguments = ("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 800, "--objective", "latency")
    shown = carpool(*arguments).output
    assert "\n  batch 32, wait 0s, 1 in flight\n" in shown
    assert "the tuner starts from this baseline" not in shown
    assert "a baseline equal to it counts as none" in shown
    assert "baseline" not in yaml.safe_load(shown[shown.index("policy:") :])["policy"]
    assert "baseline" not in json.loads(carpool(*arguments, "--json").output)["config"]["policy"]


def test_bounds_that_were_given_are_kept_and_pasted(carpool, profile):
    options = ("--max-batch", 4, "--max-wait", "2ms", "--max-in-flight", 1)
    shown = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 300, *options).output
    policy = yaml.safe_load(shown[shown.index("policy:") :])["policy"]
    assert policy["bounds"] == {"maxBatch": {"max": 4}, "maxWait": {"max": "2ms"}, "maxInFlight": {"max": 1}}
    assert policy["baseline"]["maxBatch"] <= 4


def test_a_load_that_nothing_holds_exits_1(carpool, profile):
    result = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 5000)
    assert result.exit_code == 1
    assert "no configuration meets the SLO" in result.output


def test_a_file_that_can_not_be_used_exits_2(carpool, profile, tmp_path):
    load = ("--slo-p99", "50ms", "--rate", 300)
    latin = tmp_path / "latin"
    latin.write_bytes(b"0.1\n# caf\xe9\n")
    for options in (("--profile", "nope.json"), ("--profile", latin), ("--profile", profile, "--trace", latin)):
        result = carpool("recommend", *options, *load)
        assert result.exit_code == 2, options
        assert len(result.output.splitlines()) == 1
    assert "latin: byte 10 is not UTF-8: save the file as UTF-8" in result.output


@pytest.mark.parametrize(
    ("given", "taken"), [("60", True), ("60%", True), ("0.6", False), ("101", False), ("0%", False)]
)
def test_a_target_may_have_its_sign(carpool, profile, given, taken):
    result = carpool(
        "recommend", "--profile", profile, "--slo-p99", "50ms", "--rate", 300, "--target-utilization", given
    )
    assert result.exit_code == (0 if taken else 2)
    assert ("write a whole number from 1 to 100, e.g. 60" in result.output) != taken


def test_a_trace_gives_rate_and_burstiness(carpool, profile, tmp_path):
    trace = tmp_path / "t.txt"
    trace.write_text("\n".join(str(step // 20 + step % 20 / 1000) for step in range(4000)))
    result = carpool("recommend", "--profile", profile, "--slo-p99", "50ms", "--trace", trace, "--json")
    assert json.loads(result.output)["rate"] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slo-p99", "0s", "--rate", 300), "'--slo-p99': '0s': has to be longer than 0s"),
        (
            ("--slo-p99", "50ms", "--rate", 300, "--max-wait", "60ms"),
            "--max-wait: 60ms is not below the SLO of 50ms: lower it or drop it",
        ),
        (("--slo-p99", "50ms", "--trace", "t.txt", "--cv", 2), "--cv does not go with --trace, which brings its own"),
    ],
)
def test_what_is_wrong_is_a_usage_error_that_names_it(carpool, profile, options, words):
    result = carpool("recommend", "--profile", profile, *options)
    assert result.exit_code == 2
    assert words in result.output


def test_no_load_is_a_usage_error(carpool, profile):
    result = carpool("recommend", "--profile", profile, "--slo-p99", "50ms")
    assert result.exit_code == 2
    assert "--rate" in result.output
