from __future__ import annotations

from random import Random

import pytest

from carpool.batching.counters import ModelStats
from carpool.learning.arrivals import Poisson, until
from carpool.learning.size_limit import SizeLimit
from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, BatchingPolicy, Latency, Objective
from carpool.simulation.simulator import Arrival, Device, linear
from carpool_cli.planning.twin import tuned


def counted(batches: int, limited: int, rows: int) -> ModelStats:
    return ModelStats(limited=limited, limited_rows=limited * rows, cells=[(0, 8, 1, 0, batches, 1.0, 1.0)])


def played(limit: SizeLimit, stats: ModelStats, seconds: float) -> list[int | None]:
    return [limit.largest for _ in range(round(2 * seconds)) if limit.observe(0.5, stats)]


def test_a_model_without_limits_is_never_limited() -> None:
    limit = SizeLimit()
    assert played(limit, counted(10, 0, 0), 60) == []
    assert limit.largest is None


def test_a_limit_is_believed_within_seconds_and_forgotten_within_seconds() -> None:
    limit = SizeLimit()
    assert played(limit, counted(10, 10, 4), 4) == [4]
    assert played(limit, counted(10, 0, 0), 4) == [None]


def test_a_limit_that_swings_is_believed_once() -> None:
    limit = SizeLimit()
    played(limit, counted(10, 10, 5), 4)
    swings = [each for _ in range(20) for rows in (4, 8) for each in played(limit, counted(10, 10, rows), 1)]
    assert swings in ([], [6]), "not a search every second"


def test_few_limited_batches_say_nothing_of_the_others() -> None:
    limit = SizeLimit()
    assert played(limit, counted(10, 4, 2), 60) == []


def test_many_small_batches_weigh_no_more_than_few_large_ones_after_them() -> None:
    limit = SizeLimit()
    played(limit, counted(100, 100, 2), 30)
    assert played(limit, counted(5, 0, 0), 4) == [None]


def test_an_interval_without_batches_changes_nothing() -> None:
    limit = SizeLimit()
    played(limit, counted(10, 10, 4), 4)
    assert not limit.observe(10.0, ModelStats())
    assert limit.largest == 4


@pytest.fixture(scope="module")
def poisoned():
    """Eight hundred requests per second. From 20 to 50 s three in a hundred are poisoned."""
    times, rng = until(Poisson(800.0), 70.0, Random(2)), Random(3)
    arrivals = [
        Arrival(at, poisoned=20 < at < 50 and rng.random() < 0.03, caller=each) for each, at in enumerate(times)
    ]
    policy = BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(0.1)))).validate()
    return tuned(arrivals, Device(linear(0.005, 0.0005)), policy)


def at(decisions, when):
    return next(each for each in decisions if each.at >= when)


def test_the_forecast_is_made_with_the_batches_that_poison_leaves(poisoned) -> None:
    outcome, decisions = poisoned
    seen, forecast = outcome.summary(35.0, 45.0), at(decisions, 45.0).predicted
    assert seen.rows / seen.batches < 8
    assert forecast.mean_batch < 8, "not the 40 rows that max_batch allows"
    assert at(decisions, 45.0).shed_slo


def test_a_limit_that_passed_leaves_nothing_behind(poisoned) -> None:
    outcome, decisions = poisoned
    # A step that is riskier waits 10 s after the one before.
    assert at(decisions, 62.0).predicted.mean_batch > 32
    assert outcome.summary(60.0).miss_fraction == 0
