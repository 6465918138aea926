"""The healthy callers: an open loop of requests over keep-alive connections, every answer compared with the right one.

Requests leave when they are due, whatever became of those before them, and latency counts from then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from carpool.learning.arrivals import Poisson, until
from neighbours.line import Line
from neighbours.model import healthy, judge

if TYPE_CHECKING:
    from neighbours.model import Question

PATIENCE = 12.0
"""Seconds a caller waits: more than the 10 s after which a sidecar gives up by default, so that its reason is seen."""

REUSED = 20
"""Requests on one connection, after which the caller opens another: new callers have to get in, too."""


class Callers:
    """Sends ``rate`` requests a second to ``port`` for ``warm_up`` and ``seconds``; only the latter have latencies.

    Equal seeds give equal requests at equal times.
    """

    def __init__(self, port: int, rate: float, seconds: float, *, warm_up: float = 0.0, seed: int = 1) -> None:
        self.outcomes: Counter[str] = Counter()
        """By what ``judge`` says of the answer."""
        self.latencies: list[float] = []
        """Seconds from when a request was due to its right answer."""
        self._port = port
        self._rng = Random(seed)
        self._due = until(Poisson(rate), warm_up + seconds, self._rng)
        self._warm_up = warm_up
        self._idle: list[Line] = []

    async def run(self) -> None:
        """Send all requests and wait for their answers, at most ``PATIENCE`` after the last one."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for serial, due in enumerate(self._due):
                question = healthy(serial, self._rng)
                await asyncio.sleep(start + due - time.monotonic())
                tasks.create_task(self._call(question, start + due, timed=due >= self._warm_up))
        for line in self._idle:
            line.close()

    async def _call(self, question: Question, due: float, *, timed: bool) -> None:
        line = self._idle.pop() if self._idle else Line(self._port)
        try:
            async with asyncio.timeout(due + PATIENCE - time.monotonic()):
                status, answer = await line.ask(question.message)
        except TimeoutError:
            outcome = f"no answer in {PATIENCE:g} s"
        except (OSError, EOFError) as error:
            outcome = f"connection lost: {type(error).__name__}"
        else:
            outcome = judge(question, status, answer)
        if outcome == "ok" and timed:
            self.latencies.append(time.monotonic() - due)
        if outcome == "ok" and line.answers < REUSED:
            self._idle.append(line)
        else:
            line.close()
        self.outcomes[outcome] += 1
