from __future__ import annotations

import json
from random import Random

import click
import pytest
from msgspec.structs import replace

from carpool.exchange.report import Lane, Stalls
from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import Poisson, first
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import (
    SLO,
    Admission,
    BatchingPolicy,
    DurationRange,
    Latency,
    Objective,
    PassThroughMode,
    ShedAt,
)
from carpool.simulation.simulator import Device, Simulation, linear
from carpool.tuning.objective import Aim, choose
from carpool_cli.live.running import Running, learned
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.recommending import recommend
from carpool_cli.planning.replaying import How, load
from carpool_cli.planning.what_if import Asked, _changed, what_if

SERVICE = replace(ServiceTime.measured({1: 0.0055, 24: 0.017}), largest_in_flight=2, noise=0.05)
"""Batch latency 5 + 0.5 b ms, measured up to 24 rows."""

EFFICIENT = for_p99(0.05, Objective.EFFICIENCY)

NOTHING = Asked(
    max_batch=None,
    max_wait=None,
    max_in_flight=None,
    pass_through=False,
    slo=None,
    objective=None,
    target_utilization=None,
    tune=False,
    compare=False,
    factor=1.0,
    how=How.ONCE,
    seconds=20.0,
    seed=0,
)


def behind(rate=800.0, count=4096, policy: BatchingPolicy | None = None, **change) -> Running:
    """A sidecar, and the Poisson arrivals that it has seen last."""
    policy = policy or for_p99(0.05)
    found = Running(
        address="http://127.0.0.1:9090",
        model="m",
        policy=policy,
        limits=policy.limits(),
        largest_safe=None,
        parameters=Parameters(max_batch=8, max_wait=Duration(0.002)),
        service=SERVICE,
        arrivals=[(7.0 + time, 1) for time in first(Poisson(rate), count, Random(3))],
        p50=0.01,
        p99=0.03,
        stalls=Stalls(0, 0.0),
        decision=None,
        notes=["seen there"],
    )
    return found._replace(**change)


def found_of(found: Running, how: How = How.ONCE, **asked):
    wanted = NOTHING._replace(how=how, **asked)
    return what_if(found, load(found.arrivals, how, factor=wanted.factor, seconds=wanted.seconds), wanted)


def situation_of(found: Running, played) -> Situation:
    return Situation(
        process=played.process, service=found.service, target=0.05, budget=0.005, limits=found.policy.limits()
    )


def test_what_is_recommended_is_what_the_tuners_search_finds_over_these_arrivals():
    found = behind(policy=EFFICIENT)
    played = load(found.arrivals)
    situation = situation_of(found, played)
    answer = found_of(found)
    start = situation.limits.clamp(Parameters(max_in_flight=1))
    assert (
        answer.recommendation.parameters
        == choose(played.forecaster(situation), Aim(), start, PassThroughMode.NEVER).target.parameters
    )
    # It is the cheapest of all that hold, now and at 1.25 times the load, as far as the tuner would go at once.
    (drawn,) = answer.planes
    points = [each for line in drawn.points for each in line if each.max_batch <= 2 * 24]
    cheapest = min(each.device_time for each in points if each.holds_ahead)
    assert answer.recommendation.device_time == pytest.approx(cheapest, rel=0.005)
    row, column = drawn.place(answer.recommendation.parameters)
    assert drawn.points[row][column].device_time == pytest.approx(answer.recommendation.device_time)
    assert not answer.stays


def test_of_a_fitted_process_it_is_what_recommend_says():
    found = behind(policy=EFFICIENT)
    played = load(found.arrivals, How.FITTED, seconds=20.0)
    assert found_of(found, How.FITTED).recommendation == recommend(situation_of(found, played))


def test_what_is_recommended_follows_the_objective():
    answer = found_of(behind(), compare=True)
    best = answer.recommendation
    assert best.utilization <= 0.6
    assert best.p50 < found_of(behind(policy=EFFICIENT)).recommendation.p50
    assert any("target 60%" in reason for reason in best.reasons)
    assert "zero wait" in [figures.name for figures in answer.results]


def test_the_simulated_and_the_forecast_agree():
    answer = found_of(behind(), max_batch=16, max_wait=0.01)
    (drawn,) = answer.planes
    for figures in answer.results:
        row, column = drawn.place(figures.parameters)
        point = drawn.points[row][column]
        assert figures.device_seconds_per_request == pytest.approx(point.device_time, rel=0.05)
        if point.holds:
            assert figures.p99 == pytest.approx(point.latency, rel=0.1)
    assert [figures.name for figures in answer.results] == ["now", "as given", "recommended"]
    assert answer.results[1].parameters == Parameters(max_batch=16, max_wait=Duration(0.01))


def test_the_infeasible_region_misses_more_than_the_tuner_allows():
    (drawn,) = found_of(behind()).planes
    points = [each for line in drawn.points for each in line]
    assert all((each.miss_share <= 0.005) == each.holds for each in points)
    # 800/s are more than batches of up to six can serve, however long one waits; 24 rows do without waiting.
    assert not any(each.holds for each in points if each.max_batch < 6)
    assert all(each.holds for each in points if each.max_batch >= 24 and not each.max_wait)
    assert all(each.holds for each in points if each.holds_ahead)


def test_where_the_present_is_as_good_the_tuner_would_stay():
    best = found_of(behind()).recommendation.parameters
    again = found_of(behind(parameters=best))
    assert again.stays
    assert [figures.name for figures in again.results] == ["now"]


def test_a_faster_load_holds_less():
    def held(factor):
        return sum(each.holds for line in found_of(behind(), factor=factor).planes[0].points for each in line)

    assert held(1.0) > held(1.25) > held(1.6)
    assert found_of(behind(), factor=1.25).load.rate == pytest.approx(1000, rel=0.05)


def test_another_number_of_batches_in_flight_has_a_map_of_its_own():
    answer = found_of(behind(), max_in_flight=3)
    assert [drawn.max_in_flight for drawn in answer.planes] == [3, 1]
    assert answer.results[1].parameters.max_in_flight == 3


def test_what_is_given_merges_unless_it_says_so():
    passing = behind(parameters=Parameters(max_batch=8, max_in_flight=4, pass_through=True))
    assert found_of(passing, max_batch=16).results[1].parameters == Parameters(max_batch=16, max_in_flight=4)
    assert found_of(passing).results[0].parameters.pass_through
    merged = found_of(behind(), pass_through=True)
    assert merged.results[1].parameters.pass_through


def test_everything_side_by_side_and_the_tuner():
    answer = found_of(behind(), How.REPEATED, compare=True)
    names = ["now", "no batching", "zero wait", "by hand", "recommended", "tuned"]
    assert [figures.name for figures in answer.results] == names
    tuned = answer.results[-1]
    assert tuned.steps
    assert tuned.device_seconds_per_request < answer.results[2].device_seconds_per_request


def test_a_setting_that_misses_sheds_as_its_sidecar_would():
    overloaded = {"max_batch": 2, "max_wait": 0.0}
    assert found_of(behind(), **overloaded).results[1].misses["shed"] > 0
    late = replace(for_p99(0.05), admission=Admission(shed_at=ShedAt.DEADLINE))
    assert "shed" not in found_of(behind(policy=late), **overloaded).results[1].misses
    always = replace(for_p99(0.05), admission=Admission(shed_at=ShedAt.SLO))
    assert found_of(behind(policy=always), **overloaded).results[1].misses["shed"] > 0


def test_requests_of_several_rows_are_played_as_such():
    rows = [(time, 1 + index % 4) for index, (time, _) in enumerate(behind(rate=200.0, count=800).arrivals)]
    answer = found_of(behind(arrivals=rows))
    assert answer.load.rows == 2.5
    assert answer.recommendation.holds
    assert answer.recommendation.mean_batch > 2.5


@pytest.mark.parametrize(
    ("how", "rate", "count", "says"),
    [
        (How.ONCE, 800, 600, "600 arrivals are too few for a p99: 6 lie beyond it, and 10 are needed: 1,000 arrivals"),
        (How.ONCE, 800, 4096, "rarer bursts and pauses are not in its p99"),
        (How.ONCE, 800, 4096, "--arrivals repeated repeats them"),
        (How.ONCE, 800, 4096, "--arrivals fitted draws enough of them"),
        (How.REPEATED, 800, 4096, "repeating adds no information to the 4,096 recorded ones"),
        (How.FITTED, 800, 4096, "arrivals are drawn at random; what the 4,096 recorded ones also had"),
        (How.ONCE, 800, 4096, "by quarters of the recording the present p99 would be "),
        (How.ONCE, 800, 4096, "batch latency was measured from 1 to 24 rows: 32, 48, 64 are extrapolated"),
        (How.ONCE, 800, 4096, "seen there"),
    ],
)
def test_what_the_figures_stand_on_is_said(how, rate, count, says):
    notes = found_of(behind(rate=rate, count=count), how).notes
    assert any(says in note for note in notes), notes


def test_a_draw_too_short_for_the_percentile_says_how_long_would_do():
    notes = found_of(behind(rate=800), How.FITTED, seconds=0.5).notes
    assert any("drawn are too few for a p99, which needs 1,000: --for 2s draws as many" in note for note in notes), (
        notes
    )
    notes = found_of(behind(rate=800), How.FITTED, seconds=2.0).notes
    assert not any("too few" in note for note in notes), notes


def test_a_long_recording_of_a_known_device_is_in_no_doubt():
    known = replace(ServiceTime.measured({1: 0.0055, 64: 0.037}), largest_in_flight=2)
    notes = found_of(behind(rate=100.0, service=known, p99=None)).notes
    assert notes[0] == "seen there"
    assert [note[:26] for note in notes[1:]] == ["by quarters of the recordin"[:26]]


def test_the_map_is_of_the_highest_percentile_of_the_slo():
    policy = BatchingPolicy(slo=SLO(latency=Latency(p50=Duration(0.03), p95=Duration(0.05))))
    answer = found_of(behind(rate=400.0, count=1000, policy=policy))
    assert (answer.percentile, answer.planes[0].percentile, answer.slo_seconds) == ("p95", "p95", 0.05)
    assert answer.recommendation.holds
    assert answer.recommendation.p50 <= 0.03
    assert "arrivals are too few" not in " ".join(answer.notes)


def test_what_a_batcher_counted_forecasts_what_became_of_it():
    """A sidecar that is simulated is asked as one that runs: the same Batcher and the same counters."""
    times = first(Poisson(400.0), 4096, Random(5))
    parameters = Parameters(max_batch=16, max_wait=Duration(0.01))
    device = Device(times=linear(0.005, 0.0005), cv=0.1)
    estimate = device.estimate(64)
    outcome = Simulation(times, device, slo=0.05, parameters=parameters, estimate=estimate).run()
    counted = outcome.final[0].models[""]
    service = learned(
        counted, Lane(parameters=parameters, pass_through=False, queued_requests=0, cap=16, quarantined=False)
    )
    assert service.time(1) == pytest.approx(0.0055, rel=0.03)
    assert service.time(8) == pytest.approx(0.009, rel=0.03)
    assert service.noise == pytest.approx(0.1, abs=0.03)
    service = replace(service, largest_in_flight=2)
    answer = found_of(behind(arrivals=[(time, 1) for time in times], parameters=parameters, service=service))
    now, became = answer.results[0], outcome.summary()
    assert now.device_seconds_per_request == pytest.approx(became.device_time, rel=0.03)
    assert now.p99 == pytest.approx(became.p99, rel=0.05)


def test_what_was_slower_than_forecast_is_said_at_the_same_load_alone():
    slower = behind(p99=0.2, stalls=Stalls(3, 0.9))
    (said,) = [note for note in found_of(slower).notes if note.startswith("since it started the p99 has been 200ms")]
    assert "pauses of the host (3, 900ms in all), another load" in said
    assert not any("since it began" in note for note in found_of(slower, factor=1.25).notes)
    assert not any("since it began" in note for note in found_of(behind()).notes)


def test_another_slo_moves_the_bounds_or_reports_what_prevents_it():
    asked = NOTHING._replace(slo=0.02)
    found = _changed(behind(), asked)
    assert (found.policy.slo.due, found.limits.max_wait, found.limits.max_batch) == (0.02, 0.01, 64)
    bound = replace(for_p99(0.05).bounds, max_wait=DurationRange(max=Duration(0.03)))
    with pytest.raises(click.ClickException, match=r"--slo-p99 20ms: bounds.maxWait.max: 30ms is not below"):
        _changed(behind(policy=replace(for_p99(0.05), bounds=bound)), asked)


def test_another_objective_is_what_is_recommended_by():
    other = _changed(behind(), NOTHING._replace(objective="Efficiency"))
    assert found_of(other).recommendation == found_of(behind(policy=EFFICIENT)).recommendation
    fuller = _changed(behind(), NOTHING._replace(target_utilization=90)).policy
    assert (fuller.objective, fuller.target_utilization_percent) == (Objective.BALANCED, 90)
    assert fuller.slo == behind().policy.slo


# ------------------------------------------------------------------------------------------------- end to end


def test_a_running_sidecar_is_replayed_plotted_and_reported(launched, echo, carpool, tmp_path):
    with launched("--upstream", echo, "--slo-p99", "50ms") as up:
        nobody = carpool("simulate", "--from-running", up.admin)
        assert nobody.exit_code == 1
        assert nobody.output.startswith("Error: no request that could be batched has come to ")
        done = carpool("bench", up.data, "--rate", 300, "--requests", 900, "--warm-up", "0s")
        assert done.exit_code == 0, done.output
        picture = tmp_path / "what-if.png"
        shown = carpool("simulate", "--from-running", up.admin, "--load", "1.25", "--max-batch", 4, "--plot", picture)
        assert shown.exit_code == 0, shown.output
        for words in (
            "SLO p99 50ms",
            "load: 900 arrivals over",
            "recommended: ",
            "p99, ms; ",
            "device time per request, ms; ",
            "batches, extrapolated beyond ",
            "900 arrivals are too few for a p99: 9 lie beyond it",
            f"drew {picture}",
        ):
            assert words in shown.output
        assert picture.read_bytes().startswith(b"\x89PNG")
        vector = tmp_path / "what-if.svg"
        told = carpool("simulate", "--from-running", up.admin, "--model", "standin", "--json", "--plot", vector)
        assert told.exit_code == 0, told.output
        document = json.loads(told.stdout)
        assert (document["model"], document["load"]["recorded"]) == ("standin", 900)
        assert document["service"]["seconds"] == sorted(document["service"]["seconds"])
        assert {figures["name"] for figures in document["results"]} >= {"now"}
        assert vector.read_text("utf-8").startswith("<?xml")
        nowhere = carpool("simulate", "--from-running", up.admin, "--plot", "/proc/what-if.png")
        assert (nowhere.exit_code, nowhere.output.splitlines()[-1]) == (
            1,
            "Error: /proc/what-if.png could not be written: No such file or directory",
        )
        wrong = carpool("simulate", "--from-running", up.admin, "--model", "other")
        assert wrong.output.endswith("there were some for standin\n")


def test_what_the_port_wants_is_shown(launched, echo, carpool, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret")
    with launched("--upstream", echo, "--slo-p99", "50ms", "--set", f"apiKeyFile={key}") as up:
        assert "give --key-file" in carpool("simulate", "--from-running", up.admin).output
        opened = carpool("simulate", "--from-running", up.admin, "--key-file", key).output
        assert opened.startswith("Error: no request that could be batched has come to ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "name --profile or --from-running"),
        (("--profile", "p.json", "--from-running", ":9"), "name --profile or --from-running"),
        (("--from-running", ":9", "--rate", 5), "--rate does not go with --from-running, which brings its own: --load"),
        (("--from-running", ":9", "--trace", "azure"), "--trace does not go with --from-running"),
        (("--from-running", ":9", "--config", "c.yaml"), "--config does not go with --from-running"),
        (("--profile", "p.json", "--load", 2), "--load goes with --from-running"),
        (("--profile", "p.json", "--plot", "p.png"), "--plot goes with --from-running"),
        (("--from-running", ":9", "--plot", "p.bmp"), "end it with .png, .svg, .pdf"),
        (
            ("--from-running", ":9", "--arrivals", "once", "--for", "5s"),
            "--for goes with --arrivals repeated or fitted",
        ),
        (("--from-running", ":9", "--workload", "a/b/c"), "--workload needs --key-file"),
        (("--from-running", ":9"), "no sidecar answers at http://127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_one_line_naming_the_fix(options, says, carpool):
    result = carpool("simulate", *options)
    assert result.exit_code in {1, 2}
    assert result.output.count("\n") == 1
    assert says in result.output
