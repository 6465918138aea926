"""The ConfigMaps and Secrets that pods of this node use, each followed by a watch of its own, as the kubelet does."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minicluster.client import Client, Object


class Key(NamedTuple):
    """Names one: plural is "configmaps" or "secrets"."""

    plural: str
    namespace: str
    name: str


class _Source:
    def __init__(self) -> None:
        self.known = False  # its first list has come
        self.object: Object | None = None
        self.users: set[asyncio.Event] = set()
        self.task: asyncio.Task[None] | None = None


class Sources:
    """What is used now. A user is an event, set when something that it uses has changed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sources: dict[Key, _Source] = {}

    def use(self, key: Key, changed: asyncio.Event) -> None:
        """Follow it until the user lets go."""
        if key not in self._sources:
            source = self._sources[key] = _Source()
            source.task = asyncio.create_task(self._follow(key, source))
        self._sources[key].users.add(changed)

    def release(self, changed: asyncio.Event) -> None:
        """Let go of all that a user uses."""
        for key, source in list(self._sources.items()):
            source.users.discard(changed)
            if not source.users and source.task:
                source.task.cancel()
                del self._sources[key]

    def known(self, key: Key) -> bool:
        """Whether it is known if there is such a thing."""
        return self._sources[key].known

    def data(self, key: Key) -> dict[str, bytes] | None:
        """Return its keys with their bytes; None where there is no such thing."""
        found = self._sources[key].object
        if found is None:
            return None
        texts = found.get("data") or {}
        if key.plural == "secrets":
            return {name: base64.b64decode(text) for name, text in texts.items()}
        binary = {name: base64.b64decode(text) for name, text in (found.get("binaryData") or {}).items()}
        return {name: text.encode() for name, text in texts.items()} | binary

    async def _follow(self, key: Key, source: _Source) -> None:
        path = f"/api/v1/namespaces/{key.namespace}/{key.plural}"
        async for kind, found in self._client.follow(path, fieldSelector=f"metadata.name={key.name}"):
            if kind == "SYNCED":
                source.known = True
            else:
                source.object = None if kind == "DELETED" else found
            for user in source.users:
                user.set()
