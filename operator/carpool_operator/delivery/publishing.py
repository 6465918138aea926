"""Delivery of documents to the sidecars: a ConfigMap that persists, and an immediate push to each pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

from carpool_operator.api import annotations as names
from carpool_operator.api.spec import API_VERSION, KIND
from carpool_operator.cluster.kube import APPLY, FIELD_MANAGER, ApiError, path_of
from carpool_operator.cluster.objects import ObjectsPage, RawConfigMap
from carpool_operator.cluster.watching import NOT_THERE, PAGE
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from carpool.exchange.change import Change
    from carpool_operator.api.model import Pod, Policy, Target
    from carpool_operator.cluster.writing import Writer
    from carpool_operator.delivery.signing import Signer

CHANGE, SIGNATURE = "change.json", "change.sig"
"""Keys of the ConfigMap."""

LABEL = names.PREFIX + "change"
"""Label of these ConfigMaps, ``"true"``."""

PUSH = 3.0
"""Timeout of a push in seconds, from connecting to the answer."""


def config_map(target: Target) -> Key:
    """Return the name of a target's ConfigMap; the target's pods mount it."""
    return Key(target.namespace, names.change_name(target.kind, target.name))


class Published(NamedTuple):
    """The content of a ConfigMap, and its owner."""

    body: str
    signature: str
    owner: str
    """UID of the policy."""


_pages = msgspec.json.Decoder(ObjectsPage[RawConfigMap])


class ConfigMaps:
    """The ConfigMaps' present and wanted content."""

    def __init__(self, writer: Writer, signer: Signer, mine: Callable[[str], bool] = lambda _namespace: True) -> None:
        """Start with none. ``mine``: whether this operator manages those in a namespace."""
        self._writer = writer
        self._signer = signer
        self._mine = mine
        self._held: dict[Key, Published] = {}
        self._uids: dict[Key, str] = {}

    async def read(self, namespaces: Sequence[str | None]) -> None:
        """List them all: at the start, and from time to time, because others may have changed or deleted some.

        Those of a namespace that may not be read stay as they were last known.
        Raises ``ApiError``, also if none of the namespaces may be read.
        """
        listed: list[RawConfigMap] = []
        refused: dict[str | None, ApiError] = {}
        for namespace in namespaces:
            try:
                listed += await self._list(namespace)
            except ApiError as error:
                if error.status not in NOT_THERE:
                    raise
                refused[namespace] = error
        if len(refused) == len(namespaces):
            raise next(iter(refused.values()))
        held = {key: each for key, each in self._held.items() if key.namespace in refused}
        uids = {key: each for key, each in self._uids.items() if key.namespace in refused}
        for raw in listed:
            if self._mine(raw.metadata.namespace):
                owner = next((each.uid for each in raw.metadata.owner_references if each.kind == KIND), "")
                held[raw.metadata.key] = Published(raw.data.get(CHANGE, ""), raw.data.get(SIGNATURE, ""), owner)
                uids[raw.metadata.key] = raw.metadata.uid
        self._held, self._uids = held, uids

    async def _list(self, namespace: str | None) -> list[RawConfigMap]:
        """List those of one namespace, or of all.

        Raises ``ApiError``.
        """
        items: list[RawConfigMap] = []
        query: dict[str, str | int] = {"labelSelector": f"{LABEL}=true", "limit": PAGE}
        while True:
            page = _pages.decode(await self._writer.read(path_of("v1", "configmaps", namespace), query))
            items += page.items
            if not page.metadata.continue_:
                return items
            query = {**query, "continue": page.metadata.continue_}

    def change(self, target: Target, wall: float) -> Change | None:
        """Return the published change of a target; ``None`` if there is none, or none that a sidecar would accept.

        Without the check, anyone who may edit ConfigMaps could make us sign their parameters, or renew old ones.
        ``wall``: seconds since the epoch.
        """
        held = self._held.get(config_map(target))
        change = None if held is None else self._signer.read(held.body.encode(), held.signature)
        return change if change is not None and change.target == str(target) and wall < change.expires else None

    def keys(self) -> list[Key]:
        """Return the names of all existing ConfigMaps."""
        return list(self._held)

    def owner(self, key: Key) -> str:
        """Return the UID of the policy that owns one."""
        return self._held[key].owner

    def differs(self, target: Target, wanted: Published) -> bool:
        """Whether the ConfigMap has to be written."""
        return self._held.get(config_map(target)) != wanted

    async def write(self, target: Target, wanted: Published, policy: Policy) -> None:
        """Write a target's ConfigMap as wanted. An existing one of that name is taken over.

        One without our label is another's: the chart's admission policy refuses the write.
        Raises ``ApiError`` or ``NotLeading``.
        """
        key = config_map(target)
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "labels": {LABEL: "true", "app.kubernetes.io/managed-by": FIELD_MANAGER},
                # Not a controller reference: an object can have only one, and this one may have it already.
                "ownerReferences": [
                    {"apiVersion": API_VERSION, "kind": KIND, "name": policy.name, "uid": policy.uid},
                ],
            },
            "data": {CHANGE: wanted.body, SIGNATURE: wanted.signature},
        }
        answer = await self._writer.send(
            "PATCH",
            path_of("v1", "configmaps", *key),
            body,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            content=APPLY,
        )
        self._held[key] = wanted
        self._uids[key] = msgspec.json.decode(answer, type=RawConfigMap).metadata.uid

    async def remove(self, key: Key) -> None:
        """Delete a ConfigMap that belongs to no policy any more.

        Raises ``ApiError`` or ``NotLeading``.
        """
        uid = self._uids.get(key)
        if uid is None:
            return  # a list since then found that it was deleted
        try:
            await self._writer.send("DELETE", path_of("v1", "configmaps", *key), {"preconditions": {"uid": uid}})
        except ApiError as error:
            if error.status not in {404, 409}:
                raise
        self._held.pop(key, None)
        self._uids.pop(key, None)


class Pusher:
    """Sends documents to pods."""

    def __init__(self, session: aiohttp.ClientSession, at_once: asyncio.Semaphore) -> None:
        self._session = session
        self._at_once = at_once

    async def push(self, pod: Pod, body: bytes, signature: str) -> str:
        """Send one to a pod; returns the error, ``""`` where it was accepted."""
        try:
            async with (
                self._at_once,
                self._session.put(
                    f"http://{address(pod)}/v1/config",
                    data=body,
                    # Pushes are rare: a connection kept for the next one costs a file descriptor per pod.
                    headers={
                        "content-type": "application/json",
                        "x-carpool-signature": signature,
                        "connection": "close",
                    },
                    timeout=aiohttp.ClientTimeout(total=PUSH),
                    allow_redirects=False,
                ) as response,
            ):
                if response.status < 300:
                    return ""
                said = (await response.content.read(300)).decode(errors="replace").strip()
                return f"it answers {response.status}: {said}"
        except TimeoutError:
            return f"no answer within {PUSH:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__


def address(pod: Pod) -> str:
    """Return the address of a pod's admin port."""
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return f"{host}:{pod.admin_port}"
