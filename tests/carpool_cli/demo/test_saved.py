from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from carpool.exchange.report import Stalls
from carpool.learning.arrivals import Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, table
from carpool_cli.demo.observed import Choice, Count
from carpool_cli.demo.saved import compare, compared
from carpool_cli.live import running
from carpool_cli.live.running import Running
from carpool_cli.planning.assumptions import for_p99

CURVE = replace(ServiceTime.measured({1: 0.0055, 16: 0.013}), largest_in_flight=2)
ZERO = Parameters(max_batch=16)


SECONDS = 90.0


def served(rate):
    """A model behind a sidecar after ``SECONDS`` of a load, and what its device had counted every half second."""
    policy, counts = for_p99(0.05), []
    times = list(until(Poisson(rate), SECONDS, Random(7)))
    simulation = Simulation(
        times, Device(times=table(CURVE.table(64))), slo=0.05, parameters=ZERO, estimate=CURVE.believed(16)
    )

    def look(now, stats):
        counts.append(Count(now, 0, 0, 0.0, stats[0].device_busy))

    simulation.every(0.5, look).run()
    found = Running(
        address="http://127.0.0.1:9090",
        model="m",
        policy=policy,
        limits=policy.limits(),
        largest_safe=None,
        parameters=ZERO,
        service=CURVE,
        arrivals=[(each, 1) for each in times],
        p50=None,
        p99=None,
        stalls=Stalls(0, 0.0),
        decision=None,
        notes=[],
        since_last=SECONDS - times[-1],
    )
    return found, counts


@pytest.mark.parametrize("rate", [60.0, 150.0, 600.0])
def test_the_forecast_of_what_is_in_force_is_what_the_device_counted(rate):
    found, counts = served(rate)
    within = [each for each in counts if 30.0 <= each.at <= SECONDS]
    assert compared(found, within).error == pytest.approx(0.0, abs=0.02)
    earlier = [each for each in counts if 20.0 <= each.at <= 70.0]
    assert compared(found, earlier, SECONDS - 70.0).error == pytest.approx(0.0, abs=0.025)


def test_what_the_sidecar_counted_has_the_way_to_the_device_in_it(monkeypatch):
    """The device computes for 95 % of what its batches take the sidecar; the forecast is made from the latter."""
    found, counts = served(150.0)
    monkeypatch.setattr(running, "read", lambda *_: found)
    choices = [Choice(each.at, ZERO, each.busy) for each in counts]
    computed = [each._replace(busy=each.busy / 1.05) for each in counts]
    both = compare("127.0.0.1:9090", "m", computed, choices, [30.0, 90.0])
    assert both.seen == pytest.approx(1.05 * both.counted)
    assert both.error_of_seen == pytest.approx(0.0, abs=0.02)
    assert both.error == pytest.approx(0.05, abs=0.02)
    assert f"The sidecar counted {both.seen:,.0f} (" in both.in_words()


def test_where_nobody_looked_at_the_sidecar_twice_only_the_device_s_count_is_said(monkeypatch):
    found, counts = served(150.0)
    monkeypatch.setattr(running, "read", lambda *_: found)
    both = compare("127.0.0.1:9090", "m", counts, [Choice(40.0, ZERO, 1.0)], [30.0, 90.0])
    assert both.seen == 0.0
    assert both.in_words().endswith(f"The device itself counted {both.counted:,.0f} ({both.error:+.1%})")
    assert "sidecar" not in both.in_words()


def test_nothing_is_compared_where_no_setting_lasted():
    counts = [Count(0.5 * step, 0, 0, 0.0, 0.2 * step) for step in range(100)]
    choices = [Choice(float(at), Parameters(max_batch=at)) for at in range(1, 50, 3)]
    assert compare("127.0.0.1:1", "m", counts, choices, [30.0, 40.0, 49.0]) is None
