from __future__ import annotations

import pytest

from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, linear
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.simulating import Twin, distinct, show

EVEN = [0.01 * i for i in range(500)]
PAIRS = Parameters(max_batch=2, max_wait=Duration(0.02))


def twin(arrivals=EVEN) -> Twin:
    return Twin(Device(times=linear(0.004, 0.001)), for_p99(0.05), arrivals, seconds=5.0, seed=0)


def test_who_knows_the_service_time_holds_from_the_start():
    service = ServiceTime.measured({1: 0.005, 2: 0.006})
    known = twin().known("a", PAIRS, service, shed_slo=False)
    assert (known.p99, known.mean_batch) == (pytest.approx(0.016), 2.0)
    # A Batcher that has to learn the batch latency first holds no request until then.
    assert 1.5 < twin().fixed("a", PAIRS).mean_batch < 2.0


def test_requests_of_several_rows_keep_them():
    found = twin([(time, 2) for time in EVEN]).fixed("two", Parameters(max_batch=2))
    assert (found.mean_batch, found.p99) == (2.0, pytest.approx(0.006))


def test_who_will_be_late_is_shed_where_that_is_said():
    service = ServiceTime.measured({1: 0.005})
    crowd = twin([0.001 * i for i in range(400)])
    alone = Parameters(max_batch=1)
    assert crowd.known("a", alone, service, shed_slo=True).misses["shed"] > 0
    assert "shed" not in crowd.known("a", alone, service, shed_slo=False).misses


def test_each_configuration_is_listed_once_by_its_first_name():
    assert distinct([("a", PAIRS), ("b", Parameters()), ("c", PAIRS)]) == [("a", PAIRS), ("b", Parameters())]


def test_people_see_what_is_beyond_the_slo(capsys):
    found = twin().known("slow", PAIRS, ServiceTime.measured({1: 0.005}), shed_slo=False)
    show([found], 0.01, 0.01)
    assert "16ms !" in capsys.readouterr().out
    show([found], 0.05, 0.01)
    assert "!" not in capsys.readouterr().out


def test_results_with_too_many_misses_are_marked_though_answered_requests_met_the_p99(capsys):
    service = ServiceTime.measured({1: 0.005})
    found = twin([0.001 * i for i in range(400)]).known("shed", Parameters(max_batch=1), service, shed_slo=True)
    show([found], 0.06, 0.01)
    assert "% !" in capsys.readouterr().out
    show([found], 0.06, 0.99)
    assert "% !" not in capsys.readouterr().out
