from __future__ import annotations

from random import Random

import pytest
from proof.rivals.bentoml import BentoML, Optimizer, contender
from rivalry import batches, come, known, refusals, service, sizes


def trained(**options):
    """A dispatcher after its training, on the device of 5 ms + 0.5 ms a row, with a line drawn just before 100 s."""
    bento = BentoML(**{"slots": 1, "max_batch": 64, "max_latency": 0.05, **options})
    for at, size in zip(range(33, 105, 6), [1] * 9 + [2, 3, 1], strict=True):
        (batch,) = batches(come(bento, [at] * size))
        bento.complete(batch, at + service(size))
    return bento


def test_the_regression_recovers_the_line():
    optimizer = Optimizer(0.05)
    for number, rows in enumerate((9, 9, 1, 4, 2, 8)):
        # The first two are taken for warm-up: they would spoil it.
        optimizer.log(rows, 0.002 * rows, 1.0 if number < 2 else service(rows), 10.0 * number)
    assert optimizer.slope == pytest.approx(0.0005)
    assert optimizer.fixed == pytest.approx(0.005)
    assert optimizer.wait == pytest.approx(0.0075)


def test_one_size_alone_gives_the_shortest_vector():
    # Of slope + fixed = 10 ms, and for 3 requests 3 slope + fixed = 10 ms.
    for requests, slope, fixed in ((1, 0.005, 0.005), (3, 0.003, 0.001)):
        optimizer = Optimizer(0.05)
        for number in range(3):
            optimizer.log(requests, 0.0, 0.010, 10.0 * number)
        assert (optimizer.slope, optimizer.fixed) == (pytest.approx(slope), pytest.approx(fixed))


def test_nothing_costs_less_than_nothing():
    optimizer = Optimizer(0.05)
    for number, (requests, seconds) in enumerate([(1, 1.0), (1, 1.0), (1, 0.020), (8, 0.001)]):
        optimizer.log(requests, 0.0, seconds, 10.0 * number)
    assert optimizer.slope == 1e-6
    assert optimizer.fixed == pytest.approx(0.0105 + 4.5 * 0.019 / 7)


def test_lines_are_drawn_every_five_seconds_over_the_last_fifty():
    optimizer = Optimizer(0.05)
    for number in range(3):
        optimizer.log(1 + number, 0.0, service(1 + number), 0.0)
    drawn = optimizer.slope
    for rows in (2, 4) * 30:
        optimizer.log(rows, 0.0, 2 * service(rows), 4.9)
    assert optimizer.slope == drawn
    optimizer.log(2, 0.0, 2 * service(2), 5.0)
    assert optimizer.slope == pytest.approx(0.001)


def test_training_learns_the_device():
    bento = trained()
    assert bento.optimizer.slope == pytest.approx(0.0005)
    assert bento.optimizer.fixed == pytest.approx(0.005)
    assert bento.optimizer.wait == 0.0


def test_training_waits_for_two_requests_but_not_for_ever():
    bento = BentoML(slots=1, max_batch=64, max_latency=0.05)
    for number in range(9):
        (batch,) = batches(come(bento, [float(number)]))
        bento.complete(batch, number + 0.010)
    # Nine calls of one at 10 ms: a = b = 5 ms. Two take 15 ms, and five 30: until the first is 15 ms old.
    assert sizes(come(bento, [20.0])) == []
    assert bento.wake_at() == pytest.approx(20.015)
    assert sizes(bento.poll(bento.wake_at())) == [1]


def test_training_keeps_who_is_late_as_long_as_it_needs_them():
    bento = BentoML(slots=1, max_batch=64, max_latency=0.05)
    (first,) = batches(come(bento, [0.0]))
    come(bento, [0.001] * 5)
    # Training needs two, and one was served. So one of five late requests is kept, and the other four are refused.
    actions = bento.complete(first, 0.1)
    assert refusals(actions) == ["predicted-late"] * 4
    assert sizes(actions) == [1]


def test_it_corks_while_waiting_is_cheap():
    bento = trained()
    bento.optimizer.wait = 0.010
    # One waits until 0.95 * 10 ms - 1 ms - 0.5 ms after it came; with a second, until 4.75 - 1.5 ms after that.
    assert sizes(come(bento, [100.0])) == []
    assert bento.wake_at() == pytest.approx(100.008)
    assert sizes(come(bento, [100.004])) == []
    assert bento.wake_at() == pytest.approx(100.00725)
    assert sizes(bento.poll(bento.wake_at())) == [2]


def test_it_releases_at_once_where_nobody_usually_waits():
    assert sizes(come(trained(), [100.0])) == [1]


def test_who_would_be_late_in_the_whole_queue_is_cancelled():
    bento = trained()
    (first,) = batches(come(bento, [100.0]))
    come(bento, [100.001, 100.002, 100.010])
    # At 45.6 ms after 100 s: three take 6.5 ms, and the first has waited for 44.6; two take 6, the next waited 43.6.
    actions = bento.complete(first, 100.0456)
    assert refusals(actions) == ["predicted-late"]
    assert sizes(actions) == [2]


def test_a_single_one_is_only_cancelled_when_late():
    for ends, refused in ((100.0505, []), (100.0515, ["predicted-late"])):
        bento = trained()
        (first,) = batches(come(bento, [100.0]))
        come(bento, [100.001])
        assert refusals(bento.complete(first, ends)) == refused


def test_its_contender_allows_the_slo():
    bento = contender(known(executors=3), Random(0)).dispatcher()
    assert bento.slots == 3
    assert bento.optimizer.slope == pytest.approx(0.05 / 15)
    assert bento.optimizer.fixed == pytest.approx(0.05 / 30)
