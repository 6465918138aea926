"""Load on several servers at once, with polls while it runs, and reports on parts of it."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_cli.load.loadgen import LoadGenerator, Recording
from carpool_cli.load.report import Report, summarize
from carpool_sidecar.http1.client.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from carpool_cli.demo.processes import Running
    from carpool_cli.load.servers import Request
    from carpool_sidecar.http1.messages import Headers

TIMEOUT = 5.0
"""Seconds after which a client gives up."""

CONNECTIONS = 192
"""Requests one client sends at once: this bounds an overloaded server's queue, as real connection pools do."""

STALL = 0.05
"""Least duration in seconds of a reported pause of this host: shorter ones hardly move a p99 of 250 ms."""

TICK = 0.5
"""Seconds between two polls of the servers."""


class Aim(NamedTuple):
    """The target of a load, by V2 with binary tensors."""

    server: Running
    model: str
    requests: Sequence[Request]


class Keeping(LoadGenerator):
    """Keeps every good answer, to be checked later."""

    def __init__(self, pool: Pool, aim: Aim, due: Sequence[float]) -> None:
        super().__init__(
            pool,
            f"/v2/models/{aim.model}/infer",
            aim.requests,
            due,
            protocol="v2-binary",
            timeout=TIMEOUT,
            headers=[(b"x-carpool-debug", b"1")],  # the answer has the size of its batch
            verify=False,
        )
        self.answers: list[tuple[int, Headers, bytes]] = []

    def verify(self, index: int, headers: Headers, body: bytes) -> None:
        """Keep the answer."""
        self.answers.append((index, headers, body))


class Driven(NamedTuple):
    """The results of a load: by request, and the good answers as (place in ``due``, headers, body)."""

    recording: Recording
    answers: list[tuple[int, Headers, bytes]]


async def drive(aims: Sequence[Aim], due: Sequence[float], look: Callable[[float], Awaitable[None]]) -> list[Driven]:
    """Send a request to each aim at each of the due times (seconds from now).

    ``look`` is called with the seconds since the start, every ``TICK`` and at the end; an exception from it ends
    everything.
    """
    loop = asyncio.get_running_loop()
    pools = [Pool(*_place(aim.server.address), max_connections=CONNECTIONS, shared=False) for aim in aims]
    generators = [Keeping(pool, aim, due) for pool, aim in zip(pools, aims, strict=True)]
    started = loop.time()
    recordings: list[asyncio.Task[Recording]] = []
    try:
        async with asyncio.TaskGroup() as group:
            recordings = [group.create_task(generator.run()) for generator in generators]
            pending: set[asyncio.Task[Any]] = set(recordings)
            while pending:
                await look(loop.time() - started)
                _, pending = await asyncio.wait(pending, timeout=TICK)
        await look(loop.time() - started)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for pool in pools:
            await pool.close()
    return [
        Driven(recording.result(), generator.answers)
        for recording, generator in zip(recordings, generators, strict=True)
    ]


def report_on(recording: Recording, start: float, seconds: float, slo: float) -> Report:
    """Report on the requests due in a part of a load; at least one is."""
    first, last = (bisect_left(recording.due, time) for time in (start, start + seconds))
    part = recording._replace(
        due=recording.due[first:last],
        sent=recording.sent[first:last],
        done=recording.done[first:last],
        status=recording.status[first:last],
        complained=recording.complained[first:last],
        stalls=[
            stall
            for stall in recording.stalls
            if stall.end - stall.start >= STALL and start < stall.end and stall.start < start + seconds
        ],
    )
    return summarize(part, slo=slo, warm_up=start, seconds=seconds, connections=CONNECTIONS)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
