from __future__ import annotations

import pytest
from msgspec.structs import replace

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, BatchingPolicy, Latency, Tuning, TuningMode
from carpool.tuning.requirements import Requirements
from carpool.tuning.tuner import Tuner
from carpool_cli.planning.assumptions import for_p99


def test_the_highest_percentile_leads_and_the_others_have_to_be_met_too():
    latency = Latency(p50=Duration(0.01), p95=Duration(0.03), p99=Duration(0.05))
    found = Requirements.of(BatchingPolicy(slo=SLO(latency=latency)), None)
    assert (found.quantile, found.target) == (0.99, 0.05)
    assert found.quantiles == ((0.5, 0.01), (0.95, 0.03))
    assert found.budget == pytest.approx(0.005), "half of what the SLO allows"


@pytest.mark.parametrize(
    ("mode", "held", "recommends"),
    [(TuningMode.APPLY, False, False), (TuningMode.RECOMMEND, False, True), (TuningMode.HOLD, True, False)],
)
def test_the_mode_says_whether_anything_is_changed(mode, held, recommends):
    found = Requirements.of(replace(for_p99(0.05), tuning=Tuning(mode=mode)), None)
    assert (found.held, found.recommends) == (held, recommends)


def test_parameters_that_are_held_are_those_in_force_whatever_the_bounds():
    fixed = Parameters(max_batch=16, max_wait=Duration(0.5))
    policy = for_p99(0.05)
    assert Requirements.of(policy, None).clamp(fixed).max_wait == 0.025
    held = replace(policy, tuning=Tuning(mode=TuningMode.HOLD))
    assert Requirements.of(held, None).clamp(fixed) == fixed
    assert Tuner(held, parameters=fixed).parameters == fixed
