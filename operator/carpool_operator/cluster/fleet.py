"""The operator's knowledge of the cluster: caches, and the periodic lists that find what events missed.

kopf reports changes of policies and workloads; our own watch reports changes of pods with a sidecar. Neither is trusted
alone: an event may be lost, and deletions during a gap are never reported. So everything is listed before the first
decision, and again from time to time. A list also discovers which kinds this cluster has.
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
from carpool_operator.api.model import Target
from carpool_operator.api.spec import API_VERSION, PLURAL
from carpool_operator.cluster.autoscalers import HPAS, SCALED_OBJECTS, RawHpa, RawScaledObject
from carpool_operator.cluster.cache import Cache
from carpool_operator.cluster.kube import ApiError, Kube, path_of
from carpool_operator.cluster.objects import RawNamespace, RawPod, RawPolicy, workload
from carpool_operator.cluster.watching import NOT_THERE, RARELY, Items, Kept, LeftOut, Listing, Watch
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    import logging
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from carpool_operator.api.model import Namespace, Pod, Policy, Workload
    from carpool_operator.cluster.autoscalers import Autoscaler

POLICIES, NAMESPACES, PODS = "policies", "namespaces", "pods"


class Kind(NamedTuple):
    """One kind of object that is watched."""

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
    # An operator of an older chart has no rights to them.
    HPAS: Kind("autoscaling/v2", HPAS, {}, Kept(RawHpa, RawHpa.autoscaler), optional=True),
    SCALED_OBJECTS: Kind(
        "keda.sh/v1alpha1", SCALED_OBJECTS, {}, Kept(RawScaledObject, RawScaledObject.autoscaler), optional=True
    ),
}

WATCHED = (PODS, "replicasets", HPAS, SCALED_OBJECTS)
"""Kinds with our own watch: they change by themselves all the time, or most of them don't matter, as the ReplicaSets of
Deployments. kopf watches the others, and holds all of an object."""

REQUIRED = [name for name, kind in KINDS.items() if not kind.optional]
"""Kinds that every cluster has."""


class Fleet:
    """The caches. Used in the event loop's thread, except methods marked for any thread."""

    def __init__(self, clock: Callable[[], float], mine: Callable[[str], bool] = lambda _namespace: True) -> None:
        """Start empty. ``mine``: whether objects of a namespace are kept."""
        self.policies: Cache[Key, Policy] = Cache()
        self.pods: Cache[Key, Pod] = Cache()
        self.left_out = {kind: LeftOut(kind) for kind in KINDS}
        """Unreadable objects by kind, shared by all that read the kind: the list, and its watch or kopf."""
        self.synced = False
        """Whether everything has been listed once."""
        now = clock()
        self.last_event = dict.fromkeys(REQUIRED, now)
        """Time of the last event, by kind that this cluster has; for pods, bookmarks count."""
        self.unheard: dict[tuple[str, str | None], int] = {}
        """By kind and namespace (``None``: all): lists in a row that found changes while no event had come since the
        list before. By namespace, because each has its own watch."""
        self._clock = clock
        self._mine = mine
        self._last_list: dict[tuple[str, str | None], float] = {}
        """By kind and namespace (``None``: all), where the last list worked."""
        self._unread: set[str | None] = set()
        """Namespaces that could not be read."""
        self._last_events: dict[tuple[str, str], float] = {}
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
        """The kinds that this cluster has, as far as known."""
        return frozenset(self.last_event)

    @property
    def places(self) -> frozenset[tuple[str, str | None]]:
        """Kinds and namespaces (``None``: all) whose last list worked."""
        return frozenset(self._last_list)

    def followed(self) -> tuple[list[str], list[str | None]]:
        """Return the kinds and the namespaces (``None``: all) that kopf can watch.

        kopf watches each of the kinds in each of the namespaces, and ends if it may not list one of them. So a kind
        that can't be listed in one of these namespaces is left out. Its objects are only listed, from time to time.
        """
        listed = self._last_list
        namespaces = [
            each for kind, each in listed if kind == POLICIES and all((of, each) in listed for of in REQUIRED)
        ]
        # Namespaces can't be watched with rights in only some of them.
        apart = {*WATCHED} if None in namespaces else {*WATCHED, NAMESPACES}
        kinds = [kind for kind in KINDS if kind not in apart and all((kind, each) in listed for each in namespaces)]
        return kinds, namespaces

    def is_listed(self, kind: str, namespace: str) -> bool:
        """Whether the last list of a kind worked in a namespace. If not, objects that are not known may exist there."""
        return (kind, namespace) in self._last_list or (kind, None) in self._last_list

    def lists_workloads(self, kind: str, namespace: str) -> bool:
        """Whether the last list of a kind of workload, such as ``Rollout``, worked in a namespace."""
        return kind in registry.BY_NAME and self.is_listed(registry.BY_NAME[kind].plural, namespace)

    def found(self, kind: str) -> None:
        """Record that this cluster has a kind."""
        self.last_event.setdefault(kind, self._clock())

    def unlisted(self, kind: str, namespace: str | None) -> None:
        """Record that a kind can't be listed in a namespace or in all, and forget its objects there.

        If it can't be listed anywhere, the cluster does not have it.
        """
        self._last_list.pop((kind, namespace), None)
        self.unheard.pop((kind, namespace), None)
        self._caches[kind].forget(_within(namespace))
        if not any(listed == kind for listed, _ in self._last_list):
            self.last_event.pop(kind, None)

    def leave_out(self, namespace: str | None) -> None:
        """Forget all of a namespace that can't be read, and ignore its events until something there is listed again."""
        self._unread.add(namespace)
        for kind in KINDS:
            self.unlisted(kind, namespace)

    def handle_event(self, kind: str, deleted: bool, plain: object) -> None:
        """Handle an event from kopf; call it in the event loop's thread."""
        try:
            raw = msgspec.convert(plain, KINDS[kind].kept.one.type)
        except msgspec.ValidationError as error:
            self.left_out[kind].report(plain.get("metadata") or {} if isinstance(plain, dict) else {}, error)
            return
        self.left_out[kind].read(raw.metadata)
        self.seen(kind, raw.metadata.key, raw.metadata.version, None if deleted else KINDS[kind].kept.keep(raw))

    def seen(self, kind: str, key: Key, version: int, value: object) -> None:
        """Record an object at a version; ``None``: it was deleted, or does not matter any more."""
        if kind not in self.last_event or key.namespace in self._unread:
            return  # a late event, sent before the kind was removed or the namespace left out
        now = self.last_event[kind] = self._clock()
        if (kind, key.namespace) in self._last_list:
            self._last_events[kind, key.namespace] = now
        if value is None:
            self._caches[kind].drop(key, version)
        elif self._mine(key.namespace):
            self._caches[kind].put(key, version, value)

    def took(self, body: bytes) -> RawPolicy:
        """Record a policy as the server returned it after a write; its event comes later."""
        raw: RawPolicy = KINDS[POLICIES].kept.one.decode(body)
        self.seen(POLICIES, raw.metadata.key, raw.metadata.version, raw.policy())
        return raw

    def alive(self, kind: str) -> None:
        """Record that the watch works, unless the cluster does not have the kind."""
        if kind in self.last_event:
            self.last_event[kind] = self._clock()

    def listed_by_watch(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> None:
        """Store the first list of a watch: the cluster has the kind."""
        self.found(kind)
        self.listed(kind, namespace, items, version)

    def listed(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> int:
        """Store a list of all objects of a kind, in one namespace or in all; returns how many changed."""
        self._unread.discard(namespace)
        mine = {key: item for key, item in items.items() if self._mine(key.namespace)}
        return self._caches[kind].replace(mine, version, _within(namespace))

    def listening(self, kind: str, namespace: str | None, changes: int) -> None:
        """Compare the changes that a list of a kind found, in one namespace or in all, with the events received."""
        place = kind, namespace
        heard = self.last_event[kind] if namespace is None else self._last_events.get((kind, namespace), -inf)
        last = self._last_list.get(place)
        missed = changes and self.synced and last is not None and heard <= last
        deaf = missed and self._is_watched(kind, namespace)
        self.unheard[place] = self.unheard.get(place, 0) + 1 if deaf else 0
        self._last_list[place] = self._clock()

    def _is_watched(self, kind: str, namespace: str | None) -> bool:
        kinds, namespaces = self.followed()
        return kind in WATCHED or (kind in kinds and namespace in namespaces)

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
        """Return the autoscalers that follow the load of workloads; if several, the first by kind and name."""
        found = sorted((each for cache in self._autoscalers.values() for each in cache), key=str, reverse=True)
        # A Deployment that another workload created is no workload here: its autoscaler follows that workload.
        creators = {
            made: of.target
            for kind in registry.KINDS
            if kind.deployment is not None
            for of in self._workloads[kind.plural]
            if self.workload(made := Target(of.target.namespace, *kind.scaled(of.target.name))) is None
        }
        return {creators.get(each.target, each.target): each for each in found}

    def pods_by_target(self) -> Mapping[Target, Sequence[Pod]]:
        """Return all pods with a sidecar by the workload that they belong to."""
        found: dict[Target, list[Pod]] = {}
        for pod in self.pods:
            found.setdefault(pod.target, []).append(pod)
        return found


class Sync:
    """Lists everything, at once and then every ``interval`` seconds."""

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
        """When the last list ended, successful or not."""
        self.ok = asyncio.Event()
        """Set while the last list was successful."""
        self.kinds_changed = asyncio.Event()
        """Set when other kinds can be listed, or the same in other namespaces; the consumer clears it."""
        self._kube = kube
        # Its own thread pool: name lookups for servers named in policies use the loop's, and may take long.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lists")
        self._fleet = fleet
        self._namespaces = namespaces
        self._interval = interval
        self._found = found
        self._clock = clock
        self._log = log
        self._random = random
        self._doubted = asyncio.Event()
        self._places = fleet.places
        """Those of the last successful list."""
        self._left_out: set[str | None] = set()
        """Namespaces that it left out."""

    def doubt(self) -> None:
        """List again at once: ``ok`` is cleared until a list that begins now succeeds."""
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
                wait = min(self._interval, RARELY) if self._left_out else self._interval
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
        """List everything. A namespace that may not be read, as after its deletion, is left out.

        Raises ``ApiError``, also if none of the namespaces may be read; results until then are stored.
        """
        before, there = self._fleet.present, list(self._namespaces)
        for name, kind in KINDS.items():
            changes, refused = 0, dict[str | None, ApiError]()
            for namespace in there:
                try:
                    changes += await self._list(name, kind, namespace)
                except ApiError as error:
                    if error.status not in NOT_THERE:
                        raise
                    refused[namespace] = error
            if len(refused) < len(there) and self._fleet.synced and name in before:
                self._found(name, changes)
            if kind.optional:
                for namespace in refused:
                    self._fleet.unlisted(name, namespace)
            elif len(refused) == len(there):
                raise next(iter(refused.values()))
            else:
                there = [each for each in there if each not in refused]
                self._leave_out(refused)
        for namespace in self._left_out.intersection(there):
            self._log.info("a namespace can be read again", extra={"namespace": namespace})
        self._left_out = {*self._namespaces} - {*there}
        if self._fleet.present != before:
            self._log.info("the cluster has other kinds", extra={"kinds": sorted(self._fleet.present)})
        if self._fleet.places != self._places:
            self._places = self._fleet.places
            self.kinds_changed.set()
        if not self._fleet.synced:
            self._fleet.synced = True
            self._log.info("synchronised", extra=self._fleet.sizes())
        if not self._doubted.is_set():  # otherwise some results may be from before
            self.ok.set()

    def _leave_out(self, refused: Mapping[str | None, ApiError]) -> None:
        """Forget namespaces that can't be read, and log each once."""
        for namespace, error in refused.items():
            if namespace not in self._left_out:
                what = {"namespace": namespace, "status": error.status, "error": str(error)}
                self._log.warning("a namespace can't be read, and is left out until it can", extra=what)
            self._fleet.leave_out(namespace)

    async def _list(self, name: str, kind: Kind, namespace: str | None) -> int:
        """List all objects of a kind, in one namespace or in all; returns how many changed.

        Raises ``ApiError``.
        """
        # With rights only in some namespaces, each of these may be read by itself.
        read, path = Listing.read, path_of(kind.api, kind.plural, namespace)
        if name == NAMESPACES and namespace is not None:
            read, path = Listing.read_one, path_of(kind.api, kind.plural, None, namespace)
        listing = Listing(path, kind.query, kind.kept, self._fleet.left_out[name])
        items, version = await asyncio.get_running_loop().run_in_executor(self._thread, read, listing, self._kube)
        self._fleet.found(name)
        changes = self._fleet.listed(name, namespace, items, version)
        self._fleet.listening(name, namespace, changes)
        return changes


def _within(namespace: str | None) -> Callable[[Key], bool]:
    """Return whether a key is in a namespace; ``None``: in any."""
    return lambda key: namespace is None or key.namespace == namespace


def watch_of(
    kube: Kube, fleet: Fleet, name: str, namespace: str | None, loop: asyncio.AbstractEventLoop, *,
    log: logging.Logger, random: random.Random,
) -> Watch[Any]:  # fmt: skip
    """Return the watch of a kind, in one namespace or in all; it calls the fleet in the loop's thread."""
    kind = KINDS[name]
    return Watch(
        kube,
        Listing(path_of(kind.api, kind.plural, namespace), kind.query, kind.kept, fleet.left_out[name]),
        listed=lambda items, version: _call(loop, fleet.listed_by_watch, name, namespace, items, version),
        seen=lambda key, version, value: _call(loop, fleet.seen, name, key, version, value),
        alive=lambda: _call(loop, fleet.alive, name),
        # A namespace may be deleted, and its Role with it: the list of everything reports that.
        optional=kind.optional or namespace is not None,
        log=log,
        random=random,
    )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call it in the loop's thread; if the loop has ended, do nothing."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)
