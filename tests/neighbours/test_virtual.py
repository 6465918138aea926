"""Healthy callers in virtual time: the same figures on every machine."""

from __future__ import annotations

from random import Random

import pytest
from neighbours import verdict, virtual
from neighbours.catalogue import NEIGHBOURS

from carpool.simulation.simulator import Arrival


@pytest.mark.parametrize("name", virtual.ARRIVALS)
def test_healthy_callers_pay_nothing_in_virtual_time(name):
    played = virtual.play(name)
    assert played.failed == 0
    assert played.ratio <= verdict.bounds()["virtual p99"].value


def test_equal_seeds_give_equal_figures_and_others_do_not():
    assert virtual.play("cancels", 3) == virtual.play("cancels", 3)
    assert virtual.play("cancels", 3) != virtual.play("cancels", 4)


def test_every_simulated_load_is_a_neighbour_and_the_others_are_not_played():
    assert set(virtual.ARRIVALS) <= {neighbour.name for neighbour in NEIGHBOURS}
    assert virtual.play("streams") is None


def test_requests_merge_without_a_neighbour():
    # What 200 requests a second gather in 100 ms, in two queues: ten each.
    requests = virtual.alike(virtual.at(200.0, Random(1)))
    assert 8 < virtual.simulate(requests).summary().mean_batch < 14


def test_a_request_that_is_never_answered_is_counted_as_failed():
    hopeless = [Arrival(1.0, deadline=0.001), Arrival(2.0)]
    p99, failed = virtual.beside(hopeless, [Arrival(0.9999, rows=32, length=virtual.OTHER)])
    assert failed == 1
    assert p99 > 0
