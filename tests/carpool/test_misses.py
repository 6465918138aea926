from __future__ import annotations

from random import Random

import pytest

from carpool.misses import MissTest


def run(test, fraction, requests, seed, per_step=100):
    """Feed requests of which a fraction misses; return how many it took to alarm, None if it never did."""
    rng = Random(seed)
    for step in range(requests // per_step):
        misses = sum(rng.random() < fraction for _ in range(per_step))
        if test.observe(per_step - misses, misses):
            return (step + 1) * per_step
    return None


def test_a_kept_promise_raises_no_alarm():
    alarms = [run(MissTest(), 0.002, 100_000, seed) for seed in range(20)]
    assert alarms == [None] * 20


def test_at_the_good_fraction_alarms_are_rare():
    early = [run(MissTest(), 0.005, 5_000, seed) for seed in range(40)]
    assert sum(alarm is not None for alarm in early) <= 4


@pytest.mark.parametrize(("fraction", "within"), [(0.02, 3000), (0.05, 800), (0.2, 300)])
def test_a_broken_promise_is_noticed(fraction, within):
    alarms = [run(MissTest(), fraction, 20_000, seed) for seed in range(20)]
    assert all(alarm is not None for alarm in alarms)
    assert sorted(alarms)[10] <= within


def test_a_busy_spell_that_reaches_into_a_second_interval_is_one():
    test = MissTest(spells=True)
    spell = [test.observe(94, 6), test.observe(94, 6)]
    assert spell == [False, False]
    assert test.observe(94, 6), "one that lasts a third is none"
    test.restart()
    apart = [test.observe(94, 6), test.observe(20, 0), test.observe(94, 6)]
    assert apart == [False, False, True], "two by themselves are two"
    many = MissTest()
    assert [many.observe(94, 6), many.observe(94, 6)] == [False, True], "of many servers it is no single spell"


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


def test_the_fractions_must_make_sense():
    with pytest.raises(ValueError, match="0 < good < bad < 1"):
        MissTest(good=0.02, bad=0.005)
