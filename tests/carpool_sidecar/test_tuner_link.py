from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import pytest

from carpool.policy import for_p99, to_plain
from carpool_sidecar import tuner_link
from carpool_sidecar.tuner_link import TunerLink
from carpool_sidecar.wire import Observations, Setup

LOG = logging.getLogger("test")
SETUP = Setup(to_plain(for_p99(0.05)))


@pytest.fixture
def decided():
    return []


@pytest.fixture
async def link(decided, monkeypatch):
    monkeypatch.setattr(tuner_link, "FIRST_PAUSE", 0.0)
    link = TunerLink(decided.append, lambda: link.send(SETUP), LOG)
    task = asyncio.create_task(link.run())
    yield link
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_observed_is_decided_upon(link, decided, wait_until):
    assert not link.send(Observations({}))  # nobody is there yet
    await wait_until(lambda: link.pid is not None)
    assert link.send(Observations({}))
    await wait_until(lambda: decided)
    assert decided[0].models == {}


async def test_a_process_that_is_killed_is_started_again_and_told_the_policy(link, decided, wait_until):
    await wait_until(lambda: link.pid is not None)
    first = link.pid
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: link.pid not in {None, first})
    assert link.restarts == 1
    assert link.send(Observations({}))
    await wait_until(lambda: decided)


async def test_the_process_ends_with_the_link(decided, wait_until):
    link = TunerLink(decided.append, lambda: None, LOG)
    task = asyncio.create_task(link.run())
    await wait_until(lambda: link.pid is not None)
    pid = link.pid
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_does_not_read_is_not_waited_for(decided, wait_until):
    command = (sys.executable, "-c", "import sys; sys.stdout.buffer.read if 0 else __import__('signal').pause()")
    link = TunerLink(decided.append, lambda: None, LOG, command)
    task = asyncio.create_task(link.run())
    await wait_until(lambda: link.pid is not None)
    taken = 0
    while link.send(Setup({"filler": "x" * 100_000})):
        taken += 1
        assert taken < 1000
    assert taken > 5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_command_that_is_not_there_is_tried_again(decided, wait_until, monkeypatch):
    monkeypatch.setattr(tuner_link, "FIRST_PAUSE", 0.0)
    link = TunerLink(decided.append, lambda: None, LOG, ("/nonexistent/tuner",))
    task = asyncio.create_task(link.run())
    await wait_until(lambda: link.restarts >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
