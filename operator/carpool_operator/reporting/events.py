"""Kubernetes Events: each is recorded once, even if every pass reports it again."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_operator.api.model import LONGEST_NOTE
from carpool_operator.cluster.kube import ApiError, path_of
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from carpool_operator.api.model import Event, Workload
    from carpool_operator.cluster.writing import Writer

API = "events.k8s.io/v1"
CONTROLLER = "carpool.dev/operator"

WINDOW = 600.0
"""Seconds within which the same event is not recorded again."""

LASTING = 3600.0
"""The same for lasting states: about as long as a server keeps events."""

WAITING = 500
"""Most events that wait to be written; beyond that the oldest are dropped. They only inform users."""

PATIENCE = 300.0
"""Seconds for which writing an event is tried."""


class About(NamedTuple):
    """The object of an event."""

    api: str
    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, workload: Workload) -> About:
        """Return a workload as the object of an event."""
        target = workload.target
        return cls(BY_NAME[target.kind].api, target.kind, target.namespace, target.name, workload.uid)


class _Waiting(NamedTuple):
    body: dict[str, Any]
    until: float


class Recorder:
    """Collects events, and writes them on ``flush``.

    An event's name is a hash of its content and of the ten minutes, or the hour, in which it is recorded. So a repeated
    event conflicts with the first one, also after a restart.
    """

    def __init__(self, writer: Writer, instance: str) -> None:
        self._writer = writer
        self._instance = instance
        self._waiting: deque[_Waiting] = deque(maxlen=WAITING)
        self._said: dict[str, float] = {}

    def record(self, about: About, event: Event, wall: float, every: float = WINDOW) -> None:
        """Queue an event for the next ``flush``, unless it was recorded before.

        ``wall``: seconds since the epoch. ``every``: seconds, at most ``LASTING``, after which it may be recorded
        again.
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
                    # A name has at most 253 characters.
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
        """Write waiting events. Rejected events are dropped; after other failures they are retried."""
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
