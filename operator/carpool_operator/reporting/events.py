"""Kubernetes Events: told once, however often a pass comes to the same."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_operator.api.model import LONGEST_NOTE
from carpool_operator.cluster.kube import ApiError, path_of

if TYPE_CHECKING:
    from carpool_operator.api.model import Event
    from carpool_operator.cluster.writing import Writer

API = "events.k8s.io/v1"
CONTROLLER = "carpool.dev/operator"

WINDOW = 600.0
"""Seconds within which the same is not said again."""

LASTING = 3600.0
"""The same of what lasts: about as long as a server keeps events."""

WAITING = 500
"""Events that wait to be written; beyond them the oldest are lost. They are for people, and nothing depends on them."""

PATIENCE = 300.0
"""Seconds for which an event is tried to be written."""


class About(NamedTuple):
    """What an event is about."""

    api: str
    kind: str
    namespace: str
    name: str
    uid: str


class _Waiting(NamedTuple):
    body: dict[str, Any]
    until: float


class Recorder:
    """Collects events, and writes them when told to.

    An event's name is made of what it says and of the ten minutes, or the hour, in which it is said: whoever says it
    again meets the first, also after a restart.
    """

    def __init__(self, writer: Writer, instance: str) -> None:
        self._writer = writer
        self._instance = instance
        self._waiting: deque[_Waiting] = deque(maxlen=WAITING)
        self._said: dict[str, float] = {}

    def record(self, about: About, event: Event, wall: float, every: float = WINDOW) -> None:
        """Have an event written by the next ``flush``, unless it was said before.

        ``wall``: seconds since the epoch. ``every``: seconds, at most ``LASTING``, after which it may be said again.
        """
        window = int(wall // every)
        said = f"{window}\0{about.uid}\0{event.reason}\0{event.message}"
        digest = sha256(said.encode()).hexdigest()[:16]
        if digest in self._said:
            return
        self._said = {known: at for known, at in self._said.items() if at > wall - LASTING}
        self._said[digest] = wall
        self._waiting.append(
            _Waiting(
                until=wall + PATIENCE,
                body={
                    "apiVersion": API,
                    "kind": "Event",
                    # A name has 253 characters.
                    "metadata": {"name": f"{about.name[:230].rstrip('.-')}.{digest}", "namespace": about.namespace},
                    "eventTime": datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                    "reportingController": CONTROLLER,
                    "reportingInstance": self._instance[:128],
                    "action": event.reason,
                    "reason": event.reason,
                    "type": "Warning" if event.warning else "Normal",
                    "note": event.message[:LONGEST_NOTE],
                    "regarding": {
                        "apiVersion": about.api,
                        "kind": about.kind,
                        "namespace": about.namespace,
                        "name": about.name,
                        "uid": about.uid,
                    },
                },
            )
        )

    async def flush(self, wall: float) -> None:
        """Write what waits. What the server refuses is dropped, what it can't do now is tried again."""
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            try:
                await self._writer.send(
                    "POST", path_of(API, "events", waiting.body["metadata"]["namespace"]), waiting.body
                )
            except ApiError as error:
                if wall < waiting.until and (error.status in {0, 429} or error.status >= 500):
                    self._waiting.append(waiting)
                    return
