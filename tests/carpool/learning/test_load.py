from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from random import Random

import pytest
from bursts import OnOff
from msgspec.structs import replace

from carpool.learning.arrivals import Gamma, Modulated, Poisson, WindowCounts, until
from carpool.learning.load import LONG_MEMORY, UNMEASURED, Load


def feed(load, process, seconds, seed=1, step=0.5):
    """Observe a process in steps; return the times at which the believed load changed."""
    times = list(until(process, seconds, Random(seed)))
    changes, last = [], None
    for index in range(round(seconds / step)):
        start = index * step
        here = times[bisect_left(times, start) : bisect_left(times, start + step)]
        gaps = [later - earlier for earlier, later in pairwise([last, *here] if last is not None else here)]
        last = here[-1] if here else last
        counts = WindowCounts.of([time - start for time in here], step)
        counts = replace(counts, gaps_squared=sum(gap * gap for gap in gaps))
        if load.observe(step, counts, counts.arrivals):
            changes.append(start + step)
    return changes


@pytest.mark.parametrize("rate", [5.0, 50.0, 500.0])
def test_a_steady_load_is_believed_and_left_alone(rate):
    load = Load()
    changes = feed(load, Poisson(rate), 120.0)
    assert load.rate == pytest.approx(rate, rel=0.15)
    assert sum(when > 30.0 for when in changes) <= (2 if rate < 10 else 0), (
        "chance must not move what was measured over half a minute, but twice the evidence may"
    )


def test_a_doubled_load_is_believed_within_two_seconds_and_from_what_came_after_alone():
    load = Load()
    feed(load, Poisson(400.0), 60.0)
    changes = feed(load, Poisson(800.0), 3.0, seed=2)
    assert changes[0] <= 1.0
    assert load.rate == pytest.approx(800.0, rel=0.1)


def test_chance_that_is_fitted_by_another_kind_of_process_is_not_another_load():
    load = Load()
    feed(load, Poisson(320.0), 30.0)
    # The counts of independent callers are fitted by gamma gaps of a CV near 1 every now and then.
    load.process = Gamma(load.rate, 0.98)
    load._evidence = 1
    feed(load, Poisson(320.0), 1.0, seed=2)
    assert load._believe(report=False) is False
    load.process = Gamma(load.rate, 3.0)
    assert load._believe(report=False)


def test_after_a_jump_the_rate_is_known_less_well():
    load = Load()
    feed(load, Poisson(400.0), 60.0)
    assert load.error < 0.01
    feed(load, Poisson(800.0), 1.0, seed=2)
    assert 0.02 < load.error < 0.06


@pytest.mark.parametrize("step", [0.5, 2.0, 5.0, 15.0])
def test_a_quarter_more_is_believed_soon_however_long_an_observation_lasts(step):
    load = Load()
    feed(load, Poisson(100.0), 600.0, step=step)
    assert load._spread() < UNMEASURED / 2
    changes = feed(load, Poisson(125.0), 120.0, seed=2, step=step)
    assert changes[0] <= max(10.0, step)
    assert load.rate == pytest.approx(125.0, rel=0.08)


def test_a_spread_once_known_outlasts_a_jump():
    load = Load()
    feed(load, Poisson(400.0), 60.0)
    assert load._spread() < UNMEASURED / 2
    assert feed(load, Poisson(800.0), 1.0, seed=2)
    assert load._spread() < UNMEASURED / 2


def test_a_collapsed_load_is_believed():
    load = Load()
    feed(load, Poisson(400.0), 60.0)
    feed(load, Poisson(40.0), 3.0, seed=2)
    assert load.rate == pytest.approx(40.0, rel=0.3)


def test_a_load_of_hardly_anybody_is_measured_for_longer():
    load = Load()
    feed(load, Gamma(60.0, 2.0), 60.0)
    feed(load, Poisson(0.25), 400.0, seed=3)
    assert load.rate == pytest.approx(0.25, rel=0.35)


def test_a_thin_load_has_no_spread_of_another():
    load = Load()
    feed(load, Gamma(60.0, 3.0), 60.0)
    assert isinstance(load.process, Gamma)
    feed(load, Poisson(0.25), 120.0, seed=3)
    assert isinstance(load.process, Poisson)


def test_a_few_more_than_hardly_any_are_chance():
    load = Load()
    jumps = [feed(load, Poisson(0.25), 3600.0, seed=seed, step=4.0) for seed in range(1, 4)]
    assert sum(map(len, jumps)) < 30, "in three hours, beside the first guesses"


def test_a_jump_leaves_the_spread_what_it_was():
    load = Load()
    feed(load, Poisson(400.0), 60.0)
    feed(load, Poisson(800.0), 4.0, seed=2)
    assert isinstance(load.process, Poisson), "the jump itself must not look like burstiness"


def test_before_its_spread_is_known_a_load_is_assumed_to_be_bursty():
    worst = []
    for seed in range(1, 41):
        load = Load()
        feed(load, Gamma(200.0, 3.0), 1.5, seed=seed)
        off = 0.0
        for second in range(3):
            feed(load, Gamma(200.0, 3.0), 1.0, seed=1000 * seed + second)
            off = max(off, abs(load.rate / 200.0 - 1))
        worst.append(off)
    # Without an assumed spread, one second's burst or lull changed the rate by itself: half of the runs were 16 % off.
    assert sorted(worst)[20] < 0.14


def test_rows_per_request_are_averaged():
    load = Load()
    for _ in range(20):
        load.observe(0.5, WindowCounts(5, 100, 2000), 400)
    assert load.rows == pytest.approx(4.0)
    # One request of 41 rows among a hundred of one: 1.4 on average, whichever came last.
    for second in range(200):
        load.observe(0.5, WindowCounts(5, 50, 500), 50 if second % 2 else 90)
    assert load.rows == pytest.approx(1.4, rel=0.03)


def test_without_arrivals_there_is_no_load():
    load = Load()
    assert load.process is None
    load.observe(0.5, WindowCounts(5, 0, 0), 0)
    assert load.process is None
    assert load.rate == 0.0
    feed(load, Poisson(100.0), 40.0)
    for _ in range(80):
        load.observe(0.5, WindowCounts(5, 0, 0), 0)
    assert load.process is None


def test_bursts_are_the_nature_of_a_load_and_no_change_of_it():
    load = Load()
    changes = feed(load, OnOff(rate_on=540.0, mean_on=0.5, mean_off=0.5, rate_off=130.0), 1200.0)
    assert load.rate == pytest.approx(335.0, rel=0.25)
    # Of 1,200 bursts and lulls.
    assert sum(when > 60.0 for when in changes) <= 60


@pytest.mark.parametrize("seed", range(1, 5))
def test_bursts_of_a_steady_load_are_rarely_taken_for_a_change(seed):
    changes = feed(load := Load(), Gamma(170.0, 4.0), 1800.0, seed=seed)
    assert load.rate == pytest.approx(170.0, rel=0.15)
    # Of every tenth second it was believed that the load had doubled or halved: 15 to 24 changes.
    assert sum(when > 60.0 for when in changes) <= 8


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("rate", "within"), [(340.0, 8.0), (85.0, 15.0)])
def test_a_change_that_bursts_hide_for_a_second_is_detected_within_a_few(rate, within, seed):
    load = Load()
    feed(load, Gamma(170.0, 4.0), 90.0, seed=seed)
    assert feed(load, Gamma(rate, 4.0), within, seed=seed + 10)
    assert load.rate == pytest.approx(rate, rel=0.4)


def test_bursts_that_last_are_distinguished_from_gamma_gaps():
    feed(load := Load(), OnOff(rate_on=900.0, mean_on=0.3, mean_off=0.6, rate_off=270.0), 60.0)
    assert isinstance(load.process, Modulated)
    assert load.process.lasting == pytest.approx(0.2, rel=0.5)
    feed(load := Load(), Gamma(500.0, 3.0), 60.0)
    assert isinstance(load.process, Gamma)


def test_counts_of_several_replicas_are_fitted_as_gamma_gaps_and_not_as_bursts_that_last():
    # They get their shares of the same bursts, so their sum spreads more than the counts of each.
    load, times = Load(), list(until(Gamma(500.0, 3.0), 60.0, Random(1)))
    for step in range(120):
        here = [time - step / 2 for time in times if step / 2 <= time < step / 2 + 0.5]
        counts = WindowCounts.of(here, 0.5)
        load.observe(1.0, counts + counts, 2 * counts.arrivals, 2)
    assert isinstance(load.process, Gamma)


def test_a_slow_load_is_measured_by_as_many_arrivals_as_a_fast_one():
    # By half a minute a rate of 38/s is off by 3 %, and a wait that keeps a utilization goes up and down with it.
    errors = []
    for seed in range(10):
        feed(load := Load(), Poisson(38.0), 120.0, seed=seed)
        errors.append((load.rate / 38.0 - 1) ** 2)
    assert (sum(errors) / len(errors)) ** 0.5 < 0.025


def test_a_load_that_comes_to_rest_is_believed_to():
    load = Load()
    feed(load, OnOff(rate_on=540.0, mean_on=0.5, mean_off=0.5, rate_off=130.0), 120.0)
    assert load.process.dispersion > 30
    feed(load, Poisson(335.0), LONG_MEMORY + 5, seed=2)
    assert isinstance(load.process, Poisson)
    # And its jumps count again.
    assert feed(load, Poisson(670.0), 3.0, seed=3)[0] <= 1.0


def test_burstiness_as_measured_is_of_all_that_is_remembered():
    errors = []
    for seed in range(8):
        load = Load()
        feed(load, Gamma(450.0, 2.0), 60.0, seed=seed)
        errors.append((abs(load.measured.cv - 2.0), abs(load.process.cv - 2.0)))
        assert load.measured.rate == load.rate
    assert max(measured for measured, _ in errors) < 0.16
    assert sum(measured for measured, _ in errors) < sum(believed for _, believed in errors)
    assert Load().measured is None
