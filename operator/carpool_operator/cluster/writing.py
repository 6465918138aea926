"""Writes of the one that leads: each is checked against its lease just before it goes out.

What fails is not retried here. The next pass sees what is still to be done, and ``Backoff`` says when it may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_operator.cluster.election import DURATION, RENEW
from carpool_operator.cluster.kube import JSON, Kube

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Mapping

FIRST, LONGEST = 1.0, 60.0
"""Seconds until the first and the latest retries."""


TIMEOUT = DURATION - RENEW
"""Seconds that a write may take: one that begins in the leader's last moment is over before there can be another."""


LEASE = 2
"""Threads that are the election's: behind a thousand writes to a slow server no lease would be renewed in time, and one
renewal may still hang while the next goes out."""


class NotLeading(Exception):  # noqa: N818 - what it is, not that it is an error
    """Another may hold the lease by now."""


class Writer:
    """Reads and writes for as long as ``leads`` says so."""

    def __init__(self, kube: Kube, leads: Callable[[], bool]) -> None:
        self._kube = kube
        self._leads = leads
        self._at_once = asyncio.Semaphore(kube.workers - LEASE)

    async def read(self, path: str, query: Mapping[str, str | int] | None = None) -> bytes:
        """Read something; any time.

        Raises ``ApiError``.
        """
        async with self._at_once:
            return await self._kube.request("GET", path, query=query)

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str | int] | None = None,
        content: str = JSON,
    ) -> bytes:
        """Write something.

        Raises ``ApiError``, or ``NotLeading`` with nothing written.
        """
        async with self._at_once:
            return await self._kube.request(
                method, path, body, query=query, content=content, within=TIMEOUT, before=self._check
            )

    def _check(self) -> None:
        if not self._leads():
            raise NotLeading


class Backoff:
    """When what has failed may be tried again: 1 s, 2 s, 4 s up to a minute, spread by half."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._failures: dict[Hashable, tuple[int, float]] = {}

    def ready(self, key: Hashable, now: float) -> bool:
        """Whether it may be tried."""
        return key not in self._failures or now >= self._failures[key][1]

    def failed(self, key: Hashable, now: float, at_least: float = 0.0) -> None:
        """Take note of a failure; the server asks for ``at_least`` so many seconds."""
        count = self._failures.get(key, (0, 0.0))[0]
        wait = min(LONGEST, FIRST * 2**count) * self._random.uniform(0.5, 1.0)
        self._failures[key] = (count + 1, now + max(wait, at_least))

    def succeeded(self, key: Hashable) -> None:
        """Forget its failures."""
        self._failures.pop(key, None)

    def forget(self, alive: Callable[[Hashable], bool]) -> None:
        """Forget all that is not ``alive`` any more."""
        self._failures = {key: each for key, each in self._failures.items() if alive(key)}

    def rest(self, now: float) -> None:
        """Forget what nobody has tried again, though it was time to, for ``LONGEST``: it is wanted no more."""
        self._failures = {key: each for key, each in self._failures.items() if now < each[1] + LONGEST}
