"""Every rival in a short run of everything that may happen: each request ends, once."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from proof.rivals import RIVALS
from rivalry import known, service

from carpool.learning import arrivals
from carpool.learning.latency_model import ServiceTime
from carpool.simulation.outcome import ENDS, End
from carpool.simulation.simulator import Arrival, Device, Simulation


def simulate(name, requests, *, knowledge=None, device=None, replicas=1, seconds=0.0, **options):
    """Let a rival play, and count how often each request was reported as ended."""
    knowledge = knowledge or known()
    contender = RIVALS[name].maker(knowledge, Random("rival"))
    start = contender.start()
    own = [rule for _ in range(replicas) if (rule := contender.dispatcher()) is not None]
    simulation = Simulation(
        requests,
        device or Device(lambda rows, bucket: service(rows), executors=knowledge.executors, cv=0.05),
        slo=knowledge.slo,
        parameters=start.parameters,
        estimate=start.estimate,
        shed_slo=start.shed_slo,
        dispatcher=iter(own).__next__ if own else None,
        replicas=replicas,
        seconds=seconds,
        **options,
    )
    if contender.interval:
        simulation.every(contender.interval, contender.observe)
    return simulation.run()


def ends(outcome):
    """How requests ended; counters and outcome must agree, so that none has ended twice."""
    counts = Counter(ENDS[code] for code in outcome.ends)
    models = [stats.models[""] for stats in outcome.final if "" in stats.models]
    assert sum(model.hits + sum(model.misses.values()) for model in models) == len(outcome.ends)
    assert End.PENDING not in counts
    return counts


def poisson(rate, seconds, seed=0):
    return arrivals.until(arrivals.Poisson(rate), seconds, Random(seed))


def test_each_has_a_source():
    assert len(RIVALS) == 14
    assert all(rival.name == name and rival.cite for name, rival in RIVALS.items())


@pytest.mark.parametrize("name", RIVALS)
def test_at_half_load_hardly_anybody_misses(name):
    # 1,600/s in batches of 40.
    outcome = simulate(name, poisson(400.0, 8.0))
    counts = ends(outcome)
    assert counts[End.HIT] >= 0.98 * len(outcome.ends)
    assert max(outcome.batch_rows) <= 64


@pytest.mark.parametrize("name", RIVALS)
def test_far_beyond_capacity_every_request_still_ends_once(name):
    ends(simulate(name, poisson(3500.0, 1.5)))


@pytest.mark.parametrize("name", RIVALS)
def test_largest_batch_of_one(name):
    outcome = simulate(name, poisson(60.0, 4.0), knowledge=known(largest=1, in_flight=1))
    ends(outcome)
    assert set(outcome.batch_rows) == {1}


@pytest.mark.parametrize("name", RIVALS)
def test_nobody_comes(name):
    outcome = simulate(name, [], seconds=30.0)
    assert not ends(outcome)


@pytest.mark.parametrize("name", RIVALS)
def test_a_device_that_can_not_meet_the_slo(name):
    slow = known(slo=0.004)
    ends(simulate(name, poisson(50.0, 2.0), knowledge=slow))


@pytest.mark.parametrize("name", RIVALS)
def test_replicas_concurrency_lengths_faults_stalls_and_callers_that_leave(name):
    rng = Random(7)
    requests = [
        Arrival(
            time,
            rows=rng.choice((1, 1, 1, 3, 70)),
            length=rng.choice((1, 2)),
            deadline=rng.choice((0.02, 5.0)),
            patience=rng.choice((0.01, 9.0, 9.0)),
        )
        for time in poisson(150.0, 4.0)
    ]
    device = Device(
        lambda rows, bucket: bucket * service(rows),
        executors=2,
        cv=0.1,
        cold=3.0,
        largest=40,
        stalls=((1.0, 0.2),),
        drift=((2.0, 1.5),),
    )
    counts = ends(simulate(name, requests, knowledge=known(executors=2), device=device, replicas=2))
    assert counts[End.HIT] > 0
    assert counts[End.CANCELLED] > 0


def test_rivals_accept_a_latency_curve_of_one_size():
    one = known(largest=4)._replace(service=ServiceTime.measured({4: 0.007}))
    for name in RIVALS:
        ends(simulate(name, poisson(100.0, 1.0), knowledge=one))
