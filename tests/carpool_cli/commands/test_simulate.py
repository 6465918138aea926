from __future__ import annotations

import json

import pytest

LOAD = ("--slo-p99", "50ms", "--rate", 800, "--for", "20s")


@pytest.fixture
def profile(tmp_path):
    def write(**change):
        path = tmp_path / "p.json"
        curve = {"name": "reference", "source": "synthetic", "rows": [1, 128], "seconds": [0.0055, 0.069]}
        path.write_text(json.dumps(curve | change))
        return path

    return write


@pytest.fixture
def simulated(carpool, profile):
    def run(*options, **change):
        result = carpool("simulate", "--profile", profile(**change), *options, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    return run


def test_a_fixed_configuration_is_forecast_and_the_same_each_time(simulated):
    document = simulated(*LOAD, "--max-batch", 64)
    (found,) = document["results"]
    assert found["parameters"]["maxBatch"] == 64
    assert found["p50"] < found["p99"] < 0.05
    assert found["missShare"] == 0
    assert found["meanBatch"] > 5
    assert document == simulated(*LOAD, "--max-batch", 64)
    assert document["results"] != simulated(*LOAD, "--max-batch", 64, "--seed", 1)["results"]


def test_without_any_answer_there_are_no_latencies(carpool, profile, simulated):
    load = ("--slo-p99", "50ms", "--rate", 10, "--for", "5s", "--rows", 65536)
    (found,) = simulated(*load)["results"]
    assert (found["missShare"], found["goodput"]) == (1, 0)
    assert (found["p50"], found["p99"], found["deviceSecondsPerRequest"]) == (None, None, None)
    shown = carpool("simulate", "--profile", profile(), *load).output
    (line,) = (line for line in shown.splitlines() if line.startswith("fixed: "))
    assert line.removeprefix("fixed: batch 32, wait 0s, 1 in flight").split() == [
        "-", "-", "0.0/s", "100", "%", "!", "-", "32.0",
    ]  # fmt: skip


def test_no_batching_is_far_beyond_the_device_and_says_why_it_misses(simulated):
    (found,) = simulated(*LOAD, "--max-batch", 1, "--shed-at", "Deadline")["results"]
    assert found["missShare"] > 0.9
    assert set(found["misses"]) == {"late", "queue-full"}


def test_a_fixed_configuration_sheds_its_backlog_as_the_sidecar_does(simulated):
    (left,) = simulated(*LOAD, "--max-batch", 1, "--shed-at", "Deadline")["results"]
    (found,) = simulated(*LOAD, "--max-batch", 1)["results"]
    assert found["misses"]["shed"] > 0
    assert found["goodput"] > left["goodput"]


def test_shedding_at_the_slo_saves_some_answers(simulated):
    (found,) = simulated(*LOAD, "--max-batch", 1, "--shed-at", "SLO")["results"]
    assert found["misses"]["shed"] > 0
    assert found["goodput"] > 100


def test_the_tuner_in_the_loop_saves_device_time_and_says_what_it_did(simulated):
    (fixed,) = simulated(*LOAD, "--max-batch", 32)["results"]
    (tuned,) = simulated(*LOAD, "--max-batch", 32, "--tune")["results"]
    assert tuned["deviceSecondsPerRequest"] < fixed["deviceSecondsPerRequest"]
    assert tuned["missShare"] < 0.01
    assert tuned["steps"][-1]["parameters"] == tuned["parameters"] != fixed["parameters"]
    assert all(step["reason"] and step["message"] for step in tuned["steps"])


def test_more_server_concurrency_gives_more_goodput(simulated):
    (one,) = simulated(*LOAD, "--max-batch", 4)["results"]
    (four,) = simulated(*LOAD, "--max-batch", 4, "--executors", 4, "--max-in-flight", 4)["results"]
    assert four["goodput"] > one["goodput"]


def test_requests_of_several_rows_fill_batches(simulated):
    (found,) = simulated("--slo-p99", "50ms", "--rate", 100, "--for", "10s", "--rows", 8)["results"]
    assert found["meanBatch"] >= 8


def test_the_comparison_holds_each_configuration_once_and_the_best_is_best(simulated):
    found = {figures["name"]: figures for figures in simulated(*LOAD, "--max-batch", 16, "--compare")["results"]}
    assert {"no batching", "zero wait", "by hand", "as given", "best fixed", "tuned"} == set(found)
    holding = [figures for figures in found.values() if figures["missShare"] < 0.01]
    assert min(holding, key=lambda one: one["deviceSecondsPerRequest"])["name"] in {"best fixed", "tuned"}


def test_parameters_that_nobody_gave_are_not_compared(simulated, tmp_path):
    load, config = ("--rate", 200, "--for", "2s", "--compare"), tmp_path / "sidecar.yaml"
    text = "upstream: {url: http://127.0.0.1:9000}\npolicy: {slo: {latency: {p99: 50ms}}}\n"
    config.write_text(text)
    for policy in (("--slo-p99", "50ms"), ("--config", config)):
        assert "as given" not in {figures["name"] for figures in simulated(*policy, *load)["results"]}
    config.write_text(text + "parameters: {'*': {maxBatch: 16, maxWait: 3ms}}\n")
    assert "as given" in {figures["name"] for figures in simulated("--config", config, *load)["results"]}


def test_the_best_of_a_device_that_loses_by_batching_is_not_to_batch(simulated):
    superlinear = {"rows": [1, 8, 16], "seconds": [0.0057, 0.0536, 0.1216]}
    found = simulated("--slo-p99", "50ms", "--rate", 100, "--for", "10s", "--compare", **superlinear)["results"]
    # Listed once: to not batch at all is the best.
    assert "best fixed" not in {figures["name"] for figures in found}
    assert found[-1]["parameters"]["maxBatch"] == 1


def test_a_sidecars_file_gives_policy_and_parameters(simulated, tmp_path):
    config = tmp_path / "sidecar.yaml"
    config.write_text(
        "upstream: {url: http://127.0.0.1:9000}\n"
        "policy: {slo: {latency: {p99: 40ms}}}\n"
        "parameters: {'*': {maxBatch: 16, maxWait: 3ms}}\n"
    )
    document = simulated("--config", config, "--rate", 200, "--for", "5s")
    assert document["sloSeconds"] == 0.04
    assert document["results"][0]["parameters"] == {
        "maxBatch": 16,
        "maxWait": "3ms",
        "maxInFlight": 1,
        "passThrough": False,
    }


def test_people_get_a_table_the_misses_and_the_steps(carpool, profile):
    shown = carpool("simulate", "--profile", profile(), *LOAD, "--tune").output
    assert "Poisson at 800/s" in shown
    assert "device time per request" in shown
    assert "tuned: batch" in shown
    assert "LowersUtilization: batch 32, wait 0s, 1 in flight to " in shown
    assert "misses, fixed: late" in carpool("simulate", "--profile", profile(), *LOAD, "--max-batch", 1).output


def test_a_batch_far_beyond_the_profile_is_remarked_upon(carpool, profile):
    assert "ends at 128 rows" in carpool("simulate", "--profile", profile(), *LOAD, "--max-batch", 300).output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rate", "10"), "--slo-p99 or --config"),
        (("--slo-p99", "50", "--rate", "10"), "50ms"),
        (("--slo-p99", "50ms"), "--rate"),
        (("--slo-p99", "50ms", "--trace", "nowhere.csv"), "nowhere.csv"),
        (("--config", "nowhere.yaml", "--rate", "10"), "nowhere.yaml"),
        (("--slo-p99", "50ms", "--rate", "100", "--objective", "latency"), "add --tune or --compare"),
        (("--slo-p99", "0s", "--rate", "10"), "'--slo-p99': '0s': has to be longer than 0s"),
        (("--slo-p99", "50ms", "--trace", "t.txt", "--cv", "2"), "--cv does not go with --trace"),
        (("--config", "s.yaml", "--max-batch", "4"), "--max-batch does not go with --config, which brings its own"),
        (("--config", "s.yaml", "--max-wait", "1ms"), "--max-wait does not go with --config"),
        (("--config", "s.yaml", "--max-in-flight", "2"), "--max-in-flight does not go with --config"),
        (("--config", "s.yaml", "--pass-through"), "--pass-through does not go with --config"),
        (("--config", "s.yaml", "--timeout", "1s"), "--timeout does not go with --config"),
        (("--config", "s.yaml", "--shed-at", "SLO"), "--shed-at does not go with --config"),
        (("--config", "s.yaml", "--tune", "--objective", "latency"), "--objective does not go with --config"),
        (("--config", "s.yaml", "--tune", "--target-utilization", "9"), "--target-utilization does not go with"),
    ],
)
def test_what_is_wrong_is_one_line_naming_the_fix(options, says, carpool, profile):
    result = carpool("simulate", "--profile", profile(), *options)
    assert result.exit_code != 0
    assert says in result.output.splitlines()[-1]


# -- with an autoscaler

HPA = """
kind: HorizontalPodAutoscaler
spec:
  maxReplicas: 4
  metrics:
  - {type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 60}}}
"""


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "hpa.yaml"
    path.write_text(HPA)
    return path


def test_a_day_with_an_autoscaler_is_played_and_drawn(carpool, profile, manifest, tmp_path):
    asked = (
        "simulate",
        "--profile",
        profile(rows=[1, 16], seconds=[0.0055, 0.013]),
        "--slo-p99",
        "50ms",
        "--rate",
        1500,
    )
    asked += ("--autoscaler", manifest, "--replicas", "1..6")
    shown = carpool(*asked, "--plot", tmp_path / "day.png")
    assert shown.exit_code == 0, shown.output
    assert "60 % CPU, 1 to 6 replicas" in shown.output
    assert (tmp_path / "day.png").stat().st_size > 10_000
    document = json.loads(carpool(*asked, "--json").output)
    assert document["autoscaler"]["metrics"] == [{"name": "cpu", "target": 60.0}]
    days = document["days"]
    given, _, ours, fewest = (day["replicaHours"] for day in days)
    # With zero wait a device is busy most of the time long before it is full.
    assert given > 1.5 * fewest
    assert ours <= 1.15 * fewest


ONLY_UP = "  behavior: {scaleDown: {selectPolicy: Disabled}}\n"


def test_a_day_goes_by_the_behavior_of_the_manifest_which_is_refused_where_it_is_not_understood(
    carpool, profile, manifest
):
    asked = ("simulate", "--profile", profile(rows=[1, 16], seconds=[0.0055, 0.013]), "--slo-p99", "50ms")
    asked += ("--rate", 300, "--autoscaler", manifest, "--json")
    given = json.loads(carpool(*asked).output)["days"][0]
    manifest.write_text(HPA + ONLY_UP)
    kept = json.loads(carpool(*asked).output)["days"][0]
    assert kept["replicaHours"] > 1.1 * given["replicaHours"]
    manifest.write_text(HPA + ONLY_UP.replace("Disabled", "Disabled, jitter: 2"))
    refused = carpool(*asked)
    assert refused.exit_code == 2
    assert "spec.behavior.scaleDown.jitter can't be simulated" in refused.output


def test_a_day_with_no_replica_at_night_says_what_was_held(carpool, profile, manifest):
    asked = ("simulate", "--profile", profile(rows=[1, 16], seconds=[0.0055, 0.013]), "--slo-p99", "50ms")
    asked += ("--rate", 0.001, "--autoscaler", manifest, "--replicas", "0..8")
    shown = carpool(*asked)
    assert "0 to 8 replicas" in shown.output
    assert "to 0 after 5m idle" in shown.output
    assert "held: requests that waited up to 1m for a first replica" in shown.output
    given = json.loads(carpool(*asked, "--json").output)["days"][0]
    assert 0 < given["replicaHours"] < 24
    assert 0.5 < given["held"] <= given["misses"] <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replicas", "1..8"), "goes with --autoscaler"),
        (("--autoscaler", "MANIFEST", "--replicas", "8"), "1..8 or 0..8"),
        (("--autoscaler", "MANIFEST", "--replicas", "0..0"), "1..8 or 0..8"),
        (("--autoscaler", "MANIFEST", "--replicas", "²..8"), "1..8 or 0..8"),
        (("--autoscaler", "MANIFEST"), "--rate"),
        (("--autoscaler", "MANIFEST", "--rate", "5", "--max-batch", "8"), "--max-batch does not go with --autoscaler"),
        (("--autoscaler", "MANIFEST", "--rate", "5", "--for", "60s"), "--for does not go with --autoscaler"),
        (("--autoscaler", "nowhere.yaml", "--rate", "5"), "nowhere.yaml: No such file"),
        (("--plot", "x.png", "--rate", "5"), "goes with --from-running, or --autoscaler"),
    ],
)
def test_what_an_autoscaler_needs_is_named(carpool, profile, manifest, options, words):
    given = [str(manifest) if option == "MANIFEST" else option for option in options]
    result = carpool("simulate", "--profile", profile(), "--slo-p99", "50ms", *given)
    assert result.exit_code == 2
    assert words in result.output


def test_what_a_manifest_lacks_is_named(carpool, profile, manifest):
    asked = ("simulate", "--profile", profile(), "--slo-p99", "50ms", "--rate", "5", "--autoscaler", manifest)
    manifest.write_text(HPA.replace("  maxReplicas: 4\n", ""))
    assert "'maxReplicas' is missing" in carpool(*asked).output
    manifest.write_text(HPA.replace("maxReplicas: 4", 'maxReplicas: "4"'))
    assert "spec.maxReplicas: '4' is no whole number" in carpool(*asked).output
    manifest.write_text("kind: []\n")
    assert "it has 0 HPAs or ScaledObjects" in carpool(*asked).output


def test_a_manifest_that_is_no_yaml_is_named_with_the_line(carpool, profile, tmp_path):
    (path := tmp_path / "hpa.yaml").write_text("kind: [\nspec")
    result = carpool("simulate", "--profile", profile(), "--slo-p99", "50ms", "--rate", "5", "--autoscaler", path)
    assert result.output.startswith(f"Error: {path}: line 2, column 5: expected ")
    path.write_text("[" * 100_000)
    result = carpool("simulate", "--profile", profile(), "--slo-p99", "50ms", "--rate", "5", "--autoscaler", path)
    assert result.output.startswith(f"Error: {path}: maximum recursion depth exceeded")


@pytest.mark.parametrize("options", [(), ("--for", "1m"), ("--compare",)])
def test_the_goodput_of_a_trace_is_over_the_time_that_it_lasts(simulated, tmp_path, options):
    trace = tmp_path / "arrivals.csv"
    trace.write_text("\n".join(f"{number / 100}" for number in range(500)))
    document = simulated("--slo-p99", "50ms", "--trace", trace, *options)
    assert document["seconds"] == pytest.approx(5.0)
    assert document["results"][0]["goodput"] == pytest.approx(100, rel=0.02)
