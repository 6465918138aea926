"""The operator's knowledge of the cluster: caches, and the periodic lists that find what events missed.

kopf reports changes of policies and workloads; our own watch reports changes of pods with a sidecar. Neither is trusted
alone: an event may be lost, and deletions during a gap are never reported. So everything is listed before the first
decision, and again from time to time. A list also discovers which kinds this cluster has.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from carpool_operator.api.model import Target
from carpool_operator.cluster.autoscalers import HPAS, SCALED_OBJECTS
from carpool_operator.cluster.cache import Cache
from carpool_operator.cluster.coverage import Coverage
from carpool_operator.cluster.kinds import KINDS, NAMESPACES, PODS, POLICIES
from carpool_operator.cluster.kube import ApiError, Kube, path_of
from carpool_operator.cluster.watching import NOT_THERE, RARELY, Items, LeftOut, Listing, Watch
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    import logging
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from carpool_operator.api.model import Namespace, Pod, Policy, Workload
    from carpool_operator.cluster.autoscalers import Autoscaler
    from carpool_operator.cluster.kinds import Kind
    from carpool_operator.cluster.objects import RawPolicy


class Fleet:
    """The caches. Used in the event loop's thread, except methods marked for any thread."""

    def __init__(self, clock: Callable[[], float], mine: Callable[[str], bool] = lambda _namespace: True) -> None:
        """Start empty. ``mine``: whether objects of a namespace are kept."""
        self.coverage = Coverage(clock)
        self.policies: Cache[Key, Policy] = Cache()
        self.pods: Cache[Key, Pod] = Cache()
        self.left_out = {kind: LeftOut(kind) for kind in KINDS}
        """Unreadable objects by kind, shared by all that read the kind: the list, and its watch or kopf."""
        self._mine = mine
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

    def unlisted(self, kind: str, namespace: str | None) -> None:
        """Record that a kind can't be listed in a namespace or in all, and forget its objects there."""
        self.coverage.unlisted(kind, namespace)
        self._caches[kind].forget(_within(namespace))

    def leave_out(self, namespace: str | None) -> None:
        """Forget all of a namespace that can't be read, and ignore its events until something there is listed again."""
        self.coverage.unread(namespace)
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
        if not self.coverage.heard(kind, key.namespace):
            return
        if value is None:
            self._caches[kind].drop(key, version)
        elif self._mine(key.namespace):
            self._caches[kind].put(key, version, value)

    def took(self, body: bytes) -> RawPolicy:
        """Record a policy as the server returned it after a write; its event comes later."""
        raw: RawPolicy = KINDS[POLICIES].kept.one.decode(body)
        self.seen(POLICIES, raw.metadata.key, raw.metadata.version, raw.policy())
        return raw

    def listed_by_watch(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> None:
        """Store the first list of a watch: the cluster has the kind."""
        self.coverage.found(kind)
        self.listed(kind, namespace, items, version)

    def listed(self, kind: str, namespace: str | None, items: Items[Any], version: int) -> int:
        """Store a list of all objects of a kind, in one namespace or in all; returns how many changed."""
        self.coverage.read(namespace)
        mine = {key: item for key, item in items.items() if self._mine(key.namespace)}
        return self._caches[kind].replace(mine, version, _within(namespace))

    def sizes(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        return {kind: len(cache) for kind, cache in self._caches.items() if kind in self.coverage.last_event}

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


class Lister:
    """Lists everything into the fleet. ``found`` is called with the changes that no event had reported, by kind."""

    def __init__(
        self,
        kube: Kube,
        fleet: Fleet,
        namespaces: Sequence[str | None],
        *,
        found: Callable[[str, int], None],
        log: logging.Logger,
    ) -> None:
        self._kube = kube
        # Its own thread pool: name lookups for servers named in policies use the loop's, and may take long.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lists")
        self._fleet = fleet
        self._namespaces = namespaces
        self._found = found
        self._log = log
        self._places = fleet.coverage.places
        """Those of the last successful list."""
        self.left_out: dict[str | None, str] = {}
        """Namespaces that are left out, and why."""

    async def list_all(self) -> bool:
        """List everything. A namespace that may not be read, as after its deletion, is left out.

        Returns whether other kinds can be listed than by the last successful list, or the same in other namespaces.
        Raises ``ApiError``, also if none of the namespaces may be read; results until then are stored.
        """
        coverage = self._fleet.coverage
        before, there = coverage.present, list(self._namespaces)
        for name, kind in KINDS.items():
            changes, refused = 0, dict[str | None, ApiError]()
            for namespace in there:
                try:
                    changes += await self._list(name, kind, namespace)
                except ApiError as error:
                    if error.status not in NOT_THERE:
                        raise
                    refused[namespace] = error
            if len(refused) < len(there) and coverage.synced and name in before:
                self._found(name, changes)
            if kind.optional:
                for namespace in refused:
                    self._fleet.unlisted(name, namespace)
            elif len(refused) == len(there):
                raise next(iter(refused.values()))
            else:
                there = [each for each in there if each not in refused]
                self._leave_out(refused)
        for namespace in there:
            if self.left_out.pop(namespace, None) is not None:
                self._log.info("a namespace can be read again", extra={"namespace": namespace})
        if coverage.present != before:
            self._log.info("the cluster has other kinds", extra={"kinds": sorted(coverage.present)})
        if not coverage.synced:
            coverage.synced = True
            self._log.info("synchronised", extra=self._fleet.sizes())
        listed_before, self._places = self._places, coverage.places
        return self._places != listed_before

    def _leave_out(self, refused: Mapping[str | None, ApiError]) -> None:
        """Forget namespaces that can't be read, and log each once, and again if another error prevents it."""
        for namespace, error in refused.items():
            why = str(error)
            if self.left_out.get(namespace) != why:
                what = {"namespace": namespace, "status": error.status, "error": why}
                self._log.warning("a namespace can't be read, and is left out until it can", extra=what)
            self.left_out[namespace] = why
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
        self._fleet.coverage.found(name)
        changes = self._fleet.listed(name, namespace, items, version)
        self._fleet.coverage.listed(name, namespace, changes)
        return changes


class Sync:
    """Has everything listed, at once and then every ``interval`` seconds."""

    def __init__(
        self,
        lister: Lister,
        *,
        interval: float,
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
        self._lister = lister
        self._interval = interval
        self._clock = clock
        self._log = log
        self._random = random
        self._doubted = asyncio.Event()

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
                wait = min(self._interval, RARELY) if self._lister.left_out else self._interval
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
        """List everything; raises ``ApiError``."""
        if await self._lister.list_all():
            self.kinds_changed.set()
        if not self._doubted.is_set():  # otherwise some results may be from before
            self.ok.set()


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
        _Reports(fleet, name, namespace, loop),
        # A namespace may be deleted, and its Role with it: the list of everything reports that.
        optional=kind.optional or namespace is not None,
        log=log,
        random=random,
    )


class _Reports:
    """Hands what a watch reports to the fleet, in the loop's thread."""

    def __init__(self, fleet: Fleet, name: str, namespace: str | None, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet, self._name, self._namespace, self._loop = fleet, name, namespace, loop

    def listed(self, items: Items[Any], version: int) -> None:
        self._call(self._fleet.listed_by_watch, self._name, self._namespace, items, version)

    def seen(self, key: Key, version: int, value: object) -> None:
        self._call(self._fleet.seen, self._name, key, version, value)

    def alive(self) -> None:
        self._call(self._fleet.coverage.alive, self._name)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it in the loop's thread; if the loop has ended, do nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
