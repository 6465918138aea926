"""What the operator knows of the cluster: which kinds can be listed in which namespaces, and when events came."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool_operator.cluster.kinds import KINDS, NAMESPACES, POLICIES, REQUIRED, WATCHED
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from collections.abc import Callable

Place = tuple[str, str | None]
"""A kind, and a namespace; ``None``: all of them."""


class Coverage:
    """Lists that worked, and events, by kind and namespace. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.synced = False
        """Whether everything has been listed once."""
        now = clock()
        self.last_event = dict.fromkeys(REQUIRED, now)
        """Time of the last event, by kind that this cluster has; for pods, bookmarks count."""
        self.unheard: dict[Place, int] = {}
        """Lists in a row that found changes while no event had come since the list before. By namespace, because each
        has its own watch."""
        self._clock = clock
        self._last_list: dict[Place, float] = {}
        """Where the last list worked."""
        self._last_events: dict[tuple[str, str], float] = {}
        self._unread: set[str | None] = set()
        """Namespaces that could not be read."""

    @property
    def present(self) -> frozenset[str]:
        """The kinds that this cluster has, as far as known."""
        return frozenset(self.last_event)

    @property
    def places(self) -> frozenset[Place]:
        """Where the last list worked."""
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
        """Record that a kind can't be listed in a namespace or in all.

        If it can't be listed anywhere, the cluster does not have it.
        """
        self._last_list.pop((kind, namespace), None)
        self.unheard.pop((kind, namespace), None)
        if not any(listed == kind for listed, _ in self._last_list):
            self.last_event.pop(kind, None)

    def unread(self, namespace: str | None) -> None:
        """Record that a namespace can't be read: its events don't count until something there is listed again."""
        self._unread.add(namespace)

    def read(self, namespace: str | None) -> None:
        """Record that something in a namespace, or in all, was listed."""
        self._unread.discard(namespace)

    def heard(self, kind: str, namespace: str) -> bool:
        """Record an event; False: a late one, sent before the kind was removed or the namespace left out."""
        if kind not in self.last_event or namespace in self._unread:
            return False
        now = self.last_event[kind] = self._clock()
        if (kind, namespace) in self._last_list:
            self._last_events[kind, namespace] = now
        return True

    def alive(self, kind: str) -> None:
        """Record that the watch works, unless the cluster does not have the kind."""
        if kind in self.last_event:
            self.last_event[kind] = self._clock()

    def listed(self, kind: str, namespace: str | None, changes: int) -> None:
        """Record a list of a kind, and compare the changes that it found with the events received."""
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
