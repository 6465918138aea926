"""Copies, comparisons and what follows from them, with a sidecar on real sockets."""

from __future__ import annotations

import asyncio
import json

import model_functions
import numpy as np
import pytest

from carpool.batching.batcher import Batcher
from carpool.batching.first_calls import SLOW
from carpool.batching.requests import Estimate, Request
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar.axis_verification import verifier as verifier_module
from carpool_sidecar.axis_verification.check import LONE, TRIALS
from carpool_sidecar.axis_verification.delays import (
    BUSY_SHARE,
    DELAYED,
    DELAYED_SHARE,
    FIRST_DELAYED,
    FIRST_SECONDS,
    FREE_SECONDS,
    Delays,
)
from carpool_sidecar.axis_verification.record import FREE_ROWS
from carpool_sidecar.axis_verification.verifier import FIRST as ANSWERS
from carpool_sidecar.axis_verification.verifier import FORMS
from carpool_sidecar.dispatch.trials import harms
from carpool_sidecar.http1.messages import find

FIRST = [{"name": "m", "axis": "First"}]
FIXED = {"*": {"maxBatch": 8, "maxInFlight": 1}}
LARGE = {"*": {"maxBatch": 32, "maxInFlight": 1}}
LINEAR = model_functions.GOOD["linear"]


def state(sidecar):
    (entry,) = sidecar.models
    return sidecar.driver.verifier.state(entry)


def check_of(sidecar):
    (entry,) = sidecar.models
    (check,) = entry.record.checks.values()
    return check


def ones(rng, rows):
    return np.ones((rows, 4), np.float32)


def singles(rng, rows):
    return rng.normal(0, 2, (1, 4)).astype(np.float32)


def rows_of(received):
    return len(json.loads(received.body)["instances"])


async def asked(sidecar, client, load, **fields):
    """One caller's requests, one after the other: by default as many as it takes to begin a trial."""
    told = await load(client, "v1", callers=1, **{"requests": LONE, "draw": singles, **fields})
    assert {one.answer.status for one in told} == {200}
    return told


async def idle(world, sidecar):
    await world.until(lambda: sidecar.batcher.idle)


async def verified(world, sidecar, client, load):
    await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "verified")
    await idle(world, sidecar)


async def test_trials_are_few_calls_and_count_as_nobody_s_requests(world, served, load):
    sidecar, client = await served(LINEAR)
    told = await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "verified")
    assert len(world.model.received) == len(told) + TRIALS
    assert [rows_of(call) for call in world.model.received[-TRIALS:]] == [8, 8]
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (counted.arrivals, counted.rows, counted.hits, counted.misses) == (LONE, LONE, LONE, {})
    assert state(sidecar)[1] == "2 batches gave every row the same answer as a single request"
    assert sidecar.driver.verifier.results == {("m", "agreed"): TRIALS}
    assert all(one.batch == 1 for one in told)
    (entry,) = sidecar.models
    assert entry.waiters == 0


@pytest.mark.usefixtures("untuned")
async def test_a_trial_of_a_slow_model_is_small_since_others_wait_behind_it(world, served, load):
    sidecar, client = await served(LINEAR)
    times = tuple(0.1 * sidecar.driver.terms.due * rows for rows in range(65))
    sidecar.batcher.learn("m", Estimate(times, times), sidecar.clock())
    await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "verified")
    assert [rows_of(call) for call in world.model.received[-TRIALS:]] == [5, 5]


@pytest.mark.usefixtures("untuned")
async def test_an_overload_refuses_no_trial_since_only_batches_may_end_it(world, served, load):
    sidecar, client = await served(LINEAR, parameters={"*": {"maxBatch": 8, "maxInFlight": 2}})
    await asked(sidecar, client, load, requests=LONE - 1)
    behave, held = world.model.behave, []
    world.model.behave = held.append
    async with asyncio.TaskGroup() as callers:
        for rows in (1, 5):
            x = np.ones((rows, 4), np.float32)
            callers.create_task(load(client, "v1", callers=1, requests=1, draw=lambda rng, rows, x=x: x))
            await world.until(lambda rows=rows: [rows_of(call) for call in held][-1:] == [rows])
            # From now on it is known how long rows take, and that late requests delay others: a trial of four rows
            # behind the second request would be late.
            times = tuple(0.18 * sidecar.driver.terms.due * rows for rows in range(65))
            sidecar.batcher.learn("m", Estimate(times, times), sidecar.clock(), shed_slo=True)
        world.model.behave = behave
        behave(held[0])
        await world.until(lambda: state(sidecar)[0] == "verified")
        behave(held[1])
    await idle(world, sidecar)


async def test_trials_wait_for_a_slot_like_everybody(world, served, load):
    sidecar, client = await served(LINEAR, parameters={"*": {"maxBatch": 8, "maxInFlight": 1}})
    most = 0
    behave = world.model.behave

    def counting(exchange):
        nonlocal most
        most = max(most, sidecar.batcher.in_flight)
        behave(exchange)

    world.model.behave = counting
    await load(client, "v1")
    assert most == 1


async def test_callers_who_all_send_the_same_are_merged_with_each_other(world, served, load, compare):
    sidecar, client = await served(LINEAR)
    told = await load(client, "v1", draw=ones)
    assert all(compare(LINEAR, one) for one in told)
    same = [one for one in told if one.batch > len(one.rows)]
    assert same
    # Requests of one and of two rows are not the same ones: only one of them was let be merged.
    assert len({len(one.rows) for one in same}) == 1
    assert state(sidecar)[0] == "unverified"
    told = await load(client, "v1")
    assert all(compare(LINEAR, one) for one in told)
    assert state(sidecar)[0] == "verified"


async def test_a_model_that_becomes_another_without_a_word_is_found_by_a_check_of_live_traffic(
    world, served, load, caplog
):
    changed = False

    def model(x):
        return model_functions.NEVER["averaged-with-neighbour"](x) if changed else x

    sidecar, client = await served(model)
    await verified(world, sidecar, client, load)
    changed = True
    await load(client, "v1")
    assert state(sidecar)[0] == "refuted"
    assert "in batch of live traffic, output 'predictions'" in state(sidecar)[1]
    assert sidecar.batcher.model("m").isolation.quarantined
    assert sidecar.driver.verifier.results["m", "disagreed"] == 1
    assert [record.detail for record in caplog.records if "depends on its batch" in record.message] == [
        state(sidecar)[1]
    ]
    told = await load(client, "v1")
    assert all(one.batch == len(one.rows) for one in told)


async def test_what_waits_already_is_not_merged_once_a_model_is_refuted(world, served, load):
    sidecar, client = await served(LINEAR, slow=False)
    await verified(world, sidecar, client, load)
    first, rest = await world.queue_behind(sidecar, client, [b"[1,2,3,4.5]", b"[1,2,3,5.5]"])
    (entry,) = sidecar.models
    sidecar.driver.verifier._disagrees(entry, check_of(sidecar), "a test says so")
    calls = len(world.model.received)
    for exchange in world.model.held:
        exchange.respond(200, [], b'{"predictions":[[1.0,2.0,3.0,4.0,5.0]]}')
    world.model.held, world.model.holding = [], False
    await first
    assert [(await one).status for one in rest] == [200, 200]
    assert [rows_of(call) for call in world.model.received[calls:]] == [1, 1]


async def test_an_answer_alone_with_other_rows_stops_merging_at_once(world, served, load):
    short = False
    sidecar, client = await served(lambda x: x[:-1] if short else x)
    await verified(world, sidecar, client, load)
    check_of(sidecar).pace.look_at = 0.0
    short = True
    await asked(sidecar, client, load, requests=1)
    assert state(sidecar) == ("refuted", "of a request sent alone, 0 predictions for 1 rows")


async def test_a_batch_with_other_rows_stops_merging_at_once(world, served, load):
    short = False
    sidecar, client = await served(lambda x: x[:1] if short else x)
    await verified(world, sidecar, client, load)
    short = True
    await load(client, "v1", requests=2, draw=singles)
    assert state(sidecar)[0] == "refuted"
    assert state(sidecar)[1].startswith("of a batch, 1 predictions for ")


async def test_trials_that_the_model_is_too_busy_for_are_sent_again(world, served, load):
    sidecar, client = await served(LINEAR)
    behave, busy = world.model.behave, [True, True]

    def sometimes(exchange):
        if rows_of(exchange) > 1 and busy:
            busy.pop()
            exchange.respond(503, [], b"busy")
        else:
            behave(exchange)

    world.model.behave = sometimes
    for left in (1, 0):
        await asked(sidecar, client, load)
        await world.until(lambda left=left: len(busy) == left and not check_of(sidecar).pace.under_way)
        assert state(sidecar)[0] == "unverified"
        assert "was answered with status 503" in state(sidecar)[1]
        check_of(sidecar).pace.try_at = check_of(sidecar).pace.look_at = 0.0
    await verified(world, sidecar, client, load)
    assert sidecar.driver.verifier.results == {("m", "failed"): 2, ("m", "agreed"): 2}


async def test_a_model_that_refuses_batches_of_what_it_answers_alone_is_not_sent_any(world, served, load):
    sidecar, client = await served(LINEAR)
    behave = world.model.behave

    def single(exchange):
        if rows_of(exchange) > 1:
            exchange.respond(500, [], b"one at a time")
        else:
            behave(exchange)

    world.model.behave = single
    for _ in range(2):
        await asked(sidecar, client, load)
        await world.until(lambda: not check_of(sidecar).pace.under_way)
        check_of(sidecar).pace.try_at = check_of(sidecar).pace.look_at = 0.0
    assert state(sidecar)[0] == "refuted"
    assert state(sidecar)[1] == (
        "a trial batch of 8 rows, made of requests that were answered, was answered with status 500"
    )


async def test_a_trial_that_is_never_answered_ends_with_the_deadline_of_a_request(world, served, load):
    sidecar, client = await served(LINEAR, policy={"admission": {"timeout": "1s"}})  # this host pauses
    behave = world.model.behave
    world.model.behave = lambda exchange: None if rows_of(exchange) > 1 else behave(exchange)
    await asked(sidecar, client, load)
    await world.until(lambda: not check_of(sidecar).pace.under_way)
    assert state(sidecar) == ("unverified", "not verified yet: the last trial was not answered")
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert counted.misses == {}
    (entry,) = sidecar.models
    assert entry.waiters == 0


async def test_another_model_is_verified_anew_and_what_was_under_way_says_nothing_of_it(world, served, load):
    sidecar, client = await served(LINEAR)
    await asked(sidecar, client, load, requests=LONE - 1)
    (entry,) = sidecar.models
    held = []
    behave = world.model.behave
    world.model.behave = lambda exchange: held.append(exchange) if rows_of(exchange) > 1 else behave(exchange)
    await asked(sidecar, client, load, requests=1, seed=17)
    await world.until(lambda: held)
    sidecar._changed(entry)
    assert state(sidecar) == ("unverified", "not verified yet: no single request was answered with success")
    held[0].respond(500, [], b"")
    await idle(world, sidecar)
    assert sidecar.driver.verifier.results == {}
    world.model.behave = behave
    await verified(world, sidecar, client, load)
    sidecar._found(again=True)
    assert state(sidecar)[0] == "unverified"
    await verified(world, sidecar, client, load)


async def test_an_axis_that_the_policy_asserts_is_merged_at_once_and_only_warned_about(
    world, served, load, compare, caplog
):
    model = model_functions.NEVER["averaged-with-neighbour"]
    sidecar, client = await served(model, policy={"models": FIRST})
    told = await load(client, "v1")
    assert any(one.batch > len(one.rows) for one in told[:20])
    assert sidecar.driver.verifier.results["m", "disagreed"] >= 1
    assert state(sidecar)[0] == "contradicted"
    assert (
        "the policy says axis First, but in batch of live traffic, output 'predictions', row 0: " in state(sidecar)[1]
    )
    assert not sidecar.batcher.model("m").isolation.quarantined
    assert [record.message for record in caplog.records if record.name == "carpool" and record.levelname == "WARNING"][
        -1
    ] == "a row's answer depends on its batch: merged anyway, because the policy says axis First"
    told = await load(client, "v1", requests=3)
    assert any(one.batch > len(one.rows) for one in told)


def with_classes(exchange):
    rows = json.loads(exchange.body)["instances"]
    exchange.respond(200, [], json.dumps({"predictions": rows, "classes": ["cat", "dog"]}).encode())


@pytest.mark.parametrize(("models", "known"), [([], "refuted"), (FIRST, "contradicted")])
async def test_an_array_beside_the_rows_is_named_as_what_cannot_be_divided(world, served, load, caplog, models, known):
    sidecar, client = await served(LINEAR, policy={"models": models})
    world.model.behave = lambda exchange: asyncio.get_running_loop().call_later(0.001, with_classes, exchange)
    told = await load(client, "v1")
    assert all(one.answer.json["predictions"] == one.rows.tolist() for one in told)
    assert state(sidecar)[0] == known
    assert "answer's `classes` has 2 entries, the batch " in state(sidecar)[1]
    assert [record.message for record in caplog.records if "divided" in record.message] == [
        "an answer can't be divided by rows: requests are sent alone"
    ]
    assert "depends on its batch" not in caplog.text


async def test_a_model_that_refuses_batches_is_logged_as_that(world, served, load, caplog):
    sidecar, client = await served(LINEAR)
    behave = world.model.behave
    world.model.behave = lambda exchange: exchange.respond(400, [], b"") if rows_of(exchange) > 1 else behave(exchange)
    check = None
    for _ in range(3):
        await asked(sidecar, client, load)
        check = check_of(sidecar)
        check.pace.try_at = check.pace.look_at = 0.0
        await idle(world, sidecar)
    assert check.rejected == 2
    assert "the model refuses batches: requests are sent alone" in caplog.messages


async def test_an_asserted_axis_that_holds_is_said_to(world, served, load, compare):
    sidecar, client = await served(LINEAR, policy={"models": FIRST})
    told = await load(client, "v1")
    assert all(compare(LINEAR, one) for one in told)
    assert sidecar.driver.verifier.results.keys() == {("m", "agreed")}
    assert state(sidecar) == ("asserted", "the policy says axis First")


@pytest.mark.parametrize("models", [[], FIRST])
async def test_requests_that_may_not_be_repeated_are_not(world, served, load, compare, models):
    policy = {"idempotent": False, "models": models}
    sidecar, client = await served(LINEAR, policy=policy, parameters={"*": {"maxBatch": 64, "maxInFlight": 1}})
    told = await load(client, "v1")
    assert all(compare(LINEAR, one) for one in told)
    assert sum(rows_of(call) for call in world.model.received) == sum(len(one.rows) for one in told)
    if models:
        assert any(one.batch > len(one.rows) for one in told)
    else:
        assert all(one.batch == len(one.rows) for one in told)
        assert "not idempotent, so no copies are sent to verify batches" in state(sidecar)[1]
        assert sidecar.driver.counts.alone == {("m", "axis-unverified"): len(told)}


async def test_nothing_is_checked_where_the_policy_believes_the_server(world, served, load):
    sidecar, client = await served(LINEAR, policy={"verification": {"mode": "Never"}})
    told = await load(client, "v2")
    assert any(one.batch > len(one.rows) for one in told[:10])
    assert state(sidecar)[0] == "off"
    assert sidecar.driver.verifier.results == {}


async def test_the_tolerance_is_the_policy_s(world, served, load):
    model = lambda x: x * (1 + 0.003 * len(x))  # noqa: E731 - a model like all others
    sidecar, client = await served(model, policy={"verification": {"tolerancePercent": 10}})
    await verified(world, sidecar, client, load)
    world.sidecars.remove(sidecar)
    await sidecar.close()
    sidecar, client = await served(model)
    await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "refuted")


async def test_the_word_of_a_person_stands_over_a_refutation_and_ends_with_it(world, served, load):
    sidecar, client = await served(model_functions.NEVER["reversed"])
    await load(client, "v1")
    assert state(sidecar)[0] == "refuted"
    told = []
    for models in (FIRST, []):
        text = world.config(policy={"models": models, "verification": {}})
        sidecar._use(world.parsed(text))
        assert not sidecar.batcher.model("m").isolation.quarantined
        told.append(await load(client, "v1", requests=6))
    assert any(one.batch > len(one.rows) for one in told[0])
    assert all(one.batch == len(one.rows) for one in told[1])
    assert state(sidecar)[0] == "refuted"


async def test_a_fault_in_comparing_costs_nobody_an_answer(world, served, load, compare, monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(verifier_module, "disagreement", broken)
    sidecar, client = await served(LINEAR)
    told = await load(client, "v1")
    assert all(compare(LINEAR, one) for one in told)
    assert all(one.batch == len(one.rows) for one in told)
    assert "the sidecar's log says why" in state(sidecar)[1]
    assert "an error in verifying batches; requests are served" in caplog.messages


async def test_each_form_of_request_is_verified_for_itself(world, served, load):
    sidecar, client = await served(LINEAR)
    await verified(world, sidecar, client, load)
    body = b'{"instances":[[1.5,2,3,4]],"signature_name":"other"}'
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.send(b"POST", b"/v1/models/m:predict", body)] * 2)
    for exchange in world.model.held:
        exchange.respond(200, [], b'{"predictions":[[1.0]]}')
    world.model.held, world.model.holding = [], False
    await first
    for one in asked:
        assert (await one).status == 200
    assert sidecar.driver.counts.alone["m", "axis-unverified"] == LONE + 2


async def test_callers_who_make_up_forms_push_out_none_that_is_verified(world, served, load):
    sidecar, client = await served(LINEAR, slow=False)
    await verified(world, sidecar, client, load)
    for number in range(40):
        body = b'{"instances":[[1.5,2,3,4]],"made_up":%d}' % number
        assert (await client.send(b"POST", b"/v1/models/m:predict", body)).status == 200
    (entry,) = sidecar.models
    assert len(entry.record.checks) <= 17
    assert state(sidecar)[0] == "verified"


async def test_stats_metrics_and_log_say_what_is_known(world, served, load, ask_v1, caplog):
    caplog.set_level("INFO", "carpool")
    sidecar, client = await served(model_functions.NEVER["cumulative-sum"])
    admin = world.client(sidecar.admin_address)
    target, body, headers = ask_v1(np.ones((1, 4)))
    await client.send(b"POST", target, body, headers)
    (model,) = (await admin.get(b"/v1/stats")).json["models"]
    assert (model["merges"], model["verified"]) == (False, "unverified")
    assert model["evidence"] == "not verified yet: 1 of 8 single requests were answered with success"
    told = await load(client, "v1")
    (model,) = (await admin.get(b"/v1/stats")).json["models"]
    assert (model["merges"], model["verified"]) == (False, "refuted")
    assert model["evidence"].startswith("in trial batch of 8 rows, output 'predictions', row ")
    text = (await admin.get(b"/metrics")).body.decode()
    assert 'carpool_axis_checks_total{model="m",result="disagreed"} 1.0' in text
    assert 'carpool_alone_total{model="m",reason="axis-refuted"}' in text
    assert sum(sidecar.driver.counts.alone.values()) == 1 + len(told)
    (warning,) = [record for record in caplog.records if "depends on its batch" in record.message]
    assert (warning.levelname, warning.detail) == ("WARNING", model["evidence"])
    (alone,) = [record for record in caplog.records if getattr(record, "reason", "") == "axis-unverified"]
    assert alone.detail.startswith("not verified yet: ")


async def copied(world, sidecar, client, load, rows):
    """Wish for a batch of copies, and send a request that it can be made of."""
    times = (0.01 * sidecar.driver.terms.due,) * 65
    sidecar.batcher.learn("m", Estimate(times, times), sidecar.clock())
    pace = check_of(sidecar).pace
    pace.look_at = pace.try_at = 0.0  # however soon after the last one
    sidecar.driver.verifier.measure("m", [rows])
    told = await asked(sidecar, client, load, requests=1)
    await idle(world, sidecar)
    return told[0].rows


@pytest.mark.usefixtures("untuned")
async def test_a_batch_of_copies_is_measured_and_nobody_waits_for_its_answer(world, served, load):
    sidecar, client = await served(LINEAR, parameters=LARGE)
    sidecar.driver._flights._stalled = lambda *_: False  # what this host pauses in is not counted
    await verified(world, sidecar, client, load)
    before = sidecar.batcher.stats(sidecar.clock())
    calls = len(world.model.received)
    await copied(world, sidecar, client, load, 16)
    # The first batch of a size may be slow for being the first: it shows nothing.
    rows = await copied(world, sidecar, client, load, 16)
    assert len(world.model.received) == calls + 4
    assert json.loads(world.model.received[-1].body)["instances"] == [rows[0].tolist()] * 16
    since = sidecar.batcher.stats(sidecar.clock()).since(before).models["m"]
    assert (since.arrivals, since.rows, since.hits) == (2, 2, 2)
    counts = sidecar.driver.counts
    assert counts.batch_rows["m"] == sidecar.batcher.stats(sidecar.clock()).models["m"].rows, "of callers only"
    assert 16 in {cell[1] for cell in since.cells}, "its latency is known"
    assert sidecar.driver.verifier.results["m", "agreed"] == TRIALS + 2
    # Once: another one has to be asked for.
    await asked(sidecar, client, load, requests=3)
    await idle(world, sidecar)
    assert max(map(rows_of, world.model.received[calls + 4 :])) == 1


@pytest.mark.usefixtures("untuned")
async def test_no_copies_that_would_delay_others_by_most_of_the_slo(world, served, load):
    sidecar, client = await served(LINEAR, parameters=LARGE)
    await verified(world, sidecar, client, load)
    calls = len(world.model.received)
    times = tuple(0.04 * sidecar.driver.terms.due * rows for rows in range(65))
    for sizes, sent in (([17], 1), ([24, 17, 16, 8], 2)):
        sidecar.batcher.learn("m", Estimate(times, times), sidecar.clock())
        sidecar.driver.verifier.measure("m", sizes)
        pace = check_of(sidecar).pace
        pace.look_at = pace.try_at = 0.0
        await asked(sidecar, client, load, requests=1)
        await idle(world, sidecar)
        assert len(world.model.received) == (calls := calls + sent)
    assert rows_of(world.model.received[-1]) == 16, "the first that may be"


@pytest.mark.usefixtures("untuned")
async def test_no_copies_for_a_while_after_they_delayed_many_requests(world, served, load):
    sidecar, client = await served(LINEAR, parameters=LARGE)
    await verified(world, sidecar, client, load)
    calls, counters = len(world.model.received), sidecar.batcher.model("m").counters
    behave = world.model.behave

    def busy(exchange):
        if rows_of(exchange) == 16:
            counters.arrivals += FIRST_DELAYED + 2  # as if they came meanwhile
        behave(exchange)

    world.model.behave = busy
    await copied(world, sidecar, client, load, 16)
    assert len(world.model.received) == calls + 2
    await copied(world, sidecar, client, load, 16)
    assert len(world.model.received) == calls + 4, "as many as copies may delay at first"
    await copied(world, sidecar, client, load, 8)
    assert len(world.model.received) == calls + 5, "no copies"
    counters.arrivals += round(FIRST_DELAYED / DELAYED_SHARE) + 100
    await copied(world, sidecar, client, load, 8)
    assert len(world.model.received) == calls + 7


def test_later_fewer_requests_are_delayed_than_at_first():
    delays = Delays()
    assert delays.allow(1000, 5.0)
    delays.add(FIRST_DELAYED, 0.0)
    assert delays.allow(1000, 5.0 + FIRST_SECONDS - 1)
    assert not delays.allow(1000, 5.0 + FIRST_SECONDS)
    enough = 1000 + round((FIRST_DELAYED - DELAYED) / DELAYED_SHARE)
    assert not delays.allow(enough - 1, 1e3)
    assert delays.allow(enough + 1, 1e3)
    # What was not used is not kept, and a batch that hangs counts no more than that.
    assert delays.allow(10**9, 1e3)
    delays.add(10**6, 0.0)
    assert delays.allow(10**9 + round(FIRST_DELAYED / DELAYED_SHARE), 1e3)
    assert delays.allow(2 * 10**9, 1e3)
    delays.add(DELAYED + 1, 0.0)
    assert not delays.allow(2 * 10**9, 1e3)


def test_copies_take_a_second_of_the_device_and_then_a_twentieth_of_the_time():
    delays = Delays()
    assert delays.allow(0, 5.0)
    delays.add(0, FREE_SECONDS)
    assert delays.allow(0, 5.0)
    delays.add(0, 0.3)
    assert not delays.allow(0, 5.0)
    assert not delays.allow(0, 4.9 + 0.3 / BUSY_SHARE)
    assert delays.allow(0, 5.1 + 0.3 / BUSY_SHARE)


def test_copies_leave_time_for_two_requests_after_them():
    state = Batcher(Parameters()).model("m")
    state.belief.learn(Estimate((0.0, 0.3, 0.35), (0.0, 0.3, 0.35)))
    assert harms(state, 0, 2, 0.94, 0.0)
    assert not harms(state, 0, 2, 0.96, 0.0)
    state.belief.learn(Estimate((0.0, 0.01, 0.35), (0.0, 0.01, 0.35)))
    assert harms(state, 0, 2, 0.52, 0.0), "two thirds of the SLO at most"
    assert not harms(state, 0, 2, 0.53, 0.0)


def test_copies_leave_time_for_requests_that_wait_when_they_begin():
    batcher = Batcher(Parameters(max_wait=Duration(0.5)))
    state = batcher.model("m")
    batcher.learn("m", Estimate((0.0, 0.1, 0.2), (0.0, 0.1, 0.2)), 0.0)
    assert batcher.waited(state, 1.0) == 0.0
    batcher.arrive(Request(key="k", arrived=1.0, due=9.0, model="m"), 1.0)
    waited = batcher.waited(state, 1.4)
    assert waited == pytest.approx(0.4)
    assert harms(state, 0, 2, 0.79, waited)
    assert not harms(state, 0, 2, 0.81, waited)


@pytest.mark.usefixtures("untuned")
async def test_copies_that_are_too_large_say_nothing_of_smaller_batches(world, served, load):
    sidecar, client = await served(LINEAR, parameters=LARGE)
    await verified(world, sidecar, client, load)
    behave = world.model.behave
    world.model.behave = lambda exchange: (
        exchange.respond(500, [], b"out of memory") if rows_of(exchange) > 16 else behave(exchange)
    )
    for rows in (24, 32, 24, 12):
        await copied(world, sidecar, client, load, rows)
    assert [rows_of(each) for each in world.model.received if rows_of(each) > 16 or rows_of(each) == 12] == [24, 12]
    assert state(sidecar)[0] == "verified"


@pytest.mark.parametrize(
    "fields", [{"idempotent": False}, {"verification": {"mode": "Never"}}], ids=["not idempotent", "never"]
)
async def test_no_copies_are_sent_where_the_policy_has_none(world, served, load, fields):
    sidecar, client = await served(LINEAR, parameters=LARGE, policy={"models": FIRST, **fields})
    await asked(sidecar, client, load)
    sidecar.driver.verifier.measure("m", [24])
    await asked(sidecar, client, load)
    await idle(world, sidecar)
    assert max(map(rows_of, world.model.received)) == 1


@pytest.mark.usefixtures("untuned")
async def test_copies_are_within_the_rows_of_all_trials(world, served, load):
    sidecar, client = await served(LINEAR, parameters=LARGE)
    await verified(world, sidecar, client, load)
    for _ in range(12):
        await copied(world, sidecar, client, load, 16)
    assert 64 < sum(rows for rows in map(rows_of, world.model.received) if rows > 1) <= FREE_ROWS


async def test_extra_calls_are_under_one_percent_of_the_rows(world, served, load):
    sidecar, client = await served(LINEAR, slow=False)
    check_of_first = await load(client, "v1", callers=8, requests=150)
    rows = sum(len(one.rows) for one in check_of_first)
    (entry,) = sidecar.models
    assert entry.record.rows <= 64 + 0.01 * sidecar.batcher.model("m").limits.served_rows
    assert sum(rows_of(call) for call in world.model.received) == rows + entry.record.rows


async def test_of_a_server_without_metadata_v1_is_verified_and_v2_has_no_axis(world, served, load, compare):
    sidecar, client = await served(LINEAR, metadata=False)
    await load(client, "v2", callers=1, requests=1)
    await world.until(lambda: all(entry.alone == "axis-none" for entry in sidecar.models))
    (model,) = await models(world, sidecar)
    assert (model["merges"], model["verified"], model["evidence"]) == (False, "off", "its requests are not merged")
    told = await load(client, "v1")
    assert any(one.batch > len(one.rows) for one in told)
    (model,) = await models(world, sidecar)
    assert (model["merges"], model["verified"]) == (True, "verified")
    told = await load(client, "v2", requests=4)
    assert all(compare(LINEAR, one) and one.batch == len(one.rows) for one in told)
    assert sidecar.driver.counts.alone["m", "axis-none"] == len(told)


async def models(world, sidecar):
    return (await world.client(sidecar.admin_address).get(b"/v1/stats")).json["models"]


async def test_answers_that_are_to_be_compared_are_not_asked_for_compressed(world, served):
    sidecar, client = await served(LINEAR)
    for number in range(LONE):
        await client.predict(b"[%d,2,3,4]" % number, [(b"Accept-Encoding", b"gzip")])
    await world.until(lambda: state(sidecar)[0] == "verified")
    assert not any(find(call.headers, b"accept-encoding") for call in world.model.received)


async def test_an_answer_that_nobody_examines_may_come_compressed(world, served):
    sidecar, client = await served(LINEAR, parameters={"*": {"maxBatch": 1, "maxInFlight": 1}})
    await client.predict(b"[1,2,3,4]")
    check = check_of(sidecar)
    check.pace.look_at = float("inf")
    await client.predict(b"[1,2,3,4]", [(b"Accept-Encoding", b"gzip")])
    assert find(world.model.received[-1].headers, b"accept-encoding") == b"gzip"
    check.pace.look_at = 0.0
    await client.predict(b"[1,2,3,4]", [(b"Accept-Encoding", b"gzip")])
    assert find(world.model.received[-1].headers, b"accept-encoding") is None


async def waiting(world, sidecar, client, others):
    """Have a request at the model, which holds it, and others wait behind it."""
    world.model.holding = True
    first = client.predict(b"[1,2,3,0.5]")
    await world.until(lambda: world.model.held)
    rest = [lambda row=row: client.predict(b"[1,2,3,%d.5]" % row) for row in range(1, others + 1)]
    return first, await world.queue(sidecar, *rest)


async def test_a_trial_goes_before_requests_that_have_waited_for_long_and_the_tuner_waits_for_it(world, served, load):
    sidecar, client = await served(LINEAR, parameters=FIXED)
    await asked(sidecar, client, load, requests=LONE - 1)
    sidecar.batcher.learn("m", Estimate((0.0, SLOW), (0.0, SLOW)), sidecar.clock())
    assert not sidecar.batcher.grows("m"), "nobody waits"
    first, rest = await waiting(world, sidecar, client, 6)
    assert sidecar.batcher.grows("m")
    for queue in sidecar.batcher._queues.by_key.values():
        for request in queue:
            request.arrived -= 100.0
    calls = len(world.model.received)
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == 7 * [200]
    # Answers that make a trial possible are examined after the next call has left.
    calls = [rows_of(call) for call in world.model.received[calls:]]
    assert [rows > 1 for rows in calls[:4]] == [False, True, False, True]
    await world.until(lambda: state(sidecar)[0] == "verified")
    first, rest = await waiting(world, sidecar, client, 1)
    assert not sidecar.batcher.grows("m"), "they are merged"
    world.model.release()
    await asyncio.gather(first, *rest)


async def test_what_waits_already_is_merged_once_batches_are_verified(world, served, load):
    sidecar, client = await served(LINEAR, parameters=FIXED)
    await asked(sidecar, client, load, requests=LONE - 1)
    first, rest = await waiting(world, sidecar, client, 7)
    (another,) = await world.queue(sidecar, lambda: client.predict(b"[[1,2,3,4]]"))
    calls = len(world.model.received)
    world.model.release()
    answers = [(await one).json["predictions"][0] for one in (first, *rest, another)]
    rows = np.array([[1, 2, 3, number + 0.5] for number in range(8)], np.float32)
    assert np.allclose(answers[:8], LINEAR(rows))
    sizes = [rows_of(call) for call in world.model.received[calls:]]
    # Three of the seven leave before the second trial has ended; the others share a batch, but for one of another form.
    assert sizes[:6] == [1, 8, 1, 8, 1, 4]
    assert 1 in sizes[6:]


async def test_the_tuner_waits_for_no_more_answers_than_a_few(world, served, load):
    sidecar, client = await served(LINEAR, parameters=FIXED)
    await asked(sidecar, client, load, requests=2)
    first, rest = await waiting(world, sidecar, client, 1)
    sidecar.batcher.learn("m", Estimate((0.0, 0.01), (0.0, 0.01)), sidecar.clock())
    assert not sidecar.batcher.grows("m"), "a quick model shows it soon"
    sidecar.batcher.learn("m", Estimate((0.0, SLOW), (0.0, SLOW)), sidecar.clock())
    assert sidecar.batcher.grows("m")
    (entry,) = sidecar.models
    entry.record.looks = ANSWERS
    rest += await world.queue(sidecar, lambda: client.predict(b"[1,2,3,2.5]"))
    assert not sidecar.batcher.grows("m")
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]


async def test_nothing_waits_for_answers_that_are_too_large_to_be_compared(world, served, load, monkeypatch):
    monkeypatch.setattr(verifier_module, "MAX_SAMPLE", 10)
    sidecar, client = await served(LINEAR, parameters=FIXED)
    await asked(sidecar, client, load)
    (entry,) = sidecar.models
    assert sidecar.driver.verifier.goes_on(entry)
    while entry.record.looks < ANSWERS:  # not all answers are examined
        await asked(sidecar, client, load, requests=1)
    assert not sidecar.driver.verifier.goes_on(entry)


async def test_requests_of_many_forms_are_waited_for_no_longer_than_those_of_a_few(world, served):
    sidecar, client = await served(LINEAR, parameters=FIXED)

    async def ask(number):
        body = b'{"instances": [[1, 2, 3, 4]], "signature_name": "%d"}' % number
        assert (await client.send(b"POST", b"/v1/models/m:predict", body, [])).status == 200

    await ask(0)
    (entry,) = sidecar.models
    await world.until(lambda: entry.alone is None)
    for number in range(1, FORMS * ANSWERS - entry.record.looks):
        await ask(number)
        assert sidecar.driver.verifier.goes_on(entry)
    await ask(FORMS * ANSWERS)
    assert not sidecar.driver.verifier.goes_on(entry)
