"""Copies, comparisons and what follows from them, with a sidecar on real sockets."""

from __future__ import annotations

import asyncio
import json

import model_functions
import numpy as np
import pytest
from verification import FIRST, LINEAR, asked, check_of, idle, ones, rows_of, singles, state, verified

from carpool.batching.requests import Estimate
from carpool_sidecar.axis_verification import trial_runner
from carpool_sidecar.axis_verification.check import LONE, TRIALS
from carpool_sidecar.http1.messages import find


async def test_trials_are_few_calls_and_count_as_nobody_s_requests(world, served, load):
    sidecar, client = await served(LINEAR)
    told = await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "verified")
    assert len(world.model.received) == len(told) + TRIALS
    assert [rows_of(call) for call in world.model.received[-TRIALS:]] == [8, 8]
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (counted.arrivals, counted.rows, counted.hits, counted.misses) == (LONE, LONE, LONE, {})
    assert state(sidecar)[1] == "2 batches gave every row the same answer as a single request"
    assert sidecar.driver.verifier.trials.results == {("m", "agreed"): TRIALS}
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
    assert sidecar.driver.verifier.trials.results["m", "disagreed"] == 1
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
    sidecar.driver.verifier.trials.disagrees(entry, check_of(sidecar), "a test says so")
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
    assert sidecar.driver.verifier.trials.results == {("m", "failed"): 2, ("m", "agreed"): 2}


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
    assert sidecar.driver.verifier.trials.results == {}
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
    assert sidecar.driver.verifier.trials.results["m", "disagreed"] >= 1
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
    assert sidecar.driver.verifier.trials.results.keys() == {("m", "agreed")}
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
    assert sidecar.driver.verifier.trials.results == {}


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
        sidecar.versions.use(world.parsed(text))
        assert not sidecar.batcher.model("m").isolation.quarantined
        told.append(await load(client, "v1", requests=6))
    assert any(one.batch > len(one.rows) for one in told[0])
    assert all(one.batch == len(one.rows) for one in told[1])
    assert state(sidecar)[0] == "refuted"


async def test_a_fault_in_comparing_costs_nobody_an_answer(world, served, load, compare, monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(trial_runner, "disagreement", broken)
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
    admin = world.client(sidecar.admin.address)
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
    return (await world.client(sidecar.admin.address).get(b"/v1/stats")).json["models"]


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
