from __future__ import annotations

from random import Random

import pytest
from proof.rivals.nexus import EPOCH, Nexus, contender, residual
from rivalry import batches, come, known, refusals, service, sizes

LATENCY = tuple(service(rows) for rows in range(65))


def test_a_rate_that_fills_the_device_takes_the_largest_batch_back_to_back():
    # 40 rows in 25 ms: 1,600/s.
    assert residual(LATENCY, 0.05, 40, 1600.0) == (40, 0.0)
    assert residual(LATENCY, 0.05, 40, 0.0) == (40, 0.0)


def test_any_other_rate_takes_what_comes_in_time():
    # At 400/s: (b - 1) / 400 + 5 ms + 0.5 ms b <= 50 ms, b <= 15.8; once every 37.5 ms, and 37.5 + 12.5 <= 50.
    assert residual(LATENCY, 0.05, 40, 400.0) == (15, pytest.approx(0.0375))


def test_at_a_rate_too_low_for_batching_requests_are_sent_alone():
    # The second request comes after 50 ms.
    assert residual(LATENCY, 0.05, 40, 20.0) == (1, pytest.approx(0.0445))


def test_a_batch_is_gathered_for_a_cycle_once_the_rate_is_known():
    nexus = Nexus(known())
    for number in range(int(400 * EPOCH)):
        at = number / 400
        for batch in batches(come(nexus, [at])):
            nexus.complete(batch, at)
    assert sizes(come(nexus, [EPOCH])) == []
    # A cycle of 37.5 ms, but the policy allows half the SLO.
    assert nexus.wake_at() == pytest.approx(EPOCH + 0.025)
    assert sizes(come(nexus, [EPOCH + 0.001] * 14)) == [15]


def test_a_quiet_time_counts_towards_the_rate():
    nexus = Nexus(known())
    for at in (0.0, 100.0):
        for batch in batches(come(nexus, [at])):
            nexus.complete(batch, at)
    # One in 100 s: the second of two would come much too late, so no request waits for another.
    assert sizes(come(nexus, [100.001])) == [1]


def test_who_would_be_late_in_a_full_batch_is_dropped():
    nexus = Nexus(known())
    (first,) = batches(come(nexus, [0.0]))
    come(nexus, [0.001, 0.001, 0.010, 0.010])
    # At 45 ms a batch of four takes until 52: the first two are due at 51. The other two take until 51, due at 60.
    actions = nexus.complete(first, 0.045)
    assert refusals(actions) == ["predicted-late"] * 2
    assert sizes(actions) == [2]


def test_a_smaller_window_may_still_be_in_time():
    nexus = Nexus(known())
    (first,) = batches(come(nexus, [0.0]))
    come(nexus, [0.001, 0.002])
    # At 44.7 ms two take until 50.7, and one until 50.2: both are in time for what is due at 51 and 52.
    assert sizes(nexus.complete(first, 0.0447)) == [2]


def test_everybody_may_be_late():
    nexus = Nexus(known())
    (first,) = batches(come(nexus, [0.0]))
    come(nexus, [0.001] * 3)
    actions = nexus.complete(first, 1.0)
    assert refusals(actions) == ["predicted-late"] * 3
    assert sizes(actions) == []


def test_its_contender_brings_a_dispatcher_for_each_replica():
    made = contender(known(executors=2), Random(0))
    one, other = made.dispatcher(), made.dispatcher()
    assert one is not other
    assert one.slots == 2
