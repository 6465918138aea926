"""The healthy callers against servers whose faults are known: each has to be seen."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from neighbours import callers
from neighbours.callers import Callers
from neighbours.model import reply
from neighbours.server import answer

HEAD = re.compile(rb"POST (\S+) HTTP/1.1\r\n.*Content-Length: (\d+)\r\n", re.DOTALL)


@asynccontextmanager
async def serving(behave):
    """A server that answers with what ``behave`` makes of the right answer; ``None``: it hangs up."""
    connections = Counter()

    async def serve(reader, writer):
        connections["opened"] += 1
        try:
            while True:
                target, length = HEAD.match(await reader.readuntil(b"\r\n\r\n")).groups()
                said = behave(reply(target, await reader.readexactly(int(length))))
                if said is None:
                    break
                writer.write(said)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], connections


async def called(behave, *, seconds=0.3):
    async with serving(behave) as (port, connections):
        load = Callers(port, 100.0, seconds)
        await load.run()
    return load, connections


def right(said):
    return answer(said.status, said.body)


async def test_right_answers_are_counted_and_timed():
    load, _ = await called(right)
    assert set(load.outcomes) == {"ok"}
    assert len(load.latencies) == load.outcomes["ok"] > 10


@pytest.mark.parametrize(
    ("behave", "outcome"),
    [
        (lambda said: answer(200, said.body.replace(b"[", b"[9", 1)), "wrong"),
        (lambda _: answer(422, b'{"error":"private to row 3"}'), "foreign"),
        (lambda _: answer(429, b'{"error":"full","reason":"queue-full"}'), "429 queue-full"),
        (lambda _: None, "connection lost: IncompleteReadError"),
    ],
)
async def test_every_fault_is_named_and_has_no_latency(behave, outcome):
    load, _ = await called(behave)
    assert set(load.outcomes) == {outcome}
    assert not load.latencies


async def test_an_answer_for_somebody_else_is_wrong():
    before = []

    def swapped(said):
        before.append(said)
        return answer(200, before[-2 if len(before) > 2 else -1].body)

    load, _ = await called(swapped)
    assert load.outcomes["wrong"] > 0


async def test_no_answer_is_a_failure_after_the_callers_patience(monkeypatch):
    monkeypatch.setattr(callers, "PATIENCE", 0.2)
    load, _ = await called(lambda _: b"")
    assert set(load.outcomes) == {"no answer in 0.2 s"}


async def test_nobody_there_is_a_failure():
    async with serving(right) as (port, _):
        pass
    load = Callers(port, 100.0, 0.1)
    await load.run()
    assert set(load.outcomes) == {"connection lost: ConnectionRefusedError"}


async def test_connections_are_kept_and_now_and_then_new():
    load, connections = await called(right, seconds=1.0)
    assert load.outcomes["ok"] / callers.REUSED - 1 < connections["opened"] < load.outcomes["ok"]


async def test_what_is_asked_in_the_warm_up_counts_but_is_not_timed():
    async with serving(right) as (port, _):
        load = Callers(port, 100.0, 0.1, warm_up=0.3)
        await load.run()
    assert 0 < len(load.latencies) < load.outcomes["ok"]


async def test_equal_seeds_ask_the_same_at_the_same_times():
    assert Callers(1, 100.0, 2.0, seed=3)._due == Callers(1, 100.0, 2.0, seed=3)._due
    assert Callers(1, 100.0, 2.0, seed=3)._due != Callers(1, 100.0, 2.0, seed=4)._due
