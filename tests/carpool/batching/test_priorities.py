"""Rule 6: the order in which classes and keys are served, so that none of them starves."""

from __future__ import annotations

from math import inf

import pytest
from batchers import batcher, batches, held, occupied, one_after_another, refusals, request, send, waiters

from carpool.batching.requests import Priority, Refused
from carpool.policy.spec import Admission


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


def test_rule_6_a_request_that_may_wait_for_ever_does_not_delay_those_of_its_key() -> None:
    # One of batch priority of one key waits beside steady requests of another key.
    to = batcher(max_batch=1, ageing=1.0)
    running = occupied(to)
    job = request(0.0, key="k", priority=3, slo=inf)
    to.arrive(job, 0.0)
    served: list[tuple[float, object]] = []
    for step in range(1, 200):
        now = step * 0.1
        to.arrive(request(now, key="l", slo=0.3), now)
        if step == 50:
            to.arrive(waits := request(now, key="k", slo=0.2), now)
        (running,) = batches(to.complete(running, now))
        served += [(now, each) for each in waiters(running)]
    # The aged one goes first as before, and nobody of its key waits for the other key's requests to end.
    assert [now for now, each in served if each in (job, waits)] == pytest.approx([5.0, 5.1], abs=0.3)


def test_rule_6_a_request_without_a_deadline_does_not_starve_beside_other_keys() -> None:
    to = batcher(max_batch=1, ageing=1.0)
    running = occupied(to)
    job = request(0.0, key="k", priority=3, slo=inf)
    to.arrive(job, 0.0)
    for step in range(1, 200):
        now = step * 0.1
        to.arrive(request(now, key="l", slo=0.05), now)
        (running,) = batches(to.complete(running, now))
        if waiters(running) == [job]:
            break
    # Due after ten times the ageing, and one class below.
    assert now == pytest.approx(11.0, abs=0.2)


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
