"""Requests that become larger or smaller at the same rate, and overloads of slow servers: no one stays worse off."""

from __future__ import annotations

from random import Random

import pytest

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import tuned


def requests(*parts, seed=1):
    """Poisson arrivals: (requests/s, rows, until)."""
    rng, now, found = Random(seed), 0.0, []
    for rate, rows, until in parts:
        while (now := now + rng.expovariate(rate)) < until:
            found.append(Arrival(now, rows))
        now = until
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_of_more_rows_are_noticed_at_the_same_rate(seed):
    device = Device(times=linear(0.004, 0.0003), cv=0.05)
    load = requests((200, 1, 40), (200, 8, 80), seed=seed)
    outcome, decisions = tuned(load, device, for_p99(0.05), as_sidecars=True)
    # A fifth was refused for minutes: batches of 12 rows held one request, as when requests had one row.
    assert outcome.summary(50.0, 80.0).miss_fraction < 0.01
    assert decisions[-1].parameters.max_batch >= 16


def test_requests_of_fewer_rows_do_not_wait_as_the_larger_ones_did():
    device = Device(times=linear(0.006, 0.0004), cv=0.05)
    load = requests((350, 4, 60), (350, 1, 100))
    outcome, _ = tuned(load, device, for_p99(0.1), as_sidecars=True)
    zero_wait = Simulation(load, device, slo=0.1, parameters=Parameters(32, Duration(0.0))).run()
    # 40 ms before, for as long as the load stayed; the target of 60 % takes some milliseconds.
    assert outcome.summary(80.0, 100.0).p50 < 2 * zero_wait.summary(80.0, 100.0).p50


def test_an_overload_with_slow_batches_ends_with_the_sizes_that_carry_most():
    device = Device(times=linear(0.4, 0.03), cv=0.05)
    outcome, decisions = tuned(requests((100, 1, 90)), device, for_p99(20.0), as_sidecars=True)
    # Each trial of a larger batch was ended by the refusals of the overload: it stayed at batches of 6, and 10 %.
    assert decisions[-1].parameters.max_batch >= 24
    assert outcome.summary(45.0, 70.0).miss_fraction < 0.8
