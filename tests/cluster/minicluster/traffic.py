"""Open-loop requests to a Service's ready endpoints, as a proxy that follows EndpointSlices would send them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import aiohttp

from minicluster.client import ApiError

if TYPE_CHECKING:
    from minicluster.api import Api

LONGEST = 900.0  # seconds after which it stops by itself
PATIENCE = 30.0  # for one answer


class Answer(NamedTuple):
    """How a request ended: "200", another status, or the exception's name; ``seconds`` from when it was due."""

    at: float
    outcome: str
    seconds: float
    endpoint: str


class Traffic:
    """Poisson arrivals in a thread of their own, from ``with`` to its end. ``rate`` may be changed at any time.

    They begin when there is an endpoint; from then on a request that finds none has failed.
    """

    def __init__(self, api: Api, service: str, namespace: str, path: str, body: bytes, *, rate: float = 0.0) -> None:
        self.rate = rate
        self.answers: deque[Answer] = deque(maxlen=200_000)
        self._api, self._service, self._namespace = api, service, namespace
        self._path, self._body = path, body
        self._endpoints: list[str] = []
        self._found = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE + 10)

    def outcomes(self, since: float = 0.0) -> Counter[str]:
        """Return how many requests that were due after ``since`` (time.monotonic) ended how."""
        return Counter(answer.outcome for answer in list(self.answers) if answer.at >= since)

    def failed(self, since: float = 0.0) -> list[Answer]:
        """Return the requests after ``since`` that had no 200."""
        return [answer for answer in list(self.answers) if answer.at >= since and answer.outcome != "200"]

    def wait_for(self, answers: int, timeout: float = 120.0) -> None:
        """Wait until so many more requests have ended.

        Raises:
            AssertionError: They have not within ``timeout`` seconds.
        """
        wanted = len(self.answers) + answers
        deadline = time.monotonic() + timeout
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline, f"{wanted - len(self.answers)} answers missing of {answers}"
            self._stop.wait(0.05)

    def _follow(self) -> None:
        """Keep the ready endpoints as the slices have them."""

        def take(slices: list[dict[str, Any]]) -> bool:
            self._endpoints = [
                f"{address}:{port['port']}"
                for one in slices
                for port in (one.get("ports") or [])[:1]
                for endpoint in one.get("endpoints") or []
                if endpoint.get("conditions", {}).get("ready")
                for address in endpoint["addresses"]
            ]
            if self._endpoints:
                self._found.set()
            return self._stop.is_set()

        labels = f"kubernetes.io/service-name={self._service}"
        while not self._stop.is_set():
            # Its deadline, a server that does not answer in time, or a cluster that is being removed: from anew.
            with contextlib.suppress(AssertionError, ApiError, OSError):
                self._api.until("endpointslices", self._namespace, take, labels=labels, timeout=2)

    async def _send(self) -> None:
        chance = random.Random(0)
        until = due = time.monotonic()
        until += LONGEST
        tasks: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE)
        ) as session:
            while not self._stop.is_set() and due < until:
                if not self.rate or not self._found.is_set():
                    await asyncio.sleep(0.02)
                    due = time.monotonic()
                    continue
                due += chance.expovariate(self.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                task = asyncio.create_task(self._one(session, due, chance))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession, due: float, chance: random.Random) -> None:
        endpoints = self._endpoints
        if not endpoints:
            self.answers.append(Answer(due, "no endpoint", 0.0, ""))
            return
        endpoint = chance.choice(endpoints)
        try:
            async with session.post(
                f"http://{endpoint}{self._path}", data=self._body, headers={"content-type": "application/json"}
            ) as answer:
                text = await answer.read()
                outcome = str(answer.status) if answer.status != 200 or text else "empty"
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = f"{type(error).__name__}: {error}"
        self.answers.append(Answer(due, outcome, time.monotonic() - due, endpoint))
