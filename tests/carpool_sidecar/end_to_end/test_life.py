"""What happens around requests that are on their way: the tuner fails, the configuration changes, the process ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from carpool.batching.requests import Estimate
from carpool.exchange.decision import Decision, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar import child_process
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.tuning import tuner_link
from carpool_sidecar.tuning.messages import Decided

TUNED = {"parameters": {}}
ESTIMATE = Estimate(times=(0.0, 0.001), upper=(0.0, 0.002))


async def served(client, numbers):
    asked = [client.predict(b"%d" % number) for number in numbers]
    return [(await one).json for one in asked] == [{"predictions": [number]} for number in numbers]


# ----------------------------------------------------------------------------------------------------------- the tuner


async def tuned(world):
    """A sidecar whose tuner has said what to do."""
    sidecar, client = await world.start(**TUNED)
    await world.until(lambda: sidecar.control.link.pid is not None)
    parameters = Parameters(max_batch=4, max_wait=Duration(0.001), max_in_flight=2)
    decision = Decision(
        parameters=parameters, change=True, reason=Reason.SAVES_DEVICE_TIME, message="", estimate=ESTIMATE
    )
    sidecar.control._heard(Decided("m", decision, sidecar.control.observer.generation("m")))
    return sidecar, client


async def test_a_tuner_that_is_killed_costs_no_request_and_what_it_said_holds(world, monkeypatch):
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.0)
    sidecar, client = await tuned(world)
    link, lane = sidecar.control.link, sidecar.batcher.model("m")
    before = lane.parameters
    for _ in range(3):
        pid = link.pid
        os.kill(pid, signal.SIGKILL)
        assert await served(client, range(20))
        await world.until(lambda pid=pid: link.pid not in {None, pid})
    assert (lane.parameters, lane.belief.estimate) == (before, ESTIMATE)
    assert link.restarts == 3


async def test_a_terminals_interrupt_does_not_reach_the_tuner(world):
    sidecar, _ = await tuned(world)
    # A terminal sends Ctrl-C to the whole process group; the sidecar then drains, and decides until it has drained.
    assert os.getpgid(sidecar.control.link.pid) != os.getpgrp()


async def test_a_tuner_that_hangs_is_not_waited_for_and_another_takes_its_place(world, monkeypatch):
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(tuner_link, "SILENCE", 0.3)
    sidecar, client = await tuned(world)
    link, counts = sidecar.control.link, sidecar.control.decisions.counts
    hung = link.pid
    os.kill(hung, signal.SIGSTOP)
    turns = 0
    async with asyncio.timeout(30):
        while link.pid == hung:
            sidecar.control.observe()
            assert await served(client, range(turns, turns + 4))
            turns += 1
    assert turns > 1
    monkeypatch.undo()
    told = sum(counts.values())
    await world.until(lambda: sum(counts.values()) > told)  # the new one decides
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


async def test_without_any_tuner_requests_are_served_by_the_baseline(world, monkeypatch):
    monkeypatch.setattr(tuner_link, "COMMAND", ("/nonexistent/tuner",))
    monkeypatch.setattr(tuner_link.TunerLink.__init__, "__defaults__", (("/nonexistent/tuner",),))
    policy = {"baseline": {"maxBatch": 2, "maxInFlight": 1}}
    sidecar, client = await world.start(**TUNED, policy=policy)
    await world.until(lambda: sidecar.control.link.restarts)
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.predict(b"1")] * 4)
    sidecar.control.observe()
    world.model.release()
    assert [(await one).status for one in (first, *asked)] == [200] * 5
    assert [len(call.rows) for call in world.model.received] == [1, 2, 2]


# --------------------------------------------------------------------------------------------------- the configuration


@pytest.fixture
async def configured(world, tmp_path):
    """A sidecar with a file, and a function that puts another version there."""
    path = tmp_path / "sidecar.json"

    async def configured(**fields):
        path.write_text(world.config(**fields))
        sidecar = await world.sidecar(path.read_text(), path=path)

        def write(text=None, **fields):
            path.write_text(world.config(**fields) if text is None else text)
            sidecar.versions.file.look()

        return sidecar, world.client(sidecar.data.address), write

    return configured


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"parameters": {"*": {"maxBatch": 2, "maxInFlight": 1}}}, [2, 2, 2]),
        ({"parameters": {"*": {"maxBatch": 8, "maxInFlight": 1, "passThrough": True}}}, [1] * 6),
        ({"policy": {"models": [{"name": "m", "maxBatch": 3}]}}, [3, 3]),
        ({"policy": {"admission": {"maxQueuedRows": 1}}}, [6]),  # what waits stays
        ({"policy": {"admission": {"timeout": "1ms"}}}, [6]),  # a deadline is of the time of arrival
    ],
)
async def test_a_version_that_comes_while_requests_wait_holds_for_them_and_loses_none(world, configured, fields, sizes):
    sidecar, client, write = await configured()
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.predict(b"1")] * 6)
    write(**fields)
    assert sidecar.versions.generation == 2
    world.model.release()
    assert [(await one).json for one in (first, *asked)] == [{"predictions": ["first"]}, *[{"predictions": [1]}] * 6]
    assert [len(call.rows) for call in world.model.received[1:]] == sizes


@pytest.mark.parametrize("text", ["", "{", "policy: .nan", '{"policy": {"slo": {"latency": {"p99": "1"}}}}', "\0"])
async def test_a_bad_version_changes_nothing_and_is_named_where_people_look(world, configured, text):
    sidecar, client, write = await configured()
    admin = world.client(sidecar.admin.address)
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.predict(b"1")] * 3)
    write(text)
    shown = (await admin.get(b"/v1/config")).json
    assert (shown["generation"], bool(shown["error"])) == (1, True)
    assert shown["parameters"]["m"]["maxBatch"] == 8
    assert b"carpool_config_rejected_total 1.0" in (await admin.get(b"/metrics")).body
    world.model.release()
    assert [(await one).status for one in (first, *asked)] == [200] * 4
    write(parameters={"*": {"maxBatch": 5}})
    shown = (await admin.get(b"/v1/config")).json
    assert (shown["generation"], shown["error"], shown["parameters"]["m"]["maxBatch"]) == (2, None, 5)


async def test_a_file_that_vanishes_changes_nothing(world, configured, tmp_path):
    sidecar, client, _ = await configured()
    (tmp_path / "sidecar.json").unlink()
    sidecar.versions.file.look()
    assert "No such file" in sidecar.versions.file.error
    assert await served(client, range(3))
    assert sidecar.versions.generation == 1


async def test_the_level_of_the_log_follows_the_file(world, configured, caplog):
    sidecar, _, write = await configured()
    write(log="Error")
    sidecar.log.warning("unheard")
    write(log="Info")
    sidecar.log.info("heard")
    assert "heard" in caplog.messages
    assert "unheard" not in caplog.messages


# -------------------------------------------------------------------------------------------------------------- the end


async def test_a_drain_answers_everybody_who_is_in(world):
    """In a batch, waiting, still uploading, pipelined, forwarded: all get their answers, then the port is closed."""
    sidecar, client = await world.start(shutdown={"lame": "0s", "limit": "20s"})
    first = await world.occupy(client)
    waiting = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
    forwarded = client.send(b"POST", b"/v2/repository/index", b"x")
    await world.until(lambda: len(world.model.held) == 2)
    host, _, port = sidecar.data.address.rpartition(":")
    uploading = await asyncio.open_connection(host, int(port))
    post = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: test\r\nContent-Length: 17\r\n\r\n"
    uploading[1].write(post + b'{"insta')
    pipelined = await asyncio.open_connection(host, int(port))
    pipelined[1].write((post + b'{"instances":[7]}') * 2)
    await world.queued(sidecar, 4)
    await world.until(lambda: sidecar.data.server.busy == 6)
    world.model.behave, echo = lambda exchange: forward_or(echo, exchange), world.model.behave

    draining = asyncio.create_task(sidecar.drain())
    await world.until(lambda: not sidecar.data.server._listeners)
    with pytest.raises(UpstreamError):
        await world.client(f"{host}:{port}").predict(b"9")
    assert not draining.done()
    uploading[1].write(b'nces":[8]}')
    await world.queued(sidecar, 5)
    world.model.release()
    await draining

    assert [(await one).json for one in (first, *waiting)] == [{"predictions": [one]} for one in ("first", 1, 2)]
    assert (await forwarded).body == b"indexed"
    assert (await uploading[0].read()).endswith(b'{"predictions":[8]}')
    text = await pipelined[0].read()
    assert text.count(b'{"predictions":[7]}') == 2
    assert text.count(b"connection: close") == 1  # with the last
    assert world.model.received[-1].rows == [1, 2, 7, 7, 8]
    for _, writer in (uploading, pipelined):
        writer.close()


def forward_or(echo, exchange):
    if exchange.target == b"/v2/repository/index":
        exchange.respond(200, [], b"indexed")
    else:
        echo(exchange)


@pytest.mark.usefixtures("untuned")
async def test_a_drain_sends_waiting_requests_at_once(world):
    policy = {"slo": {"latency": {"p99": "2h"}}, "admission": {"timeout": "2h"}}
    sidecar, client = await world.start(
        parameters={"*": {"maxBatch": 8, "maxWait": "1h", "maxInFlight": 2}}, policy=policy
    )
    sidecar.batcher.learn("m", ESTIMATE, sidecar.clock())
    held = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
    assert not world.model.received
    await sidecar.drain()
    assert [(await one).json for one in held] == [{"predictions": [1]}, {"predictions": [2]}]
    assert world.model.received[0].rows == [1, 2]


async def test_a_model_server_that_comes_back_is_used_again(world):
    sidecar, client = await world.start()
    assert await served(client, range(3))
    port = world.model.port
    await world.model.die()
    answers = [await client.predict(b"1") for _ in range(3)]
    assert {answer.status for answer in answers} <= {502, 503}
    assert all(json.loads(answer.body)["reason"].startswith("upstream-") for answer in answers)
    await world.until(lambda: not sidecar.ready)
    await world.model.listen(port)
    assert await served(client, range(3))
    await world.until(lambda: sidecar.ready)
