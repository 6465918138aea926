"""What the operator knows of the cluster: caches, and the lists that fill them and find what events left out.

kopf reports changes of policies and workloads, a watch of our own those of pods with a sidecar. Neither is trusted
alone: an event may be lost, and after a gap nobody reports what was deleted in it. So all is listed once before
anything is decided, and again from time to time. A list also finds out which kinds this cluster has.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from carpool_operator.api import annotations as names
from carpool_operator.api.spec import API_VERSION, PLURAL
from carpool_operator.cluster.autoscalers import HPAS, SCALED_OBJECTS, RawHpa, RawScaledObject
from carpool_operator.cluster.cache import Cache
from carpool_operator.cluster.kube import ApiError, Kube, path_of
from carpool_operator.cluster.objects import RawNamespace, RawPod, RawPolicy, workload
from carpool_operator.cluster.watching import NOT_THERE, Items, Kept, LeftOut, Watch, read_list, read_one
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    import logging
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from carpool_operator.api.model import Namespace, Pod, Policy, Target, Workload
    from carpool_operator.cluster.autoscalers import Autoscaler

POLICIES, NAMESPACES, PODS = "policies", "namespaces", "pods"


class Kind(NamedTuple):
    """One kind of object that is followed."""

    api: str
    plural: str
    query: dict[str, str]
    kept: Kept[Any]
    optional: bool = False
    """Whether a cluster may be without it."""


KINDS = {
    POLICIES: Kind(API_VERSION, PLURAL, {}, Kept(RawPolicy, RawPolicy.policy)),
    **{
        kind.plural: Kind(kind.api, kind.plural, {}, Kept(kind.raw, partial(workload, kind)), not kind.built_in)
        for kind in registry.KINDS
    },
    NAMESPACES: Kind("v1", NAMESPACES, {}, Kept(RawNamespace, RawNamespace.namespace), optional=True),
    PODS: Kind("v1", PODS, {"labelSelector": f"{names.INJECTED}=true"}, Kept(RawPod, RawPod.pod)),
    # An operator of an older chart has no right to them.
    HPAS: Kind("autoscaling/v2", HPAS, {}, Kept(RawHpa, RawHpa.autoscaler), optional=True),
    SCALED_OBJECTS: Kind(
        "keda.sh/v1alpha1", SCALED_OBJECTS, {}, Kept(RawScaledObject, RawScaledObject.autoscaler), optional=True
    ),
}

WATCHED = (PODS, HPAS, SCALED_OBJECTS)
"""Those that a watch of our own follows: they change by themselves all the time. The others are kopf's."""


class Fleet:
    """The caches. Of the event loop's thread, but for what is said to be of any."""

    def __init__(self, clock: Callable[[], float], mine: Callable[[str], bool] = lambda _namespace: True) -> None:
        """Begin empty. ``mine``: whether what lies in a namespace is kept."""
        self.policies: Cache[Key, Policy] = Cache()
        self.pods: Cache[Key, Pod] = Cache()
        self.left_out = {kind: LeftOut(kind) for kind in KINDS}
        """Of each kind, for all that read it: the list, and its watch or kopf."""
        self.synced = False
        """Whether all has been listed once."""
        now = clock()
        self.last_event = {name: now for name, kind in KINDS.items() if not kind.optional}
        """When something was last reported, by kind that this cluster has; bookmarks count for pods."""
        self.unheard: dict[tuple[str, str | None], int] = {}
        """By kind and namespace (``None``: of all): lists in a row that had news while no event had come since the list
        before. Of each namespace, because each has a watch of its own."""
        self._clock = clock
        self._mine = mine
        self._last_list: dict[tuple[str, str | None], float] = {}
        self._told: dict[tuple[str, str], float] = {}
        self.namespaces: Cache[Key, Namespace] = Cache()
        self._workloads: dict[str, Cache[Key, Workload]] = {kind.plural: Cache() for kind in registry.KINDS}
        self._autoscalers: dict[str, Cache[Key, Autoscaler]] = {kind: Cache() for kind in (HPAS, SCALED_OBJECTS)}
        self._caches: dict[str, Cache[Key, Any]] = {
            POLICIES: self.policies,
            **self._workloads,
            NAMESPACES: self.namespaces,
            PODS: self.pods,
            **self._autoscalers,
        }

    @property
    def present(self) -> frozenset[str]:
        """The kinds that this cluster has, as far as is known."""
        return frozenset(self.last_event)

    def found(self, kind: str, there: bool) -> None:
        """Take note whether this cluster has a kind; of one that it has no more, nothing is there."""
        if there:
            self.last_event.setdefault(kind, self._clock())
        elif kind in self.last_event:
            del self.last_event[kind]
            self._caches[kind].clear()
            self.unheard = {place: lists for place, lists in self.unheard.items() if place[0] != kind}

    def told(self, kind: str, deleted: bool, plain: object) -> None:
        """Take an event as kopf hands it on; in any thread but that the loop calls for it."""
        try:
            raw = msgspec.convert(plain, KINDS[kind].kept.one.type)
        except msgspec.ValidationError as error:
            self.left_out[kind].told(plain.get("metadata") or {} if isinstance(plain, dict) else {}, error)
            return
        self.left_out[kind].read(raw.metadata)
        self.seen(kind, raw.metadata.key, raw.metadata.version, None if deleted else KINDS[kind].kept.keep(raw))

    def seen(self, kind: str, key: Key, version: int, value: object) -> None:
        """Take an object as it was at a version; ``None``: it is gone, or of no interest any more."""
        if kind not in self.last_event:
            return  # an event that was on its way when the kind went
        now = self.last_event[kind] = self._clock()
        if (kind, key.namespace) in self._last_list:
            self._told[kind, key.namespace] = now
        if value is None:
            self._caches[kind].drop(key, version)
        elif self._mine(key.namespace):
            self._caches[kind].put(key, version, value)

    def alive(self, kind: str) -> None:
        """Take note that somebody watches, unless the cluster does not have it."""
        if kind in self.last_event:
            self.last_event[kind] = self._clock()

    def listed_by_watch(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> None:
        """Take the list that a watch begins with: the cluster has the kind."""
        self.found(kind, there=True)
        self.listed(kind, namespace, items, version)

    def listed(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> int:
        """Take a list of all of a kind, in one namespace or in all; returns how many objects it had news of."""
        mine = {key: item for key, item in items.items() if self._mine(key.namespace)}
        return self._caches[kind].replace(mine, version, lambda key: namespace is None or key.namespace == namespace)

    def listening(self, kind: str, namespace: str | None, news: int) -> None:
        """Compare what a list of a kind, in one namespace or in all, had to say with what the events did."""
        place = kind, namespace
        heard = self.last_event[kind] if namespace is None else self._told.get((kind, namespace), -inf)
        deaf = news and self.synced and heard <= self._last_list.get(place, -inf)
        self.unheard[place] = self.unheard.get(place, 0) + 1 if deaf else 0
        self._last_list[place] = self._clock()

    def sizes(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        return {kind: len(cache) for kind, cache in self._caches.items() if kind in self.last_event}

    def workload(self, target: Target) -> Workload | None:
        """Return a target's workload."""
        return self._workloads[registry.BY_NAME[target.kind].plural].get(Key(target.namespace, target.name))

    def workloads(self) -> Iterator[Workload]:
        """Yield all workloads, of whatever kind."""
        for cache in self._workloads.values():
            yield from cache

    def autoscalers(self) -> Mapping[Target, Autoscaler]:
        """Return what follows the load of workloads; the first of several, by kind and name."""
        found = sorted((each for cache in self._autoscalers.values() for each in cache), key=str, reverse=True)
        return {each.target: each for each in found}

    def pods_by_target(self) -> Mapping[Target, Sequence[Pod]]:
        """Return all pods with a sidecar by what they belong to."""
        found: dict[Target, list[Pod]] = {}
        for pod in self.pods:
            found.setdefault(pod.target, []).append(pod)
        return found


class Sync:
    """Lists all there is, at once and then every ``interval`` seconds."""

    def __init__(
        self,
        kube: Kube,
        fleet: Fleet,
        namespaces: Sequence[str | None],
        *,
        interval: float,
        found: Callable[[str, int], None],
        clock: Callable[[], float],
        log: logging.Logger,
        random: random.Random,
    ) -> None:
        self.ended = clock()
        """When the last of them came to an end, well or not."""
        self.ok = asyncio.Event()
        """Set while the last one went well."""
        self.kinds_changed = asyncio.Event()
        """Set when the cluster has other kinds than before; whoever follows them unsets it."""
        self._kube = kube
        # Its own: in the loop's, whatever names policies have for servers are looked up, for as long as that takes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lists")
        self._fleet = fleet
        self._namespaces = namespaces
        self._interval = interval
        self._found = found
        self._clock = clock
        self._log = log
        self._random = random
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """List again at once: ``ok`` is unset until a list that begins from now on goes well."""
        self.ok.clear()
        self._doubted.set()

    async def run(self) -> None:
        """List until cancelled."""
        failures = 0
        while True:
            self._doubted.clear()
            try:
                await self.once()
                failures = 0
                wait = self._interval
            except ApiError as error:
                self.ok.clear()
                wait = max(error.retry_after, min(30.0, 2.0**failures))
                failures = min(failures + 1, 10)
                self._log.warning("listing failed", extra={"status": error.status, "error": str(error)})
            self.ended = self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait * self._random.uniform(0.8, 1.0)):
                    await self._doubted.wait()

    async def once(self) -> None:
        """List all there is.

        Raises ``ApiError``, with what was listed until then taken.
        """
        before = self._fleet.present
        for name, kind in KINDS.items():
            try:
                news = await self._list(name, kind)
            except ApiError as error:
                if not kind.optional or error.status not in NOT_THERE:
                    raise
                self._fleet.found(name, there=False)
                continue
            if self._fleet.synced and name in before:
                self._found(name, news)
        if self._fleet.present != before:
            self._log.info("the cluster has other kinds", extra={"kinds": sorted(self._fleet.present)})
            self.kinds_changed.set()
        if not self._fleet.synced:
            self._fleet.synced = True
            self._log.info("synchronised", extra=self._fleet.sizes())
        if not self._doubted.is_set():  # else what was listed may be from before
            self.ok.set()

    async def _list(self, name: str, kind: Kind) -> int:
        """List all of a kind; returns how many objects it had news of.

        Raises ``ApiError``.
        """
        news = 0
        for namespace in self._namespaces:
            # With rights in some namespaces, each of these may be read by itself.
            read, path = read_list, path_of(kind.api, kind.plural, namespace)
            if name == NAMESPACES and namespace is not None:
                read, path = read_one, path_of(kind.api, kind.plural, None, namespace)
            items, version = await asyncio.get_running_loop().run_in_executor(
                self._thread, read, self._kube, path, kind.query, kind.kept, self._fleet.left_out[name]
            )
            self._fleet.found(name, there=True)
            found = self._fleet.listed(name, namespace, items, version)
            self._fleet.listening(name, namespace, found)
            news += found
        return news


def watch_of(
    kube: Kube, fleet: Fleet, name: str, namespace: str | None, loop: asyncio.AbstractEventLoop, *,
    log: logging.Logger, random: random.Random,
) -> Watch[Any]:  # fmt: skip
    """Return the watch of a kind, in one namespace or in all; it tells the fleet in the loop's thread."""
    kind = KINDS[name]
    return Watch(
        kube,
        path_of(kind.api, kind.plural, namespace),
        kind.query,
        kind.kept,
        fleet.left_out[name],
        listed=lambda items, version: _call(loop, fleet.listed_by_watch, name, namespace, items, version),
        seen=lambda key, version, value: _call(loop, fleet.seen, name, key, version, value),
        alive=lambda: _call(loop, fleet.alive, name),
        optional=kind.optional,
        log=log,
        random=random,
    )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Have the loop's thread do it; where that has ended, nobody wants to know any more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)
