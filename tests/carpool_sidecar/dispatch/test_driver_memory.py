"""What requests leave in memory: nothing."""

from __future__ import annotations

import gc
import json

import pytest

from carpool_sidecar.dispatch.flights import Flight
from carpool_sidecar.dispatch.waiters import Waiter
from carpool_sidecar.models import MAX_ENTRIES, OTHER


async def test_names_that_callers_make_up_leave_nothing_behind(world):
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(404, [], b'{"error":"no such model"}')
    for number in range(300):
        assert (await client.predict(b"1", model=f"made-up-{number}")).status == 404
    assert [entry.model for entry in sidecar.models] == ["m"]
    assert [lane.name for lane in sidecar.batcher.models()] == ["m"]
    assert sidecar.driver.counts.answers == {(OTHER, "v1", 404): 300}
    assert not sidecar.driver.counts.batch_sizes
    assert not sidecar.driver.counts.duration_seconds


async def test_names_that_callers_make_up_are_bounded_however_many_wait_at_once(world):
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(400, [], b'{"error":"no such model"}')
    for turn in range(2):
        world.model.holding = True
        asked = [client.predict(b"1", model=f"{turn}-{number}") for number in range(MAX_ENTRIES + 50)]
        # Each model has a slot of its own; those that the table has no room for share one.
        await world.until(lambda: len(world.model.held) > MAX_ENTRIES // 2)
        world.model.release()
        assert {(await one).status for one in asked} == {400}
    assert len([*sidecar.batcher.models()]) <= MAX_ENTRIES + 1


async def test_what_was_answered_is_freed_without_the_garbage_collector(world):
    sidecar, client = await world.start(policy={"admission": {"timeout": "30s"}})
    gc.collect()
    gc.disable()
    try:
        first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3"])
        rest[1].leave()
        await world.queued(sidecar, 2)
        expired = client.predict(b"4", [(b"x-request-timeout-ms", b"5")])
        assert (await expired).status == 504
        world.model.release()
        for one in (first, rest[0], rest[2]):
            assert (await one).status == 200
        assert (await client.predict(b"[")).body == b'{"predictions":[[]}'
        left = [thing for thing in gc.get_objects() if isinstance(thing, Waiter | Flight)]
        assert left == []
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [b"[" * 3_000_000, b"{", b'{"predictions":[1]}'], ids=["large", "no JSON", "rows"])
async def test_an_answer_that_can_not_be_split_is_freed_without_the_garbage_collector(world, answer):
    sidecar, client = await world.start()
    echo = world.model.behave
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.behave = lambda exchange: (
        exchange.respond(200, [], answer) if len(json.loads(exchange.body)["instances"]) > 1 else echo(exchange)
    )
    gc.collect()
    gc.disable()
    try:
        world.model.release()
        assert [(await one).status for one in (first, *rest)] == [200] * 3
        assert len(world.model.received) == 4
        assert [thing for thing in gc.get_objects() if isinstance(thing, Waiter | Flight)] == []
    finally:
        gc.enable()
