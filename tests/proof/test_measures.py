from __future__ import annotations

import pytest
from proof.measures import Tally, add, converged, flips, highest, overload, saving, seconds_of, settings, tally
from tiny import step

from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Outcome, Setting
from carpool.simulation.simulator import Device, Simulation, linear

A, B, C = (Parameters(max_batch=size) for size in (1, 2, 3))


def test_a_tally_keeps_what_figures_are_made_of():
    # One a second, 0.4 s each, alone; due after 0.3 s: all answered, none in time.
    outcome = Simulation([0.5, 1.5, 2.5], Device(linear(0.4, 0.0)), slo=0.3, seconds=4.0).run()
    counted = tally(outcome.summary(0.0, 4.0))
    assert counted == Tally(seconds=4.0, stayed=3, hits=0, answers=3, busy=pytest.approx(1.2))
    assert (counted.misses, counted.goodput, counted.device_time) == (1.0, 0.0, pytest.approx(0.4))


def test_a_tally_of_nothing():
    counted = Tally(1.0, 0, 0, 0, 0.0)
    assert (counted.misses, counted.goodput, counted.device_time) == (0.0, 0.0, float("inf"))


def test_tallies_add_up():
    assert add([Tally(1.0, 4, 3, 4, 0.5), Tally(2.0, 6, 6, 6, 0.25)]) == Tally(3.0, 10, 9, 10, 0.75)


def test_the_seconds_of_an_outcome_add_up_to_it():
    outcome = Simulation([0.1 * i for i in range(95)], Device(linear(0.01, 0.001)), slo=0.05, seconds=10.0).run()
    seconds = seconds_of(outcome)
    assert len(seconds) == 10
    whole = tally(outcome.summary())
    assert add(seconds).hits == whole.hits
    assert add(seconds).busy == pytest.approx(whole.busy)


# -- the two shares


@pytest.mark.parametrize(
    ("misses", "load"),
    [
        ((0.0, 0.01, 0.011, 0.3), 0.9),  # 1 % of misses is held
        ((0.0, 0.0, 0.02, 0.3), 0.95),  # half way from 0 to 2 %
        ((0.0, 0.02, 0.0, 0.3), 1.0),  # chance: 1 % on the average of both
        ((0.0, 0.05, 0.0, 0.3), 0.66),  # not by chance: 2.5 % on the average of both, and 1 % is 2/5 of the way
        ((0.0, 0.0, 0.0, 0.0), 1.1),
        ((0.02, 0.03, 0.03, 0.3), 0.0),
    ],
)
def test_the_highest_load_is_where_misses_rise_beyond_one_percent(misses, load):
    steps = [(load, step(missing, 1)) for load, missing in zip((0.5, 0.9, 1.0, 1.1), misses, strict=True)]
    assert highest(steps) == pytest.approx(load)


def test_a_saving_is_measured_from_zero_wait_to_the_oracle():
    # Of 10 ms the oracle saves 8, the contender 6.
    gain = saving(step(0.0, 4), best=step(0.0, 2), lazy=step(0.0, 10))
    assert gain is not None
    assert (gain.available, gain.share) == (pytest.approx(0.8), pytest.approx(0.75))


def test_who_misses_too_many_has_saved_nothing():
    gain = saving(step(0.02, 1), best=step(0.0, 2), lazy=step(0.0, 10))
    assert gain is not None
    assert gain.share == 0.0


def test_wasting_more_than_zero_wait_is_less_than_nothing():
    gain = saving(step(0.0, 12), best=step(0.0, 2), lazy=step(0.0, 10))
    assert gain is not None
    assert gain.share == pytest.approx(-0.25)


@pytest.mark.parametrize("best", [step(0.0, 9.6), step(0.02, 2)])
def test_nothing_is_compared_where_the_oracle_saves_little_or_misses(best):
    assert saving(step(0.0, 9), best=best, lazy=step(0.0, 10)) is None


# -- convergence


def every_second(*parts):
    """(seconds, share missed, ms a request) at 100 requests/s."""
    return [
        Tally(1.0, 100, 100 - round(100 * missing), 100, 0.1 * milliseconds)
        for seconds, missing, milliseconds in parts
        for _ in range(seconds)
    ]


IDEAL, LAZY = every_second((60, 0.0, 2)), every_second((60, 0.0, 10))


def test_good_from_when_five_seconds_are_good():
    assert converged(every_second((12, 0.2, 2), (48, 0.0, 2)), IDEAL, LAZY, 0, 60) == 12


def test_savings_have_to_be_made_as_well():
    # 90 % of the oracle's saving of 8 ms are 7.2: up to 2.8 ms is good.
    assert converged(every_second((20, 0.0, 3.5), (40, 0.0, 2.7)), IDEAL, LAZY, 0, 60) == 20


def test_savings_do_not_matter_where_there_are_none_to_be_made():
    assert converged(every_second((60, 0.0, 9.8)), every_second((60, 0.0, 9.6)), LAZY, 0, 60) == 0


def test_nobody_has_to_be_better_than_the_oracle():
    assert converged(every_second((60, 0.4, 2)), every_second((60, 0.39, 2)), LAZY, 0, 60) == 0
    assert converged(every_second((60, 0.42, 2)), every_second((60, 0.39, 2)), LAZY, 0, 60) is None


def test_each_phase_is_judged_by_itself():
    mine = every_second((20, 0.0, 2), (3, 0.5, 2), (37, 0.0, 2))
    assert converged(mine, IDEAL, LAZY, 20, 60) == 3
    assert converged(mine, IDEAL, LAZY, 0, 20) == 0


def test_a_backlog_has_to_be_gone():
    mine = every_second((10, 0.02, 2), (50, 0.0, 2))
    # Five seconds with 2 % in the first of them are good on the whole.
    assert converged(mine, IDEAL, LAZY, 0, 60) == 8


def test_a_few_good_seconds_are_not_enough():
    mine = every_second((5, 0.0, 2), (20, 0.3, 2), (35, 0.0, 2))
    assert converged(mine, IDEAL, LAZY, 0, 60) == 25
    assert converged(every_second((5, 0.0, 2), (55, 0.3, 2)), IDEAL, LAZY, 0, 60) is None


# -- flips


def changing(*steps):
    return [(float(at), replica, Setting(parameters)) for at, replica, parameters in steps]


def test_a_path_is_what_one_replica_went_through():
    changes = changing((0, 0, A), (10, 0, B), (10, 1, B), (11, 0, B), (20, 0, A), (30, 0, C))
    assert settings(changes, 0, 100) == [A, B, A, C]
    assert settings(changes, 15, 30) == [B, A]
    assert settings(changes, 20, 100) == [A, C]


def test_flips_are_returns_to_what_was_just_left():
    assert flips([A, B, A, C, A]) == 2
    assert flips([A, B, C, A]) == 0
    assert flips([A]) == 0


def test_the_path_of_a_run_begins_with_what_it_began_with():
    outcome = Outcome([], 10.0, A)
    assert settings(outcome.changes, 0.0, 10.0) == [A]


# -- overload


def test_overload_is_compared_with_the_own_peak():
    assert overload([step(0.0, 1, rate=50), step(0.01, 1)], step(0.6, 1, rate=200)) == pytest.approx(80 / 99)


def test_who_has_no_peak_has_none_to_lose():
    assert overload([step(1.0, 1)], step(1.0, 1)) == 1.0
