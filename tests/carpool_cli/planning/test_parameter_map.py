from __future__ import annotations

import io

import pytest
from rich.console import Console

from carpool.forecasting.forecaster import Situation
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters
from carpool.tuning.candidates import SIZES
from carpool_cli.planning import parameter_map
from carpool_cli.planning.replaying import load

EVERY_10_MS = load([(0.01 * i, 1) for i in range(1001)])
LIMITS = Limits(min_batch=1, max_batch=64, min_wait=0.0, max_wait=0.025, min_in_flight=1, max_in_flight=8)


def drawn(target=0.05, sizes=(1, 2, 4), waits=(0.0, 0.025), flights=1, factor=1.0):
    played = load([(0.01 * i, 1) for i in range(1001)], factor=factor)
    situation = Situation(
        process=played.process,
        service=ServiceTime.measured({1: 0.005, 2: 0.006}),
        target=target,
        budget=0.005,
        limits=LIMITS,
    )
    return parameter_map.plane(played.forecaster(situation), flights, sizes, waits, "p99")


def test_a_map_of_worked_numbers():
    found = drawn()
    # One every 10 ms: alone each takes 5 ms; in pairs the first waits for the second, and 6 ms are shared.
    (alone, also_alone), (greedy, pair), (_, four) = found.points
    for point in (alone, also_alone, greedy):
        assert (point.latency, point.device_time) == (pytest.approx(0.005), pytest.approx(0.005))
    assert (pair.latency, pair.device_time) == (pytest.approx(0.016), pytest.approx(0.003, rel=0.01))
    # The fourth of a batch would come after 30 ms: it leaves after 25 with three, and takes 7.
    assert four.latency == pytest.approx(0.032)
    assert all(point.holds and point.holds_ahead and not point.miss_share for line in found.points for point in line)
    assert (pair.max_batch, pair.max_wait) == (2, 0.025)


def test_what_misses_the_slo_is_infeasible():
    found = drawn(target=0.0155)
    (alone, _), (_, pair), _ = found.points
    assert alone.holds
    # Every second request has waited 10 ms for the next.
    assert (pair.holds, pair.latency, pair.miss_share) == (False, pytest.approx(0.016), pytest.approx(0.5, abs=0.001))
    tight = drawn(target=0.004)
    assert not any(point.holds for line in tight.points for point in line)
    assert tight.points[0][0].miss_share == 1


def test_what_holds_now_alone_says_so():
    # 180 a second are 90 % of what single requests could be; 1.25 times that is too much.
    (alone, _), *_ = drawn(factor=1.8).points
    assert (alone.holds, alone.holds_ahead) == (True, False)


def test_sizes_not_measured_are_extrapolated():
    found = drawn()
    assert found.measured == (1, 2)
    assert [found.extrapolated(size) for size in found.sizes] == [False, False, True]


def test_every_point_is_counted():
    seen = []
    situation = Situation(
        process=EVERY_10_MS.process, service=ServiceTime.measured({1: 0.005}), target=0.05, budget=0.005, limits=LIMITS
    )
    parameter_map.plane(EVERY_10_MS.forecaster(situation), 1, (1, 2), (0.0, 0.01, 0.02), "p99", lambda: seen.append(1))
    assert len(seen) == 6


def test_a_configuration_has_a_place_only_on_the_map_of_its_slots():
    found = drawn()
    assert found.place(Parameters(max_batch=4, max_wait=Duration(0.025))) == (2, 1)
    assert found.place(Parameters(max_batch=4, max_wait=Duration(0.025), max_in_flight=2)) is None
    assert found.place(Parameters(max_batch=3)) is None
    assert found.place(Parameters(max_batch=4, pass_through=True)) == (0, 0)


def test_the_grid_covers_the_limits_and_has_what_is_marked():
    given = Parameters(max_batch=10, max_wait=Duration(0.0033))
    sizes, waits = parameter_map.grid(LIMITS, [Parameters(max_batch=16), given])
    assert sizes == [1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64]
    assert (waits[0], waits[-1], 0.0033 in waits) == (0.0, 0.025, True)
    assert parameter_map.grid(LIMITS, [Parameters(max_batch=100, max_wait=Duration(0.04))])[0][-1] == 100


def test_a_wide_grid_is_thinned_but_for_what_is_marked():
    wide = Limits(min_batch=1, max_batch=1024, min_wait=0.0, max_wait=0.0, min_in_flight=1, max_in_flight=1)
    sizes, waits = parameter_map.grid(wide, [Parameters(max_batch=3), Parameters(max_batch=5)])
    assert len(sizes) == parameter_map.MOST_SIZES < len(SIZES)
    assert {1, 3, 5, 1024} <= set(sizes)
    assert waits == [0.0]
    # What passes requests on has no size and no wait of its own.
    assert 7 not in parameter_map.grid(wide, [Parameters(max_batch=7, pass_through=True)])[0]


def test_a_terminal_shows_what_is_what():
    marked = {
        "now": Parameters(max_batch=1),
        "as given": Parameters(max_batch=4),
        "recommended": Parameters(max_batch=2, max_wait=Duration(0.025)),
    }
    sink = io.StringIO()
    Console(file=sink, width=80).print(*parameter_map.drawn(drawn(target=0.018), marked), sep="\n")
    lines = [" ".join(line.split()) for line in sink.getvalue().splitlines()]
    assert lines[:2] == ["p99, ms; 1 in flight", "rows 0ms 25ms"]
    assert lines[2] == "1 (5) 5"
    assert "[16]" in lines[3]
    assert lines[4].startswith("4? <5>")
    assert lines[5] == "device time per request, ms; 1 in flight"
    overload = io.StringIO()
    Console(file=overload, width=80).print(*parameter_map.drawn(drawn(target=0.004), {}), sep="\n")
    assert "5 !" in overload.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0000421, "0.0421"), (0.02312, "23.1"), (0.9994, "999"), (9.62, "9.6s"), (962.0, "962s")]
)
def test_figures_fit_a_cell(seconds, text):
    assert parameter_map.milliseconds(seconds) == text
