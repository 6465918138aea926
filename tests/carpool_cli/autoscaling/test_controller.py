from __future__ import annotations

import math

import pytest

from carpool_cli.autoscaling.controller import (
    CPU,
    LOAD,
    Autoscaler,
    Behavior,
    Controller,
    Metric,
    Policy,
    Rules,
    Select,
    Unit,
)

STEP = 15.0


def pods(value, seconds=STEP):
    return Policy(Unit.PODS, value, seconds)


def percent(value, seconds=STEP):
    return Policy(Unit.PERCENT, value, seconds)


def scaler(behavior=None, **changes):
    return Autoscaler(**{"metrics": (Metric(LOAD, 1.0),), "most": 100, "behavior": behavior, **changes})


def course(behavior, start, wanted, seconds=STEP):
    """Return the replicas after each look, where the metric asks for ``wanted`` each time."""
    controller, current, found = Controller(scaler(behavior), 0.0, start), start, []
    for index, count in enumerate(wanted):
        current = controller.decide(index * seconds, count, current)
        found.append(current)
    return found


def up(*policies, window=0.0, select=Select.MAX):
    return Behavior(up=Rules(window, policies, select))


def down(*policies, window=0.0, select=Select.MAX):
    return Behavior(down=Rules(window, policies, select))


# -- without a behavior, and with the default one


def test_without_a_behavior_at_most_twice_as_many_but_four_in_any_case():
    assert course(None, 1, [50] * 5) == [4, 8, 16, 32, 50]


def test_with_a_behavior_its_default_policies_allow_four_more_or_twice_as_many():
    assert course(Behavior(), 1, [50] * 5) == [5, 10, 20, 40, 50]


def test_without_a_behavior_the_most_that_was_wanted_in_five_minutes_stays_wanted():
    # What could not be started at once is started later, though less was wanted then.
    assert course(None, 2, [20, 3, 3]) == [4, 8, 16]
    assert course(Behavior(), 2, [20, 3, 3]) == [6, 6, 6]


def test_what_it_finds_was_wanted_when_it_began():
    assert course(None, 10, [1] * 25) == [10] * 21 + [1] * 4
    assert course(Behavior(), 10, [1] * 25) == [10] * 20 + [1] * 5


# -- policies


def test_of_two_policies_the_larger_change_counts_by_default():
    # Percent: 100 -> 90 -> 81; below 40, four pods are more than a tenth.
    found = course(down(pods(4), percent(10)), 80, [10] * 14)
    assert found == [72, 64, 57, 51, 45, 40, 36, 32, 28, 24, 20, 16, 12, 10]


def test_with_min_the_smaller_change_counts():
    assert course(up(pods(2), percent(100), select=Select.MIN), 1, [50] * 4) == [2, 4, 6, 8]
    assert course(down(pods(1), percent(50), select=Select.MIN), 10, [1] * 4) == [9, 8, 7, 6]


def test_a_policy_counts_what_changed_within_its_period():
    # One a minute: the next one comes after four looks.
    assert course(up(pods(1, 60.0)), 1, [9] * 9) == [2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert course(down(percent(50, 60.0)), 16, [1] * 9) == [8, 8, 8, 8, 4, 4, 4, 4, 2]


def test_what_was_added_may_be_removed_again_within_the_period():
    # Two of the four that run were added within the minute. It began with two, and one of those may go.
    behavior = Behavior(up=Rules(0.0, (pods(2),)), down=Rules(0.0, (pods(1, 60.0),)))
    assert course(behavior, 2, [4, 1]) == [4, 1]


def test_a_disabled_direction_changes_nothing():
    assert course(up(pods(4), select=Select.DISABLED), 3, [9, 9]) == [3, 3]
    assert course(down(pods(4), select=Select.DISABLED), 3, [1] * 30) == [3] * 30


def test_a_percentage_is_rounded_towards_the_change():
    assert course(up(percent(10)), 1, [9] * 3) == [2, 3, 4]
    assert course(down(percent(10)), 9, [1] * 3) == [8, 7, 6]


def test_scale_out_waits_for_its_window_too():
    assert course(up(percent(900), window=60.0), 2, [9] * 5) == [2, 2, 2, 2, 9]


def test_bounds_are_kept():
    controller = Controller(scaler(Behavior(), least=2, most=6), 0.0, 4)
    assert controller.decide(0.0, 50, 4) == 6
    assert controller.decide(1000.0, 0, 6) == 2


# -- what the metric asks for


@pytest.mark.parametrize(("total", "wanted"), [(4.3, 4), (4.5, 5), (3.7, 4), (3.5, 4), (2.9, 3)])
def test_within_a_tenth_of_the_target_nothing_is_wanted(total, wanted):
    assert scaler().wanted([total], 4, 4) == wanted


def test_each_direction_has_its_own_tolerance():
    wide = Behavior(up=Rules(0.0, (pods(4),), tolerance=0.5), down=Rules(0.0, (pods(4),), tolerance=0.0))
    assert scaler(wide).wanted([5.9], 4, 4) == 4
    assert scaler(wide).wanted([6.1], 4, 4) == 7
    assert scaler(wide).wanted([2.9], 4, 4) == 3
    assert scaler(wide, metrics=(Metric(CPU, 60),)).wanted([60 * 5.9], 4, 4) == 4


def test_replicas_that_start_count_as_idle_for_cpu_only():
    cpu = scaler(metrics=(Metric(CPU, 50),))
    assert cpu.wanted([200.0], 2, 4) == 4
    assert cpu.wanted([400.0], 2, 4) == math.ceil(400 / 50)


def test_each_of_several_metrics_has_its_own_tolerance_and_the_most_replicas_count():
    both = scaler(metrics=(Metric(LOAD, 1.0), Metric(CPU, 50)))
    assert both.wanted([4.3, 210.0], 4, 4) == 4, "each within a tenth of its target"
    assert both.wanted([4.3, 100.0], 4, 4) == 4, "CPU asks for 2"
    assert both.wanted([2.0, 250.0], 4, 4) == 5
    assert both.wanted([6.0, 250.0], 4, 4) == 6
