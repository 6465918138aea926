from __future__ import annotations

from random import Random

import pytest

from carpool.learning.miss_test import MissTest


def run(test, fraction, requests, seed, per_step=100):
    """Feed requests, and let a fraction of them miss; return how many it took to alarm, None if it never did."""
    rng = Random(seed)
    for step in range(requests // per_step):
        misses = sum(rng.random() < fraction for _ in range(per_step))
        if test.observe(per_step - misses, misses):
            return (step + 1) * per_step
    return None


def test_an_slo_that_is_met_raises_no_alarm():
    alarms = [run(MissTest(), 0.002, 100_000, seed) for seed in range(20)]
    assert alarms == [None] * 20


def test_at_the_good_fraction_alarms_are_rare():
    early = [run(MissTest(), 0.005, 5_000, seed) for seed in range(40)]
    assert sum(alarm is not None for alarm in early) <= 4


@pytest.mark.parametrize(("fraction", "within"), [(0.02, 3000), (0.05, 800), (0.2, 300)])
def test_an_slo_that_is_missed_is_noticed(fraction, within):
    alarms = [run(MissTest(), fraction, 20_000, seed) for seed in range(20)]
    assert all(alarm is not None for alarm in alarms)
    assert sorted(alarms)[10] <= within


def test_a_burst_that_reaches_into_a_second_interval_counts_as_one():
    test = MissTest(bursts=True)
    burst = [test.observe(94, 6), test.observe(94, 6)]
    assert burst == [False, False]
    assert test.observe(94, 6), "one that lasts a third is none"
    test.restart()
    apart = [test.observe(94, 6), test.observe(20, 0), test.observe(94, 6)]
    assert apart == [False, False, True], "two by themselves are two"
    many = MissTest()
    assert [many.observe(94, 6), many.observe(94, 6)] == [False, True], "of many servers it is no single burst"


def bursts(test, fraction, together, seconds, seed, per_step=280):
    """Feed bursts of a second in which some requests miss together, two steps a second; return when it alarms.

    ``together``: the mean of how many, geometrically distributed.
    """
    rng = Random(seed)
    late = [0] * (2 * seconds + 4)
    begin = 0.0
    while (begin := begin + rng.expovariate(2 * per_step * fraction / together)) < seconds:
        size = 1
        while rng.random() < 1 - 1 / together:
            size += 1
        for _ in range(size):
            late[int(2 * (begin + rng.random()))] += 1
    alarms = []
    for step, misses in enumerate(late):
        if test.observe(max(per_step - misses, 0), misses):
            alarms.append(step / 2)
            test.restart()
    return alarms


def test_bursts_of_misses_within_an_slo_that_is_met_raise_hardly_an_alarm():
    alarms = [len(bursts(MissTest(bursts=True), 0.0035, 8, 3600, seed)) for seed in range(4)]
    assert sum(alarms) <= 12, "fifty an hour where every request is evidence of its own"


@pytest.mark.parametrize(("fraction", "within"), [(0.02, 20), (0.05, 6), (0.3, 1)])
def test_an_slo_that_is_missed_is_noticed_though_misses_came_in_bursts(fraction, within):
    delays = []
    for seed in range(20):
        test = MissTest(bursts=True)
        bursts(test, 0.0035, 8, 60, seed)
        delays.append(bursts(test, fraction, 8, 300, 100 + seed)[0])
    assert sorted(delays)[10] <= within


@pytest.mark.parametrize("per_step", [100, 3000])
def test_misses_that_come_one_by_one_are_as_much_evidence_each(per_step):
    plain, learned = MissTest(), MissTest(bursts=True)
    rng = Random(3)
    for test in (plain, learned):
        for _ in range(400):
            misses = sum(rng.random() < 0.004 for _ in range(per_step))
            test.observe(per_step - misses, misses)
    took = [sorted(run(test, 0.03, 20_000, seed, per_step) for seed in range(20))[10] for test in (plain, learned)]
    assert took[1] <= took[0] + per_step, "the next interval tells half, no more"


def test_a_restart_forgets_how_many_miss_together():
    test = MissTest(bursts=True)
    for _ in range(20):
        test.observe(270, 10)
        for _ in range(10):
            test.observe(280, 0)
    assert [test.observe(275, 5) for _ in range(3)] == [False, False, False], "ten at a time are usual"
    test.restart()
    assert [test.observe(275, 5) for _ in range(3)] == [False, False, True]


def test_one_burst_raises_no_alarm_after_the_slo_was_met_for_long():
    plain, test = MissTest(), MissTest(bursts=True)
    assert test.observe(350, 58), "of parameters that nobody knows it is obvious"
    test.restart()
    for one in (plain, test):
        one.observe(100_000, 5)
    assert plain.observe(350, 58)
    assert not test.observe(350, 58)
    assert not test.observe(400, 0)
    assert [test.observe(350, 58), test.observe(350, 58)] == [False, True], "one that lasts is none"


def test_good_times_cannot_be_saved_up():
    test = MissTest()
    test.observe(100_000, 0)
    assert test.observe(0, 60)


def test_one_cluster_of_misses_is_no_alarm():
    test = MissTest()
    assert not test.observe(400, 30)
    assert not test.observe(400, 0)


def test_what_two_slow_batches_explain_is_not_obvious():
    assert MissTest().observe(100, 90)
    assert not MissTest().observe(100, 90, together=64)
    assert MissTest().observe(100, 130, together=64)


def test_a_restart_forgets():
    test = MissTest()
    assert test.observe(0, 60)
    test.restart()
    assert not test.alarmed
    assert (test.requests, test.misses) == (0, 0)
