"""Requests that can't share a batch are not held, and the tuner forecasts with the share of those that can."""

from __future__ import annotations

from itertools import cycle, islice
from random import Random

import pytest

from carpool.batching.batcher import Batcher
from carpool.batching.queue_set import MAX_KEYS
from carpool.batching.recent_keys import LIKELY, RECENT, BatchableShare
from carpool.batching.requests import Batch, Fault, FaultKind, Request
from carpool.exchange.decision import Reason
from carpool.learning.arrivals import Poisson, until
from carpool.learning.batchable_share import MOST_GROUPS, NONE, Sharing, explained, groups, pays_to_hold
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, BatchingPolicy, Latency, Objective
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from carpool.tuning.tuner import Tuner
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import Pilot, tuned

WAIT = 0.25
RATE = 50.0
ALONE = 0.05
"""Seconds that one request takes."""


def drawn(number, count, seed=1):
    rng = Random(seed)
    return [rng.randrange(number) for _ in range(count)]


def share_of(keys, *, gap=0.02, bucket=0):
    share = BatchableShare()
    return sum(share.arrived(key, bucket, at * gap, WAIT) for at, key in enumerate(keys)) / len(keys)


# -- what is observed


@pytest.mark.parametrize("number", [2, 5, 20])
def test_the_share_is_the_chance_that_two_arrivals_have_one_key(number):
    assert share_of(drawn(number, 20_000)) == pytest.approx(1 / number, rel=0.1)


def test_unequal_callers_count_by_their_squares():
    rng = Random(3)
    keys = [0 if rng.random() < 0.7 else 1 + rng.randrange(1000) for _ in range(20_000)]
    assert share_of(keys) == pytest.approx(0.49, rel=0.05)


@pytest.mark.parametrize("number", [2, 3, 8, RECENT])
def test_callers_who_take_turns_are_seen_as_what_they_are(number):
    assert share_of(list(islice(cycle(range(number)), 13_000))) == pytest.approx((RECENT // number) / RECENT, rel=0.01)


def test_one_key_is_a_share_of_one_to_the_last_bit():
    share = BatchableShare()
    assert all(share.arrived("k", 0, at * 1.0, WAIT) for at in range(1000))
    assert share.share == 1.0
    assert share.worth_holding(0.0)


def test_texts_of_another_length_are_no_other_caller():
    share = BatchableShare()
    assert all(share.arrived(bucket, bucket, 0.0, WAIT) for bucket in drawn(4, 1000))
    assert share.share == 1.0


def test_what_callers_send_is_not_kept():
    share, secret = BatchableShare(), b"authorization: Bearer 12345"
    share.arrived(secret, 0, 0.0, WAIT)
    assert secret not in share._recent[0]._keys


def request(now, key="k", **fields):
    return Request(key=key, model="m", arrived=now, due=now + 1.0, **fields)


def counted(batcher):
    stats = batcher.stats(100.0).models["m"]
    return stats.arrivals, stats.batchable


def test_requests_that_may_not_be_batched_never_match():
    batcher = Batcher(Parameters(max_batch=8))
    for at in range(20):
        batcher.arrive(request(at, mergeable=False), at)
    assert counted(batcher) == (20, 0)
    assert not batcher.model("m").batchable.worth_holding(WAIT)


def test_a_quarantined_model_has_no_batchable_requests():
    batcher = Batcher(Parameters(max_batch=8, max_in_flight=1))
    (running,) = batcher.arrive(request(0.0), 0.0)
    batcher.arrive(request(0.0), 0.0)
    batcher.arrive(request(0.0), 0.0)
    (_, merged) = batcher.complete(running, 0.1)
    assert isinstance(merged, Batch)
    batcher.complete(merged, 0.2, fault=Fault(FaultKind.ROWS))
    assert batcher.model("m").isolation.quarantined
    before = counted(batcher)
    for at in range(1, 11):
        batcher.arrive(request(at), at)
    assert counted(batcher) == (before[0] + 10, before[1])


def test_a_request_that_found_too_many_keys_waiting_counts_by_its_key():
    batcher = Batcher(Parameters(max_batch=8, max_in_flight=1))
    for key in range(MAX_KEYS + 10):
        batcher.arrive(request(0.0, key=key), 0.0)
    arrivals, batchable = counted(batcher)
    for _ in range(50):
        batcher.arrive(request(0.0, key="one more kind"), 0.0)
    assert counted(batcher)[0] == arrivals + 50
    assert counted(batcher)[1] >= batchable + 50 - 2 * RECENT


# -- the Batcher


def played(keys, *, rate=RATE, seconds=30.0, wait=WAIT):
    """Summaries of every 3 seconds; ``keys``: of how many keys an arrival at a time has one, at random."""
    rng = Random(1)
    arrivals = [Arrival(at, key=rng.randrange(keys(at))) for at in until(Poisson(rate), seconds, Random(2))]
    device = Device(linear(ALONE, 0.0001), executors=4)
    point = Parameters(max_batch=32, max_wait=Duration(wait), max_in_flight=4)
    outcome = Simulation(arrivals, device, slo=1.0, parameters=point, estimate=device.estimate()).run()
    return [outcome.summary(start, start + 3.0) for start in range(0, int(seconds), 3)]


def test_a_hundred_callers_with_keys_of_their_own_are_not_held():
    # Before this, p50 was 303 ms for as long as the parameters lasted.
    summaries = played(lambda at: 100)
    assert max(each.p50 for each in summaries[1:]) < 1.1 * ALONE


def test_one_key_is_held_as_before():
    summaries = played(lambda at: 1)
    assert all(each.rows / each.batches > 10 for each in summaries)
    assert min(each.p50 for each in summaries) > ALONE + WAIT / 3


def test_holding_ends_and_returns_within_seconds():
    summaries = played(lambda at: 100 if 9 <= at < 18 else 1)
    assert summaries[2].p50 > 3 * ALONE
    assert summaries[4].p50 < 1.1 * ALONE, "3 s after the callers became many"
    assert summaries[7].p50 > 3 * ALONE, "3 s after they became one"


def test_a_few_keys_are_held_where_others_come_in_time():
    # 3 keys: 4.2 requests of each come within a wait.
    assert all(each.rows / each.batches > 3 for each in played(lambda at: 3))


def test_a_wait_that_is_short_for_the_keys_holds_nothing():
    # 5 keys, 5 ms: 0.05 requests to be expected.
    assert max(each.p50 for each in played(lambda at: 5, wait=0.005)[1:]) < ALONE + 0.001


# -- the tuner's belief


def believed(number, *, intervals=600, count=25):
    share, sharing, news = BatchableShare(), Sharing(), []
    keys = iter(drawn(number, intervals * count))
    for interval in range(intervals):
        now = 0.5 * interval
        matches = sum(share.arrived(next(keys), 0, now, WAIT) for _ in range(count))
        if sharing.observe(0.5, count, matches):
            news.append(interval)
    return sharing.share, news


@pytest.mark.parametrize(("number", "most"), [(2, 3), (5, 4), (20, 5)])
def test_a_steady_share_is_soon_known_and_seldom_reported_as_changed(number, most):
    share, news = believed(number)
    assert share == pytest.approx(1 / number, rel=0.25)
    assert news[0] == 0, "one interval contradicts that all have one key"
    assert len(news) <= most


def test_one_key_is_never_reported_as_changed():
    assert believed(1) == (1.0, [])


def test_a_few_others_make_no_difference():
    sharing = Sharing()
    assert not any(sharing.observe(0.5, 100, 95) for _ in range(100))
    assert sharing.share == 1.0


def test_no_match_at_all_is_believed_after_many_arrivals():
    sharing = Sharing()
    sharing.observe(0.5, 25, 0)
    assert sharing.share > NONE, "25 arrivals leave 2 % open"
    for _ in range(100):
        sharing.observe(0.5, 25, 0)
    assert sharing.share == 0.0
    assert "carpool_alone_total" in explained(sharing.share)


def test_other_callers_are_seen_in_one_interval():
    sharing = Sharing()
    for _ in range(100):
        sharing.observe(0.5, 25, 25)
    assert sharing.observe(0.5, 25, 1)
    assert sharing.share < 0.1
    for _ in range(100):
        sharing.observe(0.5, 25, 0)
    assert sharing.observe(0.5, 25, 25)
    assert sharing.share == 1.0


@pytest.mark.parametrize("share", [0.89, 0.7, 0.5, 0.34, 1 / 3, 0.2, 0.05, 1 / MOST_GROUPS])
def test_groups_have_the_share(share):
    found = groups(share)
    assert sum(found) == pytest.approx(1.0)
    assert sum(each * each for each in found) == pytest.approx(share, rel=1e-6)
    assert all(each > 0 for each in found)


def test_groups_are_bounded_and_none_are_many():
    assert len(groups(0.006)) == MOST_GROUPS
    assert len(groups(0.01, 8)) == 8
    assert groups(1.0) == groups(0.9) == groups(0.0) == (1.0,)


def test_holding_is_worth_it_from_an_even_chance_on():
    assert pays_to_hold(0.1, 50.0, 1.01 * LIKELY / 5)
    assert not pays_to_hold(0.1, 50.0, 0.99 * LIKELY / 5)
    assert pays_to_hold(1.0, 0.1, 0.001), "with one key the load is the tuner's to weigh"


# -- the tuner


def loop(number, *, rate=RATE, seconds=40.0, fixed=0.01, per_row=0.0005, parameters=None):
    """Tune a load of so many keys (0: of each request its own)."""
    rng = Random(1)
    times = until(Poisson(rate), seconds, Random(2))
    arrivals = [Arrival(at, key=rng.randrange(number) if number else 1 + each) for each, at in enumerate(times)]
    policy = BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(0.5))))
    return tuned(arrivals, Device(linear(fixed, per_row)), policy, parameters=parameters)


@pytest.mark.parametrize("number", [100, 0])
def test_without_requests_of_the_same_key_no_savings_are_forecast(number):
    outcome, decisions = loop(number)
    last = decisions[-1]
    assert last.parameters.pass_through or last.parameters.max_wait == 0
    assert last.reason is Reason.NOTHING_BATCHABLE
    assert "of the last requests could share a batch" in last.message
    assert "carpool_key_fragments_total" in last.message
    assert last.share < 0.03
    assert last.predicted.device_time == pytest.approx(0.0105, rel=0.01), "what one request takes"
    assert next(each.at for each in decisions if each.reason is Reason.NOTHING_BATCHABLE) < 10
    assert outcome.summary(3.0).p50 < 0.013


def test_with_one_key_the_same_load_is_batched():
    outcome, decisions = loop(1)
    assert decisions[-1].parameters.max_wait > 0.1
    assert decisions[-1].share == 1.0
    summary = outcome.summary(20.0)
    assert summary.rows / summary.batches > 8


def test_a_few_keys_are_forecast_as_they_are():
    outcome, decisions = loop(3)
    summary = outcome.summary(10.0)
    seen = summary.device_busy / summary.answers
    assert decisions[-1].predicted.device_time == pytest.approx(seen, rel=0.2)
    assert decisions[-1].parameters.max_wait > 0.1


def test_without_requests_of_the_same_key_a_full_server_gets_all_in_pass_through():
    # 80 % of what it serves one by one.
    start = Parameters(max_batch=16, max_wait=Duration(0.2), max_in_flight=1)
    _, decisions = loop(0, rate=76.0, parameters=start)
    known = [each for each in decisions if each.share == 0]
    assert len(known) > 20
    assert len({each.parameters for each in known}) == 1, "no setting differs from another"
    last = known[-1].parameters
    assert (last.max_wait, last.max_in_flight, last.pass_through) == (0.0, 32, True)
    assert last.max_batch > 1, "a backlog may have some that can be batched"


@pytest.mark.parametrize("keys", [0, 50])
def test_a_server_of_eight_instances_is_not_fed_one_by_one_because_little_can_be_batched(keys):
    # Nearly all of one instance, or three times that.
    for rate in (200.0, 600.0):
        rng = Random(4)
        arrivals = [
            Arrival(time, key=rng.randrange(keys) if keys else index)
            for index, time in enumerate(until(Poisson(rate), 20.0, Random(3)))
        ]
        device = Device(linear(0.004, 0.0005), executors=8)
        summary = tuned(arrivals, device, for_p99(0.05), dispatcher=lambda: Batcher(undecided=32)).outcome.summary(5.0)
        assert summary.p99 < 0.008
        assert summary.miss_fraction == 0


@pytest.mark.parametrize("executors", [1, 8])
def test_in_an_overload_of_what_cannot_be_batched_requests_wait_where_they_can_be_refused(executors):
    # 1.5 times what the server can serve, then half of it. With 32 at a single instance one of seven answers is late.
    capacity, rng = executors / 0.0045, Random(3)
    times = [*until(Poisson(1.5 * capacity), 20.0, rng), *(20 + at for at in until(Poisson(capacity / 2), 20.0, rng))]
    arrivals = [Arrival(time, key=index) for index, time in enumerate(times)]
    device = Device(linear(0.004, 0.0005), executors=executors, cv=0.15)
    outcome, decisions = tuned(arrivals, device, for_p99(0.05), dispatcher=lambda: Batcher(undecided=32))
    (last,) = (each.parameters for each in decisions if each.at == max(one.at for one in decisions if one.at < 20))
    assert executors <= last.max_in_flight <= executors + 2, "the server concurrency is an estimate"
    assert outcome.summary(10.0, 20.0).miss_fraction < 1 / 3 + 0.03
    assert (decisions[-1].parameters.max_in_flight, decisions[-1].parameters.pass_through) == (32, True)
    assert outcome.summary(25.0, 40.0).miss_fraction < 0.001


def test_counters_of_older_sidecars_mean_that_all_can_be_batched():
    pilot = Pilot(Tuner(BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(0.5))))))
    times = until(Poisson(RATE), 20.0, Random(2))
    Simulation(times, Device(linear(0.01, 0.0005)), slo=0.5, parameters=pilot.tuner.parameters).every(
        0.5, lambda now, stats: pilot.observe(now, [_older(each) for each in stats])
    ).run()
    assert {each.share for each in pilot.decisions} == {1.0}


def _older(stats):
    from msgspec import msgpack  # noqa: PLC0415 - as it comes over the wire

    from carpool.batching.counters import Stats  # noqa: PLC0415 - likewise

    plain = msgpack.decode(msgpack.encode(stats))
    for model in plain["models"].values():
        del model["batchable"]
    return msgpack.decode(msgpack.encode(plain), type=Stats)
