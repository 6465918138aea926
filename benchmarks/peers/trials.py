"""Trials: the same open-loop load for every engine, and its result."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop
from peers.engines import row_of
from peers.results import Faults, Trial
from peers.running import TICK

from carpool_cli.load.loadgen import FAILURES, MISMATCH, LoadGenerator, due_times
from carpool_cli.load.report import summarize
from carpool_cli.load.servers import Request
from carpool_sidecar.http1.client.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from peers.running import Device, Running

    from carpool_cli.load.loadgen import Recording
    from carpool_sidecar.http1.messages import Headers

TIMEOUT = 3.0
"""Seconds of silence after which a client gives up: thirty times the SLO."""

CONNECTIONS = 512

GIVEN_UP = 499
"""The status that nginx made up for a client that closed its connection."""

CANCELLED_SHARE = 0.2
CANCELLED_WITHIN = 0.02
"""Seconds: while it waits for other requests, or in the batch."""

POISONED_EVERY = 1.0
"""Seconds between two poisoned requests: each is alone with its batch."""


class CheckedLoad(LoadGenerator):
    """Load of rows that differ from each other, each answer checked. ``given_up``: when clients leave, in seconds."""

    def __init__(
        self,
        pool: Pool,
        running: Running,
        due: Sequence[float],
        *,
        poisoned: Collection[int] = (),
        given_up: Mapping[int, float] | None = None,
    ) -> None:
        self._engine = running.engine
        self._rows = [row_of(index + 1, poisoned=index in poisoned) for index in range(len(due))]
        self._given_up = given_up or {}
        json = [(b"content-type", b"application/json")]
        requests = [Request(self._engine.encode(row), json) for row in self._rows]
        super().__init__(
            pool, self._engine.target, requests, due, protocol="v1", timeout=TIMEOUT, headers=[], verify=True
        )

    def verify(self, index: int, headers: Headers, body: bytes) -> None:  # noqa: ARG002 - the generator's signature
        """Compare an answer with the row that was sent."""
        if not self._engine.echoes(self._rows[index], body):
            self._outcomes.status[index] = -1 - FAILURES.index(MISMATCH)

    def _send(self, index: int) -> None:
        super()._send(index)
        if (seconds := self._given_up.get(index)) is not None:
            asyncio.get_running_loop().call_later(seconds, self._leave, index)

    def _leave(self, index: int) -> None:
        if (call := self._outstanding.get(index)) is not None:
            call.cancel()
            self.settle(index, GIVEN_UP)


class Look(NamedTuple):
    """Counters at one time. ``machine``: CPU seconds that anybody used; ``generator``: those of this process.

    ``waited``: seconds that the engine's threads stood in line for a core.
    """

    at: float
    cpu: dict[str, float]
    waited: float
    device: Device
    machine: float
    generator: float


def look(running: Running) -> Look:
    """Read the counters."""
    # user, nice, system, idle, iowait, irq, softirq, steal: what hypervisors steal is used by others, too.
    fields = [int(each) for each in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:9]]
    machine = (sum(fields) - fields[3] - fields[4]) / TICK
    own = os.times()
    return Look(
        time.monotonic(),
        running.cpu_seconds(),
        running.waited_seconds(),
        running.device(),
        machine,
        own.user + own.system,
    )


def trial(running: Running, rate: float, *, warm_up: float, seconds: float, slo: float, seed: int) -> Trial:
    """Load an engine at a rate, and report on what comes after the warm-up."""
    rng = random.Random(seed)
    due = due_times((rate,), 1.0, warm_up, rng) + [warm_up + at for at in due_times((rate,), 1.0, seconds, rng)]

    async def run() -> tuple[Recording, Look, Look]:
        pool = Pool("127.0.0.1", running.port, max_connections=CONNECTIONS, shared=False)
        going = asyncio.create_task(CheckedLoad(pool, running, due).run())
        await asyncio.sleep(warm_up)
        before = await asyncio.to_thread(look, running)
        await asyncio.sleep(seconds - 0.1)
        after = await asyncio.to_thread(look, running)
        recording = await going
        await pool.close()
        return recording, before, after

    running.settle()
    begun = time.monotonic()
    recording, before, after = uvloop.run(run())
    report = summarize(recording, slo=slo, warm_up=warm_up, seconds=seconds, connections=CONNECTIONS)
    # Costs are those of the time between the two looks, and so are the answers that share them.
    answered = sum(
        status == 200 and before.at <= begun + done <= after.at
        for status, done in zip(recording.status, recording.done, strict=True)
    )
    each = 1e3 / max(answered, 1)
    cpu = {name: used - before.cpu.get(name, 0.0) for name, used in after.cpu.items()}
    device = after.device.since(before.device)
    waited = after.waited - before.waited
    own = after.generator - before.generator
    others = (after.machine - before.machine - sum(cpu.values()) - own) / (after.at - before.at)
    return Trial(
        rate=rate,
        seconds=seconds,
        requests=report.requests,
        good_share=report.good_share,
        goodput=report.goodput,
        p50=report.latency.p50 if report.latency else None,
        p99=report.latency.p99 if report.latency else None,
        steady_good_share=report.steady_good_share,
        steady_p99=report.steady.p99 if report.steady else None,
        errors=report.errors,
        complaints={name: next(iter(said)) for name, said in report.complaints.items()},
        device_ms=device.busy * each,
        rows_a_batch=device.rows / max(device.batches, 1),
        cpu_ms=sum(cpu.values()) * each,
        cpu_ms_by_process={name: used * each for name, used in sorted(cpu.items()) if used},
        stalled=[window.start for window in report.windows if window.stalled],
        longest_stall=max((stall.seconds for stall in report.stalls), default=0.0),
        others_cores=max(others, 0.0),
        denied=waited / max(waited + sum(cpu.values()), 1e-9),
        generator_limits=report.generator_limits,
    )


def cancels(running: Running, rate: float, seconds: float, seed: int) -> Faults:
    """Load an engine while one client in five hangs up on it."""
    rng = random.Random(seed)
    due = due_times((rate,), 1.0, seconds, rng)
    given_up = {at: rng.uniform(0, CANCELLED_WITHIN) for at in range(len(due)) if rng.random() < CANCELLED_SHARE}
    return _faults(running, rate, seconds, due, given_up=given_up)


def poison(running: Running, rate: float, seconds: float, seed: int) -> Faults:
    """Load an engine while one request a second makes its batch fail."""
    due = due_times((rate,), 1.0, seconds, random.Random(seed))
    poisoned, last = set(), 0.0
    for index, at in enumerate(due):
        if at - last >= POISONED_EVERY:
            poisoned.add(index)
            last = at
    return _faults(running, rate, seconds, due, poisoned=poisoned)


def _faults(
    running: Running,
    rate: float,
    seconds: float,
    due: Sequence[float],
    *,
    poisoned: Collection[int] = (),
    given_up: Mapping[int, float] | None = None,
) -> Faults:
    misbehaving = set(poisoned) | set(given_up or {})

    async def run() -> Recording:
        pool = Pool("127.0.0.1", running.port, max_connections=CONNECTIONS, shared=False)
        recording = await CheckedLoad(pool, running, due, poisoned=poisoned, given_up=given_up).run()
        await pool.close()
        return recording

    running.settle()
    before = running.device()
    recording = uvloop.run(run())
    running.settle()
    device = running.device().since(before)
    theirs, innocents = tally(recording.status, misbehaving)
    wrong = innocents.pop(MISMATCH, 0)
    return Faults(
        rate=rate,
        seconds=seconds,
        requests=len(due),
        misbehaved=len(misbehaving),
        their_answers=theirs,
        innocents=len(due) - len(misbehaving),
        refused={name: count for name, count in innocents.items() if name.isdigit() and name != "200"},
        lost={name: count for name, count in innocents.items() if not name.isdigit()},
        wrong=wrong,
        rows_computed=device.rows,
        rows_a_batch=device.rows / max(device.batches, 1),
        serves_after=running.serves(),
        stalls=len(recording.stalls),
    )


def tally(status: Sequence[int], misbehaving: Collection[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Count what became of those that misbehave, and of the others: by status, or by how they failed."""
    theirs: Counter[str] = Counter()
    innocents: Counter[str] = Counter()
    for index, code in enumerate(status):
        into = theirs if index in misbehaving else innocents
        into[str(code) if code > 0 else FAILURES[-1 - code]] += 1
    return dict(theirs.most_common()), dict(innocents.most_common())
