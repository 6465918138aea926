"""Requests of different lengths share batches once padded rows were seen to get the answers that they get alone."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from carpool_sidecar.axis_verification.check import LONE, TRIALS

LENGTH = b"Inference-Header-Content-Length"
FIXED = {"*": {"maxBatch": 8, "maxInFlight": 1}}
SEQUENCE = {
    "pad": {"input_ids": 0, "attention_mask": 0},
    "lengths": [16, 32],
    "outputs": ["last_hidden_state"],
}


def encoder(ids, mask):
    """A model with a mask: what a position gets depends on all that are not masked. Whole numbers, so it is exact."""
    total = (ids * mask).sum(1, keepdims=True)
    return {"last_hidden_state": 2 * ids + total, "pooled": total}


def without_mask(ids, mask):
    """A model that takes padding for text."""
    return {"last_hidden_state": 2 * ids, "pooled": ids.sum(1, keepdims=True) + ids.shape[1]}


def answering(model, calls, *, named=True):
    """Serve a function of ids and mask in both protocols; ``calls`` gets the shape of each call's input.

    ``named``: whether the predictions of V1 are objects; else each is the only output.
    """

    def behave(exchange):
        lines = {name.lower(): value for name, value in exchange.headers}
        if b":predict" in exchange.target:
            rows = json.loads(exchange.body)["instances"]
            ids = np.array([row["input_ids"] for row in rows])
            mask = np.array([row.get("attention_mask", [1] * ids.shape[1]) for row in rows])
            calls.append(ids.shape)
            outputs = model(ids, mask)
            rows = [{name: value[row].tolist() for name, value in outputs.items()} for row in range(len(ids))]
            if not named:
                rows = [value for row in rows for value in row.values()]
            exchange.respond(200, [], json.dumps({"predictions": rows}).encode())
            return
        length = lines.get(LENGTH.lower())
        at = len(exchange.body) if length is None else int(length)
        arrays = []
        start = at
        for one in json.loads(exchange.body[:at])["inputs"]:
            if "data" in one:
                flat = np.array(one["data"])
            else:
                size = one["parameters"]["binary_data_size"]
                flat = np.frombuffer(exchange.body[start : start + size], np.int64)
                start += size
            arrays.append(flat.reshape(one["shape"]))
        calls.append(arrays[0].shape)
        outputs, tail = [], b""
        for name, value in model(*arrays).items():
            head = {"name": name, "datatype": "INT64", "shape": list(value.shape)}
            if length is None:
                outputs.append({**head, "data": value.ravel().tolist()})
            else:
                data = value.astype(np.int64).tobytes()
                outputs.append({**head, "parameters": {"binary_data_size": len(data)}})
                tail += data
        text = json.dumps({"model_name": "m", "outputs": outputs}).encode()
        exchange.respond(200, [(LENGTH, b"%d" % len(text))] if tail else [], text + tail)

    return behave


def v1(ids):
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    return b"/v1/models/m:predict", json.dumps({"instances": rows}).encode(), []


def v2(ids, *, nested=False):
    tensors = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": list(each.shape),
            "data": each.tolist() if nested else each.ravel().tolist(),
        }
        for name, each in (("input_ids", ids), ("attention_mask", np.ones_like(ids)))
    ]
    return b"/v2/models/m/infer", json.dumps({"inputs": tensors}).encode(), []


def binary(ids):
    tensors, tail = [], b""
    for name, each in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        data = each.astype(np.int64).tobytes()
        head = {"name": name, "datatype": "INT64", "shape": list(each.shape)}
        tensors.append({**head, "parameters": {"binary_data_size": len(data)}})
        tail += data
    text = json.dumps({"inputs": tensors}).encode()
    return b"/v2/models/m/infer", text + tail, [(LENGTH, b"%d" % len(text))]


def unmasked(ids):
    return b"/v1/models/m:predict", json.dumps({"instances": [{"input_ids": row.tolist()} for row in ids]}).encode(), []


ASK = {"v1": v1, "unmasked": unmasked, "flat": v2, "nested": lambda ids: v2(ids, nested=True), "binary": binary}


def content(answer):
    length = answer.header(LENGTH.lower())
    at = len(answer.body) if length is None else int(length)
    return json.loads(answer.body[:at]), answer.body[at:]


class Compared:
    """An answer, and the one that a model server gives to the same bytes without a sidecar."""

    def __init__(self, answer, alone) -> None:
        self.answer = answer
        self.alone = alone
        self.batch = int(answer.header(b"x-carpool-batch-size") or 0)

    @property
    def same(self):
        """Whether all fields are the same, and each byte of binary data."""
        return (self.answer.status, content(self.answer)) == (200, content(self.alone))


@pytest.fixture
def encoded(world):
    """Start a sidecar in front of a function of ids and mask; how its requests are made and what they are answered."""

    async def start(model=encoder, *, models=None, policy=None, parameters=FIXED, named=True, **fields):
        calls: list[tuple[int, ...]] = []
        behave = answering(model, calls, named=named)
        world.model.behave = lambda exchange: asyncio.get_running_loop().call_later(0.001, behave, exchange)
        models = models or [{"name": "m", "sequence": SEQUENCE}]
        world.model.documents[b"/v2/models/m"] = (
            200,
            {
                "name": "m",
                "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}],
                "outputs": [{"name": "pooled", "datatype": "INT64", "shape": [-1, 1]}],
            },
        )
        policy = {"models": models, "verification": {}, **(policy or {})}
        sidecar, client = await world.start(policy=policy, parameters=parameters, **fields)
        await world.until(lambda: all(entry.alone != "axis-unknown" for entry in sidecar.models))
        direct = world.client(f"127.0.0.1:{world.model.port}")

        async def ask(protocol, ids):
            target, body, headers = ASK[protocol](np.asarray(ids))
            answer = await client.send(b"POST", target, body, [*headers, (b"X-Carpool-Debug", b"1")])
            return answer, (target, body, headers)

        async def load(protocol, *, callers=6, requests=12, lengths=range(1, 33), rows=(1, 1, 2)):
            told = []

            async def caller(number):
                rng = np.random.default_rng([21, number])
                for _ in range(requests):
                    ids = rng.integers(1, 1000, (int(rng.choice(rows)), int(rng.choice(list(lengths)))))
                    told.append(await ask(protocol, ids))

            async with asyncio.TaskGroup() as tasks:
                for number in range(callers):
                    tasks.create_task(caller(number))
            await world.until(lambda: sidecar.batcher.idle)
            return [
                Compared(answer, await direct.send(b"POST", target, body, headers))
                for answer, (target, body, headers) in told
            ]

        return sidecar, load, ask, calls

    return start


def entry_of(sidecar):
    (entry,) = sidecar.models
    return entry


def padding(sidecar):
    return sidecar.driver.verifier.padding(entry_of(sidecar))


@pytest.mark.parametrize("protocol", ["v1", "flat", "nested", "binary"])
async def test_padded_requests_get_exactly_the_answers_that_they_get_alone(encoded, protocol):
    sidecar, load, _, calls = await encoded()
    told = await load(protocol)
    assert all(one.same for one in told)
    assert padding(sidecar).startswith("verified")
    told = await load(protocol)
    assert all(one.same for one in told)
    assert sum(one.batch > 2 for one in told) > len(told) / 2  # lengths of 1 to 32: with equal ones alone hardly any
    # The server sees no length that no caller sent, and few shapes have padding that the bucket does not ask for.
    assert {length for _, length in calls} <= set(range(1, 33))
    own, added = sidecar.driver.counts.tokens["m"]
    assert 0 < added < own
    assert sidecar.driver.verifier.trials.results["m", "agreed"] > TRIALS
    assert ("m", "disagreed") not in sidecar.driver.verifier.trials.results
    # Batches of the two buckets are counted apart.
    cells = sidecar.batcher.stats(sidecar.clock()).models["m"].cells
    assert {cell[0] for cell in cells} == {16, 32}


async def test_no_request_is_padded_before_trials_agreed(encoded, world):
    sidecar, load, _, calls = await encoded()
    told = await load("v1", callers=1, requests=LONE, rows=(1,))
    await world.until(lambda: padding(sidecar).startswith("verified"))
    await world.until(lambda: sidecar.batcher.idle)
    assert all(one.same and one.batch == 1 for one in told)
    trials = [shape for shape in calls[: len(calls) - len(told)] if shape[0] > 1]
    assert len(trials) == TRIALS
    assert sidecar.driver.verifier.state(entry_of(sidecar))[0] == "verified"


async def test_a_model_without_a_mask_is_found_out_and_goes_on_with_equal_lengths(encoded, caplog):
    sidecar, load, _, _ = await encoded(without_mask)
    told = [*await load("v1", lengths=(3, 5)), *await load("v1", lengths=(3, 5))]
    assert all(one.same for one in told)
    assert padding(sidecar).startswith("refuted, so only requests of equal length share a batch: in padded trial batch")
    assert sidecar.driver.verifier.state(entry_of(sidecar))[0] == "verified"  # rows are independent
    assert any(one.batch > 2 for one in told)
    assert sidecar.driver.counts.unpadded["m", "padding-refuted"] > 0
    assert sidecar.driver.counts.tokens["m"][1] == 0
    (warning,) = [record for record in caplog.records if "depends on its padding" in record.message]
    assert "output" in warning.detail


async def test_rows_that_come_without_the_mask_are_not_taken_for_those_that_have_one(encoded):
    def model(ids, mask):
        return {"pooled": (ids * mask).sum(1, keepdims=True) + mask.sum(1, keepdims=True)}

    sidecar, load, _, _ = await encoded(model)
    await load("v1")
    assert padding(sidecar).startswith("verified")
    told = [*await load("unmasked"), *await load("unmasked")]
    assert all(one.same for one in told)
    # The trial is one of them; those with the mask are padded all the same.
    assert padding(sidecar).startswith("refuted, so only requests of equal length share a batch: in padded trial batch")
    before = sidecar.driver.counts.tokens["m"][1]
    told = await load("v1")
    assert all(one.same for one in told)
    assert sidecar.driver.counts.tokens["m"][1] > before


async def test_large_rows_that_are_longer_with_padding_are_found_out(encoded):
    """One output of TensorFlow Serving's, without a name: of its 100 kB of JSON only a part is read in a trial."""

    def model(ids, mask):
        total = (ids * mask).sum(1, keepdims=True)
        return {"hidden": np.repeat((ids + total)[..., None] + 0.123456789012, 400, axis=2)}

    models = [{"name": "m", "sequence": {**SEQUENCE, "outputs": []}}]
    sidecar, load, _, _ = await encoded(model, models=models, named=False)
    told = [*await load("v1", lengths=(12, 15), rows=(1,)), *await load("v1", lengths=(12, 15), rows=(1,))]
    assert all(one.same for one in told)
    assert "in padded trial batch of" in padding(sidecar)
    assert "4800 elements alone, 6000 elements in a batch" in padding(sidecar)


@pytest.mark.parametrize("protocol", ["v1", "nested", "flat"])
async def test_padding_that_only_the_last_position_sees_is_found_out(encoded, protocol):
    """A convolution without a mask: what follows the last position counts, and it is 7 where nothing does."""

    def model(ids, mask):
        del mask
        after = np.concatenate([ids[:, 1:], np.full((len(ids), 1), 7)], axis=1)
        return {"last_hidden_state": np.repeat((1000 * ids + after)[..., None], 700, axis=2)}

    sidecar, load, _, _ = await encoded(model, named=False)
    asked = {"lengths": (12, 15), "rows": (1,)}
    told = [*await load(protocol, **asked), *await load(protocol, **asked)]
    assert all(one.same for one in told)
    assert "in padded trial batch of" in padding(sidecar)


async def test_an_output_that_the_policy_does_not_name_is_found_out(encoded):
    models = [{"name": "m", "sequence": {**SEQUENCE, "outputs": []}}]
    sidecar, load, _, _ = await encoded(models=models)
    told = await load("flat", lengths=(3, 5))
    assert all(one.same for one in told)
    assert "refuted" in padding(sidecar)
    assert "output 'last_hidden_state', row 0: [1, 3] alone, [1, 5] in a batch" in padding(sidecar)


async def test_an_output_named_by_mistake_is_found_out(encoded):
    models = [{"name": "m", "sequence": {**SEQUENCE, "outputs": ["pooled", "last_hidden_state"]}}]
    sidecar, load, _, _ = await encoded(models=models)
    told = await load("binary", lengths=(3, 5))
    assert all(one.same for one in told)
    assert "output 'pooled' has shape [8, 1], but sequence.outputs says" in padding(sidecar)


async def test_an_axis_that_the_policy_asserts_does_not_assert_padding(encoded):
    models = [{"name": "m", "axis": "First", "sequence": SEQUENCE}]
    sidecar, load, _, _ = await encoded(without_mask, models=models)
    told = await load("v1", lengths=(3, 5))
    assert all(one.same for one in told)
    assert padding(sidecar).startswith("refuted")
    assert sidecar.driver.verifier.state(entry_of(sidecar))[0] == "asserted"


async def test_without_copies_nothing_is_padded_and_that_is_said(encoded):
    models = [{"name": "m", "axis": "First", "sequence": SEQUENCE}]
    sidecar, load, _, _ = await encoded(models=models, policy={"idempotent": False})
    told = await load("v1", lengths=(3, 5))
    assert all(one.same for one in told)
    assert padding(sidecar).startswith("off: the policy says that requests are not idempotent")
    assert sidecar.driver.counts.tokens["m"][1] == 0
    assert sidecar.driver.counts.unpadded["m", "padding-unverified"] == len(told)


@pytest.mark.parametrize("refuted", [False, True])
async def test_of_a_model_that_is_not_batched_no_padding_is_awaited(encoded, refuted):
    def model(ids, mask):
        return {"pooled": ids.sum(1, keepdims=True) + len(ids)}

    models = [{"name": "m", "axis": "Auto" if refuted else "None", "sequence": SEQUENCE}]
    sidecar, load, _, _ = await encoded(model, models=models)
    told = [*await load("v1", lengths=(3, 5)), *await load("v1", lengths=(3, 5))]
    assert all(one.same for one in told)
    assert padding(sidecar) == "off: requests of this model are not merged"


async def test_what_is_longer_than_the_last_bucket_shares_batches_with_its_own_length(encoded):
    sidecar, load, _, calls = await encoded()
    await load("v1")
    calls.clear()
    told = await load("v1", lengths=(33, 34))
    assert all(one.same for one in told)
    assert any(one.batch > 2 for one in told)
    assert sidecar.driver.counts.unpadded["m", "too-long"] == len(told)
    assert {length for _, length in calls} == {33, 34}


async def test_a_model_that_loses_its_mask_is_found_by_a_check_of_live_traffic_and_what_waits_is_not_padded(encoded):
    lost = False

    def model(ids, mask):
        return without_mask(ids, mask) if lost else encoder(ids, mask)

    sidecar, load, _, _ = await encoded(model)
    await load("v1", lengths=(3, 5))
    assert padding(sidecar).startswith("verified")
    # As after a long time, the next batch is one to be checked.
    (check,) = entry_of(sidecar).record.checks.values()
    check.live.sizes.clear()
    lost = True
    await load("v1", lengths=(3, 5))
    assert "in padded batch of live traffic" in padding(sidecar)
    told = await load("v1", lengths=(3, 5))
    assert all(one.same for one in told)
    assert not sidecar.batcher.model("m").isolation.quarantined


async def test_requests_that_wait_when_padding_is_refuted_are_sent_as_they_came(encoded, world):
    sidecar, load, ask, calls = await encoded()
    await load("v1", lengths=(3, 5))
    (check,) = entry_of(sidecar).record.checks.values()
    behave, held = world.model.behave, []
    world.model.behave = held.append
    first = asyncio.create_task(ask("v1", [[1, 2, 3]]))
    await world.until(lambda: held)
    others = [asyncio.create_task(ask("v1", [[7] * length])) for length in (3, 4, 5, 6)]
    await world.queued(sidecar, 4)
    check.pads_no_more("the test says so", sidecar.clock())
    calls.clear()
    world.model.behave = behave
    behave(held[0])
    answers = [await each for each in (first, *others)]
    assert [answer.status for answer, _ in answers] == [200] * 5
    assert calls == [(1, 3), (1, 3), (1, 4), (1, 5), (1, 6)]


async def test_a_large_request_is_split_and_put_together_among_others_of_other_lengths(encoded):
    sidecar, load, _, calls = await encoded()
    await load("flat")
    calls.clear()
    told = await load("flat", rows=(1, 3, 11), lengths=range(17, 33))
    assert all(one.same for one in told)
    assert any(shape[0] == 8 for shape in calls)
    assert padding(sidecar).startswith("verified")


async def test_a_poisoned_request_fails_alone_and_the_others_are_padded_again(encoded, world):
    sidecar, load, ask, _ = await encoded()
    await load("v1")
    behave = world.model.behave

    def failing(exchange):
        if b"666" in exchange.body:
            exchange.respond(400, [], b"666 is no word")
        else:
            behave(exchange)

    world.model.behave = failing
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask("v1", [[666 if number == 5 else 7] * (number + 1)])) for number in range(12)]
    answers = [each.result()[0] for each in asked]
    assert [answer.status for answer in answers] == [400 if number == 5 else 200 for number in range(12)]
    assert answers[5].body == b"666 is no word"
    rows = [json.loads(answer.body)["predictions"][0] for answer in answers if answer.status == 200]
    assert [len(row["last_hidden_state"]) for row in rows] == [number + 1 for number in range(12) if number != 5]
    assert sidecar.batcher.stats(sidecar.clock()).models["m"].bisections > 0


async def test_a_padded_batch_that_is_answered_with_other_lengths_costs_nobody_an_error(encoded):
    """A server that looks at the mask and answers in the longest own length, not the padded one."""
    odd = False

    def model(ids, mask):
        outputs = encoder(ids, mask)
        state = outputs["last_hidden_state"]
        return {**outputs, "last_hidden_state": state[:, :1] if odd and not mask.all() else state}

    sidecar, load, _, _ = await encoded(model)
    await load("flat", lengths=(3, 5), rows=(1,))
    odd = True
    told = await load("flat", lengths=(3, 5), rows=(1,))
    assert {one.answer.status for one in told} == {200}
    assert "but sequence.outputs says" in padding(sidecar)
    assert not sidecar.batcher.model("m").isolation.quarantined


async def test_a_sequence_axis_in_the_file_comes_and_goes_without_a_wrong_answer(encoded, world):
    sidecar, load, _, _ = await encoded()
    await load("v1")
    assert padding(sidecar).startswith("verified")
    policy = {"models": [{"name": "m", "sequence": {**SEQUENCE, "lengths": [64]}}], "verification": {}}
    for each in (policy, {"models": [], "verification": {}}, policy):
        sidecar.versions._configured(world.parsed(world.config(policy=each)))
        assert not padding(sidecar).startswith("verified")
        told = await load("v1")
        assert all(one.same for one in told)


async def test_without_room_to_pad_it_a_request_shares_batches_of_its_own_length(encoded):
    models = [{"name": "m", "axis": "First", "sequence": {**SEQUENCE, "lengths": [1024]}}]
    bodies = {"maxRequest": "64Ki", "maxBuffered": "1Mi", "maxAnswer": "64Ki"}
    sidecar, load, _, _ = await encoded(models=models, policy={"verification": {"mode": "Never"}}, bodies=bodies)
    # 1 KiB that may grow to 350 KiB: of six callers two at most have room.
    told = await load("binary", lengths=range(3, 64), rows=(20,))
    assert all(one.same for one in told)
    assert sidecar.driver.counts.unpadded["m", "too-large"] > 0
    assert sidecar.driver.counts.tokens["m"][1] > 0


async def test_the_tuner_learns_each_bucket_by_itself_and_the_batcher_plans_with_it(encoded):
    sidecar, load, _, _ = await encoded(parameters={})
    for _ in range(200):  # it takes some seconds of measurements, whatever the host has to do: 12 to 21 loads when idle
        await load("v1", lengths=(3, 5, 30))
        estimate = sidecar.batcher.model("m").belief.estimate
        if estimate is not None and estimate.buckets:
            break
    assert set(estimate.buckets) == {16, 32}
    assert estimate.of(16) is not estimate.of(32)


async def test_stats_and_metrics_show_padding(encoded, world):
    sidecar, load, _, _ = await encoded()
    told = [*await load("v1"), *await load("v1", lengths=(40,))]
    admin = world.client(sidecar.admin.address)
    stats = (await admin.get(b"/v1/stats")).json
    (entry,) = stats["models"]
    own, added = sidecar.driver.counts.tokens["m"]
    share = f"; {added / (own + added):.1%} of {own + added} tokens sent were padding; "
    assert entry["padding"].startswith("verified")
    assert entry["padding"].endswith(f"{share}requests kept to their own length: {len(told) // 2} too-long")
    text = (await admin.get(b"/metrics")).body.decode()
    assert f'carpool_sequence_tokens_total{{model="m"}} {float(own)}' in text
    assert f'carpool_padded_tokens_total{{model="m"}} {float(added)}' in text
    assert f'carpool_unpadded_total{{model="m",reason="too-long"}} {len(told) / 2}' in text
