from __future__ import annotations

import pytest
import worlds
from proof.rows import CARPOOL


def row(contender, highest, device_time=1.0, world="line"):
    return worlds.Row(world, contender, highest, device_time)


@pytest.mark.parametrize("name", worlds.WORLDS)
def test_each_load_brings_its_share_of_the_capacity(name):
    world = worlds.WORLDS[name]
    assert all(world.times(rows) <= world.slo for rows in (1,))
    found = worlds.arrivals(world, seed=1)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    total = worlds.SECONDS * sum(worlds.LOADS) * world.capacity
    assert sum(rows for _, rows in found) == pytest.approx(total, rel=0.1)


def test_equal_seeds_bring_equal_requests():
    world = worlds.WORLDS["irregular heavy rows"]
    assert worlds.arrivals(world, seed=3)[:500] == worlds.arrivals(world, seed=3)[:500]
    assert worlds.arrivals(world, seed=3)[:500] != worlds.arrivals(world, seed=4)[:500]


def test_a_cliff_and_a_tight_target_bound_the_batches_that_count():
    assert worlds.WORLDS["cliff"].capacity == pytest.approx(24 / (0.012 + 0.0009 * 24))
    assert worlds.WORLDS["tight"].capacity == pytest.approx(4 * 4 / (0.03 + 0.003 * 4))


def test_carpool_is_judged_by_the_best_rule_of_each_world():
    lines, least = worlds.show([row(CARPOOL, 0.9, 2.0), row("greedy", 0.8), row("half-slo", 1.0, 3.0)])
    assert least == pytest.approx(0.9)
    assert lines[-1] == (
        "| line: fixed cost and cost per row | 90.0% | 100.0% (half-slo) | 80.0% | 2 ms | 1 ms (greedy) |"
    )


def test_a_world_in_which_no_rule_holds_anything_judges_nobody():
    assert worlds.show([row(CARPOOL, 0.0, 0.0), row("greedy", 0.0, 0.0)])[1] == 1.0
