from __future__ import annotations

from msgspec.structs import replace
from proof import alone, oracle
from proof.scenario import Gamma, OnOff
from tiny_world import SCENARIO, SEED, small  # noqa: F401 - a fixture

from carpool.policy import Duration


def test_an_hour_is_of_a_load_that_can_be_played():
    hour = alone.hour(replace(SCENARIO, arrivals=Gamma(2.0)), SEED)
    assert hour is not None
    assert (hour.load, hour.rate) == (0.5, 200.0)
    assert hour.flips <= hour.changes
    assert alone.hour(replace(SCENARIO, arrivals=OnOff(Duration(1.0), Duration(1.0))), SEED) is None


def test_fast_devices_have_no_such_hour(monkeypatch):
    monkeypatch.setattr(oracle, "capacity", lambda _: 2000.0)
    assert alone.hour(SCENARIO, SEED) is None


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
