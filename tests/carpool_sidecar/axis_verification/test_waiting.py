"""What requests wait for while batches are verified, and what becomes of them."""

from __future__ import annotations

import asyncio

import numpy as np
from verification import FIXED, LINEAR, asked, rows_of, state

from carpool.batching.first_calls import SLOW
from carpool.batching.requests import Estimate
from carpool_sidecar.axis_verification import verifier as verifier_module
from carpool_sidecar.axis_verification.check import LONE
from carpool_sidecar.axis_verification.verifier import FIRST as ANSWERS
from carpool_sidecar.axis_verification.verifier import FORMS


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
