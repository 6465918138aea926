"""The leader's writes: each checks the lease just before it is sent.

Failed writes are not retried here. The next pass finds what is still missing, and ``Backoff`` limits how often it
retries.
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
"""Seconds until the first retry, and the longest pause between retries."""


TIMEOUT = DURATION - RENEW
"""Timeout of a write in seconds: one that starts in the leader's last moment ends before another can lead."""


LEASE = 2
"""Threads for the election alone: behind a thousand writes to a slow server a lease would not be renewed in time. One
renewal may hang while the next is sent."""


class NotLeading(Exception):  # noqa: N818 - what it is, not that it is an error
    """Another operator may hold the lease by now."""


class Writer:
    """Reads at any time; writes while ``leads`` returns true."""

    def __init__(self, kube: Kube, leads: Callable[[], bool]) -> None:
        self._kube = kube
        self._leads = leads
        self._at_once = asyncio.Semaphore(kube.workers - LEASE)

    async def read(self, path: str, query: Mapping[str, str | int] | None = None) -> bytes:
        """Send a read request, at any time.

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
        """Send a write request.

        Raises ``ApiError``, or ``NotLeading`` with nothing written.
        """
        async with self._at_once:
            return await self._kube.request(
                method, path, body, query=query, content=content, within=TIMEOUT, before=self.check
            )

    def check(self) -> None:
        """Raise ``NotLeading`` unless this operator leads."""
        if not self._leads():
            raise NotLeading


class Backoff:
    """When a failed action may be retried: after 1 s, 2 s, 4 s up to a minute, varied by half."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._failures: dict[Hashable, tuple[int, float]] = {}

    def ready(self, key: Hashable, now: float) -> bool:
        """Return whether it may be tried."""
        return key not in self._failures or now >= self._failures[key][1]

    def failed(self, key: Hashable, now: float, at_least: float = 0.0) -> None:
        """Record a failure; the server asked to wait ``at_least`` so many seconds."""
        count = self._failures.get(key, (0, 0.0))[0]
        wait = min(LONGEST, FIRST * 2**count) * self._random.uniform(0.5, 1.0)
        self._failures[key] = (count + 1, now + max(wait, at_least))

    def succeeded(self, key: Hashable) -> None:
        """Forget its failures."""
        self._failures.pop(key, None)

    def forget(self, alive: Callable[[Hashable], bool]) -> None:
        """Forget all that are not ``alive`` any more."""
        self._failures = {key: each for key, each in self._failures.items() if alive(key)}

    def rest(self, now: float) -> None:
        """Forget actions not retried for ``LONGEST`` after they could have been: they are not needed any more."""
        self._failures = {key: each for key, each in self._failures.items() if now < each[1] + LONGEST}
