from __future__ import annotations

from random import Random

import pytest
from proof.rivals.tensorflow_serving import AdaptiveShared, InFlightLimit, contender
from rivalry import batches, come, known, refusals, sizes


def scheduler(**options):
    return AdaptiveShared(
        **{"slots": (1, 4), "max_batch": 4, "enqueued": 10, "timeout": 0.0, "rng": Random(0), **options}
    )


def moved(limit, mean):
    """Two batches of a mean latency, which make a step, and where it led."""
    for seconds in (mean - 0.001, mean + 0.001):
        limit.completed(seconds)
    return limit.limit


def test_the_limit_turns_back_where_latency_rises_and_halves_its_steps_there():
    limit = InFlightLimit(1.0, 8.0, averaged=2)
    limit.limit = 2.0
    # There is no mean to compare the first with, so it counts as a rise, and the way is down.
    assert moved(limit, 0.040) == 2.0 - 2.0 / 8
    # It fell after a rise, so the step is halved.
    assert moved(limit, 0.030) == 1.75 - 1.75 / 16
    # It fell again: twice the step, but never more than an eighth.
    assert moved(limit, 0.020) == 1.640625 * (1 - 1 / 8)
    before = limit.limit
    # It rose: turn, at the same step.
    assert moved(limit, 0.050) == pytest.approx(before * (1 + 1 / 8))


def test_the_limit_stays_in_bounds():
    limit = InFlightLimit(1.0, 1.2, averaged=2)
    assert moved(limit, 0.040) == 1.0  # down from 1
    assert moved(limit, 0.050) == pytest.approx(1.125)
    assert moved(limit, 0.040) == pytest.approx(1.125 * (1 + 1 / 16))
    assert moved(limit, 0.030) == 1.2


def test_what_is_not_full_leaves_while_the_limit_allows():
    shared = scheduler(slots=(2, 4))
    assert sizes(come(shared, [0.0, 0.001, 0.002, 0.003])) == [1, 1]
    (first, _) = shared.in_flight
    assert sizes(shared.complete(first, 0.005)) == [2]


def test_a_fraction_is_the_chance_of_one_more_drawn_once_for_each_event():
    drawn = []

    class Drawn(Random):
        def random(self):
            drawn.append(1)
            return 0.6

    shared = scheduler(rng=Drawn())
    shared.limit.limit = 1.5
    (first,) = batches(come(shared, [0.0]))
    assert sizes(come(shared, [0.001, 0.002])) == []  # one batch was begun
    assert len(drawn) == 1
    assert sizes(come(shared, [0.003, 0.003, 0.003])) == []  # and another
    assert len(drawn) == 2
    shared.limit.limit = 1.7
    assert sizes(shared.complete(first, 0.005)) == [4, 1]


def test_what_is_not_full_waits_for_the_timeout():
    shared = scheduler(slots=(2, 2), timeout=0.010)
    assert sizes(come(shared, [0.0, 0.001])) == []
    assert shared.wake_at() == 0.010
    assert sizes(come(shared, [0.002, 0.002])) == [4]
    assert sizes(come(shared, [0.004])) == []
    assert sizes(shared.poll(0.014)) == [1]


def test_more_batches_than_may_be_enqueued_are_refused():
    shared = scheduler(enqueued=1)
    actions = come(shared, [0.0] * 6)
    assert refusals(actions) == ["queue-full"]


def test_its_contender_begins_with_as_many_as_the_device_computes():
    shared = contender(known(executors=3, in_flight=4), Random(0)).dispatcher()
    assert shared.limit.limit == 3
    assert shared.slots == 4
    assert contender(known(executors=3, in_flight=2), Random(0)).dispatcher().slots == 3
