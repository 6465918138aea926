"""The counters of a pod, read from its sidecar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from carpool.exchange.report import decode
from carpool.policy.plain import PolicyError
from carpool_operator.api.model import Reading
from carpool_operator.delivery.publishing import address

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from carpool_operator.api.model import Pod

TIMEOUT = 3.0
"""Timeout of one report in seconds, from connecting to its last byte."""

LARGEST = 16 * 2**20
"""Most bytes of a report: 16,384 kinds of batches are 1 MiB."""


class Sidecars:
    """Reads pods, as many at a time as ``at_once`` allows."""

    def __init__(self, session: aiohttp.ClientSession, at_once: asyncio.Semaphore, clock: Callable[[], float]) -> None:
        self._session = session
        self._at_once = at_once
        self._clock = clock

    async def read(self, pod: Pod, ticket: str, *, reuse: bool) -> Reading:
        """Read one pod, with the given ``Authorization`` header. Raises nothing: a failure is the reading's error.

        ``reuse``: whether the connection is kept for the next request.
        """
        try:
            async with (
                self._at_once,
                self._session.get(
                    f"http://{address(pod)}/v1/stats",
                    headers={"authorization": ticket} if reuse else {"authorization": ticket, "connection": "close"},
                    timeout=aiohttp.ClientTimeout(total=TIMEOUT),
                    allow_redirects=False,
                ) as response,
            ):
                # The counters date from the start of the answer.
                at = self._clock()
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > LARGEST:
                        return Reading(at, None, f"its report is longer than {LARGEST // 2**20} MiB")
                if response.status != 200:
                    said = body[:300].decode(errors="replace").strip()
                    return Reading(at, None, f"it answers {response.status}: {said}")
            return Reading(at, decode(bytes(body)))
        except TimeoutError:
            return Reading(self._clock(), None, f"no answer within {TIMEOUT:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reading(self._clock(), None, str(error) or type(error).__name__)
        except PolicyError as error:
            return Reading(self._clock(), None, f"its report can't be read: {error}")
