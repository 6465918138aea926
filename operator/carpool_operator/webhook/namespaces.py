"""The namespaces' settings for their sidecars: read when a pod is admitted, and cached for a few seconds."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from carpool_operator.cluster.kube import ApiError, path_of
from carpool_operator.injector.quotas import UNREAD, Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_operator.webhook.store import Server

KEEP = 10.0
"""Seconds for which a reading is cached. Quotas' remaining amounts are read for every pod."""
WITHIN = 1.5
"""Timeout of a reading in seconds; the API server waits 5 for the whole review."""
MOST = 1000
"""Most namespaces that are cached."""

log = logging.getLogger("carpool.injector")


class _Seen(NamedTuple):
    at: float
    around: Surroundings


class Namespaces:
    """Reads them. ``clock``: monotonic seconds; ``failed`` is called after each failed reading."""

    def __init__(self, server: Server, clock: Callable[[], float], failed: Callable[[], None]) -> None:
        self._server = server
        self._clock = clock
        self._failed = failed
        self._seen: dict[str, _Seen] = {}

    async def around(self, namespace: str) -> Surroundings:
        """Return what is known of a namespace. If reading fails, return the last known value, or unknown."""
        seen = self._seen.get(namespace)
        fresh = seen is not None and self._clock() < seen.at + KEEP
        if seen is not None and fresh and not seen.around.quotas:
            return seen.around
        try:
            async with asyncio.timeout(WITHIN):
                if seen is not None and fresh:
                    return seen.around._replace(quotas=await self._list(namespace, "resourcequotas"))
                around = await self._read(namespace)
        except (ApiError, TimeoutError, msgspec.DecodeError, KeyError, TypeError) as error:
            self._failed()
            log.warning(
                "namespace %s can't be read (%s): its annotations, LimitRanges and quotas are not known",
                namespace,
                str(error) or "it took too long",
            )
            return UNREAD if seen is None else seen.around
        self._seen.pop(namespace, None)
        if len(self._seen) >= MOST:
            del self._seen[next(iter(self._seen))]
        self._seen[namespace] = _Seen(self._clock(), around)
        return around

    async def _read(self, namespace: str) -> Surroundings:
        found, limit_ranges, quotas = await asyncio.gather(
            self._server.request("GET", path_of("v1", "namespaces", None, namespace)),
            self._list(namespace, "limitranges"),
            self._list(namespace, "resourcequotas"),
        )
        metadata = msgspec.json.decode(found)["metadata"]
        return Surroundings(
            metadata.get("annotations") or {}, limit_ranges, quotas, labels=metadata.get("labels") or {}
        )

    async def _list(self, namespace: str, plural: str) -> tuple[dict[str, Any], ...]:
        found = await self._server.request("GET", path_of("v1", plural, namespace))
        return tuple(msgspec.json.decode(found)["items"])
