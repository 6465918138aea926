from __future__ import annotations

import json
from math import inf

import pytest
from evidence import limits
from msgspec.structs import replace
from proof import verdict
from proof.rows import Recovery, Rest
from tiny import proof, step, timeline


def figure(name, **changes):
    return verdict.figures(proof(**changes))[name].value


def test_the_figures_of_a_run():
    assert {name: each.value for name, each in verdict.figures(proof()).items()} == pytest.approx(
        {
            "highest load, worst": 0.9375,  # six sixteenths of the way from 0.4 to 2 % of misses
            "highest load, median": 0.9375,
            "highest load, ahead": 0.9375 - (0.5 + 0.4 * 9 / 19),
            "saving, worst": 0.75,
            "saving, median": 0.75,
            "saving, ahead": 0.75,
            "step misses, worst": 0.001,
            "extra misses, worst": 0.002,
            "first good, worst": 30.0,
            "load rises, worst": inf,
            "overload, worst": 50 / 99.9,
            "flips, worst": 1,
            "flips in an hour, worst": 0,
            "forecast, worst": 0.025,
            "rollback, worst": 120,
        }
    )


def test_every_figure_but_flips_while_tuning_has_a_limit():
    assert set(verdict.figures(proof())) - set(limits(verdict.LIMITS)) == {"flips, worst", "saving, median"}


def test_every_limit_is_of_something_measured():
    for path in (verdict.LIMITS, verdict.QUICK_LIMITS):
        for name in limits(path):
            measure, _, kind = name.partition(", ")
            assert measure in verdict.MEASURES, name
            assert kind in {"worst", "median", "ahead"}, name


def test_a_rule_that_saves_by_missing_is_not_ahead():
    assert verdict.median_share(proof(), "fixed", "saving") == 0.0


def test_the_overload_is_no_load_that_is_held():
    made = proof()
    stairs = [replace(each, steps=(*each.steps[:-1], each.steps[0])) for each in made.stairs]
    assert verdict.highest_loads(replace(made, stairs=stairs), "carpool") == {"plain": pytest.approx(0.9375)}


def test_misses_at_a_moderate_load_are_seen_whatever_the_highest_load_is():
    made = proof()
    stairs = [
        replace(each, steps=(step(0.1, 2), *each.steps[1:])) if each.contender == "carpool" else each
        for each in made.stairs
    ]
    assert verdict.step_misses(replace(made, stairs=stairs), "carpool") == {"plain": pytest.approx(0.1)}


def test_a_low_rate_has_more_time():
    slow = [replace(phase, rate=99.0) for phase in proof().phases["plain"]]
    assert "first good, worst" not in verdict.figures(proof(phases={"plain": slow}))


def test_forecasts_of_a_saturated_device_do_not_count():
    saturated = [replace(proof().forecasts[0], utilization=0.95)]
    assert "forecast, worst" not in verdict.figures(proof(forecasts=saturated))


def test_a_part_has_only_its_own_figures():
    made = proof(contenders=proof().contenders[:1], stairs=proof().stairs[:2], hours=[], forecasts=[], rollbacks=[])
    assert set(verdict.figures(made)) == {
        "highest load, worst",
        "highest load, median",
        "step misses, worst",
        "extra misses, worst",
        "first good, worst",
        "load rises, worst",
        "overload, worst",
        "flips, worst",
    }


def bounds(tmp_path, **changes):
    path = tmp_path / "limits.json"
    limit = {"name": "extra misses, worst", "value": 0.01, "unit": "x", "direction": "at most", "why": "It may not."}
    path.write_text(json.dumps([limit | changes]))
    return path


def test_a_limit_that_is_missed_is_reported(tmp_path):
    assert verdict.missed(proof(), bounds(tmp_path)) == []
    (line,) = verdict.missed(proof(), bounds(tmp_path, value=0.001))
    assert line == "extra misses, worst: 0.002, at most 0.001 x. It may not."


def test_a_goal_that_is_missed_falls_short_of_it_without_failing(tmp_path):
    path, reasons = bounds(tmp_path, value=0.01, goal=0.001), tmp_path / "reasons.json"
    reasons.write_text("{}")
    assert verdict.missed(proof(), path) == []
    (found,) = verdict.shortfalls(proof(), path, reasons)
    assert (found.scenario, found.measure, found.value, found.reason) == ("plain", "extra misses", 0.002, None)


def test_a_reason_is_found_by_scenario_and_measure(tmp_path):
    path, reasons = bounds(tmp_path, value=0.001), tmp_path / "reasons.json"
    reasons.write_text(json.dumps({"plain": {"extra misses": "the cold start", "saving": "another"}}))
    (found,) = verdict.shortfalls(proof(), path, reasons)
    assert found.reason == "the cold start"


def test_a_reason_may_be_of_one_seed(tmp_path):
    path, reasons = bounds(tmp_path, value=0.001), tmp_path / "reasons.json"
    reasons.write_text(json.dumps({"plain": {"extra misses": {"7": "a late burst"}}}))
    found = {seed: verdict.shortfalls(proof(seed=seed), path, reasons)[0].reason for seed in (1, 7)}
    assert found == {1: None, 7: "a late burst"}


def test_carpool_is_put_beside_the_rules_that_save_more():
    (alone,) = verdict.beside_those_ahead(proof())
    assert (alone.loads, alone.near, alone.poor, alone.mean) == (1, 0, 1, pytest.approx(0.75))
    assert alone.highest == pytest.approx(0.9375)
    best = next(each for each in proof().stairs if each.contender == "oracle")
    stairs = [replace(each, steps=best.steps) if each.contender == "fixed" else each for each in proof().stairs]
    own, ahead = verdict.beside_those_ahead(proof(stairs=stairs))
    assert own == alone
    assert (ahead.near, ahead.poor, ahead.mean) == (1, 0, pytest.approx(1.0))


def test_goals_of_all_scenarios_together_come_first(tmp_path):
    path, reasons = bounds(tmp_path, name="saving, ahead", value=0.7, goal=0.8, direction="at least"), tmp_path / "r"
    reasons.write_text(json.dumps({verdict.EVERYWHERE: {"saving, ahead": "half the promise is hard to beat"}}))
    (found,) = verdict.shortfalls(proof(), path, reasons)
    assert (found.scenario, found.value) == (verdict.EVERYWHERE, 0.75)
    assert found.reason == "half the promise is hard to beat"


def test_reasons_that_were_reviewed_are_of_scenarios_and_measures_that_there_are():
    known = {path.stem for path in (verdict.HERE.parent / "scenarios").glob("*.json")}
    for scenario, reasons in json.loads(verdict.REASONS.read_text()).items():
        assert scenario in {*known, verdict.EVERYWHERE}
        assert {name.partition(", ")[0] for name in reasons} <= set(verdict.MEASURES)


def test_a_phase_that_never_became_good_is_the_worst():
    lines = [timeline("carpool", 0.0, Recovery(None, 1, 0), Recovery(1.0, 1, 0))]
    assert figure("first good, worst", timelines=lines) == inf


def test_a_shortfall_is_reported_beside_the_result_with_true_values(tmp_path):
    # Another scenario, where nothing falls short, is none of its business.
    best = next(each for each in proof().stairs if each.contender == "oracle")
    others = [replace(each, scenario="other", steps=best.steps) for each in proof().stairs]
    made = proof(
        told=[replace(best, contender="told t(b)")],
        scenarios=[*proof().scenarios, replace(proof().scenarios[0], name="other")],
        stairs=[*proof().stairs, *others],
    )
    bounds = tmp_path / "limits.json"
    limit = {"name": "highest load, worst", "value": 0.95, "unit": "x", "direction": "at least", "why": "why"}
    bounds.write_text(json.dumps([limit]))
    assert [(each.scenario, each.told) for each in verdict.shortfalls(made, bounds)] == [("plain", (1.0, None))]
    found = {each.measure: each for each in verdict.shortfalls(made) if each.scenario == "plain"}
    assert found["saving"].value == pytest.approx(0.75)
    assert found["saving"].told == (1.0, None)
    assert found["overload"].told[0] == pytest.approx(0.5, rel=0.02)
    assert found["load rises"].told == (None, None), "of the timeline, which it is not put through"


def test_what_more_time_brings_is_said_of_the_saving_alone():
    rest = Rest("plain", 0.5, (0.5, None, 0.97))
    short = {each.measure: each.rest for each in verdict.shortfalls(proof(rests=[rest]))}
    assert short.pop("saving") is rest
    assert set(short.values()) == {None}
    assert verdict.by_minute(rest) == "50%, -, 97%"


def test_the_load_at_which_least_is_saved():
    made = proof()
    lower = replace(made.scenarios[0], loads=(0.2, 0.5, 1.0, 2.0))
    assert verdict.least_saving(replace(made, scenarios=[lower]), "plain") == 0.2
