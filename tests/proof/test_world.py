from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random

import pytest
from msgspec.structs import replace
from proof import scenario as suite
from proof import world
from proof.ourselves import CARPOOL
from proof.world import Stretch, arrival_times, play, timeline

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Objective
from carpool.simulation.outcome import End, Setting
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import tuned

POISSON = next(each for each in suite.load_all() if each.name == "synthetic-1-executor")


def like(**changes):
    return replace(POISSON, **changes)


class Still:
    """One setting for all that is to come."""

    interval = 0.0

    def __init__(self, parameters=None):
        self.parameters = parameters or Parameters()

    def start(self):
        return Setting(self.parameters)

    def observe(self, now, stats):
        raise AssertionError("asked not to be called")

    def dispatcher(self):
        return None


def still(known, rng):
    return Still()


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Return the folder of a recording of 300 requests in 100 s: 6 a second, then 2 a second, to a third each."""
    at = datetime(2023, 11, 16, 18, 0, tzinfo=UTC)
    times = [index / 6 for index in range(150)] + [25 + index / 2 for index in range(151)]
    rows = [f"{at + timedelta(seconds=time):%Y-%m-%d %H:%M:%S.%f},10,20" for time in times]
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows)
    )
    monkeypatch.setenv("CARPOOL_TRACES", str(tmp_path))
    suite.recording.cache_clear()
    yield tmp_path
    suite.recording.cache_clear()


@pytest.mark.parametrize(
    "arrivals",
    [
        suite.Poisson(),
        suite.Gamma(cv=2),
        suite.Gamma(cv=4),
        suite.OnOff(on=Duration(0.2), off=Duration(0.4), quiet=0.3),
        suite.OnOff(on=Duration(0.2), off=Duration(0.4)),
        suite.Diurnal(swing=0.3, period=Duration(30.0)),
        suite.Trace(),
    ],
)
def test_every_process_has_the_rate_asked_for(arrivals, trace):
    course = (Stretch(150.0, 100.0), Stretch(150.0, 200.0))
    times = arrival_times(like(arrivals=arrivals), course, 1)
    assert times == sorted(times)
    assert times[-1] < 300
    first = sum(time < 150 for time in times)
    assert first == pytest.approx(15_000, rel=0.1)
    assert len(times) - first == pytest.approx(30_000, rel=0.1)


def test_courses_that_begin_alike_have_the_same_arrivals_until_they_part():
    one = arrival_times(POISSON, (Stretch(10.0, 100.0), Stretch(10.0, 300.0)), 1)
    other = arrival_times(POISSON, (Stretch(10.0, 100.0), Stretch(20.0, 50.0)), 1)
    assert [time for time in one if time < 10] == [time for time in other if time < 10]
    assert arrival_times(POISSON, (Stretch(10.0, 100.0),), 2) != one[: len(one)]


def test_a_higher_load_is_the_same_load_faster():
    slow = arrival_times(POISSON, (Stretch(10.0, 100.0),), 1)
    fast = arrival_times(POISSON, (Stretch(5.0, 200.0),), 1)
    assert fast == pytest.approx([time / 2 for time in slow])


def test_bursts_and_lulls_are_as_long_as_given():
    bursts = like(arrivals=suite.OnOff(on=Duration(0.2), off=Duration(0.4)))
    times = arrival_times(bursts, (Stretch(200.0, 500.0),), 1)
    # 1,500 a second in a burst, so 50 ms without an arrival are a lull: 200 / 0.6 of them, but for the shortest.
    lulls = [after - before for before, after in pairwise(times) if after - before > 0.05]
    assert len(lulls) == pytest.approx(200 / 0.6 * 0.88, rel=0.1)


def test_a_day_is_busiest_in_its_second_quarter():
    day = like(arrivals=suite.Diurnal(swing=0.5, period=Duration(40.0)))
    times = arrival_times(day, (Stretch(400.0, 100.0),), 1)
    up, down = (sum((time % 40 < 20) is early for time in times) for early in (True, False))
    assert up / down == pytest.approx((1 + 1 / 3.1416) / (1 - 1 / 3.1416), rel=0.05)
    assert day.cycle == 40


def test_the_trace_is_rescaled_by_the_factor_stated(trace):
    recorded = suite.recording()
    assert recorded.rate == pytest.approx(3.0)
    # 300 gaps in 100 s, wanted 100 a second: the clock runs 33 times as fast.
    assert suite.stretch_factor(100.0) == pytest.approx(0.03)
    times = arrival_times(like(arrivals=suite.Trace()), (Stretch(30.0, 100.0),), 1)
    assert min(after - before for before, after in pairwise(times)) == pytest.approx(0.03 / 6, rel=1e-4)
    assert len(times) == pytest.approx(3000, abs=301)


def test_another_seed_begins_the_trace_elsewhere(trace):
    scenario = like(arrivals=suite.Trace())
    one, other = (arrival_times(scenario, (Stretch(3.0, 100.0),), seed) for seed in (1, 2))
    assert one != other


def test_a_missing_trace_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CARPOOL_TRACES", str(tmp_path))
    suite.recording.cache_clear()
    assert "CARPOOL_TRACES" in like(arrivals=suite.Trace()).missing()
    assert POISSON.missing() is None


def test_every_contender_meets_the_same_arrivals():
    course = (Stretch(20.0, 200.0), Stretch(5.0, 400.0))
    one = play(POISSON, still, course, 7).outcome
    other = play(POISSON, CARPOOL.maker, course, 7).outcome
    assert one.times == other.times
    assert len(one.times) == len(one.latencies)
    assert play(POISSON, still, course, 7).outcome.latencies == one.latencies


def test_carpool_is_the_sidecar_as_simulate_tune_plays_it():
    course = (Stretch(40.0, 500.0),)
    mine = play(POISSON, CARPOOL.maker, course, 3)
    twin = tuned(
        arrival_times(POISSON, course, 3),
        world.devices(POISSON, course)[0],
        for_p99(0.05, Objective.EFFICIENCY),
        seconds=40.0,
        seed=3,
        as_sidecars=True,
    )
    assert mine.contender.decisions == twin.decisions
    assert mine.outcome.latencies == twin.outcome.latencies


def test_a_timeline_is_the_phases_at_the_capacity_given():
    scenario = like(phases=(suite.Phase(seconds=120, load=0.5), suite.Phase(seconds=60, load=0.5, device=2.0)))
    course = timeline(scenario, 400.0)
    assert course == (Stretch(120.0, 200.0), Stretch(60.0, 200.0, 2.0))
    (device,) = world.devices(scenario, course)
    assert device.drift == ((0.0, 1.0), (120.0, 2.0))


def test_replicas_share_the_load_and_the_last_may_be_slow():
    scenario = like(replicas=3, slow_pod=2.0)
    outcome = play(scenario, still, (Stretch(20.0, 600.0),), 1).outcome
    served = [stats.models[""].served for stats in outcome.final]
    assert sum(served) == len(outcome.times)
    assert served[2] < served[0]
    assert world.devices(scenario, ())[2].times(4, 0) == pytest.approx(2 * 0.007)


def test_only_requests_of_the_same_bucket_are_batched_together():
    lengths = suite.Lengths(median=90, sigma=0.8, buckets=(64, 128, 256), reference=128)
    outcome = play(like(lengths=lengths), still, (Stretch(10.0, 300.0),), 1).outcome
    cells = outcome.final[0].models[""].cells
    assert {cell[0] for cell in cells} == {64, 128, 256}
    (device,) = world.devices(like(lengths=lengths), ())
    assert device.times(3, 256) == pytest.approx(0.005 + 6 * 0.0005)


def test_cold_batches_stalls_and_memory_are_the_devices():
    scenario = like(cold=5.0, stalls=suite.Stalls(every=Duration(2.0), lasting=Duration(0.1)), largest=4, cv=0.3)
    (device,) = world.devices(scenario, (Stretch(5.0, 10.0),))
    assert (device.cold, device.largest, device.cv) == (5.0, 4, 0.3)
    assert device.stalls == ((2.0, 0.1), (4.0, 0.1))
    outcome = play(scenario, still, (Stretch(5.0, 500.0),), 1).outcome
    assert outcome.summary().hits
    assert max(outcome.batch_rows) > 4
    assert End.FAILED not in outcome.summary().ends


def test_rivals_know_the_true_values_of_the_device():
    known = world.knowledge(like(executors=4, cv=0.1))
    assert (known.slo, known.executors, known.replicas) == (0.05, 4, 1)
    assert known.service.time(10) == pytest.approx(0.01)
    assert known.service.noise == 0.1
    assert known.service.executors_for(8) == 4
    believed = world.estimate(known)
    assert believed.times[10] == pytest.approx(0.01)
    assert believed.upper[10] == pytest.approx(0.012)
    assert world.estimate(known, 2.0).times[10] == pytest.approx(0.02)


def test_and_of_each_length_bucket_by_itself():
    scenario = like(lengths=suite.Lengths(reference=64, median=64, sigma=1.0, buckets=(64, 256)))
    believed = world.estimate(world.knowledge(scenario))
    short, long = (believed.of(bucket).times for bucket in (64, 256))
    assert short[8] < believed.times[8] < long[8]
    assert long[8] == pytest.approx(short[32])


def test_a_contender_has_its_own_random_numbers():
    drawn = []

    def maker(known, rng):
        drawn.append(rng.random())
        return Still()

    for seed in (1, 1, 2):
        play(POISSON, maker, (Stretch(1.0, 100.0),), seed)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == Random(f"{POISSON.name} 1 contender").random()
