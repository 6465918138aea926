"""Batches of copies, which show sizes that the load does not fill."""

from __future__ import annotations

import json

import pytest
from verification import FIRST, LARGE, LINEAR, asked, check_of, idle, rows_of, state, verified

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Estimate, Request
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar.axis_verification.check import TRIALS
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
from carpool_sidecar.dispatch.trials import harms


async def copied(world, sidecar, client, load, rows):
    """Wish for a batch of copies, and send a request that it can be made of."""
    times = (0.01 * sidecar.driver.terms.due,) * 65
    sidecar.batcher.learn("m", Estimate(times, times), sidecar.clock())
    pace = check_of(sidecar).pace
    pace.look_at = pace.try_at = 0.0  # however soon after the last one
    sidecar.driver.verifier.trials.measure("m", [rows])
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
    assert sidecar.driver.verifier.trials.results["m", "agreed"] == TRIALS + 2
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
        sidecar.driver.verifier.trials.measure("m", sizes)
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
    sidecar.driver.verifier.trials.measure("m", [24])
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
