"""The Kubernetes API over aiohttp, for what runs in an event loop: the node, and loads that follow endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
# Between attempts to reach an API server that answers with errors: restarts of a watch must not be a hot loop.
PAUSE = 0.2
TOO_MANY = 429
log = logging.getLogger("node.client")


class ApiError(Exception):
    """The API server refused; ``status`` is HTTP's code, ``reason`` the API's."""

    def __init__(self, status: int, body: Object) -> None:
        super().__init__(f"{status} {body.get('reason', '')}: {body.get('message', body)}")
        self.status = status
        self.reason = body.get("reason", "")


class Client:
    """An API server's client with a bearer token, for use in one event loop."""

    def __init__(self, server: str, token: str, authority: Path) -> None:
        self.server = server
        context = ssl.create_default_context(cafile=authority)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=30),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        timeout: float = 30.0,  # noqa: ASYNC109 - HTTP's own limit
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """Ask for a path (``/api/v1/...``) and return the answer.

        Raises:
            ApiError: The server answered with an error.
        """
        async with self._session.request(
            method,
            self.server + path,
            params=query,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": kind},
            timeout=aiohttp.ClientTimeout(total=timeout),
        ) as answer:
            text = await answer.text()
            try:
                parsed: Object = json.loads(text)
            except ValueError:
                parsed = {"message": text}
            if answer.status >= 400:
                raise ApiError(answer.status, parsed)
            return parsed

    async def insist(self, method: str, path: str, body: Any) -> None:
        """Write until it went through, or the server says that it never will: what it is about is gone, or another."""
        kind = STRATEGIC if method == "PATCH" else "application/json"
        while True:
            try:
                await self.call(method, path, body, kind=kind)
            except ApiError as error:
                log.warning("%s %s: %s", method, path, error)
                if error.status < 500 and error.status != TOO_MANY:
                    return
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s %s: %s", method, path, error)
            else:
                return
            await asyncio.sleep(PAUSE)

    async def follow(self, path: str, **selectors: str) -> AsyncIterator[tuple[str, Object]]:
        """Follow a collection for ever: yield (ADDED, MODIFIED or DELETED, object), and ("SYNCED", {}) after each list.

        If an object went while the watch was broken, the next list shows it, and it is yielded as DELETED.
        """
        known: dict[str, Object] = {}
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.call("GET", path, query=selectors)
                    version = listed["metadata"]["resourceVersion"]
                    present = {one["metadata"]["uid"]: one for one in listed["items"]}
                    for uid in known.keys() - present.keys():
                        yield "DELETED", known.pop(uid)
                    for uid, one in present.items():
                        yield ("MODIFIED" if uid in known else "ADDED"), one
                    known = present
                    yield "SYNCED", {}
                async for kind, one in self._watch(path, version, selectors):
                    version = one["metadata"]["resourceVersion"]
                    if kind == "BOOKMARK":
                        continue
                    if kind == "DELETED":
                        known.pop(one["metadata"]["uid"], None)
                    else:
                        known[one["metadata"]["uid"]] = one
                    yield kind, one
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                version = ""
                await asyncio.sleep(PAUSE)

    async def _watch(self, path: str, version: str, selectors: dict[str, str]) -> AsyncIterator[tuple[str, Object]]:
        query = {**selectors, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with self._session.get(self.server + path, params=query) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, {"message": await answer.text()})
            # Lines are as long as objects are: aiohttp's own line reader has a limit.
            pending = b""
            async for chunk in answer.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", 500), event["object"])
                    yield event["type"], event["object"]
