from __future__ import annotations

import pytest

from carpool.learning.latency_model import ServiceTime
from carpool_cli.profiling.measuring import Stopped, advise, executors_of, interleave, sizes_up_to, throughputs


class Clock:
    """Time that passes only when a batch runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def run(self, seconds):
        self.now += seconds


def test_sizes_double_up_to_the_largest():
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_up_to(48) == [1, 2, 4, 8, 16, 32, 48]


def test_rounds_visit_every_size_and_alternate():
    clock, seen = Clock(), []
    runs = {size: lambda size=size: (seen.append(size), clock.run(size / 100)) for size in (1, 2)}
    timings = interleave(runs, {1: 9.0, 2: 8.0}, rounds=4, budget=99.0, clock=clock)
    assert seen == [1, 2, 2, 1, 1, 2, 2, 1]
    assert [(timing.rows, timing.cold, timing.rounds) for timing in timings] == [(1, 9.0, 4), (2, 8.0, 4)]
    assert timings[1].best == pytest.approx(0.02)


def test_one_pause_moves_the_minimum_the_median_and_the_spread_not_at_all():
    clock, times = Clock(), iter([0.01, 5.0, 0.01, 0.01, 0.01])
    (timing,) = interleave({1: lambda: clock.run(next(times))}, {1: 0.0}, rounds=5, budget=99.0, clock=clock)
    assert (timing.best, timing.middle, timing.spread) == pytest.approx((0.01, 0.01, 0.0), abs=1e-9)


def test_the_budget_ends_it_after_three_rounds():
    clock = Clock()
    (timing,) = interleave({1: lambda: clock.run(10.0)}, {1: 0.0}, rounds=100, budget=1.0, clock=clock)
    assert timing.rounds == 3


def interrupted_at(number):
    """Runs of sizes 1 and 2; Ctrl-C ends the `number`th (from 1)."""
    clock, calls = Clock(), []

    def run(seconds):
        calls.append(seconds)
        if len(calls) == number:
            raise KeyboardInterrupt
        clock.run(seconds)

    runs = {size: lambda size=size: run(size / 100 + len(calls)) for size in (1, 2)}
    return interleave(runs, {1: 0.0, 2: 0.0}, rounds=9, budget=99.0, clock=clock)


def test_complete_rounds_outlive_ctrl_c():
    with pytest.raises(Stopped) as caught:
        interrupted_at(6)
    assert [(timing.rows, timing.rounds) for timing in caught.value.timings] == [(1, 2), (2, 2)]
    assert caught.value.timings[0].best == pytest.approx(0.01)
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_at(2)
    assert not isinstance(caught.value, Stopped)


def test_server_concurrency_is_a_whole_number_of_single_callers():
    assert executors_of({1: 100.0, 2: 120.0, 3: 110.0}) == 1
    assert executors_of({1: 100.0, 2: 185.0, 3: 290.0, 4: 280.0}) == 3


def test_a_caller_that_fails_fails_the_measurement():
    def fail():
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        throughputs(fail, 2, seconds=0.01, trials=1, clock=Clock())


GAINING = ServiceTime.measured({1: 0.0055, 256: 0.133})
WORSENING = ServiceTime.measured({1: 0.0057, 8: 0.0536, 16: 0.1216})


def test_batches_grow_until_a_row_gets_no_cheaper():
    flat = ServiceTime.measured({1: 0.010, 8: 0.010, 16: 0.020, 64: 0.080})
    advice = advise(flat, slo=1.0, limit=None)
    assert advice.max_batch == 8
    assert advice.gain == pytest.approx(8)


def test_two_service_times_must_lie_within_the_slo():
    # Batch latency 5 + 0.5 b ms: twice that of 30 rows is 40 ms.
    advice = advise(GAINING, slo=0.0400001, limit=None)
    assert advice.max_batch == 30
    assert advice.rows_per_second == pytest.approx(1500)
    assert "no room" in advice.text


def test_what_gets_worse_is_not_batched():
    advice = advise(WORSENING, slo=1.0, limit=None)
    assert (advice.max_batch, advice.gain) == (1, 1.0)
    assert "don't batch" in advice.text
    assert "1.3 times as much" in advice.text


def test_memory_limits_it():
    assert advise(GAINING, slo=1.0, limit=10).max_batch <= 10


def test_a_p99_that_one_row_can_not_meet_is_reported():
    advice = advise(GAINING, slo=0.01, limit=None)
    assert not advice.fits
    assert "can't be met" in advice.text


def test_only_what_was_measured_says_that_larger_batches_gain_nothing():
    still_falling = ServiceTime.measured({1: 0.010, 8: 0.010})
    assert "larger ones may gain more" in advise(still_falling, slo=1.0, limit=None).text
    assert "larger ones may gain more" in advise(ServiceTime.measured({1: 0.010}), slo=1.0, limit=None).text
    # 47 rows are within 5 % of the cheapest measured, 64; each row more costs a seventh less than those.
    bending = advise(ServiceTime.measured({1: 0.0021, 32: 0.0066, 64: 0.0116}), slo=1.0, limit=None)
    assert bending.max_batch < 0.9 * 64
    assert "a row still gets cheaper at 64, the largest measured" in bending.text
    flat = ServiceTime.measured({1: 0.010, 8: 0.010, 16: 0.020, 64: 0.080})
    assert "larger batches gain little" in advise(flat, slo=1.0, limit=None).text
    assert "memory" in advise(flat, slo=1.0, limit=8).text
