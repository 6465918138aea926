from __future__ import annotations

import pytest

from carpool.batching.counters import ModelStats
from carpool.exchange.decision import Observation
from carpool.policy.parameters import Parameters
from carpool.tuning.belief import Belief


def counted(cells=((4, 40, 0.007),), **more):
    arrivals = 100
    return ModelStats(
        arrivals=arrivals, arrivals_squared=2100, windows=5, rows=arrivals, hits=arrivals, batchable=arrivals,
        cells=[(0, rows, 1, 0, count, count * each, count * each**2) for rows, count, each in cells], **more,
    )  # fmt: skip


def seen(belief, *stats, start=0.0):
    return [
        belief.observe(Observation(now=start + (index + 1) / 2, seconds=0.5, stats=each))
        for index, each in enumerate(stats)
    ]


def test_before_a_batch_was_measured_nothing_is_planned_with():
    belief = Belief()
    assert belief.service is None
    assert not belief.has_changed
    assert belief.planned(Parameters(), 0.1) is None
    assert belief.capacity(Parameters()) is None


def test_what_is_put_in_force_is_what_the_batcher_plans_with_until_it_changes():
    belief = Belief()
    seen(belief, *[counted()] * 4)
    assert belief.has_changed
    belief.put_in_force(16)
    assert not belief.has_changed
    planned = belief.planned(Parameters(max_batch=8), 0.1)
    assert len(planned.times) == 17
    assert planned.times[4] == pytest.approx(0.007, rel=0.01)
    assert belief.capacity(Parameters(max_batch=4)) == pytest.approx(4 / 0.007, rel=0.01)
    belief.in_force = None
    assert belief.has_changed


def test_a_model_three_times_as_slow_is_another():
    belief = Belief()
    seen(belief, *[counted()] * 10)
    belief.begin_epoch()
    assert not belief.is_another_model()
    assert not belief.begin_epoch()
    moved = seen(belief, *[counted(((4, 40, 0.021),))] * 5, start=5.0)
    assert any(each.model for each in moved)
    assert belief.is_another_model()
    assert belief.begin_epoch()


def test_rows_that_differ_are_known_by_their_shares():
    belief = Belief()
    seen(belief, counted(request_rows=[100, 0, 0, 0]))
    assert belief.row_shares == (), "all have one"
    seen(belief, *[counted(request_rows=[50, 0, 0, 50])] * 3)
    assert belief.row_shares == pytest.approx((0.62, 0.0, 0.0, 0.38), abs=0.15)
    # One in a hundred is large, which may decide whether the SLO is met; the first second shows none of them.
    belief = Belief()
    seen(belief, counted(request_rows=[60, 40, 0, 0]))
    assert belief.row_shares[3] == 0
    seen(belief, *[counted(request_rows=[59, 40, 0, 1])] * 9)
    assert belief.row_shares == pytest.approx((0.591, 0.4, 0.0, 0.009))
