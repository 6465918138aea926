"""While nobody has decided on parameters: as many calls at once as the server answers without making them wait."""

from __future__ import annotations

from random import Random

import pytest
from batchers import batches, estimate, refusals, request, send
from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.first_calls import FirstCalls
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Objective, Tuning, TuningMode
from carpool.simulation.simulator import Device, Simulation, linear
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import tuned

SECONDS = 15.0


def served(rate, slo, device, **how):
    """Serve a load with parameters that nobody decides on."""
    times = until(Poisson(rate), SECONDS, Random(1))
    return Simulation(times, device, slo=slo, seconds=SECONDS, **how).run().summary()


def first():
    return Batcher(undecided=32)


# A server with workers that compute the rows of a batch one after another, as gunicorn's: rate, SLO, workers, seconds.
WORKERS = [
    (50, 0.1, 8, 0.020),
    (200, 0.1, 8, 0.020),
    (320, 0.1, 8, 0.020),
    (150, 0.2, 64, 0.042),
    (600, 0.2, 64, 0.042),
]


@pytest.mark.parametrize(("rate", "slo", "workers", "seconds"), WORKERS)
def test_a_server_with_workers_is_as_quick_as_without_a_sidecar(rate, slo, workers, seconds):
    device = Device(linear(0.0, seconds), executors=workers, cv=0.05)
    summary = served(rate, slo, device, dispatcher=first)
    direct = served(rate, slo, device, parameters=Parameters(1, Duration(0.0), 1024))
    assert summary.p50 == pytest.approx(direct.p50, rel=0.05)
    assert summary.miss_fraction < 0.06, "a second of fifteen, while it is found out"
    assert summary.mean_batch == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rate", [20, 180, 400, 700, 1300])
def test_a_device_that_computes_one_batch_at_a_time_gets_one(rate):
    device = Device(linear(0.005, 0.0005), cv=0.05)
    summary = served(rate, 0.05, device, dispatcher=first)
    batched = served(rate, 0.05, device)
    assert summary.p50 == pytest.approx(batched.p50, rel=0.05)
    assert summary.miss_fraction < 0.005


def test_twice_as_many_until_answers_take_longer():
    calls = FirstCalls(32)
    for at_once in (1, 2, 4, 8):
        assert (calls.allowed, calls.merges) == (at_once, False)
        for _ in range(4):
            calls.answered(at_once, 0.02)
    assert calls.allowed == 16
    for _ in range(4):
        calls.answered(16, 0.04)
    assert (calls.allowed, calls.merges) == (8, True)
    for _ in range(40):
        calls.answered(8, 0.02)
    assert calls.allowed == 8, "what was found out stays until somebody decides"


def test_no_more_at_once_than_are_allowed():
    calls = FirstCalls(3)
    for _ in range(40):
        calls.answered(min(calls.allowed, 3), 0.02)
    assert calls.allowed == 3


def test_calls_of_other_models_do_not_count_as_more_of_its_own():
    """Three models behind a server of one: all answers come with three calls or more under way."""
    calls = FirstCalls(32)
    for _ in range(2):
        calls.answered(3, 0.067)
    assert (calls.allowed, calls.merges) == (2, False)
    for _ in range(4):
        calls.answered(6, 0.134)
    assert (calls.allowed, calls.merges) == (1, True)


def test_a_first_answer_that_is_slow_does_not_count():
    calls = FirstCalls(32)
    for seconds in (2.0, 0.02):
        calls.answered(1, seconds)
    for _ in range(4):
        calls.answered(2, 0.04)
    assert calls.allowed == 4
    for _ in range(4):
        calls.answered(4, 0.08)
    assert (calls.allowed, calls.merges) == (2, True)


def answer(state, calls, seconds):
    state.first_calls.answered(calls, seconds)
    state.follow(state.first_calls)


def test_undecided_parameters_decide_nothing_and_others_do():
    batcher = first()
    state = batcher.model("m")
    assert (state.passing, state.slots) == (True, 1)
    batcher.configure(Parameters(), 0.0, undecided=32)
    batcher.configure(Parameters(max_batch=8), 0.0, model="m", undecided=32)
    assert (state.passing, state.slots) == (True, 1)
    assert state.in_force.max_batch == 8, "a limit of theirs holds at once"
    for calls in (1, 1, 2, 2, 2, 2, 4, 4, 4, 4):
        answer(state, calls, 0.02)
    assert state.slots == 8
    batcher.configure(Parameters(), 0.0, model="m", undecided=2)
    assert (state.passing, state.slots) == (True, 2)
    for _ in range(8):
        answer(state, 2, 0.02)
    assert state.slots == 2
    batcher.configure(Parameters(max_in_flight=4), 0.0, model="m")
    assert (state.passing, state.slots, state.first_calls) == (False, 4, None)
    assert batcher.model("other").passing


def test_the_same_parameters_end_it_once_they_were_chosen():
    batcher = first()
    state = batcher.model("m")
    batcher.configure(Parameters(), 0.0, model="m")
    assert (state.passing, state.slots, state.first_calls) == (False, 1, None)


def test_what_is_in_force_is_what_the_first_calls_leave_of_the_parameters():
    batcher = first()
    state = batcher.model("m")
    assert state.in_force == Parameters(max_in_flight=1, pass_through=True)
    for seconds in (0.02, 0.02, *4 * [0.02]):
        answer(state, state.slots, seconds)
    assert state.in_force == Parameters(max_in_flight=4, pass_through=True)
    for _ in range(4):
        answer(state, 4, 0.06)
    assert state.in_force == Parameters(max_in_flight=2)
    batcher.configure(Parameters(max_batch=8), 0.0)
    assert state.in_force == Parameters(max_batch=8)


@pytest.mark.parametrize("mode", TuningMode)
def test_they_end_once_the_tuner_keeps_what_is_in_force_and_applies(mode):
    """At 25/s of 20 ms and 2 ms a row, twice as many calls at once as are computed take a fifth more device time."""
    policy = replace(for_p99(0.3, Objective.EFFICIENCY), tuning=Tuning(mode=mode))
    batchers = []

    def dispatcher():
        batchers.append(first())
        return batchers[-1]

    times = until(Poisson(25), 60.0, Random(3))
    _, decisions = tuned(times, Device(linear(0.020, 0.002)), policy, seconds=60.0, dispatcher=dispatcher)
    state = batchers[0].model("")
    assert (state.first_calls is None) == (mode is TuningMode.APPLY)
    if mode is TuningMode.APPLY:
        assert state.in_force == decisions[-1].parameters


def test_they_go_on_while_the_tuner_keeps_one_at_a_time_and_no_call_has_met_another():
    """Of eight workers of 40 ms at 2/s the tuner sees one call at a time; a second one may not wait for it."""
    policy = for_p99(0.2, Objective.BALANCED)
    outcome, _ = tuned(
        until(Poisson(2), 90.0, Random(2)),
        Device(linear(0, 0.040), executors=8),
        policy,
        seconds=90.0,
        dispatcher=first,
    )
    assert outcome.summary().p99 < 0.05


def test_parameters_that_are_held_end_it_though_they_are_the_same():
    batcher = first()
    state = batcher.model("m")
    batcher.undecided = 0
    batcher.configure(Parameters(), 0.0)
    assert (state.passing, state.slots) == (False, 1)
    assert not batcher.model("other").passing


def grown(*answers, waiting=20):
    """Give a model's first calls so many answers (requests, seconds), where an answer is due after 2 s."""
    calls = FirstCalls(32)
    for requests, seconds in answers:
        calls.answered(1, seconds, requests, waiting=waiting, due=2.0)
    return calls


def test_requests_that_would_be_late_one_by_one_share_a_call_and_then_twice_as_many_do():
    for answers, shares, merges in [
        ([(1, 0.4)], 2, False),
        ([(1, 0.4), (2, 0.45)], 4, False),
        ([(1, 0.4), (2, 0.45), (3, 0.5)], 6, True),
        ([(1, 0.4), (2, 0.45), (4, 0.55), (8, 0.7), (16, 1.0)], 32, True),
        ([(1, 0.4), (2, 0.45), (4, 0.55), (3, 0.5), (8, 0.7)], 16, True),
    ]:
        calls = grown(*answers)
        assert (calls.shares, calls.merges, calls.allowed) == (shares, merges, 1), answers
    assert grown((1, 0.4), waiting=2).shares == 1, "those that wait are in time one by one"
    assert grown((1, 0.05), waiting=200).shares == 1, "of a quick model more calls are tried first"


def test_where_two_take_as_long_as_two_calls_more_calls_are_tried():
    calls = grown((1, 0.4), (2, 0.8))
    assert (calls.shares, calls.allowed, calls.ended) == (1, 2, True)
    calls = grown((1, 0.4), (2, 0.45), (4, 0.9))
    assert (calls.shares, calls.allowed, calls.merges) == (1, 2, False)


def test_calls_that_wait_for_one_another_let_two_share_one_again():
    calls = grown((1, 0.4), (2, 0.8), (1, 0.4))
    for _ in range(4):
        calls.answered(2, 0.8, waiting=20, due=2.0)
    assert (calls.shares, calls.allowed, calls.merges) == (2, 1, True)
    calls.answered(1, 0.8, 2, waiting=20, due=2.0)
    assert calls.shares == 2, "it may have been chance"
    for requests, seconds in [(2, 0.45), (4, 0.55)]:
        calls.answered(1, seconds, requests, waiting=20, due=2.0)
    assert calls.shares == 8
    calls.answered(1, 1.0, 8, waiting=20, due=2.0, cold=True)
    assert calls.shares == 8, "the first of its size may be slow"
    calls.answered(1, 1.0, 8, waiting=20, due=2.0)
    assert calls.shares > 32, "as many as the parameters allow"


def test_the_first_of_a_size_is_evidence_only_if_it_is_quick():
    calls = grown((1, 0.4))
    assert calls.answered(1, 0.45, 2, cold=True)
    assert not calls.answered(1, 5.0, 4, cold=True)


@pytest.mark.parametrize(("alone", "allowed"), [(True, 8), (False, 1)])
def test_while_none_may_share_a_call_yet_more_calls_are_tried(alone, allowed):
    calls = FirstCalls(8)
    for in_flight in (1, 1, *4 * [2], *4 * [4]):
        calls.answered(in_flight, 0.4, waiting=20, due=2.0, alone=alone)
    assert (calls.allowed, calls.merges) == (allowed, False)


@pytest.mark.parametrize(("verifies", "counted"), [(True, 2), (False, 1)])
def test_copies_of_requests_count_only_as_trials_and_while_callers_wait(verifies, counted):
    batcher = first()
    state = batcher.model("m")
    (warm,) = batches(send(batcher, 0.0, request(rows=8, mergeable=False, shadow=True)))
    batcher.complete(warm, 0.6)
    assert state.first_calls.since == 0, "nobody waits"
    (single,) = batches(send(batcher, 1.0, request(1.0, slo=2.0)))
    batcher.complete(single, 1.4)
    (copies,) = batches(send(batcher, 2.0, request(2.0, rows=8, mergeable=False, shadow=True)))
    send(batcher, 2.0, request(2.0, slo=9.0, key=None, mergeable=False))
    state.isolation.verifies = verifies
    batcher.complete(copies, 2.6)
    assert state.first_calls.since == counted


def test_a_trial_shows_how_many_may_share_a_call():
    calls = FirstCalls(1)
    calls.answered(1, 0.4, waiting=20, due=2.0, alone=True)
    assert calls.answered(1, 0.6, 8, waiting=20, due=2.0, cold=True, alone=True)
    assert (calls.shares, calls.merges) == (16, False)


def test_requests_share_calls_once_one_would_be_late_however_many_calls_are_tried():
    calls = FirstCalls(8)
    for _ in range(2):
        assert not calls.share()  # how long one takes is not known
        calls.answered(1, 1.1, waiting=2, due=10.0, cold=True)
    for _ in range(2):
        calls.answered(1, 1.1, waiting=2, due=10.0)
    assert (calls.shares, calls.allowed) == (1, 2)
    assert calls.share()
    assert (calls.shares, calls.allowed, calls.half) == (2, 1, 1.1)
    assert not calls.share()


def test_once_more_calls_are_known_to_be_right_requests_share_none():
    calls = FirstCalls(8)
    for _ in range(2):
        calls.answered(1, 1.1, waiting=2, due=10.0)
    for _ in range(5):
        calls.answered(2, 1.1, waiting=2, due=10.0)
    assert calls.allowed == 4
    assert not calls.share()


def test_while_none_may_share_a_call_no_fewer_calls_are_made_at_once():
    calls = FirstCalls(8)
    for _ in range(2):
        calls.answered(1, 1.1, waiting=2, due=10.0, alone=True)
    calls.answered(2, 1.1, waiting=50, due=10.0, alone=True)
    assert (calls.shares, calls.allowed) == (1, 2)
    calls.answered(2, 1.1, waiting=50, due=10.0)
    assert (calls.shares, calls.allowed) == (2, 1)


def test_a_request_of_a_slow_model_that_would_be_late_alone_is_not_refused_but_shares_a_call():
    to, now = Batcher(undecided=8), 0.0
    for _ in range(3):
        (batch,) = batches(send(to, now, request(now, slo=10.0)))
        now += 1.1
        to.complete(batch, now)
    to.learn("m", estimate(1.0, 0.1), now, shed_slo=True)
    # Two calls at once are tried, so ten more would be answered in time one by one, by this estimate.
    assert refusals(send(to, now, *(request(now, slo=10.0) for _ in range(20)))) == []
    state = to.model("m")
    assert (state.first_calls.shares, state.slots) == (2, 1)
    # A model that is known to be quick keeps its refusals.
    quick = Batcher(undecided=8)
    for _ in range(3):
        (batch,) = batches(send(quick, now, request(now, slo=0.2)))
        now += 0.022
        quick.complete(batch, now)
    quick.learn("m", estimate(0.020, 0.002), now, shed_slo=True)
    assert refusals(send(quick, now, *(request(now, slo=0.2) for _ in range(20))))


@pytest.mark.parametrize("seed", [1, 3, 5, 7, 8])
@pytest.mark.parametrize(
    ("fixed", "row", "slo", "rate"),
    [
        (0.4, 0.03, 5.0, 20.0),
        (0.1, 0.01, 1.0, 60.0),
        (1.0, 0.1, 10.0, 5.0),
        (1.0, 0.1, 10.0, 2.0),
        (0.25, 0.02, 0.9, 3.6),
    ],
)
def test_a_slow_model_that_begins_under_load_loses_little(fixed, row, slo, rate, seed):
    # Half of the first ten seconds, in most plays; zero wait loses none. By what a row more was guessed to take, or by
    # what single ones take, requests were refused, and one or two rows and more in flight were explored.
    times = until(Poisson(rate), 30.0, Random(seed))
    outcome, _ = tuned(times, Device(linear(fixed, row), cv=0.05), for_p99(slo), seconds=30.0, as_sidecars=True)
    assert outcome.summary(0.0, 10.0).miss_fraction < 0.12
    assert outcome.summary().miss_fraction < 0.15
