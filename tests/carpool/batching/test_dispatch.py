"""Rules 4 and 5: how many batches the upstream has at once, and how long requests wait for others."""

from __future__ import annotations

import pytest
from batchers import batcher, batches, by_bucket, held, occupied, refusals, request, send, waiters
from machine import estimate
from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Refused
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

# ------------------------------------------------------------------------------------------------- rule 4


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


# ------------------------------------------------------------------------------------------------- rule 5


def test_rule_5_kserve_zero_wait_is_work_conserving_when_idle() -> None:
    to = held(max_wait=0.0)
    assert batches(to.arrive(request(), 0.0))


def test_rule_5_due_when_full() -> None:
    to = held(max_batch=4)
    assert send(to, 0.0, *(request() for _ in range(3))) == []
    (batch,) = batches(to.arrive(request(0.001), 0.001))
    assert batch.rows == 4


def test_what_boarded_no_longer_counts_as_waiting() -> None:
    to = held(slots=2)
    first, second = send(to, 0.0, request(key="one", arrived=-1.0), request(key="two", arrived=-1.0))
    send(to, 0.0, *(request() for _ in range(12)))
    assert [batch.rows for batch in batches(to.complete(first, 0.001))] == [8]
    assert to.queued_rows == 4
    assert not batches(to.complete(second, 0.002))  # four of eight rows: they wait for more
    assert [batch.rows for batch in batches(send(to, 0.003, *(request(0.003) for _ in range(4))))] == [8]


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


def test_rule_5_each_length_is_held_by_what_its_own_bucket_seldom_exceeds() -> None:
    to = batcher(max_wait=1.0)
    to.learn("m", by_bucket(), 0.0)
    to.arrive(request(key="long", bucket=4), 0.0)
    assert to.wake_at() == pytest.approx(0.05 - 0.022 * 1.1)
    to.arrive(request(key="another", bucket=7, slo=0.02), 0.0)
    assert to.wake_at() == pytest.approx(0.02 - 0.0055 * 1.1)


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
