"""A cache of the cluster's objects, updated from events and lists in any order.

Events come twice, late, or not at all; lists arrive between events. Resource versions order them: within a resource
they are numbers that grow (Kubernetes guarantees since 1.35 that they are comparable, and etcd's always were).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Objects by key; the newest version of each wins, in whatever order they arrive."""

    def __init__(self) -> None:
        self._items: dict[K, tuple[int, V]] = {}
        self._gone: dict[K, int] = {}
        """Version of each deletion: a list that began earlier must not restore the object."""

    def __iter__(self) -> Iterator[V]:
        return iter([value for _, value in self._items.values()])

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """Return the object, if it is there."""
        item = self._items.get(key)
        return None if item is None else item[1]

    def forget(self, within: Callable[[K], bool]) -> None:
        """Forget the objects and the deletions that are ``within``."""
        self._items = {key: item for key, item in self._items.items() if not within(key)}
        self._gone = {key: seen for key, seen in self._gone.items() if not within(key)}

    def version(self, key: K) -> int:
        """Return its resource version, 0 where there is none."""
        return self._items[key][0] if key in self._items else 0

    def put(self, key: K, version: int, value: V) -> bool:
        """Store an object at a version; returns whether that changed anything."""
        if version <= max(self.version(key), self._gone.get(key, 0)):
            return False
        self._gone.pop(key, None)
        self._items[key] = (version, value)
        return True

    def drop(self, key: K, version: int) -> bool:
        """Record a deletion at a version; returns whether that changed anything."""
        if version < self.version(key):
            return False
        self._gone[key] = max(version, self._gone.get(key, 0))
        return self._items.pop(key, None) is not None

    def replace(self, items: Mapping[K, tuple[int, V]], version: int, within: Callable[[K], bool]) -> int:
        """Store a complete list as of ``version``; it covers the keys that are ``within``.

        Returns how many objects changed: changes without an event so far.
        """
        changes = sum(self.put(key, *item) for key, item in items.items())
        lost = [key for key, (seen, _) in self._items.items() if within(key) and key not in items and seen <= version]
        for key in lost:
            del self._items[key]
        self._gone = {key: seen for key, seen in self._gone.items() if seen > version or not within(key)}
        return changes + len(lost)
