from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from itertools import pairwise

import pytest

from carpool.batching.counters import Counters
from carpool.exchange.decision import Decision, Observation, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import to_plain
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar import child_process
from carpool_sidecar.tuning import tuner_link
from carpool_sidecar.tuning.messages import Answered, Decided, Observations, Observed, Setup, frame
from carpool_sidecar.tuning.tuner_link import TunerLink

LOG = logging.getLogger("test")
PARAMETERS = Parameters(max_batch=8, max_wait=Duration(0.0), max_in_flight=1)
SETUP = Setup(to_plain(for_p99(0.05)))


@pytest.fixture
def decided():
    return []


@pytest.fixture
async def link(decided, monkeypatch):
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.0)
    link = TunerLink(decided.append, lambda: link.send(SETUP), LOG)
    task = asyncio.create_task(link.run())
    yield link
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_observed_is_decided_upon(link, decided, wait_until):
    assert not link.send(observations(1))  # nobody is there yet
    await wait_until(lambda: link.pid is not None)
    assert link.send(observations(1))
    await wait_until(lambda: decided)
    assert (decided[0].model, decided[0].generation) == ("m", 1)


async def test_a_process_that_is_killed_is_started_again_and_gets_the_policy(link, decided, wait_until):
    await wait_until(lambda: link.pid is not None)
    first = link.pid
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: link.pid not in {None, first})
    assert link.restarts == 1
    assert link.send(observations(1))
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


@pytest.fixture
async def other(decided, monkeypatch):
    """Links to processes that are no tuners."""
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.0)
    tasks = []

    def start(script, *, command=None):
        link = TunerLink(decided.append, lambda: None, LOG, command or (sys.executable, "-c", script))
        tasks.append(asyncio.create_task(link.run()))
        return link

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


PAUSE = "import signal; signal.pause()"


async def test_a_process_that_does_not_read_is_not_waited_for(other, wait_until):
    link = other(PAUSE)
    await wait_until(lambda: link.pid is not None)
    assert link.send(observations(1 << 20))
    assert not link.send(observations(1))
    assert link.send(SETUP)  # without it, nothing the process says later would count


async def test_one_observation_at_a_time_so_that_no_decision_is_about_the_past(link, decided, wait_until):
    await wait_until(lambda: link.pid is not None)
    for number in range(1, 4):
        assert link.send(observations(1))
        assert not link.send(observations(1))
        await wait_until(lambda: link._answered)
        assert len(decided) == number


@pytest.mark.parametrize("ends", [True, False])
async def test_an_observation_is_answered_when_all_its_models_are(other, decided, wait_until, *, ends):
    decision = Decision(parameters=PARAMETERS, change=False, reason=Reason.HELD, message="")
    said = frame(Decided("m", decision, 1)) + frame(Decided("n", decision, 1)) + (frame(Answered()) if ends else b"")
    link = other(
        f"import sys; sys.stdin.buffer.read(1); sys.stdout.buffer.write({said!r}); sys.stdout.flush(); {PAUSE}"
    )
    await wait_until(lambda: link.pid is not None)
    assert link.send(observations(1))
    await wait_until(lambda: len(decided) == 2)
    assert [each.model for each in decided] == ["m", "n"]
    await wait_until(lambda: link._answered is ends)
    assert link.send(observations(1)) is ends


async def test_a_process_that_hangs_is_killed_and_started_again(other, wait_until, monkeypatch):
    monkeypatch.setattr(tuner_link, "SILENCE", 0.1)
    link = other(PAUSE)
    await wait_until(lambda: link.pid is not None)
    first = link.pid
    await wait_until(lambda: link.restarts >= 1 and link.pid not in {None, first})
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize(
    "said",
    [
        "b'print() in a library'",  # reads as a length of 1.9 GB
        "b'\\x04\\0\\0\\0abcd'",
        "b'\\x01\\0\\0\\0\\x80'",  # an empty map: no decisions
    ],
)
async def test_what_is_no_decision_ends_the_process_not_the_link(other, wait_until, decided, said):
    link = other(f"import sys; sys.stdout.buffer.write({said}); sys.stdout.flush(); {PAUSE}")
    await wait_until(lambda: link.restarts >= 2)
    assert not decided


async def test_a_process_that_closes_its_output_and_stays_is_killed(other, wait_until, monkeypatch):
    monkeypatch.setattr(child_process, "PARTING", 0.05)
    link = other(f"import os; os.close(1); {PAUSE}")
    await wait_until(lambda: link.restarts >= 2)


async def test_a_command_that_is_not_there_is_tried_again(other, wait_until):
    link = other("", command=("/nonexistent/tuner",))
    await wait_until(lambda: link.restarts >= 2)


@pytest.mark.looptime
async def test_pauses_between_processes_double_until_one_works_for_a_while(monkeypatch):
    loop, began, lives = asyncio.get_running_loop(), [], iter([0.0] * 8 + [child_process.STEADY + 1.0, 0.0])

    async def run_once():
        began.append(loop.time())
        await asyncio.sleep(next(lives, 1e9))
        return "it ended"

    link = TunerLink(lambda _: None, lambda: None, LOG)
    monkeypatch.setattr(link, "_run_once", run_once)
    task = asyncio.create_task(link.run())
    await asyncio.sleep(1000.0)
    assert [round(b - a) for a, b in pairwise(began)] == [1, 2, 4, 8, 16, 32, 60, 60, 61 + 1, 2]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def observations(size):
    stats = Counters().snapshot(0.0)
    return Observations({"m" * size: Observed(Observation(now=0.0, seconds=1.0, stats=stats), PARAMETERS, 1)})
