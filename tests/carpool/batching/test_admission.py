from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machine import FAILURES, MODELS, Driver, estimate, random_parameters, random_request
from msgspec.structs import replace
from soak import soak

from carpool.batching.batcher import Batcher
from carpool.batching.counters import CANCELLED, MAX_CELLS
from carpool.batching.isolation import EXTRA_ROWS, EXTRA_SHARE, MAX_ISOLATED
from carpool.batching.queue_set import MAX_KEYS
from carpool.batching.requests import (
    Abort,
    Action,
    Batch,
    Estimate,
    Failure,
    Fault,
    FaultKind,
    Finish,
    Priority,
    Refusal,
    Refused,
    Request,
)
from carpool.batching.slots import LEAST_OVERDUE, OVERDUE_UNKNOWN
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration, Quantity
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission
from carpool.simulation.outcome import ENDS, End
from carpool.simulation.simulator import Arrival, Device, Simulation, linear

ITEM = Fault(FaultKind.ITEM, detail="bad row")
SIZE = Fault(FaultKind.SIZE)
RESET = Fault(FaultKind.TRANSPORT, retryable=True)


def batcher(max_batch: int = 8, max_wait: float = 0.0, slots: int = 1, **fields: Any) -> Batcher:
    return Batcher(Parameters(max_batch=max_batch, max_wait=Duration(max_wait), max_in_flight=slots), **fields)


def held(max_batch: int = 8, max_wait: float = 0.02, slots: int = 1, **fields: Any) -> Batcher:
    """A Batcher that holds requests for others: it knows the batch latency, 5 ms + 0.5 ms per row."""
    result = batcher(max_batch, max_wait, slots, **fields)
    result.learn("m", estimate(), 0.0)
    return result


def request(now: float = 0.0, *, rows: int = 1, slo: float = 0.05, **fields: Any) -> Request:
    return Request(**{"key": "k", "model": "m", "arrived": now, "due": now + slo, "rows": rows, **fields})


def send(to: Batcher, now: float, *requests: Request) -> list[Action]:
    return [action for each in requests for action in to.arrive(each, now)]


def batches(actions: list[Action]) -> list[Batch]:
    return [action for action in actions if isinstance(action, Batch)]


def waiters(batch: Batch) -> list[Request]:
    return [each for each, _, _ in batch.slices]


def refusals(actions: list[Action]) -> list[tuple[Request, Refused]]:
    return [(action.request, action.reason) for action in actions if isinstance(action, Refusal)]


def occupied(to: Batcher, now: float = 0.0) -> Batch:
    """Fill the one slot, so that what comes next waits."""
    (batch,) = batches(to.arrive(request(now, key="first"), now))
    return batch


def one_after_another(to: Batcher, running: Batch) -> list[Batch]:
    """Complete what runs until nothing waits; what was dispatched meanwhile."""
    sent: list[Batch] = []
    while following := batches(to.complete(running, 0.01)):
        (running,) = following
        sent.append(running)
    return sent


# ------------------------------------------------------------------------------------------------- rules 1 to 3


def test_rule_1_only_equal_keys_and_models_merge() -> None:
    to = batcher()
    first = occupied(to)
    asked = [request(key="k"), request(key="l"), request(key="k"), request(key="k")]
    other = request(key="k", model="other")
    (at_once,) = batches(send(to, 0.0, *asked, other))
    assert waiters(at_once) == [other], "another model has slots of its own"
    groups = [waiters(batch) for batch in one_after_another(to, first)]
    assert groups == [[asked[0], asked[2], asked[3]], [asked[1]]]


def test_rule_2_rows_count_and_not_requests() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    asked = [request(rows=3), request(rows=4), request(rows=2)]
    send(to, 0.0, *asked)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == asked[:2]
    assert batch.rows == 7


def test_rule_2_a_larger_request_is_split_at_the_cap_and_ends_with_its_last_row() -> None:
    to = batcher(max_batch=8)
    large = request(rows=20)
    (batch,) = batches(to.arrive(large, 0.0))
    spans = []
    finished: list[Request] = []
    while True:
        spans += [(start, stop) for _, start, stop in batch.slices]
        actions = to.complete(batch, 0.01)
        (finish,) = (action for action in actions if isinstance(action, Finish))
        finished += finish.requests
        if not batches(actions):
            break
        assert finished == []
        (batch,) = batches(actions)
    assert spans == [(0, 8), (8, 16), (16, 20)]
    assert finished == [large]


def test_rule_2_the_last_part_of_a_split_request_takes_others_along() -> None:
    to = batcher(max_batch=8)
    large, small = request(rows=10), request(rows=3)
    (batch,) = batches(to.arrive(large, 0.0))
    to.arrive(small, 0.0)
    (batch,) = batches(to.complete(batch, 0.01))
    assert batch.slices == [(large, 8, 10), (small, 0, 3)]


def test_rule_2_tei_array_inputs_do_not_slip_past_the_cap() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    send(to, 0.0, request(rows=3), request(rows=100))
    (batch,) = batches(to.complete(first, 0.01))
    assert batch.rows == 4


@pytest.mark.parametrize("passing", [False, True])
def test_rule_2_a_model_s_own_cap_holds(passing: bool) -> None:
    to = Batcher(Parameters(max_batch=16, pass_through=passing))
    to.model("m").limits.max_rows = 4
    (batch,) = batches(to.arrive(request(rows=10), 0.0))
    assert batch.rows == 4


def test_rule_3_without_a_batch_axis_requests_are_sent_alone_and_whole() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    asked = [request(mergeable=False, rows=6), request(mergeable=False)]
    send(to, 0.0, *asked)
    (one,) = batches(to.complete(first, 0.01))
    (two,) = batches(to.complete(one, 0.02))
    assert (one.slices, two.slices) == ([(asked[0], 0, 6)], [(asked[1], 0, 1)])
    assert one.whole
    assert two.whole


# ------------------------------------------------------------------------------------------------- rules 4 and 5


def test_rule_3_a_shadow_takes_a_slot_and_is_counted_as_nobody() -> None:
    """The driver's own requests: their batches are samples like any, their ends are neither hits nor misses."""
    to = batcher(admission=Admission(max_queued_rows=4))

    def shadow(now: float, **fields: Any) -> Request:
        return request(now, mergeable=False, shadow=True, rows=4, **fields)

    (first,) = batches(send(to, 0.0, shadow(0.0)))
    assert to.in_flight == 1
    real, late = request(0.0), shadow(0.0, deadline=0.5)
    assert send(to, 0.0, real, late) == [Refusal(late, Refused.QUEUE_FULL, 1.0)]
    (second,) = batches(to.complete(first, 0.1))
    assert [each for each, _, _ in second.slices] == [real]
    expiring = shadow(0.1, deadline=0.5)
    send(to, 0.1, expiring)
    assert Refusal(expiring, Refused.EXPIRED) in to.poll(0.6)
    to.learn("m", estimate(), 0.6)
    hopeless = shadow(0.6, deadline=0.601)
    assert [action.reason for action in send(to, 0.6, hopeless) if isinstance(action, Refusal)] == [Refused.LATE]
    dropped = shadow(0.7, deadline=0.75)
    send(to, 0.7, dropped)
    assert refusals(to.complete(second, 0.749)) == [(dropped, Refused.LATE)]
    counted = to.stats(1.0).models["m"]
    assert (counted.arrivals, counted.rows, counted.misses) == (1, 1, {})
    assert {(rows, batches) for _, rows, _, _, batches, *_ in counted.cells} <= {(4, 1), (1, 1)}


def test_rule_4_ray_the_next_batch_grows_until_a_slot_is_free() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    asked = [request(now / 1000) for now in range(1, 6)]
    for each in asked:
        assert to.arrive(each, each.arrived) == []
        assert to.poll(each.arrived) == []
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == asked


def test_rule_4_slots_bound_the_batches_in_flight() -> None:
    to = batcher(max_batch=1, slots=3)
    sent = batches(send(to, 0.0, *(request() for _ in range(5))))
    assert len(sent) == to.in_flight == 3
    assert [batch.in_flight for batch in sent] == [1, 2, 3]
    assert len(batches(to.complete(sent[1], 0.01))) == 1
    assert to.in_flight == 3


def test_rule_4_a_model_that_never_answers_takes_no_slot_of_another() -> None:
    to = batcher(max_batch=1, slots=2)
    hung = batches(send(to, 0.0, *(request(model="other") for _ in range(5))))
    assert len(hung) == 2
    asked = [request() for _ in range(2)]
    assert [waiters(batch) for batch in batches(send(to, 0.0, *asked))] == [[asked[0]], [asked[1]]]


def test_rule_4_a_model_that_never_answers_fills_no_queue_and_delays_no_forecast_of_another() -> None:
    to = held(max_wait=0.0, admission=Admission(max_queued_rows=4))
    to.learn("other", estimate(), 0.0)
    send(to, 0.0, *(request(model="other", deadline=60.0) for _ in range(9)))
    to.poll(5.0)  # its first call gave the slot back, the next never answers either
    send(to, 10.0, *(request(10.0, model="other", deadline=60.0) for _ in range(9)))
    assert to.model("other").load.rows == 4
    to.arrive(request(10.0), 10.0)
    # 5.5 ms for what runs and 5.5 for itself; nothing of the other model's queue reaches the upstream.
    assert refusals(to.arrive(request(10.0, deadline=10.0111), 10.0)) == []
    assert refusals(to.arrive(request(10.0, deadline=10.0109), 10.0)) != []


def test_rule_4_models_take_turns_in_forecasts() -> None:
    to = held(max_batch=1, max_wait=0.0)
    to.learn("other", estimate(), 0.0)
    send(to, 0.0, *(request(0.0, model="other") for _ in range(6)), request(0.0))
    # In front: two calls under way (11 ms), one batch of the other model (5.5), then itself (5.5).
    assert refusals(to.arrive(request(0.0, deadline=0.0221), 0.0)) == []
    to.cancel(next(iter(to._queues.by_key[("m", "k")])), 0.0)
    assert refusals(to.arrive(request(0.0, deadline=0.0219), 0.0)) != []


def test_rule_8_an_overdue_call_gives_its_slot_back() -> None:
    to = held(max_batch=1, max_wait=0.0)
    (hung,) = batches(to.arrive(request(), 0.0))
    waiting = request(deadline=60.0)
    to.arrive(waiting, 0.0)
    assert to.wake_at() == LEAST_OVERDUE
    (next_one,) = batches(to.poll(LEAST_OVERDUE))
    assert waiters(next_one) == [waiting]
    assert (to.model("m").load.overdue, to.model("m").load.gave_back, to.in_flight) == (1, 1, 2)
    # Answered after all, it is an answer like any other, and frees no second slot.
    (finish,) = to.complete(hung, 1.5)
    assert isinstance(finish, Finish)
    assert not to.model("m").free
    to.complete(next_one, 1.5)
    assert to.model("m").free
    assert to.idle


def test_rule_8_a_long_call_is_overdue_after_four_times_its_forecast() -> None:
    to = batcher(max_batch=1)
    to.learn("m", estimate(base=1.0, row=0.0), 0.0)
    to.arrive(request(slo=10.0), 0.0)
    assert to.wake_at() == 4.0


def test_rule_8_a_call_of_unknown_duration_is_overdue_too() -> None:
    to = batcher(max_batch=1)
    to.arrive(request(), 0.0)
    assert to.wake_at() == OVERDUE_UNKNOWN


def test_rule_8_as_many_calls_may_be_overdue_as_there_are_slots() -> None:
    to = held(max_batch=1, max_wait=0.0, slots=2)
    sent = len(batches(send(to, 0.0, *(request(deadline=60.0) for _ in range(9)))))
    for second in range(1, 30):
        sent += len(batches(to.poll(float(second))))
    assert sent == 4
    assert to.wake_at() == 60.0, "nothing else can become due"


def test_rule_8_the_device_is_not_busy_with_an_overdue_call() -> None:
    to = held(max_batch=1, max_wait=0.0)
    (hung,) = batches(to.arrive(request(deadline=60.0), 0.0))
    to.poll(LEAST_OVERDUE)
    assert to.stats(30.0).device_busy == LEAST_OVERDUE
    to.complete(hung, 40.0)
    assert to.stats(50.0).device_busy == LEAST_OVERDUE


def test_rule_5_kserve_zero_wait_is_work_conserving_when_idle() -> None:
    to = held(max_wait=0.0)
    assert batches(to.arrive(request(), 0.0))


def test_rule_5_due_when_full() -> None:
    to = held(max_batch=4)
    assert send(to, 0.0, *(request() for _ in range(3))) == []
    (batch,) = batches(to.arrive(request(0.001), 0.001))
    assert batch.rows == 4


def test_rule_5_due_at_the_age_of_the_oldest() -> None:
    to = held(max_wait=0.02)
    oldest = request(0.0)
    assert to.arrive(oldest, 0.001) == []  # the age counts from its last byte
    assert to.arrive(request(0.015), 0.015) == []
    assert to.wake_at() == pytest.approx(0.02)
    assert to.poll(0.0199) == []
    (batch,) = batches(to.poll(to.wake_at()))
    assert batch.rows == 2


def test_rule_5_a_later_key_never_postpones_an_earlier_one() -> None:
    to = held(max_wait=0.02)
    to.arrive(request(0.0, key="k"), 0.0)
    to.arrive(request(0.01, key="l"), 0.01)
    assert to.wake_at() == pytest.approx(0.02)
    (batch,) = batches(to.poll(0.02))
    assert batch.rows == 1
    to.complete(batch, 0.025)
    assert to.wake_at() == pytest.approx(0.03)


@pytest.mark.parametrize("limit", ["due", "deadline"])
def test_rule_5_a_batch_is_due_when_waiting_longer_would_make_a_request_late(limit: str) -> None:
    # Two rows take 6 ms, seldom more than 6.6: to be there at 15 ms, they leave at 8.4.
    to = held(max_wait=0.02)
    to.arrive(request(0.0), 0.0)
    to.arrive(request(0.0, **{limit: 0.015}), 0.0)
    assert to.wake_at() == pytest.approx(0.0084)
    assert batches(to.poll(to.wake_at()))


def test_rule_5_a_request_held_to_the_last_moment_is_in_time() -> None:
    # Five rows take 7.5 ms. In floats, this one leaves 1e-17 s too late for that.
    now = 0.0938595867742349
    to = batcher(max_batch=8, max_wait=0.02)
    to.learn("m", replace(estimate(), upper=estimate().times), 0.0, shed_slo=True)
    (first,) = batches(to.arrive(request(now, key="first", rows=8), now))
    only = request(now, rows=5, slo=0.02)
    to.arrive(only, now)
    to.complete(first, now)
    assert to.wake_at() + 0.0075 > only.due
    assert [waiters(batch) for batch in batches(to.poll(to.wake_at()))] == [[only]]


def test_rule_5_more_rows_in_the_batch_bring_its_last_moment_forward() -> None:
    to = held(max_wait=0.02)
    to.arrive(request(0.0, due=0.015), 0.0)
    to.arrive(request(0.008, rows=5), 0.008)  # 6 rows: 8.8 ms
    to.poll(0.008)
    assert to.in_flight == 1


def test_rule_5_nothing_is_held_while_the_service_time_is_unknown() -> None:
    to = held()
    to.arrive(request(), 0.0)
    assert batches(to.learn("m", None, 0.001))
    assert batches(batcher(max_wait=0.02).arrive(request(), 0.0))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Parameters(max_batch=64, max_wait=Duration(0.01)), Parameters(max_batch=64, max_wait=Duration(0.1))),
        (Parameters(max_batch=2), Parameters(max_batch=64, max_wait=Duration(0.1))),
        (Parameters(max_batch=1, max_wait=Duration(0.1)), Parameters(max_batch=64, max_wait=Duration(0.1))),
        (Parameters(max_wait=Duration(0.1), pass_through=True), Parameters(max_batch=64, max_wait=Duration(0.1))),
    ],
    ids=["longer wait", "zero wait to wait", "full before", "pass-through to batches"],
)
def test_rule_5_new_parameters_never_postpone_queued_work(before: Parameters, after: Parameters) -> None:
    to = Batcher(before)
    to.learn("m", estimate(), 0.0)
    first = batches(to.arrive(request(slo=1.0), 0.0)) or batches(to.poll(to.wake_at()))
    waiting = request(0.01, slo=1.0)
    to.arrive(waiting, 0.01)
    to.configure(after, 0.011)
    actions = to.complete(first[0], 0.02)
    assert [waiters(batch) for batch in batches(actions)] == [[waiting]]


def test_rule_5_a_shorter_wait_in_between_is_not_taken_back() -> None:
    to = held(max_wait=0.02)
    to.arrive(request(slo=1.0), 0.0)
    to.configure(Parameters(max_wait=Duration(0.005)), 0.001)
    to.configure(Parameters(max_wait=Duration(0.1)), 0.002)
    assert to.wake_at() == pytest.approx(0.005)
    (batch,) = batches(to.poll(0.005))
    to.complete(batch, 0.01)
    to.arrive(request(0.01, slo=1.0), 0.01)
    assert to.wake_at() == pytest.approx(0.11)  # only what waited keeps the old wait


def test_rule_5_a_drain_holds_nothing() -> None:
    to = held()
    to.arrive(request(), 0.0)
    assert batches(to.drain(0.001))
    to.close()
    assert refusals(to.arrive(request(0.002), 0.002))[0][1] is Refused.DRAINING


# ------------------------------------------------------------------------------------------------- rule 6


def test_rule_6_first_come_first_served_inside_a_class() -> None:
    to = batcher(max_batch=2)
    first = occupied(to)
    asked = [request() for _ in range(4)]
    send(to, 0.0, *asked)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == asked[:2]


def test_rule_6_higher_classes_go_first() -> None:
    to = batcher(max_batch=1)
    first = occupied(to)
    low, normal, high = (request(priority=priority) for priority in (3, 2, 1))
    send(to, 0.0, low, normal, high)
    order = [waiter for batch in one_after_another(to, first) for waiter in waiters(batch)]
    assert order == [high, normal, low]


def test_rule_6_no_class_starves() -> None:
    # One class a second: a low request of age 2 s goes before a fresh high one.
    to = batcher(max_batch=1, ageing=1.0)
    running = occupied(to)
    low = request(0.0, priority=3)
    to.arrive(low, 0.0)
    for step in range(1, 40):
        now = step * 0.1
        to.arrive(request(now, priority=1), now)
        (running,) = batches(to.complete(running, now))
        if waiters(running) == [low]:
            break
    assert now == pytest.approx(2.0)


def test_rule_6_the_most_urgent_key_goes_first() -> None:
    to = held(max_wait=0.0)
    first = occupied(to)
    relaxed, urgent = request(key="k", slo=0.5), request(key="l", slo=0.04)
    send(to, 0.0, relaxed, urgent)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == [urgent]


def test_rule_6_a_class_is_worth_its_ageing_among_keys_too() -> None:
    to = batcher(ageing=1.0)
    first = occupied(to)
    normal, high = request(key="k", slo=0.05), request(key="l", slo=0.9, priority=1)
    send(to, 0.0, normal, high)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == [high]


def test_rule_6_a_long_batch_must_start_earlier() -> None:
    to = held(max_wait=0.0)
    first = occupied(to)
    send(to, 0.0, request(key="short", slo=0.040), request(key="long", rows=8, slo=0.042))  # 5.5 ms and 9 ms
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch)[0].key == "long"


def test_rule_6_a_flood_of_one_key_goes_behind_the_others() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    flood = [request(key="flood") for _ in range(40)]
    send(to, 0.0, *flood)
    late = request(0.001, key="other")
    to.arrive(late, 0.001)
    groups = [waiters(batch) for batch in one_after_another(to, first)]
    assert groups[0] == [late]
    assert [each for group in groups[1:] for each in group] == flood


def test_rule_6_two_keys_that_wait_for_as_much_are_served_by_urgency() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    one, two = [request(key="one") for _ in range(12)], [request(key="two", slo=0.04) for _ in range(12)]
    send(to, 0.0, *one, *two)
    assert waiters(batches(to.complete(first, 0.01))[0]) == two[:4]


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


def test_rule_6_a_flood_goes_before_lower_classes_and_loses_nothing_to_them() -> None:
    to = batcher(max_batch=4, admission=Admission(max_queued_rows=20))
    first = occupied(to)
    flood = [request(key="flood") for _ in range(15)]
    low = request(key="other", priority=Priority.LOW)
    send(to, 0.0, *flood, low)
    another = request(key="other", priority=Priority.LOW)
    assert refusals(to.arrive(another, 0.0)) == [(another, Refused.QUEUE_FULL)]
    served = [each for group in one_after_another(to, first) for each in waiters(group)]
    assert served[-1] is low or served.index(low) > 11, "only what is left of a flood is none"


def test_rule_6_a_length_is_no_other_key() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    many = [request(key=0, bucket=0) for _ in range(40)]
    send(to, 0.0, *many, request(0.001, key=1, bucket=1))
    assert waiters(batches(to.complete(first, 0.01))[0]) == many[:4]


def test_rule_7_a_flood_of_one_key_delays_forecasts_of_others_by_one_batch() -> None:
    to = held(max_batch=4, max_wait=0.0)
    occupied(to)
    send(to, 0.0, *(request(key="flood", deadline=60.0) for _ in range(40)))
    # 5.5 ms for what runs, 7 for a batch of the flood, 5.5 for itself.
    assert refusals(to.arrive(request(key="other", deadline=0.0181), 0.0)) == []
    assert refusals(to.arrive(request(key="third", deadline=0.0179), 0.0)) != []


def test_rule_6_triton_the_head_of_one_key_never_cuts_another_s_batch() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    send(to, 0.0, *(request(key=key, slo=slo) for key, slo in zip("kokoko", (0.1, 0.2) * 3, strict=True)))
    (batch,) = batches(to.complete(first, 0.01))
    assert [waiter.key for waiter in waiters(batch)] == ["k", "k", "k"]


def test_rule_6_no_key_starves() -> None:
    to = held(max_batch=1, max_wait=0.0)
    running = occupied(to)
    patient = request(0.0, key="patient", slo=0.05, priority=3)
    to.arrive(patient, 0.0)
    for step in range(1, 300):
        now = step * 0.01
        to.arrive(request(now, key="busy", priority=1), now)
        (running,) = batches(to.complete(running, now))
        if waiters(running) == [patient]:
            return
    pytest.fail("starved")


# ------------------------------------------------------------------------------------------------- rule 7


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


def test_beyond_the_limit_of_waiting_keys_requests_with_a_new_key_are_sent_alone() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    send(to, 0.0, *(request(key=kind) for kind in range(MAX_KEYS)))
    late, later = (request(key="another") for _ in range(2))
    assert not refusals(send(to, 0.0, late, later, request(key=0)))
    sent = one_after_another(to, first)
    assert [waiters(batch) for batch in sent if late in waiters(batch)] == [[late]]
    assert [waiters(batch) for batch in sent if later in waiters(batch)] == [[later]]
    assert sorted(batch.rows for batch in sent) == [1] * (MAX_KEYS + 1) + [2]


def test_of_another_kind_what_is_larger_than_a_batch_is_split_all_the_same() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    send(to, 0.0, *(request(key=kind) for kind in range(MAX_KEYS)), request(key="another", rows=20))
    assert max(batch.rows for batch in one_after_another(to, first)) == 8


def test_sizes_seen_are_bounded() -> None:
    to = batcher(max_batch=1)
    to.model("m").first_batches.seen = {(bucket, 1) for bucket in range(MAX_CELLS)}
    (batch,) = batches(to.arrive(request(), 0.0))
    assert batch.cold is ((0, 1) not in to.model("m").first_batches.seen)
    (batch,) = batches(to.complete(batch, 0.01) + to.arrive(request(bucket=-1), 0.02))
    assert not batch.cold
    assert len(to.model("m").first_batches.seen) == MAX_CELLS


def test_what_boarded_no_longer_counts_as_waiting() -> None:
    to = held(slots=2)
    first, second = send(to, 0.0, request(key="one", arrived=-1.0), request(key="two", arrived=-1.0))
    send(to, 0.0, *(request() for _ in range(12)))
    assert [batch.rows for batch in batches(to.complete(first, 0.001))] == [8]
    assert to.queued_rows == 4
    assert not batches(to.complete(second, 0.002))  # four of eight rows: they wait for more
    assert [batch.rows for batch in batches(send(to, 0.003, *(request(0.003) for _ in range(4))))] == [8]


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


def by_bucket() -> Estimate:
    """All together: 5 ms + 0.5 ms a row; short ones half of that, long ones four times as much."""
    return replace(estimate(), buckets={1: estimate(0.0025, 0.00025), 4: estimate(0.020, 0.002)})


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


def test_rule_5_each_length_is_held_by_what_its_own_bucket_seldom_exceeds() -> None:
    to = batcher(max_wait=1.0)
    to.learn("m", by_bucket(), 0.0)
    to.arrive(request(key="long", bucket=4), 0.0)
    assert to.wake_at() == pytest.approx(0.05 - 0.022 * 1.1)
    to.arrive(request(key="another", bucket=7, slo=0.02), 0.0)
    assert to.wake_at() == pytest.approx(0.02 - 0.0055 * 1.1)


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


# ------------------------------------------------------------------------------------------------- rule 8


def test_rule_8_a_cancelled_request_leaves_the_queue() -> None:
    to = batcher()
    first = occupied(to)
    gone, stays = request(size=5), request(size=7)
    send(to, 0.0, gone, stays)
    assert to.cancel(gone, 0.001) == []
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (1, 7)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == [stays]
    assert to.model("m").counters.misses == {CANCELLED: 1}


def test_rule_8_mlserver_cancelling_one_request_leaves_the_others_of_its_batch() -> None:
    to = held(max_batch=2)
    gone, stays = request(), request()
    (batch,) = batches(send(to, 0.0, gone, stays))
    assert to.cancel(gone, 0.001) == []
    (finish,) = to.complete(batch, 0.006)
    assert finish.requests == [stays]


def test_rule_8_kserve_a_call_nobody_waits_for_is_aborted_and_its_slot_stays_taken() -> None:
    to = held(max_wait=0.0)
    gone = request()
    (batch,) = batches(to.arrive(gone, 0.0))
    waiting = request()
    to.arrive(waiting, 0.0)
    assert to.cancel(gone, 0.001) == [Abort(batch)]
    assert to.in_flight == 1
    assert to.wake_at() == pytest.approx(0.0055)  # servers compute on
    assert to.poll(0.0054) == []
    (following,) = batches(to.poll(to.wake_at()))
    assert waiters(following) == [waiting]
    assert to.complete(batch, 0.006) == []  # a report that crossed the abort


def test_rule_8_an_abandoned_slot_frees_for_the_waiting_even_when_an_arrival_is_refused_first() -> None:
    to = held(max_wait=0.0, admission=Admission(max_queued_rows=1))
    gone = request()
    to.arrive(gone, 0.0)
    waiting = request()
    to.arrive(waiting, 0.0)
    to.cancel(gone, 0.001)
    actions = to.arrive(request(0.01, deadline=0.01), 0.01)
    assert [waiters(batch) for batch in batches(actions)] == [[waiting]]


def test_rule_8_the_slot_frees_at_once_where_no_finish_is_predicted() -> None:
    to = batcher()
    gone = request()
    to.arrive(gone, 0.0)
    to.arrive(request(), 0.0)
    assert [type(action) for action in to.cancel(gone, 0.001)] == [Abort, Batch]


def test_rule_8_a_split_request_is_cancelled_in_the_queue_and_in_flight() -> None:
    to = held(max_batch=4, max_wait=0.0)
    gone = request(rows=10, size=3)
    (batch,) = batches(to.arrive(gone, 0.0))
    assert to.cancel(gone, 0.001) == [Abort(batch)]
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (0, 0)
    assert to.poll(to.wake_at()) == []
    assert to.idle


def test_rule_8_what_is_left_of_a_failed_batch_waits_for_the_abandoned_slot() -> None:
    to = held(max_batch=4)
    asked = [request() for _ in range(4)]
    (batch,) = batches(send(to, 0.0, *asked))
    (half,) = batches(to.complete(batch, 0.007, fault=ITEM))
    assert waiters(half) == asked[:2]
    to.cancel(asked[0], 0.008)
    assert to.cancel(asked[1], 0.008) == [Abort(half)]
    assert not to.idle
    assert to.poll(0.0129) == []  # two rows take 6 ms, from 7 ms on
    (rest,) = batches(to.poll(to.wake_at()))
    assert to.wake_at() == LEAST_OVERDUE
    assert waiters(rest) == asked[2:]
    assert rest.dispatched == pytest.approx(0.013)


def test_rule_8_deadlines_hold_for_what_waits_behind_an_abandoned_call() -> None:
    to = held(max_batch=2)
    asked = [request(deadline=0.009), request(deadline=0.011)]
    (batch,) = batches(send(to, 0.0, *asked))
    (half,) = batches(to.complete(batch, 0.007, fault=ITEM))
    assert to.cancel(asked[0], 0.008) == [Abort(half)]  # its slot is taken until 12.5 ms
    actions = to.poll(0.009)
    assert actions == []
    assert to.wake_at() == 0.011
    assert refusals(to.poll(0.011)) == [(asked[1], Refused.EXPIRED)]
    assert to.poll(0.0125) == []
    assert to.idle


def test_rule_8_triton_deadlines_end_waiting_requests_and_running_batches() -> None:
    to = batcher(max_batch=1)
    riding, waiting = request(deadline=0.01), request(deadline=0.02)
    (batch,) = batches(send(to, 0.0, riding, waiting))
    assert to.wake_at() == 0.01
    actions = to.poll(0.01)
    assert actions[:2] == [Refusal(riding, Refused.EXPIRED), Abort(batch)]
    assert [waiters(batch) for batch in batches(actions)] == [[waiting]]
    assert to.wake_at() == 0.02
    assert refusals(to.poll(0.02)) == [(waiting, Refused.EXPIRED)]
    assert to.wake_at() == inf
    assert to.idle
    assert to.model("m").counters.misses == {Refused.EXPIRED: 2}


def test_rule_8_an_expired_request_is_not_dispatched_when_the_poll_is_late() -> None:
    to = batcher(max_batch=1)
    first = occupied(to)
    waiting = request(deadline=0.005)
    to.arrive(waiting, 0.0)
    actions = to.complete(first, 0.006)
    assert refusals(actions) == [(waiting, Refused.EXPIRED)]
    assert batches(actions) == []


def test_rule_8_device_time_of_abandoned_calls_ends_with_them() -> None:
    to = held(max_wait=0.0)
    gone = request()
    to.arrive(gone, 0.0)
    to.cancel(gone, 0.001)
    before = to.stats(1.0).device_busy
    to.poll(1.0)
    assert before == to.stats(1.0).device_busy == pytest.approx(0.0055)


# ------------------------------------------------------------------------------------------------- rule 9


def serve(
    to: Batcher, batch: Batch, culprits: set[Request], fault: Fault = ITEM
) -> tuple[list[Request], list[Failure], int]:
    """Complete until nothing is in flight; batches with a culprit fail. Returns who was answered, failures, calls."""
    answered: list[Request] = []
    failures: list[Failure] = []
    running = [batch]
    calls = 0
    while running:
        batch = running.pop(0)
        calls += 1
        bad = culprits.intersection(waiters(batch))
        actions = to.complete(batch, calls / 100, fault=fault if bad else None)
        for action in actions:
            if isinstance(action, Batch):
                running.append(action)
                assert to.in_flight == 1, "parts are served in the same slot"
            elif isinstance(action, Finish):
                answered += action.requests
            elif isinstance(action, Failure):
                failures.append(action)
    return answered, failures, calls


def together(to: Batcher, count: int, **fields: Any) -> tuple[list[Request], Batch]:
    """Requests of one batch."""
    first = occupied(to)
    asked = [request(**fields) for _ in range(count)]
    send(to, 0.0, *asked)
    (batch,) = batches(to.complete(first, 0.001))
    assert waiters(batch) == asked
    return asked, batch


@pytest.mark.parametrize("culprits", [{0}, {7}, {3}, {0, 1}, {2, 7}])
def test_rule_9_bisection_leaves_the_culprits_alone_with_their_error(culprits: set[int]) -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 8)
    bad = {asked[index] for index in culprits}
    answered, failures, _ = serve(to, batch, bad)
    assert answered == [each for each in asked if each not in bad]
    assert [failure.requests for failure in failures] == [[each] for each in asked if each in bad]
    assert not any(failure.unresolved for failure in failures)
    assert all(failure.fault is ITEM for failure in failures)
    assert to.idle


def test_rule_9_tfserving_one_bad_request_in_64_fails_alone() -> None:
    to = batcher(max_batch=32)
    asked, batch = together(to, 32)
    answered, failures, calls = serve(to, batch, {asked[17]})
    assert len(answered) == 31
    assert [failure.requests for failure in failures] == [[asked[17]]]
    assert calls == 11  # the whole, and two a level for five levels


def test_rule_9_torchserve_when_the_credit_is_spent_each_is_sent_alone_and_batches_shrink() -> None:
    to = batcher(max_batch=64)
    asked, batch = together(to, 64)
    bad = set(asked[::2])
    answered, failures, calls = serve(to, batch, bad)  # 64 rows go into the two halves, then each goes alone
    assert set(answered) == set(asked) - bad
    assert [failure.requests for failure in failures] == [[each] for each in asked if each in bad]
    assert not any(failure.unresolved for failure in failures)
    assert calls == 1 + 2 + 64
    assert to.model("m").cap == 64, "requests of other keys are batched as before"
    first = occupied(to)
    send(to, 0.7, *(request() for _ in range(64)))
    # A half of 64 failed, and the other half: the limit was halved twice.
    assert [batch.rows for batch in one_after_another(to, first)[:2]] == [16, 16]


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1, 0.5])
def test_rule_9_innocents_never_fail_and_what_is_served_again_is_bounded(share: float) -> None:
    random = Random(f"poison {share}")
    times = until(Poisson(300.0), 60.0, Random("arrivals"))
    load = [Arrival(time, poisoned=random.random() < share) for time in times]
    device = Device(linear(0.005, 0.0005), executors=1)
    outcome = Simulation(
        load, device, slo=1.0, parameters=Parameters(max_batch=32, max_wait=Duration(0.01)), estimate=device.estimate()
    ).run()
    ends = Counter((each.poisoned, ENDS[code]) for each, code in zip(load, outcome.ends, strict=True))
    if share < 0.02:  # beyond, batches are too small for this load; without Carpool they would be of one row
        assert set(ends) == {(False, End.HIT), (True, End.FAILED)}
    assert (False, End.FAILED) not in ends
    served = len(load) - ends[False, End.SHED] - ends[False, End.EXPIRED] - ends[True, End.EXPIRED]
    assert sum(outcome.batch_rows) <= EXTRA_ROWS + (1 + 1.5 * EXTRA_SHARE) * served


def test_rule_9_a_key_without_poison_keeps_its_batches() -> None:
    to = batcher(max_batch=64)
    asked, batch = together(to, 64, key="tenant a")
    serve(to, batch, set(asked))
    first = occupied(to)
    send(to, 0.7, *(request(key="tenant b") for _ in range(64)))
    assert [batch.rows for batch in one_after_another(to, first)] == [64]


def test_rule_9_a_caller_with_bad_requests_costs_the_others_no_batches() -> None:
    random = Random("callers")
    times = until(Poisson(600.0), 30.0, Random("arrivals"))
    callers = [random.randrange(10) for _ in times]
    device = Device(linear(0.005, 0.0005), executors=1)

    def share_in_time(known: bool) -> float:
        load = [
            Arrival(time, poisoned=caller == 9, caller=caller if known else None)
            for time, caller in zip(times, callers, strict=True)
        ]
        parameters = Parameters(max_batch=32, max_wait=Duration(0.01))
        outcome = Simulation(load, device, slo=0.1, parameters=parameters, estimate=device.estimate()).run()
        ends = [ENDS[code] for each, code in zip(load, outcome.ends, strict=True) if not each.poisoned]
        return ends.count(End.HIT) / len(ends)

    assert share_in_time(known=True) > 0.99
    # Where nobody knows who it is, batches shrink to one or two rows, and the device serves 182 to 333 a second.
    assert share_in_time(known=False) < 0.5


@pytest.mark.parametrize("mergeable", [True, False])
def test_rule_9_who_sends_what_can_not_be_batched_anyway_is_no_suspect(mergeable: bool) -> None:
    # Behind a gateway all callers are one: a malformed request in twenty would end batching for everybody.
    to = batcher(max_batch=8, max_wait=0.0, slots=1)
    for now in range(3):
        to.arrive(Request(key="k", model="m", arrived=now, due=now + 1.0, mergeable=mergeable, caller="gateway"), now)
        (batch,) = to._slots.in_flight
        to.complete(batch, now + 0.01, fault=Fault(FaultKind.ITEM))
    assert bool(to.model("m").isolation.suspects.left) is mergeable


def test_rule_9_keys_that_are_watched_are_bounded() -> None:
    isolation = batcher().model("m").isolation
    for key in range(3 * MAX_ISOLATED):
        isolation.failed(key, 2)
    assert list(isolation.keys) == list(range(2 * MAX_ISOLATED, 3 * MAX_ISOLATED))


def test_rule_9_what_may_not_be_sent_again_shares_the_error() -> None:
    to = batcher(max_batch=8, idempotent=False)
    asked, batch = together(to, 3)
    assert to.complete(batch, 0.01, fault=ITEM) == [Failure(asked, ITEM, unresolved=True)]
    asked, batch = together(to, 3)
    wrong = Fault(FaultKind.ROWS)
    assert to.complete(batch, 0.02, fault=wrong) == [Failure(asked, wrong)]
    assert to.model("m").isolation.quarantined


def test_rule_9_one_request_alone_gets_its_own_error_at_once() -> None:
    to = batcher(max_batch=8)
    asked = request(rows=4)
    (batch,) = batches(to.arrive(asked, 0.0))
    assert to.complete(batch, 0.01, fault=ITEM) == [Failure([asked], ITEM)]


def test_rule_9_who_stays_is_not_blamed_for_a_culprit_who_left() -> None:
    to = batcher(max_batch=8)
    (gone, stays), batch = together(to, 2)
    to.cancel(gone, 0.005)
    (again,) = batches(to.complete(batch, 0.01, fault=ITEM))
    assert waiters(again) == [stays]
    assert to.complete(again, 0.02)[0].requests == [stays]
    assert to.model("m").limits.ceiling is None


def test_rule_9_a_failed_part_fails_the_request_and_stops_its_other_parts() -> None:
    to = batcher(max_batch=4, slots=2)
    large = request(rows=12)
    parts = batches(to.arrive(large, 0.0))
    actions = to.complete(parts[0], 0.01, fault=ITEM)
    assert actions == [Failure([large], ITEM), Abort(parts[1])]
    assert to.queued_rows == 0
    assert to.idle


def test_rule_9_both_halves_succeeding_is_a_size_fault() -> None:
    to = batcher(max_batch=8)
    _, batch = together(to, 8)
    (left,) = batches(to.complete(batch, 0.01, fault=ITEM))
    (right,) = batches(to.complete(left, 0.02))
    assert to.model("m").limits.ceiling is None
    to.complete(right, 0.03)
    assert to.model("m").cap == 4
    _, batch = together(to, 4)
    assert batch.rows == 4


def test_rule_9_halves_prove_nothing_once_a_request_has_left() -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 8)
    (left,) = batches(to.complete(batch, 0.01, fault=ITEM))
    to.cancel(asked[7], 0.015)
    (right,) = batches(to.complete(left, 0.02))
    to.complete(right, 0.03)
    assert to.model("m").limits.ceiling is None


def test_rule_9_halves_prove_nothing_when_a_request_left_before_the_fault() -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 8)
    to.cancel(asked[0], 0.005)
    (left,) = batches(to.complete(batch, 0.01, fault=ITEM))
    (right,) = batches(to.complete(left, 0.02))
    to.complete(right, 0.03)
    assert to.model("m").limits.ceiling is None


def test_rule_9_413_halves_through_requests_and_lowers_the_ceiling() -> None:
    to = batcher(max_batch=16)
    asked = request(rows=16)
    (batch,) = batches(to.arrive(asked, 0.0))
    spans = []
    finished: list[Request] = []
    while batch:
        actions = to.complete(batch, 0.01, fault=SIZE if batch.rows > 5 else None)
        if batch.rows <= 5:
            spans += [portion[1:] for portion in batch.slices]
        finished += [done for action in actions if isinstance(action, Finish) for done in action.requests]
        batch = next(iter(batches(actions)), None)
    assert spans == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert finished == [asked]
    assert to.model("m").cap == 4


def test_rule_9_413_of_one_row_is_its_own_and_costs_the_others_no_ceiling() -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 8)
    answered, failures, _ = serve(to, batch, {asked[5]}, SIZE)
    assert len(answered) == 7
    assert [failure.requests for failure in failures] == [[asked[5]]]
    assert to.model("m").limits.ceiling is None


def test_rule_9_413_of_a_row_of_a_larger_request_is_judged_by_the_whole() -> None:
    to = batcher(max_batch=1)
    large = request(rows=3)
    (part,) = batches(to.arrive(large, 0.0))
    (whole,) = batches(to.complete(part, 0.01, fault=SIZE))
    assert whole.slices == [(large, 0, 3)]
    assert to.complete(whole, 0.02, fault=SIZE) == [Failure([large], SIZE)]


def test_rule_9_413_lowers_the_ceiling_at_once_when_the_budget_is_spent() -> None:
    to = batcher(max_batch=8)
    to.model("m").limits.again_rows = 100
    _, batch = together(to, 7)
    (part,) = batches(to.complete(batch, 0.01, fault=SIZE))
    assert to.model("m").cap == 4
    assert part.rows == 3


def test_rule_9_parts_obey_a_cap_lowered_while_they_waited() -> None:
    to = batcher(max_batch=16)
    _, batch = together(to, 16)
    (left,) = batches(to.complete(batch, 0.01, fault=ITEM))
    to.configure(Parameters(max_batch=3), 0.015)
    (part,) = batches(to.complete(left, 0.02))
    assert part.rows == 2  # 8 halved twice


@pytest.mark.parametrize("kind", [FaultKind.SHARED, FaultKind.TRANSPORT])
def test_rule_9_shared_errors_are_not_bisected(kind: FaultKind) -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 3)
    fault = Fault(kind)
    assert to.complete(batch, 0.01, fault=fault) == [Failure(asked, fault)]


def test_rule_9_wrong_rows_quarantine_the_model_and_each_is_served_alone() -> None:
    to = batcher(max_batch=8)
    asked, batch = together(to, 3)
    waiting = [request(rows=9), request(), request()]
    send(to, 0.0, *waiting)
    running = batches(to.complete(batch, 0.01, fault=Fault(FaultKind.ROWS)))
    assert to.model("m").isolation.quarantined
    served = []
    for step in range(6):
        (one,) = running
        served.append(one.slices)
        running = batches(to.complete(one, 0.02 + step / 100))
    assert served == [[(each, 0, each.rows)] for each in (*asked, *waiting)]
    assert running == []
    to.restarted(0.1)
    together(to, 3)


def test_rule_9_what_was_sent_before_the_quarantine_is_served_again_alone() -> None:
    to = batcher(max_batch=2, slots=2)
    asked = [request() for _ in range(4)]
    blockers = batches(send(to, 0.0, request(key="x"), request(key="y")))
    send(to, 0.0, *asked)
    one, two = [batches(to.complete(blocker, 0.01))[0] for blocker in blockers]
    alone = batches(to.complete(one, 0.02, fault=Fault(FaultKind.ROWS)))
    # It has as many rows as were asked for, and still they may be the wrong ones.
    alone += batches(to.complete(two, 0.02))
    assert [each.slices for each in alone] == [[(asked[0], 0, 1)], [(asked[2], 0, 1)]]


def test_rule_9_a_request_in_parts_is_served_again_whole() -> None:
    to = batcher(max_batch=4, slots=2)
    large = request(rows=12)
    parts = batches(to.arrive(large, 0.0))
    neighbour = request()
    to.arrive(neighbour, 0.0)
    actions = to.complete(parts[0], 0.01, fault=Fault(FaultKind.ROWS))
    assert Abort(parts[1]) in actions, "nobody waits for the other part any more"
    running = batches(actions)
    assert (large, 0, 12) in [portion for each in running for portion in each.slices]
    finished = []
    while running:
        actions = to.complete(running.pop(0), 0.02)
        running += batches(actions)
        finished += [done for action in actions if isinstance(action, Finish) for done in action.requests]
    assert sorted(finished, key=lambda done: done.rows) == [neighbour, large]
    assert to.idle


def test_rule_9_wrong_rows_of_a_whole_request_say_nothing_of_batching() -> None:
    to = batcher(max_batch=8)
    (batch,) = batches(to.arrive(request(rows=2), 0.0))
    to.complete(batch, 0.01, fault=Fault(FaultKind.ROWS))
    assert not to.model("m").isolation.quarantined


def test_rule_9_wrong_rows_of_a_part_quarantine() -> None:
    to = batcher(max_batch=8)
    (batch,) = batches(to.arrive(request(rows=20), 0.0))
    (again,) = batches(to.complete(batch, 0.01, fault=Fault(FaultKind.ROWS)))
    assert to.model("m").isolation.quarantined
    assert again.whole


def test_rule_9_requests_of_a_part_are_sent_alone_once_their_model_is_quarantined() -> None:
    to = batcher(max_batch=8, slots=2)
    asked = [request() for _ in range(4)]
    blockers = batches(send(to, 0.0, request(key="x"), request(key="y")))
    send(to, 0.0, *asked)
    (batch,) = batches(to.complete(blockers[0], 0.01))
    (left,) = batches(to.complete(batch, 0.02, fault=ITEM))
    to.complete(blockers[1], 0.02)
    to.model("m").isolation.quarantined = True
    (part,) = batches(to.complete(left, 0.03))
    assert waiters(part) == [asked[2]]
    (part,) = batches(to.complete(part, 0.04))
    assert waiters(part) == [asked[3]]


def test_rule_9_transport_is_retried_once_where_the_policy_allows() -> None:
    to = batcher(max_batch=8, retry_transport=True)
    asked, batch = together(to, 3)
    (again,) = batches(to.complete(batch, 0.01, fault=RESET))
    assert again.slices == batch.slices
    assert to.complete(again, 0.02, fault=RESET) == [Failure(asked, RESET)]


@pytest.mark.parametrize(("allowed", "fault"), [(False, RESET), (True, Fault(FaultKind.TRANSPORT))])
def test_rule_9_transport_is_not_retried_otherwise(allowed: bool, fault: Fault) -> None:
    to = batcher(max_batch=8, retry_transport=allowed)
    asked, batch = together(to, 3)
    assert to.complete(batch, 0.01, fault=fault) == [Failure(asked, fault)]


def test_rule_9_infinity_one_bad_batch_does_not_stop_the_next() -> None:
    to = batcher(max_batch=2)
    _, batch = together(to, 2)
    waiting = request()
    to.arrive(waiting, 0.0)
    actions = to.complete(batch, 0.01, fault=Fault(FaultKind.SHARED))
    assert [waiters(each) for each in batches(actions)] == [[waiting]]


# ------------------------------------------------------------------------------------------------- rules 10 and 11


def test_rule_10_a_swap_under_load_loses_nothing() -> None:
    to = batcher(max_batch=8, slots=4)
    running = batches(send(to, 0.0, *(request() for _ in range(4))))
    asked = [request(rows=3) for _ in range(6)]
    send(to, 0.0, *asked)
    to.configure(Parameters(max_batch=2, max_in_flight=1), 0.001)
    assert to.slots == 1
    served: list[Request] = []
    while running:
        actions = to.complete(running.pop(0), 0.01)
        served += [done for action in actions if isinstance(action, Finish) for done in action.requests]
        running += batches(actions)
        assert all(batch.rows <= 2 for batch in batches(actions))
        assert not batches(actions) or len(running) == 1
    assert served[4:] == asked


def test_rule_10_parameters_and_slots_are_per_model() -> None:
    to = batcher(max_batch=8)
    to.configure(Parameters(max_batch=2, max_in_flight=3), 0.0, model="m")
    assert to.slots == 3
    assert to.model("m").cap == 2
    assert to.model("other").cap == 8
    assert to.slots == 4
    to.configure(Parameters(max_batch=5), 0.0)
    assert (to.slots, to.model("m").cap, to.model("other").cap) == (2, 5, 5)


def test_rule_10_more_slots_start_what_waits_at_once() -> None:
    to = batcher(max_batch=1)
    send(to, 0.0, *(request() for _ in range(3)))
    assert len(batches(to.configure(Parameters(max_batch=1, max_in_flight=2), 0.001))) == 1


def test_rule_11_pass_through_holds_and_merges_nothing() -> None:
    to = Batcher(Parameters(max_batch=8, max_wait=Duration(0.02), max_in_flight=2, pass_through=True))
    to.learn("m", estimate(), 0.0)
    sent = batches(send(to, 0.0, *(request() for _ in range(4))))
    assert [batch.rows for batch in sent] == [1, 1]
    assert all(batch.whole for batch in sent)
    assert to.in_flight == 2
    assert len(waiters(batches(to.complete(sent[0], 0.01))[0])) == 1


def test_rule_11_caps_and_deadlines_hold_in_pass_through() -> None:
    to = Batcher(Parameters(max_batch=4, pass_through=True), admission=Admission(max_queued_rows=6))
    large = request(rows=9, deadline=0.01)
    (batch,) = batches(to.arrive(large, 0.0))
    assert batch.rows == 4
    one_more, too_many = request(rows=1), request(rows=1)  # 5 rows wait, of 6
    assert refusals(send(to, 0.0, one_more, too_many)) == [(too_many, Refused.QUEUE_FULL)]
    assert refusals(to.poll(0.01)) == [(large, Refused.EXPIRED)]


def test_rule_11_a_backlog_ends_pass_through() -> None:
    to = Batcher(Parameters(max_batch=8, max_in_flight=1, pass_through=True))
    first = occupied(to)
    to.arrive(request(), 0.0)
    assert to.model("m").passing
    to.arrive(request(), 0.0)  # two wait where one is served
    assert not to.model("m").passing
    (batch,) = batches(to.complete(first, 0.01))
    assert batch.rows == 2
    to.configure(Parameters(pass_through=True), 0.02)
    assert to.model("m").passing


# ------------------------------------------------------------------------------------------------- counting


def test_samples_are_cold_first_then_by_rows_and_in_flight_and_never_stalled() -> None:
    to = batcher(max_batch=1, slots=2)
    for start in (0.0, 1.0, 2.0):
        one, two = batches(send(to, start, request(start), request(start)))
        to.complete(one, start + 0.1, stalled=start == 2.0)
        to.complete(two, start + 0.2)
    counters = to.model("m").counters
    assert (counters.cold, counters.stalled) == (1, 1)
    seen = {key[:3]: cell for key, cell in counters.cells.items() if key[3] == 0}
    assert {key: cell.batches for key, cell in seen.items()} == {(0, 1, 1): 1, (0, 1, 2): 3}
    assert seen[0, 1, 2].busy == pytest.approx(0.6)
    # At server concurrency 1 the second would have begun when the first was done: 0.1 s each, not 0.2.
    assert counters.cells[0, 1, 2, 1].busy == pytest.approx(0.3)
    assert to.stats(9.0).device_busy == pytest.approx(0.6)


def test_queue_seconds_count_each_request_once() -> None:
    to = batcher(max_batch=4)
    first = occupied(to, 2.0)
    to.arrive(request(2.0, rows=8), 2.0)
    (batch,) = batches(to.complete(first, 2.01))
    to.complete(batch, 2.03)
    counters = to.model("m").counters
    assert counters.queue_seconds == pytest.approx(0.01)
    assert counters.dispatched == 2


def test_an_unknown_service_time_is_learned_again_after_a_restart() -> None:
    to = held()
    (batch,) = batches(send(to, 0.0, *(request() for _ in range(8))))
    to.complete(batch, 0.01)
    assert to.restarted(0.02) == []
    assert to.model("m").belief.estimate is None
    assert batches(to.arrive(request(0.03), 0.03))[0].cold


def test_a_model_that_was_replaced_is_forgotten_and_no_other() -> None:
    to = held()
    to.learn("n", to.model("m").belief.estimate, 0.0)
    to.restarted(0.01, model="m")
    assert to.model("m").belief.estimate is None
    assert to.model("n").belief.estimate is not None


# ------------------------------------------------------------------------------------------------- all together


class Riding(RuleBasedStateMachine):
    """Whatever happens, in whatever order: the driver's account and the Batcher's agree."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 4))
    def arrive(self, random: Random, count: int) -> None:
        for _ in range(count):
            self.driver.arrive(**random_request(random, self.driver.now))

    @rule(
        rows=st.integers(1, 40),
        key=st.sampled_from("kl"),
        patience=st.sampled_from([0.01, inf]),
        mergeable=st.booleans(),
        poison=st.sampled_from([None, None, None, FaultKind.ITEM, FaultKind.ROWS]),
    )
    def arrive_one(self, rows: int, key: str, patience: float, mergeable: bool, poison: FaultKind | None) -> None:
        now = self.driver.now
        self.driver.arrive(
            key=key, model="a", rows=rows, due=now + 0.02, deadline=now + patience, mergeable=mergeable, size=rows,
            payload=poison,
        )  # fmt: skip

    @rule(index=st.integers(0), failure=st.one_of(st.none(), st.sampled_from(FAILURES)), stalled=st.booleans())
    def complete(self, index: int, failure: Fault | None, stalled: bool) -> None:
        if self.driver.calls:
            calls = list(self.driver.calls)
            self.driver.complete(calls[index % len(calls)], failure, stalled=stalled)

    @rule(index=st.integers(0))
    def cancel(self, index: int) -> None:
        if self.driver.live:
            live = list(self.driver.live)
            self.driver.cancel(live[index % len(live)])

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 1.0]), on_time=st.booleans())
    def time_passes(self, seconds: float, on_time: bool) -> None:
        (self.driver.advance if on_time else self.driver.skip)(seconds)

    @rule(random=st.randoms(use_true_random=False), model=st.sampled_from([None, *MODELS]))
    def configure(self, random: Random, model: str | None) -> None:
        self.driver.configure(random_parameters(random), model)

    @rule(
        model=st.sampled_from(MODELS),
        belief=st.sampled_from([None, estimate(), estimate(0.001, 0.004), estimate(executors=3)]),
        shed_slo=st.booleans(),
    )
    def learn(self, model: str, belief: Estimate | None, shed_slo: bool) -> None:
        self.driver.learn(model, belief, shed_slo=shed_slo)

    @rule()
    def restart(self) -> None:
        self.driver.restarted()

    @rule()
    def drain(self) -> None:
        self.driver.obey(self.driver.batcher.drain(self.driver.now))

    @invariant()
    def adds_up(self) -> None:
        self.driver.check()
        self.driver.check_totals()

    def teardown(self) -> None:
        self.driver.quiesce()
        self.driver.check_totals()


TestRiding = Riding.TestCase
TestRiding.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(20))
def test_soak_in_small(seed: int) -> None:
    assert soak(seed, 1000).arrivals > 200
