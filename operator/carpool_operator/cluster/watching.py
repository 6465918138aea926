"""Lists and watches that keep only the needed fields, and go on after any failure.

A list is read page by page, a watch line by line, each decoded to a few fields. Both run in their own thread and pass
objects to the event loop.
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from carpool_operator.cluster.kube import ApiError, Kube
from carpool_operator.cluster.objects import Change, Failure, ObjectsPage
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from carpool_operator.workloads.metadata import Meta

log = logging.getLogger("carpool")

PAGE = 500
"""Objects per page of a list: some MiB of JSON at a time."""

WATCH = 290
"""Seconds after which the server ends a watch; the next one continues from there."""

SILENCE = 90.0
"""Seconds without a line after which a watch is restarted: the server sends a bookmark every minute."""

LONGEST = 30.0
"""Longest pause between two attempts, in seconds."""

GONE = 410

NOT_THERE = {403, 404}
"""Statuses of a list of a kind whose CRD is not installed, or that this operator has no rights to."""

RARELY = 120.0
"""Seconds between two checks whether such a kind has appeared."""

REMEMBERED = 1000
"""Objects of a kind whose problem is remembered; some may have been deleted since."""

T = TypeVar("T")


class Kept(Generic[T]):
    """How one kind of object is read: its JSON is decoded to ``raw``, which has ``metadata``; ``keep`` selects a part.

    ``keep`` returns ``None`` for an object that does not matter here.
    """

    def __init__(self, raw: Any, keep: Callable[[Any], T | None]) -> None:  # noqa: ANN401 - a Struct class
        self.keep = keep
        self.page = msgspec.json.Decoder(ObjectsPage[msgspec.Raw])
        self.one = msgspec.json.Decoder(raw)

    def read(self, text: bytes | msgspec.Raw, left_out: LeftOut) -> Any | None:  # noqa: ANN401 - a Struct
        """Read one object; ``None`` if its fields are invalid, so that it does not affect the others."""
        try:
            raw = self.one.decode(text)
        except msgspec.ValidationError as error:
            left_out.report(_object.decode(text).metadata, error)
            return None
        left_out.read(raw.metadata)
        return raw


class LeftOut:
    """The unreadable objects of one kind. Each is logged once, and again when its problem changes.

    For any thread: a list and a watch read the same objects.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._problems: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def report(self, metadata: Mapping[str, Any], error: msgspec.ValidationError) -> None:
        """Log why an object can't be read, unless already logged."""
        namespace, name, problem = str(metadata.get("namespace", "")), str(metadata.get("name", "")), str(error)
        with self._lock:
            said = self._problems.pop((namespace, name), None) == problem
            if len(self._problems) >= REMEMBERED:
                del self._problems[next(iter(self._problems))]
            self._problems[namespace, name] = problem
        if not said:
            what = {"kind": self._kind, "namespace": namespace, "object": name, "error": problem}
            log.warning("an object is left out", extra=what)

    def read(self, metadata: Meta) -> None:
        """Record that an object can be read."""
        if self._problems:
            with self._lock:
                self._problems.pop((metadata.namespace, metadata.name), None)


Items = dict[Key, tuple[int, T]]


class Listing(NamedTuple, Generic[T]):
    """What is listed or watched, and how it is read."""

    path: str
    query: Mapping[str, str | int]
    kept: Kept[T]
    left_out: LeftOut

    def read(self, kube: Kube) -> tuple[Items[T], int]:
        """Read a whole list in this thread: the kept parts by name with their versions, and the list's version.

        Raises ``ApiError``.
        """
        items: Items[T] = {}
        version, rest = "", ""
        while True:
            query = {**self.query, "limit": PAGE, **({"continue": rest} if rest else {})}
            page = self.kept.page.decode(kube.get(self.path, query))
            version = version or page.metadata.resource_version
            for item in page.items:
                raw = self.kept.read(item, self.left_out)
                value = None if raw is None else self.kept.keep(raw)
                if raw is not None and value is not None:
                    items[raw.metadata.key] = (raw.metadata.version, value)
            rest = page.metadata.continue_
            if not rest:
                return items, int(version)

    def read_one(self, kube: Kube) -> tuple[Items[T], int]:
        """Read one object, at the path, as a list of one, or an empty list if nothing of it is kept.

        Raises ``ApiError``.
        """
        raw = self.kept.read(kube.get(self.path, self.query), self.left_out)
        if raw is None:
            return {}, 0
        value, version = self.kept.keep(raw), raw.metadata.version
        return {} if value is None else {raw.metadata.key: (version, value)}, version


class Follower(Protocol[T]):
    """What a watch reports to, in the watch's thread."""

    def listed(self, items: Items[T], version: int) -> None:
        """Take a list as of a version."""

    def seen(self, key: Key, version: int, value: T | None) -> None:
        """Take an object that is new or changed; ``None``: it was deleted, or does not matter any more."""

    def alive(self) -> None:
        """Take note that something was received, or a new request sent."""


class Watch(Generic[T]):
    """One list and watch, in a thread of its own, until stopped."""

    def __init__(
        self,
        kube: Kube,
        listing: Listing[T],
        follower: Follower[T],
        *,
        optional: bool = False,
        log: logging.Logger,
        random: random.Random,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.listing = listing
        self.heard = clock()
        """When it last received something, or sent a new request."""
        self._clock = clock
        self._kube = kube
        self._follower = follower
        self._optional = optional
        self._log = log
        self._random = random
        self._stopped = threading.Event()
        self._version = 0
        self._failures = 0

    def start(self) -> None:
        """Begin."""
        # A daemon thread: one that waits for a line must not keep the process from ending.
        threading.Thread(target=self.run, name=f"watch {self.listing.path}", daemon=True).start()

    def stop(self) -> None:
        """Call no callback any more, and end when the next line arrives."""
        self._stopped.set()

    def run(self) -> None:
        """Watch until stopped."""
        while not self._stopped.is_set():
            try:
                self._turn()
                # Pause first: a server that ends every watch at once must not be called without pause.
                self._stopped.wait(self._random.uniform(0.1, 1.0))
            except (ApiError, msgspec.DecodeError) as fault:
                # An invalid line, from a proxy say, is a failure like any other, and everything is listed again.
                error = fault if isinstance(fault, ApiError) else ApiError(GONE, f"not understood: {fault}")
                if self._optional and error.status in NOT_THERE:
                    self._version = 0
                    self._stopped.wait(RARELY)
                    continue
                if error.status == GONE:
                    self._version = 0
                wait = max(error.retry_after, min(LONGEST, 2.0**self._failures) * self._random.uniform(0.5, 1.0))
                self._failures = min(self._failures + 1, 10)
                self._log.warning(
                    "a watch failed", extra={"path": self.listing.path, "status": error.status, "error": str(error)}
                )
                self._stopped.wait(wait)

    def _turn(self) -> None:
        """List if needed, then watch until the server ends it."""
        self._live()
        path, kept = self.listing.path, self.listing.kept
        if not self._version:
            items, self._version = self.listing.read(self._kube)
            if self._stopped.is_set():
                return
            self._follower.listed(items, self._version)
        query = {
            **self.listing.query, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": str(self._version),
            "timeoutSeconds": WATCH,
        }  # fmt: skip
        for line in self._kube.lines(path, query, SILENCE):
            if self._stopped.is_set():
                return
            self._live()
            change = _change.decode(line)
            if change.type == "ERROR":
                failure = _failure.decode(change.object)
                raise ApiError(failure.code, failure.message)
            raw = None if change.type == "BOOKMARK" else kept.read(change.object, self.listing.left_out)
            if raw is None:
                self._version = _bookmark.decode(change.object).metadata.version
            else:
                meta = raw.metadata
                self._follower.seen(meta.key, meta.version, None if change.type == "DELETED" else kept.keep(raw))
                self._version = meta.version
            self._failures = 0

    def _live(self) -> None:
        self.heard = self._clock()
        self._follower.alive()


class _BookmarkMeta(msgspec.Struct, rename="camel"):
    resource_version: str

    @property
    def version(self) -> int:
        return int(self.resource_version)


class _Bookmark(msgspec.Struct):
    metadata: _BookmarkMeta


class _Object(msgspec.Struct):
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


_object = msgspec.json.Decoder(_Object)
_change = msgspec.json.Decoder(Change)
_failure = msgspec.json.Decoder(Failure)
_bookmark = msgspec.json.Decoder(_Bookmark)
