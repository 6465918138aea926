"""Simulated sidecars do what a sidecar does by default: first calls, and batches of copies that nobody waits for."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from carpool.learning.arrivals import Poisson, until
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Tuning, TuningMode, Verification, VerificationMode
from carpool.simulation.outcome import ENDS, End
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning import assumptions
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.sidecar_batcher import SidecarBatcher
from carpool_cli.planning.twin import Sidecars, tuned
from carpool_sidecar.axis_verification.delays import DELAYED_SHARE, FIRST_DELAYED
from carpool_sidecar.axis_verification.record import FREE_ROWS, SHARE

POLICY = for_p99(0.1)
DEVICE = Device(linear(0.010, 0.001), cv=0.05)


def times(rate, seconds=30.0):
    return until(Poisson(rate), seconds, Random(1))


def recording(device=DEVICE):
    """A device, and the kinds of batches that it computes: rows, and length bucket."""
    kinds = set()

    def seconds(rows, bucket):
        kinds.add((rows, bucket))
        return device.times(rows, bucket)

    return replace(device, times=seconds), kinds


def played(policy=POLICY, device=DEVICE, *, rate=20, **how):
    """The summary, and the largest batch computed."""
    device, kinds = recording(device)
    outcome = tuned(times(rate), device, policy, seconds=30.0, **how).outcome
    return outcome.summary(), max(rows for rows, _ in kinds)


def test_a_server_with_workers_is_not_called_one_by_one_at_first():
    device = Device(linear(0.0, 0.040), executors=8)
    alone, _ = played(device=device, rate=100)
    begun, _ = played(device=device, rate=100, as_sidecars=True)
    assert begun.miss_fraction < 0.02
    assert alone.miss_fraction > 0.1


def test_copies_measure_sizes_that_the_load_does_not_fill_and_answer_nobody():
    alone, largest_alone = played()
    summary, largest = played(as_sidecars=True)
    assert largest_alone <= 8 < largest
    assert alone.rows == alone.arrivals == summary.arrivals
    assert summary.ends == {End.HIT: summary.arrivals}
    assert 0 < summary.rows - summary.arrivals <= FREE_ROWS + SHARE * summary.arrivals


@pytest.mark.parametrize(
    "policy",
    [
        replace(POLICY, tuning=Tuning(mode=TuningMode.HOLD)),
        replace(POLICY, tuning=Tuning(mode=TuningMode.RECOMMEND)),
        replace(POLICY, idempotent=False),
        replace(POLICY, verification=Verification(mode=VerificationMode.NEVER)),
    ],
    ids=["Hold", "Recommend", "not idempotent", "not verified"],
)
def test_no_copies_where_a_sidecar_sends_none(policy):
    summary, _ = played(policy, as_sidecars=True)
    assert summary.rows == summary.arrivals


@pytest.mark.parametrize(
    ("parameters", "first_calls"),
    [(None, True), (Parameters(), True), (Parameters(max_batch=4, max_in_flight=2), False)],
    ids=["nothing said", "the baseline", "chosen"],
)
@pytest.mark.parametrize("policy", [POLICY, assumptions.slo_policy(0.1, largest_batch=16)], ids=["wide", "narrow"])
def test_chosen_parameters_are_in_force_from_the_start(policy, parameters, first_calls):
    batcher = Sidecars(policy, Tuner(policy, parameters=parameters)).dispatcher()
    assert (batcher.model("").first_calls is not None) == first_calls


def test_a_written_baseline_is_in_force_from_the_start():
    written = replace(POLICY, baseline=Parameters(max_batch=8, max_in_flight=2))
    assert Sidecars(written).dispatcher().model("").first_calls is None


def test_copies_that_the_server_refuses_fail_no_caller():
    summary, largest = played(device=replace(DEVICE, largest=4), as_sidecars=True)
    assert summary.rows > summary.arrivals
    assert largest > 4
    assert summary.ends == {End.HIT: summary.arrivals}


def test_copies_have_the_length_of_the_request_that_they_copy():
    sidecars, (device, kinds) = Sidecars(POLICY), recording()
    arrivals = [(time, 1, 128) for time in times(20)]
    simulation = Simulation(arrivals, device, slo=0.1, dispatcher=sidecars.dispatcher, seconds=30.0)
    simulation.every(INTERVAL, sidecars.observe).run()
    assert max(rows for rows, _ in kinds) > 8
    assert {bucket for _, bucket in kinds} == {128}


# 40 rows take 50 ms, of the 67 that they may take; 100 rows take 11 ms on a device ten times as fast.
SENT = {
    "yes": (DEVICE, [40], {40}),
    "too long": (DEVICE, [60], set()),
    "the next is short enough": (DEVICE, [60, 40], {40}),
    "no room": (Device(linear(0.001, 0.0001)), [100], set()),
}


@pytest.mark.parametrize(("device", "wanted", "sent"), SENT.values(), ids=SENT)
def test_copies_are_sent_within_their_rows_and_two_thirds_of_the_slo(device, wanted, sent):
    batcher = SidecarBatcher(Parameters(), undecided=0)
    device, kinds = recording(device)
    simulation = Simulation(times(20, 5.0), device, slo=0.1, dispatcher=lambda: batcher, estimate=device.estimate())
    kinds.clear()  # the estimate's
    batcher.wanted = wanted
    simulation.run()
    assert {rows for rows, _ in kinds if rows > 8} == sent


def test_a_slow_model_is_not_filled_with_copies():
    # One row takes 270 ms, of an SLO of 900: copies one after the other would make every fifth request late.
    device, seconds = Device(linear(0.25, 0.02), cv=0.1), 60.0
    policy, arrivals = for_p99(0.9), until(Poisson(1.5), seconds, Random(7))
    how = {"slo": 0.9, "seconds": seconds, "seed": 7}
    sidecars = Sidecars(policy, Tuner(policy))
    simulation = Simulation(arrivals, device, dispatcher=sidecars.dispatcher, **how)
    summary = simulation.every(INTERVAL, sidecars.observe).run().summary()
    zero = Simulation(arrivals, device, parameters=Parameters(), **how).run().summary()
    assert summary.arrivals - summary.hits <= 2 + zero.arrivals - zero.hits
    assert summary.device_busy < zero.device_busy + 1.0 + 0.06 * seconds
    assert summary.p50 <= 1.1 * zero.p50


@pytest.mark.parametrize("seed", [1, 2])
def test_one_bad_request_in_a_hundred_costs_a_gateway_few_good_ones(seed):
    # One address has all requests. Where those after a bad one went one by one, 4 % were lost (decision 22).
    slo, seconds, rng, policy = 0.2, 60.0, Random(seed), for_p99(0.2)
    came = until(Poisson(100), seconds, Random(seed))
    arrivals = [Arrival(time, poisoned=time > 5 and rng.random() < 0.01, caller=0) for time in came]
    sidecars = Sidecars(policy, Tuner(policy))
    device = Device(linear(0.020, 0.001), cv=0.05)
    simulation = Simulation(arrivals, device, slo=slo, dispatcher=sidecars.dispatcher, seconds=seconds, seed=seed)
    outcome = simulation.every(INTERVAL, sidecars.observe).run()
    good = [ENDS[end] for arrival, end in zip(arrivals, outcome.ends, strict=True) if not arrival.poisoned]
    assert good.count(End.HIT) >= 0.98 * len(good)


@pytest.mark.parametrize("executors", [1, 4])
def test_copies_delay_few_requests(executors):
    rate, seconds = 400 * executors, 60.0
    device, parameters = Device(linear(0.0, 0.002), executors=executors), Parameters(8, max_in_flight=executors)
    batcher = SidecarBatcher(parameters, undecided=0)
    how = {"slo": 0.1, "parameters": parameters, "dispatcher": lambda: batcher, "estimate": device.estimate()}

    def want(_now, _stats):
        batcher.wanted = [30]

    summary = Simulation(times(rate, seconds), device, **how).every(INTERVAL, want).run().summary()
    copies = (summary.rows - summary.arrivals) / 30
    # 24 requests come in the 60 ms of each; other servers take three of four where there are four.
    allowed = (FIRST_DELAYED + DELAYED_SHARE * rate * seconds) / 24
    assert allowed - 2 <= copies <= allowed + 2
    assert copies < (FREE_ROWS + SHARE * rate * seconds) / 30 - 3, "the rows alone would be enough for more"


def test_few_copies_where_the_first_batch_of_a_size_is_slow():
    quick, _ = played(as_sidecars=True)
    slow, largest = played(device=replace(DEVICE, cold=10), as_sidecars=True)
    assert quick.rows - quick.arrivals > 60
    assert slow.rows - slow.arrivals < 40, "of sizes that the load fills, too"
    assert largest <= 8
