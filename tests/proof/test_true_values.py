from __future__ import annotations

import pytest
from proof import experiments, measures, rows, true_values
from proof.world import Stretch, knowledge
from tiny_world import SCENARIO, SEED, small  # noqa: F401 - a fixture

from carpool.batching.counters import Sample
from carpool.learning.arrivals import Gamma, WindowCounts

COURSE = (Stretch(10.0, 100.0), Stretch(10.0, 300.0, device=2.0), Stretch(10.0, 300.0))


def test_true_latencies_are_known_before_any_batch_and_through_changes_of_the_device():
    times = true_values.Times(knowledge(SCENARIO), COURSE)
    true = SCENARIO.service()
    assert [times.estimate().time(rows) for rows in (1, 64)] == [true.time(1), true.time(64)]
    assert times.estimate().executors_for(8) == SCENARIO.executors
    slow = [Sample(0, 8, 1, 0, 5, 5.0, 5.0)]  # a second each, which the true values overrule
    assert times.observe(9.5, slow) == 1.0
    assert times.estimate().time(8) == true.time(8)
    assert times.observe(10.0, slow) == 2.0
    assert times.estimate().time(8) == pytest.approx(2 * true.time(8))
    assert times.observe(25.0, slow) == 0.5
    assert times.estimate().time(8) == true.time(8)


def test_the_true_rate_is_known_at_once_and_its_spread_is_learned():
    rates = true_values.Rates(COURSE, replicas=2)
    assert rates.process is None
    # Ten windows of both replicas in each second of theirs, of 1 and 9 requests in turn.
    for _ in range(18):
        rates.observe(1.0, WindowCounts(10, 50, 410), 50, replicas=2)
    assert rates.rate == 50.0
    assert isinstance(rates.process, Gamma)
    assert rates.process.cv > 1.3
    assert not rates.observe(1.0, WindowCounts(10, 50, 410), 50, replicas=2)
    assert rates.observe(1.0, WindowCounts(10, 50, 410), 50, replicas=2), "the second stretch begins"
    assert rates.process.rate == pytest.approx(150.0)


def test_with_all_true_values_it_sustains_the_same_loads_as_with_learned_ones(small):  # noqa: F811 - the fixture
    reference = experiments.refer(SCENARIO, SEED)
    learned = experiments.contend(SCENARIO, reference, "carpool", SEED).stair
    for name in rows.TOLD:
        stair = experiments.explain(SCENARIO, name, SEED)
        assert stair.contender == name
        assert [step.stayed for step in stair.steps] == [step.stayed for step in learned.steps]
        assert stair != learned
        assert all(step.misses <= 0.01 for step in stair.steps[:2])


def test_left_alone_it_saves_as_much_minute_by_minute(small):  # noqa: F811 - the fixture
    rest = experiments.rest(SCENARIO, 0.3, SEED)
    assert (rest.scenario, rest.load) == (SCENARIO.name, 0.3)
    assert len(rest.minutes) == experiments.RESTED
    assert all(share is not None and share > 0.9 for share in rest.minutes)
    assert rest == experiments.rest(SCENARIO, 0.3, SEED)


def test_where_nothing_can_be_saved_no_share_of_it_is(small, monkeypatch):  # noqa: F811 - the fixture
    monkeypatch.setattr(measures, "WORTH", 1.0)
    assert experiments.rest(SCENARIO, 0.3, SEED).minutes == (None,) * experiments.RESTED
