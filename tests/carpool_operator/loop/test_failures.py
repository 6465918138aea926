"""Whatever fails, a later pass comes to the same end."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from fake_api import FakeApi
from fake_pod import FakePod
from lives import KEY, World, populate, status
from things import CONFIG_MAP, DEPLOYMENT, POLICY, deployment, policy

from carpool_operator.delivery.signing import Signer


async def fault_free():
    """The end state of a life in which nothing goes wrong, and how many writes it took."""
    sidecar = await FakePod(Signer(KEY).public).start()
    async with FakeApi() as api:
        one = World(api, sidecar)
        await one.start()
        populate(api)
        await one.passes(8)
        state, writes = one.end_state(), sum(api.writes.values())
        await one.close()
    await sidecar.stop()
    return state, writes


class Killed(BaseException):
    """SIGKILL."""


async def test_killed_after_any_write_it_comes_to_the_same_end(world):
    expected, writes = await fault_free()
    populate(world.api)
    assert writes > 6
    for _ in range(writes + 1):
        # Just after the next write that the server takes, this life is over: nothing that follows from it is done.
        taken = world.api._wrote
        dead = asyncio.Event()

        def wrote(key, taken=taken, dead=dead):
            if dead.is_set():
                raise Killed
            dead.set()
            world.leads = False
            taken(key)

        world.api._wrote = wrote
        await world.passes(1)
        await world.loop.tasks.end(20.0)
        world.api._wrote = taken
        world.leads = True
        await world.end()
        await world.start()
        world.now += 120.0
    await world.passes(8)

    assert world.end_state() == expected
    assert len(world.sidecar.changes) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_on_the_way_it_comes_to_the_same_end(world, seed):
    """Requests of all kinds refused, done without an answer, and cut; events (here: lists) late."""
    expected, _ = await fault_free()
    random = Random(seed)
    for _ in range(25):
        world.api.fail(
            random.choice(["GET /", "PATCH", "POST", "/configmaps", "/batchingpolicies", "/events", "status"]),
            random.choice([409, 429, 500, 503]),
            retry_after=random.choice(["", "1"]),
            after=random.random() < 0.3,
            drop=random.random() < 0.2,
        )
    populate(world.api)
    for _ in range(20):
        await world.passes(1)
        world.now += random.choice([0.0, 5.0, 70.0])
    world.api.faults.clear()
    world.now += 200.0
    await world.passes(8)

    assert world.end_state() == expected


async def test_a_server_that_refuses_is_not_asked_without_pause(world):
    populate(world.api)
    await world.passes(1)
    world.api.fail("PATCH", 500, times=10_000)
    world.api.put(*POLICY, policy("q", "web2"))
    world.api.put(*DEPLOYMENT, deployment("web2"))
    world.api.log.clear()

    await world.passes(60)  # two minutes

    # After 1 s, 2 s, 4 s up to a minute, halved at most: 11 tries of each of four objects, where 60 were possible.
    assert sum(line.startswith("PATCH") for line in world.api.log) <= 44


async def test_retry_after_is_kept(world):
    world.api.fail("PATCH", 429, retry_after="30", times=1)
    world.api.put(*POLICY, policy())
    await world.passes(1)
    world.api.log.clear()
    await world.passes(14)
    tried = [line for line in world.api.log if line.startswith("PATCH")]
    assert len(set(tried)) <= 1  # the one that was not refused
    await world.passes(2)

    assert status(world.api)["observedGeneration"] == 1
    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web")


async def test_failures_of_what_is_gone_are_forgotten(world):
    world.api.fail("PATCH", 500, times=10_000)
    populate(world.api)
    await world.passes(2)
    assert world.loop._p.backoff._failures
    for key in list(world.api.objects):
        world.api.remove(key[0], key[1], key[3], key[2])
    world.now += 200.0
    await world.passes(1)

    assert not world.loop._p.backoff._failures


async def test_a_fault_in_one_decision_costs_only_that_policy(world):
    populate(world.api)
    await world.passes(1)
    (faulty,) = [each for each in world.steps if each.views[-1].policy.name == "p"]
    faulty.fault = ZeroDivisionError("a mistake")
    world.api.put(*POLICY, policy("q", "web2"))
    await world.passes(2)

    assert status(world.api, "q")["observedGeneration"] == 1
    assert b"carpool_operator_step_errors_total 2.0" in world.metrics.text()


async def test_who_leads_no_more_writes_no_more(world):
    populate(world.api)
    world.leads = False
    await world.passes(2)

    assert not world.api.writes
