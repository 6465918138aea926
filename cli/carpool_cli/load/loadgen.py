"""Open-loop load: requests are sent when they are due, whether or not earlier ones were answered.

A generator that waits for answers slows down with the server and never observes the queue it would have met
(coordinated omission). Here the times are drawn beforehand, and latency counts from the time a request was *due*. So a
late generator makes a server look worse, never better, and its lateness is recorded, too.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar, get_args

from carpool.learning.arrivals import Gamma, Poisson, until
from carpool_cli.load import tensors
from carpool_cli.load.servers import Protocol, Request, is_echo
from carpool_sidecar.http1.client.errors import FailureKind, UpstreamError
from carpool_sidecar.http1.messages import Headers, content_length, encode_request_head, find
from carpool_sidecar.tuning.stalls import Stall, StallWatcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from random import Random

    from carpool_sidecar.http1.client.calls import Call
    from carpool_sidecar.http1.client.pool import Pool

Result = TypeVar("Result")
Number = TypeVar("Number", int, float)

MISMATCH = "mismatch"
FAILURES: tuple[str, ...] = (*get_args(FailureKind), MISMATCH)
"""Outcomes of requests without a usable answer; the n-th has status -(n + 1)."""

COMPLAINT = 200
"""Bytes kept of an error answer."""

MAX_COMPLAINTS = 32
"""Most distinct error texts per status; servers put times and names of requests into them."""


class Recording(NamedTuple):
    """The outcome of each request, in the order they were due; times are seconds from the start.

    ``status``: HTTP status, or minus the place in ``FAILURES``, counted from 1.
    """

    due: Sequence[float]
    sent: Sequence[float]
    done: Sequence[float]
    status: Sequence[int]
    stalls: list[Stall]
    cpu_seconds: float
    """CPU time of this process."""
    seconds: float
    """Wall time from the start to the last answer."""
    most_outstanding: int
    complaints: Sequence[str] = ()
    """Beginnings of answers with a status other than 2xx, each text once per status."""
    complained: Sequence[int] = ()
    """For each request the place of its answer's text in ``complaints``, counted from 1; 0: none was kept."""
    stopped_at: float | None = None
    """When it was stopped early. Requests without an answer by then are not in the recording."""
    left_out: int = 0
    """Number of requests without an answer by then."""


def due_times(rates: Sequence[float], cv: float, seconds: float, rng: Random) -> list[float]:
    """Draw the due times of requests: each rate (per second) in turn for an equal share of ``seconds``.

    Gaps are exponential for ``cv`` 1, evenly spaced for 0, else gamma with that coefficient of variation.
    """
    share = seconds / len(rates)
    times: list[float] = []
    for index, rate in enumerate(rates):
        start = index * share
        if rate == 0:
            continue
        if cv == 0:
            times += [start + step / rate for step in range(math.ceil(share * rate))]
        else:
            process = Poisson(rate) if cv == 1 else Gamma(rate, cv)
            times += [start + time for time in until(process, share, rng)]
    return times


async def when_due(due: Sequence[float], started: float) -> AsyncIterator[int]:
    """Yield the index of each request when it is due, in seconds from ``started``, and at once if that is past."""
    for index, at in enumerate(due):
        # Loops sleep whole milliseconds and may round down: round up, so as never to send early.
        while (  # noqa: ASYNC110 - nothing but time is waited for
            wait := at - (time.monotonic() - started)
        ) > 0:
            await asyncio.sleep(math.ceil(wait * 1e3) / 1e3)
        yield index
        if not index % 32:
            await asyncio.sleep(0)  # when behind, let answers arrive


class OnTime(ABC):
    """Sends requests when they are ``due`` (seconds from the start), in a task that ``stop`` ends early."""

    def __init__(self, due: Sequence[float]) -> None:
        self._due = due
        self._started = 0.0
        self._sending: asyncio.Task[None] | None = None
        self._stopped_at: float | None = None

    def now(self) -> float:
        """Seconds from the start."""
        return time.monotonic() - self._started

    def stop(self) -> None:
        """Send no more and wait for nothing; ``run`` returns the results so far."""
        if self._sending is not None and self._stopped_at is None:
            self._stopped_at = self.now()
            self._sending.cancel()

    @abstractmethod
    async def _send_all(self) -> None:
        """Send everything, and wait for the answers."""

    async def _watched(self) -> tuple[list[Stall], float, float]:
        """Send everything; return this host's pauses meanwhile, and the seconds of CPU time and of wall time."""
        cpu = time.process_time()
        watcher = StallWatcher()
        watcher.start()
        try:
            self._started = time.monotonic()
            self._sending = asyncio.get_running_loop().create_task(self._send_all())
            try:
                await self._sending
            except asyncio.CancelledError:
                if self._stopped_at is None:
                    raise
            seconds = self.now()
        finally:
            watcher.stop()
        stalls = [Stall(stall.start - self._started, stall.end - self._started) for stall in watcher.recent]
        return stalls, time.process_time() - cpu, seconds


async def until_interrupted(run: Awaitable[Result], stop: Callable[[], None]) -> Result:
    """Wait for a generator's ``run``; Ctrl-C calls ``stop``."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        return await run
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class Outcomes:
    """The outcome of each request: see ``Recording``. Each text of an error is kept once per status."""

    def __init__(self, requests: int) -> None:
        self.sent = array("d", bytes(8 * requests))
        self.done = array("d", bytes(8 * requests))
        self.status = array("h", bytes(2 * requests))
        self.complained = array("H", bytes(2 * requests))
        self._places: dict[tuple[int, str], int] = {}  # by status and text: counted from 1
        self._texts: Counter[int] = Counter()  # by status

    @property
    def texts(self) -> list[str]:
        """All texts, in the order of their places."""
        return [text for _, text in self._places]

    def complain(self, index: int, status: int, body: bytes) -> None:
        """Keep the beginning of the error that a request was answered with."""
        said = status, " ".join(body[:COMPLAINT].decode("utf-8", "replace").split())
        if said not in self._places and said[1] and self._texts[status] < MAX_COMPLAINTS:
            self._texts[status] += 1
            self._places[said] = len(self._places) + 1
        self.complained[index] = self._places.get(said, 0)


class LoadGenerator(OnTime):
    """Sends ``requests`` in turn through a pool, one at each of the ``due`` times, and records the answers.

    With ``verify`` an answer must be an echo, or it counts as a mismatch. No call lasts longer than about twice
    ``timeout`` seconds: once for a connection, and once for an answer.
    """

    def __init__(
        self,
        pool: Pool,
        target: str,
        requests: Sequence[Request],
        due: Sequence[float],
        *,
        protocol: Protocol,
        timeout: float,
        headers: Headers,
        verify: bool,
    ) -> None:
        super().__init__(due)
        self._pool = pool
        self._timeout = timeout
        self._protocol = protocol
        self._requests = requests
        self._verify = verify
        host = (b"host", pool.authority)
        self._heads = [
            encode_request_head(
                b"POST", target.encode(), [host, *headers, *request.headers, content_length(len(request.body))]
            )
            for request in requests
        ]
        self._outcomes = Outcomes(len(due))
        self._outstanding: dict[int, Call] = {}
        self._most_outstanding = 0
        self._settled = asyncio.Event()

    async def run(self) -> Recording:
        """Send everything, wait for the answers, and return the recording."""
        stalls, cpu_seconds, seconds = await self._watched()
        is_stopped = self._stopped_at is not None
        left_out = len(self._outstanding) if is_stopped else 0
        for index, call in list(self._outstanding.items()):
            call.cancel()
            if not is_stopped:
                self.settle(index, -1 - FAILURES.index("timeout"))
        outcomes = self._outcomes
        ended = [index for index, status in enumerate(outcomes.status) if status]

        def of_ended(values: Sequence[Number]) -> Sequence[Number]:
            return [values[index] for index in ended] if is_stopped else values

        return Recording(
            of_ended(self._due),
            of_ended(outcomes.sent),
            of_ended(outcomes.done),
            of_ended(outcomes.status),
            stalls,
            cpu_seconds,
            seconds,
            self._most_outstanding,
            outcomes.texts,
            of_ended(outcomes.complained),
            self._stopped_at,
            left_out,
        )

    async def _send_all(self) -> None:
        """Send everything, and wait for the answers up to their timeout."""
        loop = asyncio.get_running_loop()
        async for index in when_due(self._due, self._started):
            self._send(index)
        deadline = loop.time() + 2 * self._timeout
        while self._outstanding and loop.time() < deadline:
            self._settled.clear()
            loop.call_later(0.1, self._settled.set)
            await self._settled.wait()

    def _send(self, index: int) -> None:
        which = index % len(self._requests)
        self._outcomes.sent[index] = self.now()
        call = self._pool.send(
            self._heads[which], self._requests[which].body, _Shot(self, index), timeout=self._timeout, retry_stale=True
        )
        if not call.done:
            self._outstanding[index] = call
            self._most_outstanding = max(self._most_outstanding, len(self._outstanding))

    # Called by the shots

    def settle(self, index: int, status: int) -> None:
        """Record the end of a request."""
        self._outcomes.done[index] = self.now()
        self._outcomes.status[index] = status
        self._outstanding.pop(index, None)
        if not self._outstanding:
            self._settled.set()

    def complain(self, index: int, status: int, body: bytes) -> None:
        """Keep the beginning of an error answer."""
        self._outcomes.complain(index, status, body)

    def verify(self, index: int, headers: Headers, body: bytes) -> None:
        """Check a good answer, if requested; its time was taken before."""
        request = self._requests[index % len(self._requests)]
        if self._verify and not is_echo(self._protocol, request, find(headers, tensors.HEADER_LENGTH), body):
            self._outcomes.status[index] = -1 - FAILURES.index(MISMATCH)


class _Shot:
    """One request in progress."""

    __slots__ = ("_generator", "_index")

    def __init__(self, generator: LoadGenerator, index: int) -> None:
        self._generator = generator
        self._index = index

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        self._generator.settle(self._index, status)
        if status == 200:
            self._generator.verify(self._index, headers, bytes(body))
        elif not 200 <= status < 300:
            self._generator.complain(self._index, status, bytes(body[:COMPLAINT]))

    def failed(self, error: UpstreamError) -> None:
        self._generator.settle(self._index, -1 - FAILURES.index(error.kind))
