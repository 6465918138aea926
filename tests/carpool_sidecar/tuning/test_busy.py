from __future__ import annotations

import pytest

from carpool.batching.counters import DURATION_BOUNDS, ModelStats, Stats
from carpool.exchange.decision import Forecasted
from carpool_sidecar.tuning.busy import BusyMinutes


def forecast(p99):
    return Forecasted(0.01, p99, p99, 0.0, 10.0, 0.001, 4.0)


def counted(requests):
    return ModelStats(
        arrivals=requests,
        served=requests,
        hits=requests,
        durations=[requests] + [0] * len(DURATION_BOUNDS),
        cells=[(0, 4, 1, 0, requests, 0.0, 0.0), (0, 4, 1, 1, requests, 0.0, 0.0)],
    )


def watched(requests, predicted=lambda _: None, minutes=None):
    """Look every half second from 100.5 on; ``requests`` are counted in all at each look."""
    minutes = minutes or BusyMinutes(100.0)
    for number, each in enumerate(requests, 1):
        now = 100.0 + number / 2
        minutes.look(Stats(now, models={"m": counted(each)}), 1e9 + now, predicted)
    return minutes


def test_a_model_without_requests_has_none():
    assert watched([0, 0, 0]).last() == {}


def test_a_short_load_is_kept_with_its_end_long_after_it():
    kept = watched([0, 0, *range(10, 110, 10), *[100] * 1000]).last()["m"]
    assert (kept.at, kept.seconds, kept.stats.arrivals) == (1e9 + 106, 5.0, 100)
    assert [cell[4] for cell in kept.stats.cells] == [100]
    assert sum(kept.stats.durations) == 100


def test_of_a_long_load_it_is_the_last_minute():
    kept = watched([*range(1, 1001), *[1000] * 50]).last()["m"]
    assert kept.at == 1e9 + 600
    assert 60 <= kept.seconds <= 80
    assert kept.stats.arrivals == pytest.approx(2 * kept.seconds)


def test_after_a_long_pause_a_new_one_begins():
    kept = watched([*range(1, 101), *[100] * 400, *range(101, 111)]).last()["m"]
    assert (kept.seconds, kept.stats.arrivals) == (5.0, 10)


def test_pauses_shorter_than_a_minute_belong_to_it():
    kept = watched([*range(1, 11), *[10] * 20, 11]).last()["m"]
    assert (kept.seconds, kept.stats.arrivals) == (15.5, 11)


def test_the_forecast_is_that_of_its_end_and_not_of_no_load():
    told = iter([forecast(0.02), None, forecast(0.03)])
    minutes = watched([1, 2, 3], lambda _: next(told))
    for number in range(50):
        minutes.look(Stats(102.0 + number, models={"m": counted(3)}), 0.0, lambda _: forecast(9.0))
    assert minutes.last()["m"].predicted.p99 == 0.03


def test_a_model_that_is_forgotten_is_not_kept():
    minutes = watched([1, 2])
    minutes.look(Stats(200.0), 0.0, lambda _: None)
    assert minutes.last() == {}


def test_requests_that_fail_after_the_last_arrival_belong_to_it():
    minutes = watched([10, 20])
    failed = ModelStats(arrivals=30, served=20, hits=20, durations=[20] + [0] * len(DURATION_BOUNDS))
    minutes.look(Stats(102.0, models={"m": failed}), 1e9 + 102, lambda _: None)
    failed = ModelStats(
        arrivals=30, served=20, hits=20, misses={"failed": 10}, durations=[20] + [0] * len(DURATION_BOUNDS)
    )
    minutes.look(Stats(112.0, models={"m": failed}), 1e9 + 112, lambda _: None)
    assert minutes.last()["m"].stats.missed == 10
