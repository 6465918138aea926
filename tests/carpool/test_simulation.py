from __future__ import annotations

from random import Random

import pytest

from carpool.arrivals import Poisson, until
from carpool.policy import Parameters
from carpool.simulation import Device, Simulation, linear


def test_one_server_waits_as_pollaczek_and_khinchine_say():
    # M/D/1 at utilization 0.7, t = 5 ms: W = rho t / (2 (1 - rho)) = 5.83 ms.
    times = until(Poisson(140.0), 2000.0, Random(5))
    device = Device(linear(0.005, 0.0))
    outcome = Simulation(times, device, slo=1.0, parameters=Parameters(max_batch=1)).run()
    wait = sum(outcome.latencies) / len(times) - 0.005
    rate = len(times) / 2000.0
    utilization = rate * 0.005
    assert wait == pytest.approx(utilization * 0.005 / (2 * (1 - utilization)), rel=0.03)
