"""Rule 7: which requests are refused, on arrival or when they would be dispatched."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING

import pytest
from batchers import batcher, batches, by_bucket, held, occupied, one_after_another, refusals, request, send, waiters
from machine import estimate
from msgspec.structs import replace

from carpool.batching.requests import Action, Batch, Finish, Refusal, Refused
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Quantity
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission
from carpool.simulation.simulator import Device, Simulation, linear

if TYPE_CHECKING:
    from carpool.batching.batcher import Batcher


@pytest.mark.parametrize("unit", ["rows", "size", "tokens"])
def test_rule_7_bounds_refuse_low_classes_at_80_percent_and_all_at_100(unit: str) -> None:
    bounds = {
        "rows": Admission(max_queued_rows=10),
        "size": Admission(max_queued_bytes=Quantity(10)),
        "tokens": Admission(max_queued_tokens=10),
    }[unit]
    to = batcher(max_batch=1, admission=bounds)
    occupied(to)

    def refused(amount: int, priority: int) -> bool:
        return bool(refusals(to.arrive(request(priority=priority, **{unit: amount}), 0.0)))

    assert not refused(7, 2)
    assert not refused(1, 3)  # 8 of 10
    assert refused(1, 3)
    assert not refused(1, 1)
    assert not refused(1, 2)  # 10 of 10
    assert refused(1, 1)
    assert to.model("m").counters.misses == {Refused.QUEUE_FULL: 2}


def test_rule_7_what_leaves_makes_room() -> None:
    bounds = Admission(max_queued_rows=4, max_queued_bytes=Quantity(4), max_queued_tokens=4)
    to = batcher(max_batch=4, admission=bounds)
    first = occupied(to)
    send(to, 0.0, *(request(size=1, tokens=1) for _ in range(4)))
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (4, 4)
    to.complete(first, 0.01)
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (0, 0)
    for _ in range(4):
        assert not refusals(to.arrive(request(0.01, size=1, tokens=1), 0.01))


def test_rule_7_a_flood_of_one_key_fills_no_queue_for_the_others() -> None:
    to = batcher(max_batch=4, admission=Admission(max_queued_rows=20))
    first = occupied(to)
    flood = [request(key="flood", rows=2) for _ in range(10)]
    send(to, 0.0, *flood)
    other = request(key="other", rows=3)
    assert refusals(to.arrive(other, 0.0)) == [(flood[9], Refused.QUEUE_FULL), (flood[8], Refused.QUEUE_FULL)]
    assert refusals(to.arrive(late := request(key="flood"), 0.0)) == []  # 19 of 20 wait
    assert refusals(to.arrive(more := request(key="flood"), 0.0)) == [(more, Refused.QUEUE_FULL)]
    served = [each for group in one_after_another(to, first) for each in waiters(group)]
    assert served == [other, *flood[:8], late]


def test_rule_7_bentoml_an_idle_upstream_admits_all() -> None:
    slow = estimate(base=10.0)
    to = batcher(max_batch=4, admission=Admission(max_queued_rows=1))
    to.learn("m", slow, 0.0, shed_slo=True)
    assert batches(to.arrive(request(rows=9, deadline=1.0), 0.0))


def test_rule_7_who_joins_a_held_batch_on_an_idle_upstream_is_admitted_and_kept() -> None:
    # A full batch of 64 takes 37 ms, more than the SLO of 10: but these two would leave as two.
    to = batcher(max_batch=64, max_wait=0.002)
    to.learn("m", estimate(), 0.0, shed_slo=True)
    assert send(to, 0.0, request(slo=0.01), request(slo=0.01)) == []
    (batch,) = batches(to.poll(to.wake_at()))
    assert batch.rows == 2


def test_rule_7_an_idle_upstream_admits_even_requests_that_the_held_batch_makes_late() -> None:
    to = batcher(max_batch=64, max_wait=0.002)
    to.learn("m", estimate(), 0.0, shed_slo=True)
    asked = [request(rows=8), request(slo=0.009, deadline=0.0095)]  # nine rows take 9.5 ms
    (batch,) = batches(send(to, 0.0001, *asked))
    assert waiters(batch) == asked


def test_rule_7_while_a_slot_is_free_the_position_is_in_what_is_held() -> None:
    to = batcher(max_batch=64, max_wait=0.002, slots=2)
    to.learn("m", estimate(executors=2), 0.0, shed_slo=True)
    to.arrive(request(0.0, slo=0.01), 0.0)
    assert batches(to.poll(to.wake_at()))
    assert send(to, 0.003, request(0.003, slo=0.01), request(0.003, slo=0.01)) == []


def test_rule_7_an_unknown_service_time_refuses_none() -> None:
    to = batcher(max_batch=1)
    to.learn("m", None, 0.0, shed_slo=True)
    occupied(to)
    assert not refusals(send(to, 0.0, *(request(slo=0.0001) for _ in range(50))))


def test_rule_7_an_expired_deadline_is_refused_even_when_idle() -> None:
    idle, busy = batcher(), batcher()
    occupied(busy)
    for to in (idle, busy):
        assert refusals(to.arrive(request(0.0, deadline=0.0), 0.0))[0][1] is Refused.EXPIRED
        assert to.queued_rows == 0


def test_rule_7_predicted_behind_full_batches_in_its_own_as_it_is() -> None:
    # Batches of 8 take 9 ms. The first, alone, runs until 5.5 ms; then 8 rows until 14.5, and a ninth by itself until
    # 20: in time for 20.1 and not for 19.9.
    to = held(max_wait=0.0)
    occupied(to)
    send(to, 0.0, *(request() for _ in range(8)))
    assert refusals(to.arrive(request(deadline=0.0199), 0.0))
    assert not refusals(to.arrive(request(deadline=0.0201), 0.0))


def test_rule_7_who_is_just_in_time_at_dispatch_portions() -> None:
    for due, portions in ((0.0155, 1), (0.0154, 0)):
        to = batcher()
        to.learn("m", estimate(), 0.0, shed_slo=True)
        first = occupied(to)
        late = request(slo=due)
        assert not refusals(to.arrive(late, 0.0))
        assert len(batches(to.complete(first, 0.010))) == portions


def test_rule_7_only_classes_as_urgent_stand_before() -> None:
    to = held(max_wait=0.0)
    occupied(to)
    send(to, 0.0, *(request() for _ in range(8)))
    assert not refusals(to.arrive(request(deadline=0.0150, priority=1), 0.0))  # 5.5 + 9
    assert refusals(to.arrive(request(deadline=0.0150, priority=2), 0.0))


def test_rule_7_a_flood_of_one_key_delays_forecasts_of_others_by_one_batch() -> None:
    to = held(max_batch=4, max_wait=0.0)
    occupied(to)
    send(to, 0.0, *(request(key="flood", deadline=60.0) for _ in range(40)))
    # 5.5 ms for what runs, 7 for a batch of the flood, 5.5 for itself.
    assert refusals(to.arrive(request(key="other", deadline=0.0181), 0.0)) == []
    assert refusals(to.arrive(request(key="third", deadline=0.0179), 0.0)) != []


def test_rule_7_slots_beyond_the_server_concurrency_do_not_empty_the_queue_by_refusals() -> None:
    # Three batches queue at the device: were a newcomer's batch taken for full, nobody but the first would be admitted.
    device = Device(linear(0.005, 0.0005))
    times = until(Poisson(900.0), 10.0, Random(3))
    parameters = Parameters(max_batch=64, max_in_flight=4)
    run = Simulation(times, device, slo=0.05, parameters=parameters, estimate=device.estimate(), shed_slo=True).run()
    assert run.summary(2.0).goodput > 0.95 * 900.0


def test_rule_7_a_batch_that_took_longer_than_believed_moves_the_predictions_behind_it() -> None:
    # Two slots, server concurrency 1, 5.5 ms per batch. The first ends at 20 ms, so the second ends at 25.5, not at 11.
    to = held(slots=2, max_wait=0.0)
    first, second = send(to, 0.0, request(), request())
    assert second.finish == pytest.approx(0.011)
    to.complete(first, 0.020)
    assert second.finish == pytest.approx(0.0255)
    # A third batch is sent behind it at 20 ms. So a request that arrives at 21 ms starts at 31 ms.
    send(to, 0.020, request())
    assert refusals(to.arrive(request(deadline=0.0364), 0.021))
    assert not refusals(to.arrive(request(deadline=0.0366), 0.021))


def test_rule_7_server_concurrency_beyond_the_slots_does_not_shorten_the_forecast() -> None:
    to = batcher(max_batch=8)
    to.learn("m", estimate(executors=8), 0.0)
    occupied(to)
    send(to, 0.0, *(request() for _ in range(8)))
    assert refusals(to.arrive(request(deadline=0.0199), 0.0))


def test_rule_7_slots_beyond_the_server_concurrency_only_queue_at_the_server() -> None:
    to = batcher(max_batch=1, slots=2)
    to.learn("m", estimate(), 0.0)
    (first,) = batches(to.arrive(request(), 0.0))
    (second,) = batches(to.arrive(request(), 0.0))
    assert (first.finish, second.finish) == pytest.approx((0.0055, 0.011))
    assert refusals(to.arrive(request(deadline=0.016), 0.0))
    assert not refusals(to.arrive(request(deadline=0.017), 0.0))


def test_rule_7_unmergeable_requests_are_predicted_whole() -> None:
    # 40 rows at once take 25 ms; as 40 single batches they would take 220.
    to = held(max_wait=0.0)
    occupied(to)
    assert not refusals(to.arrive(request(mergeable=False, rows=40, deadline=0.1), 0.0))
    assert not refusals(to.arrive(request(mergeable=False, rows=40, deadline=0.1), 0.0))
    assert refusals(to.arrive(request(mergeable=False, rows=40, deadline=0.06), 0.0))


def test_rule_7_each_length_is_predicted_by_what_its_own_bucket_takes() -> None:
    to = batcher()
    to.learn("m", by_bucket(), 0.0)
    (long,) = batches(to.arrive(request(key="long", bucket=4), 0.0))
    assert long.finish == pytest.approx(0.022)
    # The short one behind it takes 2.75 ms, then a long one 22: done at 24.75 and 46.75.
    assert refusals(to.arrive(request(key="short", bucket=1, deadline=0.0247), 0.0))
    assert not refusals(to.arrive(request(key="short", bucket=1, deadline=0.0248), 0.0))
    assert refusals(to.arrive(request(key="long", bucket=4, deadline=0.0467), 0.0))
    assert not refusals(to.arrive(request(key="long", bucket=4, deadline=0.0468), 0.0))


@pytest.mark.parametrize(("bucket", "portions"), [(1, 1), (4, 0)])
def test_rule_7_each_length_is_dropped_by_what_its_own_bucket_takes(bucket: int, portions: int) -> None:
    to = batcher()
    to.learn("m", by_bucket(), 0.0, shed_slo=True)
    first = occupied(to)
    to.arrive(request(bucket=bucket, slo=0.0305), 0.0)
    assert len(batches(to.complete(first, 0.010))) == portions


def hoping() -> Batcher:
    """Server concurrency 1 is known and 2 is explored, with two slots; 5 ms + 0.5 ms per row."""
    to = batcher(max_batch=1, slots=2)
    to.learn("m", replace(estimate(executors=2), assumed=1), 0.0)
    return to


def test_rule_7_optimistic_server_concurrency_ends_with_the_first_batch_that_waited() -> None:
    to = hoping()
    one, other = batches(send(to, 0.0, request(), request()))
    to.complete(one, 0.0055)
    (third,) = batches(to.arrive(request(0.0055), 0.0055))
    to.complete(other, 0.0110)  # 9.1 ms are 1.5 times 6.05 ms, which one row seldom exceeds
    assert third.finish == pytest.approx(0.0165)
    assert to.model("m").belief.estimate.executors == 1
    # It stays at 1, until another estimate is optimistic, or more is known.
    to.learn("m", replace(estimate(executors=2), assumed=1), 0.011)
    assert to.model("m").belief.estimate.executors == 1
    to.learn("m", replace(estimate(executors=3), assumed=2), 0.011)
    assert to.model("m").belief.estimate.executors == 3
    to.learn("m", estimate(executors=2), 0.011)
    assert to.model("m").belief.estimate.executors == 2


@pytest.mark.parametrize("took", [0.0055, 0.0090])
def test_rule_7_optimistic_server_concurrency_lasts_while_no_batch_waits_for_another(took: float) -> None:
    to = hoping()
    for each in batches(send(to, 0.0, request(), request())):
        to.complete(each, took)
    # A batch alone at the upstream waits for no other batch, however long it takes.
    (slow,) = batches(to.arrive(request(1.0), 1.0))
    to.complete(slow, 2.0)
    assert to.model("m").belief.estimate.executors == 2


@pytest.mark.parametrize("others", [0, 1])
def test_alone_the_place_is_for_a_request_that_is_surely_in_time_if_another_waits(others: int) -> None:
    # One request takes 5.5 ms, two standard deviations are half of that.
    to = batcher()
    to.learn("m", replace(estimate(), noise=0.25), 0.0, shed_slo=True)
    (running,) = to.arrive(request(mergeable=False), 0.0)
    just_in_time = request(slo=0.0115, mergeable=False)
    assert to.arrive(just_in_time, 0.0) == []
    for _ in range(others):
        assert to.arrive(request(mergeable=False), 0.0) == []
    found = to.complete(running, 0.0055)
    refused = [each.request for each in found if isinstance(each, Refusal)]
    assert refused == [just_in_time] * others
    assert sum(isinstance(each, Batch) for each in found) == 1, "the device is not idle"


def test_alone_behind_others_a_request_is_refused_at_once_unless_it_is_surely_in_time() -> None:
    to = batcher()
    to.learn("m", replace(estimate(), noise=0.25), 0.0, shed_slo=True)
    for _ in range(2):
        to.arrive(request(mergeable=False), 0.0)
    # Answered after three times 5.5 ms, by the mean.
    (refusal,) = to.arrive(request(slo=0.019, mergeable=False), 0.0)
    assert isinstance(refusal, Refusal)
    assert to.arrive(request(slo=0.0195, mergeable=False), 0.0) == []


def test_a_request_that_is_exempt_from_the_start_is_refused_for_no_queue_and_no_due_time() -> None:
    to = batcher(admission=Admission(max_queued_rows=Quantity(2)))
    to.learn("m", estimate(), 0.0, shed_slo=True)
    (running,) = to.arrive(request(mergeable=False), 0.0)
    for _ in range(2):
        assert to.arrive(request(mergeable=False), 0.0) == []
    for exempt in (False, True):
        more = request(slo=0.006, mergeable=False, shadow=True, deadline=1.0)
        more.exempt = exempt
        assert [type(each) for each in to.arrive(more, 0.0)] == ([] if exempt else [Refusal])
    for at in (0.0055, 0.011, 0.0165):
        running, done = sorted(to.complete(running, at), key=lambda each: isinstance(each, Finish))
        assert isinstance(done, Finish)
    assert running.slices[0][0] is more, "late for the SLO, and sent"


@pytest.mark.parametrize(("shed_slo", "refused"), [(True, True), (False, False)])
def test_rule_7_shed_at_slo_or_deadline(shed_slo: bool, refused: bool) -> None:
    to = batcher(max_batch=1)
    to.learn("m", estimate(), 0.0, shed_slo=shed_slo)
    occupied(to)
    assert bool(refusals(to.arrive(request(slo=0.008, deadline=10.0), 0.0))) is refused


def test_rule_7_who_could_never_meet_the_slo_is_not_shed_for_it() -> None:
    to = batcher(max_batch=8)
    to.learn("m", estimate(), 0.0, shed_slo=True)
    occupied(to)
    assert not refusals(to.arrive(request(slo=0.004, deadline=10.0), 0.0))


@pytest.mark.parametrize("fields", [{"slo": 0.03}, {"slo": 0.05, "deadline": 0.03}, {"slo": 0.01, "deadline": 0.03}])
def test_rule_7_dropped_at_dispatch_when_this_batch_would_make_it_late(fields: dict[str, float]) -> None:
    to = batcher(max_batch=8)
    to.learn("m", estimate(), 0.0, shed_slo="deadline" not in fields)
    first = occupied(to)
    doomed, fine = request(**fields), request(slo=0.1)
    assert send(to, 0.0, doomed, fine) == []
    actions = to.complete(first, 0.0245)  # two rows more take 6 ms
    assert refusals(actions) == [(doomed, Refused.LATE)]
    assert doomed.ended
    assert [waiters(batch) for batch in batches(actions)] == [[fine]]


def test_rule_7_who_waits_when_shedding_begins_is_shed_as_who_comes_then() -> None:
    # Everybody was admitted until it was known what a batch takes. Served all the same, they would make late the last.
    to = batcher(max_batch=8)
    first = occupied(to)
    stale, hopeless = [request() for _ in range(8)], request(slo=0.004)
    fresh = request(0.2)
    assert refusals(send(to, 0.2, *stale, hopeless, fresh)) == []
    to.learn("m", estimate(), 0.2, shed_slo=False)
    assert not any(waiting.sheddable for waiting in (*stale, hopeless, fresh))
    to.learn("m", estimate(), 0.2, shed_slo=True)
    actions = to.complete(first, 0.2)
    assert refusals(actions) == [(each, Refused.LATE) for each in stale]
    # A request whose SLO is shorter than any batch is served.
    assert [waiters(batch) for batch in batches(actions)] == [[hopeless, fresh]]


def test_rule_7_shedding_begins_for_one_model_and_no_other() -> None:
    to = batcher(max_batch=8)
    first, second = occupied(to), batches(to.arrive(request(model="n"), 0.0))[0]
    late, other = request(), request(model="n")
    to.learn("n", estimate(), 0.0)
    assert send(to, 0.0, late, other) == []
    to.learn("m", estimate(), 0.0, shed_slo=True)
    assert late.sheddable
    assert not other.sheddable
    # By the time that the other model sheds too, it takes so long that nobody could have served this one in time.
    to.learn("n", estimate(base=0.1), 0.0, shed_slo=True)
    actions = to.complete(second, 0.06)
    assert refusals(actions) == []
    assert [waiters(batch) for batch in batches(actions)] == [[other]]
    assert refusals(to.complete(first, 0.06)) == [(late, Refused.LATE)]


def test_rule_7_a_request_half_served_is_not_dropped() -> None:
    to = held(max_wait=0.0)
    first = occupied(to)
    large = request(rows=16, deadline=0.03)
    to.arrive(large, 0.0)
    (part,) = batches(to.complete(first, 0.0055))
    (part,) = batches(to.complete(part, 0.025))  # the second half takes 9 ms
    assert part.slices == [(large, 8, 16)]


def test_rule_7_retry_after_is_the_predicted_drain() -> None:
    to = held(max_wait=0.0, admission=Admission(max_queued_rows=8))
    occupied(to)
    send(to, 0.0, *(request() for _ in range(8)))
    (refusal,) = to.arrive(request(), 0.0)
    assert refusal.retry_after == pytest.approx(0.0145)  # 5.5 ms of the first, 9 of the eight


def goodput_at_twice_the_capacity(*, slo: float, timeout: float, shed_slo: bool, keys: int = 1) -> float:
    """Good answers/s at 2 x 1,730/s: batch latency 5 + 0.5 b ms, batches of 64, SLO 50 ms, server concurrency 1."""
    to = batcher(max_batch=64, admission=Admission(max_queued_rows=10**6))
    to.learn("m", estimate(), 0.0, shed_slo=shed_slo)
    random = Random(7)
    now, good, events, end = 0.0, 0, [], 20.0
    number = 0

    def obey(actions: list[Action], at: float) -> int:
        hits = 0
        for action in actions:
            if isinstance(action, Batch):
                heappush(events, (at + 0.005 + 0.0005 * action.rows, action.number, action))
            elif isinstance(action, Finish):
                hits += sum(at <= done.due for done in action.requests)
        return hits

    while now < end:
        now += random.expovariate(3460.0)
        number += 1
        while events and events[0][0] <= now:
            at, _, batch = heappop(events)
            good += obey(to.complete(batch, at), at)
        asked = request(now, slo=slo, deadline=now + timeout, key=number % keys)
        good += obey(to.arrive(asked, now), now)
    return good / end


@pytest.mark.parametrize("keys", [1, 4])
def test_rule_7_shedding_keeps_the_goodput_at_twice_the_capacity(keys: int) -> None:
    peak = 1400.0 if keys == 1 else 900.0  # four keys share the device in smaller batches
    assert goodput_at_twice_the_capacity(slo=0.05, timeout=10.0, shed_slo=True, keys=keys) >= peak


def test_rule_7_a_long_timeout_alone_leaves_almost_nothing() -> None:
    assert goodput_at_twice_the_capacity(slo=0.05, timeout=10.0, shed_slo=False) < 50.0
