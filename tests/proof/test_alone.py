from __future__ import annotations

import pytest
from msgspec.structs import replace
from proof import alone, courses, measures, oracle
from proof import scenario as suite
from proof.ourselves import CARPOOL
from proof.scenario import Gamma, OnOff
from proof.world import Stretch, estimate, knowledge, play
from tiny_world import SCENARIO, SEED, small  # noqa: F401 - a fixture

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting

SHEDDING = Setting(Parameters(max_batch=32), estimate(knowledge(SCENARIO)), shed_slo=True)


def test_an_hour_is_of_a_load_that_can_be_played():
    hour = alone.hour(replace(SCENARIO, arrivals=Gamma(2.0)), SEED)
    assert hour is not None
    assert (hour.load, hour.rate) == (0.5, 200.0)
    assert hour.flips <= hour.changes
    assert alone.hour(replace(SCENARIO, arrivals=OnOff(Duration(1.0), Duration(1.0))), SEED) is None


def test_no_try_leads_back_to_what_was_just_left():
    # The tuner leaves 32 rows for server concurrency 4, which is not there, and sizes in between for their latency.
    scenario = next(each for each in suite.load_all() if each.name == "bert-base-t4-crowds")
    outcome = play(scenario, CARPOOL.maker, [Stretch(15.0, 200.0)], 1).outcome
    path = measures.settings(outcome.changes, 0.0, 15.0)
    assert len(path) > 2
    assert measures.flips(path) == 0


def test_fast_devices_have_no_such_hour(monkeypatch):
    monkeypatch.setattr(oracle, "capacity", lambda _: 2000.0)
    assert alone.hour(SCENARIO, SEED) is None


class Undecided:
    decisions = ()


def forecasts(scenario):
    return alone.forecasts(scenario, courses.stair(scenario, oracle.capacity(scenario)), Undecided(), SEED)


def test_forecasts_are_of_a_device_that_has_seen_every_size():
    assert forecasts(replace(SCENARIO, cold=10.0)) == forecasts(SCENARIO)


def test_what_comes_of_a_setting_is_played_until_it_is_known(monkeypatch):
    monkeypatch.setattr(alone, "FORECAST_DOUBT", 0.0)
    played = []
    play = alone.play
    monkeypatch.setattr(alone, "play", lambda *args: played.append(args[3]) or play(*args))
    noisy = replace(SCENARIO, cv=0.5)
    monkeypatch.setattr(alone, "FORECAST_RUNS", 2)
    few = forecasts(noisy)
    assert played == [SEED + 1, SEED + 2] * 2
    monkeypatch.setattr(alone, "FORECAST_RUNS", 8)
    many = forecasts(noisy)
    assert sum(surer.doubt for surer in many) < sum(one.doubt for one in few)  # of two runs doubt is hardly known
    for surer in many:
        assert surer.told == pytest.approx(surer.simulated, rel=0.05 + surer.doubt)


def test_a_setting_that_sheds_is_forecast_to(monkeypatch):
    # Twice what it can do: nobody waits for ever, since who would be late is refused.
    monkeypatch.setattr(oracle, "capacity", lambda _: 6000.0)
    monkeypatch.setattr(alone, "best_setting", lambda *_: SHEDDING)
    for one in forecasts(SCENARIO):
        assert one.told == pytest.approx(one.simulated, rel=0.1)
        assert one.told < 2 * float(SCENARIO.slo)


def test_a_bad_setting_is_taken_back():
    pushed = alone.rollback(SCENARIO, SEED)
    assert pushed is not None
    assert pushed.rate <= alone.ROLLBACK_RATE
    assert pushed.misses >= alone.BAD
    assert pushed.bad.startswith("batch 1,")
    assert pushed.requests is not None
    assert pushed.requests <= 310


def test_where_no_setting_is_bad_there_is_nothing_to_take_back(monkeypatch):
    monkeypatch.setattr(oracle, "capacity", lambda _: 60.0)
    assert alone.rollback(SCENARIO, SEED) is None


def test_bursts_count_as_load():
    # Twice the mean in bursts: 200 requests/s are 400.
    bursty = replace(SCENARIO, arrivals=OnOff(Duration(1.0), Duration(1.0)))
    pushed = alone.rollback(bursty, SEED)
    assert pushed is None or pushed.rate <= alone.ROLLBACK_RATE / 2


def test_several_replicas_have_no_guard_in_common():
    assert alone.rollback(replace(SCENARIO, replicas=2), SEED) is None
