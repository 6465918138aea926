"""Rule 9: which requests fail, and which are sent again, after a batch has failed."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from batchers import ITEM, batcher, batches, occupied, one_after_another, request, send, waiters

from carpool.batching.isolation import EXTRA_ROWS, EXTRA_SHARE, MAX_ISOLATED
from carpool.batching.requests import Abort, Batch, Failure, Fault, FaultKind, Finish, Request
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import ENDS, End
from carpool.simulation.simulator import Arrival, Device, Simulation, linear

if TYPE_CHECKING:
    from carpool.batching.batcher import Batcher

SIZE = Fault(FaultKind.SIZE)
RESET = Fault(FaultKind.TRANSPORT, retryable=True)


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


@pytest.mark.parametrize(("rate", "key", "least"), [(600.0, 1, 0.99), (250.0, 0, 0.85)], ids=["another key", "one key"])
def test_rule_9_a_gateway_with_a_few_bad_requests_keeps_its_batches(rate: float, key: int, least: float) -> None:
    """Behind a proxy all requests have one caller. Without batches, the device serves 182 a second."""
    random = Random("bad requests")
    bad = [random.random() < 0.05 for _ in range(int(20 * rate))]
    times = until(Poisson(rate), 20.0, Random("arrivals"))
    load = [
        Arrival(time, poisoned=is_bad, key=is_bad * key, caller=1) for time, is_bad in zip(times, bad, strict=False)
    ]
    device = Device(linear(0.005, 0.0005))
    outcome = Simulation(
        load, device, slo=0.1, parameters=Parameters(max_batch=32), estimate=device.estimate(), shed_slo=True
    ).run()
    ends = [ENDS[code] for each, code in zip(load, outcome.ends, strict=True) if not each.poisoned]
    assert ends.count(End.HIT) / len(ends) > least


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
