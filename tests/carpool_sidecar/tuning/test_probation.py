from __future__ import annotations

from random import Random

import pytest

from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting
from carpool.simulation.simulator import Device, Simulation, linear
from carpool.tuning.guards import TOO_LATE
from carpool_sidecar.tuning.probation import PROVEN_AFTER, Probation

GOOD, OTHER = Parameters(max_batch=32), Parameters(max_batch=48, max_wait=Duration(0.005))
BAD = Parameters(max_batch=1)
DEVICE = Device(times=linear(0.005, 0.0005))
"""181 requests/s one by one, 1,500 in batches of 32."""


def feed(probation, seconds, rate=200, missing=0.0, *, seed=1, failed=0):
    """Observe a load, and let a fraction miss; return the verdicts, each with the number of requests before it."""
    rng = Random(seed)
    verdicts = []
    each = round(rate / 2)
    for step in range(round(2 * seconds)):
        late = sum(rng.random() < missing for _ in range(each))
        verdict = probation.observe(0.5, each, each - late, late, failed)
        if verdict is not None:
            verdicts.append(((step + 1) * each, verdict))
    return verdicts


def proven(rate=200):
    """Parameters that were good, and others that just replaced them."""
    probation = Probation(0.99, GOOD, 1)
    assert feed(probation, 20, rate) == []
    assert probation.standing.good
    probation.change(OTHER, 2)
    assert not probation.standing.good
    return probation


# -- the rule


def test_what_misses_where_those_before_kept_is_taken_back():
    probation = proven()
    ((requests, verdict),) = feed(probation, 5, missing=0.3)
    assert requests <= 310
    assert (verdict.rejected, verdict.back_to) == (OTHER, GOOD)
    assert (verdict.generation, verdict.back_to_generation) == (2, 1)
    assert "requests were late where 0.01 may be" in verdict.reason
    assert (probation.standing.parameters, probation.standing.generation) == (GOOD, 1)


@pytest.mark.parametrize(("missing", "within"), [(0.02, 3000), (0.05, 800), (0.2, 310), (1.0, 310)])
def test_it_is_noticed_as_soon_as_by_the_test_of_misses(missing, within):
    found = []
    for seed in range(20):
        probation = proven()
        found += [requests for requests, _ in feed(probation, 60, missing=missing, seed=seed)]
    assert len(found) >= 12, "of 20: the others seemed good at first"
    assert sorted(found)[len(found) // 2] <= within


def test_good_ones_are_seldom_taken_back():
    taken = [feed(proven(), 60, missing=0.005, seed=seed) for seed in range(100)]
    assert sum(bool(each) for each in taken) <= 5
    assert not any(feed(proven(), 60, missing=0.002, seed=seed) for seed in range(100))


def test_what_has_proven_itself_is_not_taken_back_any_more():
    probation = proven()
    feed(probation, 20)
    assert probation.standing.good
    assert feed(probation, 20, missing=0.5) == []
    assert (probation.standing.parameters, probation.standing.good) == (OTHER, False)


def test_a_few_good_seconds_at_a_high_rate_prove_nothing():
    probation = proven(2000)
    assert feed(probation, PROVEN_AFTER - 1, 2000) == []
    assert not probation.standing.good
    assert len(feed(probation, 5, 2000, missing=0.5)) == 1


def test_where_nothing_was_good_there_is_nothing_to_go_back_to():
    probation = Probation(0.99, GOOD, 1)
    assert feed(probation, 10, missing=0.5) == []
    probation.change(OTHER, 2)
    assert feed(probation, 10, missing=0.5) == []
    assert probation.standing.parameters == OTHER


# -- what is no fault of the parameters


@pytest.mark.parametrize("factor", [1.5, 2, 10])
def test_a_load_that_rose_meanwhile_is_no_fault_of_the_parameters(factor):
    probation = proven()
    assert feed(probation, 60, round(200 * factor), missing=0.5) == []
    assert len(feed(probation, 10, 200, missing=0.5)) == 1, "back at the load that the others kept, it is"


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.2])
def test_at_a_comparable_load_it_is(factor):
    assert len(feed(proven(), 60, round(200 * factor), missing=0.5)) == 1


def test_a_higher_load_that_is_kept_proves_all_the_more():
    probation = proven()
    assert feed(probation, 20, 500) == []
    assert probation.standing.good
    probation.change(BAD, 3)
    assert len(feed(probation, 10, 500, missing=0.5)) == 1


def test_failures_of_the_upstream_are_no_misses_of_the_parameters():
    assert feed(proven(), 60, missing=0.5, failed=5) == []


def test_no_requests_are_no_evidence():
    probation = proven()
    for _ in range(100):
        assert probation.observe(0.5, 0, 0, 0, 0) is None
    assert not probation.standing.good


# -- changes that come meanwhile


def test_an_unfinished_probation_leaves_the_good_ones_what_they_are():
    probation = proven()
    feed(probation, 1)
    probation.change(BAD, 3)
    ((_, verdict),) = feed(probation, 5, missing=0.5)
    assert (verdict.rejected, verdict.back_to, verdict.generation, verdict.back_to_generation) == (BAD, GOOD, 3, 1)


def test_the_same_parameters_named_again_go_on_as_they_were():
    probation = proven()
    feed(probation, 9)
    probation.change(OTHER, 3)
    feed(probation, 1)
    assert (probation.standing.good, probation.standing.generation) == (True, 3)


def test_good_ones_named_again_are_good_still():
    probation = proven()
    probation.change(GOOD, 3)
    assert (probation.standing.good, probation.standing.generation) == (True, 3)


def test_another_slo_or_model_forgets_the_parameters_that_were_good():
    probation = proven()
    probation.forget()
    assert feed(probation, 10, missing=0.5) == []
    assert probation.standing.parameters == OTHER


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.999])
def test_any_percentile_has_its_own_measure(quantile):
    probation = Probation(quantile, GOOD, 1)
    kept, broken = (1 - quantile) / 4, min(8 * (1 - quantile), 0.95)
    feed(probation, 120, missing=kept)
    assert probation.standing.good
    probation.change(OTHER, 2)
    assert len(feed(probation, 60, missing=broken)) == 1


# -- in the simulator


def play(rate, changes, *, seconds=60.0, seed=1, rates=()):
    """Give a device a load and parameters at given times; return when, and how many requests after the first miss."""
    times = until(Poisson(rate), seconds, Random(seed))
    for start, stop, more in rates:
        times += [start + time for time in until(Poisson(more), stop - start, Random(seed + 1))]
    probation = Probation(0.99, GOOD, 1)
    before = {"rows": 0, "hits": 0, "late": 0}
    verdicts, ended, missing_since = [], 0, None
    due = list(changes)

    def look(now, stats):
        nonlocal before, ended, missing_since
        counted = stats[0].models[""]
        late = sum(counted.misses.get(reason, 0) for reason in TOO_LATE)
        after = {"rows": counted.rows, "hits": counted.hits, "late": late}
        delta = {name: after[name] - before[name] for name in after}
        before = after
        ended += delta["hits"] + delta["late"]
        if missing_since is None and delta["late"]:
            missing_since = ended - delta["late"]
        verdict = probation.observe(0.5, delta["rows"], delta["hits"], delta["late"], 0)
        if verdict is not None:
            verdicts.append((now, ended - (missing_since or 0), verdict))
            return [Setting(verdict.back_to, DEVICE.estimate())]
        if due and now >= due[0][0]:
            _, parameters, generation = due.pop(0)
            probation.change(parameters, generation)
            return [Setting(parameters, DEVICE.estimate())]
        return None

    simulation = Simulation(sorted(times), DEVICE, slo=0.05, parameters=GOOD, estimate=DEVICE.estimate())
    outcome = simulation.every(0.5, look).run()
    return outcome, verdicts, probation


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rate", "bad"), [(300, BAD), (250, BAD), (400, Parameters(max_batch=2))])
def test_a_bad_configuration_is_taken_back_within_310_requests_after_it_began_to_miss(rate, bad, seed):
    outcome, ((now, requests, verdict),), probation = play(rate, [(20.0, bad, 2)], seed=seed)
    assert requests <= 310
    assert verdict.back_to == GOOD == probation.standing.parameters
    assert outcome.summary(now + 2.0).miss_fraction < 0.01, "and all is well again"


@pytest.mark.parametrize("seed", range(5))
def test_a_good_configuration_is_never_taken_back(seed):
    _, verdicts, probation = play(600, [(20.0, OTHER, 2)], seed=seed)
    assert verdicts == []
    assert (probation.standing.parameters, probation.standing.good) == (OTHER, True)


def test_a_surge_after_a_change_is_not_held_against_it():
    # From 600 to 2,400 requests/s two seconds after the change, for 20 s: no parameters meet the SLO at that.
    _, verdicts, probation = play(600, [(20.0, OTHER, 2)], rates=[(22.0, 42.0, 1800)])
    assert verdicts == []
    assert probation.standing.parameters == OTHER
