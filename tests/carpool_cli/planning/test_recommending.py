from __future__ import annotations

import pytest
from msgspec.structs import replace

from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Poisson
from carpool.learning.latency_model import ServiceTime
from carpool.policy.spec import Objective
from carpool.simulation.simulator import Simulation
from carpool.tuning.objective import Aim
from carpool_cli.planning import assumptions
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.recommending import best_for, highest_load, recommend
from carpool_cli.profiling.device_profile import DeviceProfile

REFERENCE = DeviceProfile(name="r", source="synthetic", rows=(1, 256), seconds=(0.0055, 0.133))
SUPERLINEAR = DeviceProfile(name="s", source="synthetic", rows=(1, 8, 16), seconds=(0.0057, 0.0536, 0.1216))


def situation(profile: DeviceProfile, rate: float, slo: float = 0.05, largest: int | None = None) -> Situation:
    policy = assumptions.slo_policy(slo, largest_batch=largest)
    return Situation(
        process=Poisson(rate),
        service=assumptions.known(profile),
        target=slo,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
    )


def test_at_mid_load_it_waits_and_saves_device_time():
    found = recommend(situation(REFERENCE, 800))
    assert found.holds
    assert found.holds_ahead
    assert found.parameters.max_wait > 0
    assert found.p99 <= found.p99_ahead <= 0.05
    assert found.device_time < 0.9 * found.zero_wait_device_time < found.alone_device_time
    assert not found.alone_holds


def test_what_is_recommended_holds_in_the_simulator():
    found = recommend(situation(REFERENCE, 800))
    device = assumptions.device(REFERENCE)
    times = assumptions.arrivals(800.0, 1.0, None, 30.0, 3).times
    summary = Simulation(
        times, device, slo=0.05, parameters=found.parameters, estimate=device.estimate(64)
    ).run().summary()  # fmt: skip
    assert summary.miss_fraction <= 0.01
    assert summary.device_time == pytest.approx(found.device_time, rel=0.05)


def test_a_known_server_concurrency_is_not_assumed_to_be_higher():
    assert recommend(situation(REFERENCE, 1100)).parameters.max_in_flight == 1


def test_where_batching_loses_rows_go_alone():
    busy, idle = recommend(situation(SUPERLINEAR, 100)), recommend(situation(SUPERLINEAR, 40))
    assert busy.parameters.max_batch == 1
    assert "saves no device time" in busy.reasons[0]
    assert idle.parameters.pass_through
    assert "pass through" in idle.reasons[0]


def test_the_search_is_not_caught_among_large_batches_that_hold_nothing():
    policy = for_p99(0.05, Objective.EFFICIENCY)
    assert best_for(policy, Forecaster(situation(SUPERLINEAR, 100))).holds_now


def test_a_device_too_slow_for_a_single_request_says_so():
    found = recommend(situation(REFERENCE, 10, slo=0.004))
    assert not found.holds
    assert "a request takes 5.5ms there without any other" in found.bounded_by


def test_overload_says_so():
    found = recommend(situation(REFERENCE, 3000))
    assert not found.holds
    assert "most goodput" in found.reasons[1]
    assert found.bounded_by.startswith("bounded by the device")
    assert found.highest_load < 3000


def test_the_highest_load_is_what_the_design_says_of_the_reference_curve():
    # Full batches of 64 in two service times: 64 / 37 ms = 1,730/s at most, and not all of that inside 50 ms.
    assert 1400 <= recommend(situation(REFERENCE, 1)).highest_load <= 1700


def test_a_slo_shorter_than_the_device_can_hold_no_load():
    assert recommend(situation(REFERENCE, 1, slo=0.005)).highest_load == 0


@pytest.mark.parametrize(
    ("profile", "rate", "slo", "largest", "says"),
    [
        (REFERENCE, 200, 0.05, None, "longest wait allowed"),
        (REFERENCE, 600, 0.05, 8, "largest batch allowed"),
        (REFERENCE, 1100, 0.04, None, "bounded by the SLO"),
    ],
)
def test_what_bounds_it(profile, rate, slo, largest, says):
    assert says in recommend(situation(profile, rate, slo, largest)).bounded_by


@pytest.mark.parametrize(
    ("objective", "rate", "bound", "rule"),
    [
        (
            Objective.BALANCED,
            600,
            "the utilization target: with a shorter wait the device would be more than 60%",
            None,
        ),
        (Objective.BALANCED, 50, "the load: the device is at most 60% busy without any wait", None),
        (Objective.BALANCED, 2, "the load: the device is at most 60% busy without any wait", None),
        (Objective.LATENCY, 600, "the objective: waiting for larger batches would only add latency", "the lowest p99"),
    ],
)
def test_a_setting_chosen_for_its_latency_is_bounded_by_what_chose_it(objective, rate, bound, rule):
    found = recommend(situation(REFERENCE, rate), aim=Aim.of(for_p99(0.05, objective)))
    assert found.holds_ahead
    assert found.bounded_by.startswith(f"bounded by {bound}")
    assert found.reasons[0].endswith(f" busy: {rule}" if rule else "(target 60%): the least latency within the target")


def test_the_highest_load_is_not_shown_higher_than_the_search_was_exact():
    found = recommend(situation(REFERENCE, 100))
    shown = highest_load(replace(found, highest_load=2385.5))
    assert shown == "highest load at which any configuration meets the SLO: about 2,360 requests/s"
    assert highest_load(replace(found, highest_load=0.0)).endswith("about 0 requests/s")


def test_memory_bounds_it():
    found = recommend(situation(REFERENCE, 600, largest=8), largest_safe=8)
    assert found.bounded_by == "bounded by memory: 8 rows is all that fits"


def test_beyond_what_was_measured_it_warns():
    short = ServiceTime.measured({1: 0.0055, 8: 0.009})
    policy = for_p99(0.05)
    found = recommend(Situation(process=Poisson(800), service=short, target=0.05, budget=0.005, limits=policy.limits()))
    assert any("profile larger sizes" in doubt for doubt in found.doubts)
    assert any(
        reason.endswith("less than without batching (extrapolated: measured up to 8 rows)") for reason in found.reasons
    )
    # 16 rows in 13 ms are 1,230/s; 64 would serve all.
    alone = replace(short, largest_in_flight=2)
    found = recommend(
        Situation(process=Poisson(1400), service=alone, target=0.05, budget=0.005, limits=policy.limits())
    )
    assert not found.holds
    assert "no configuration of up to 16 rows, the largest reliable size, meets the SLO" in found.reasons[1]
    assert found.bounded_by.startswith("bounded by what was measured: sizes up to 16 rows are reliable")
    # What a replica serves is counted in full batches of 8, 889/s: larger ones are a guess.
    assert 700 < found.highest_load < 8 / 0.009
    assert found.unmeasured_beyond == 8
    assert highest_load(found).endswith("in batches of up to 8 rows; larger ones were not measured")
    assert any("of what such batches can serve" in doubt for doubt in recommend(situation(REFERENCE, 1650)).doubts)
