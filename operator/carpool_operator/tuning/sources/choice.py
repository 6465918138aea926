"""Where a policy's metrics are read: from its pods, or from a Prometheus."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from carpool.policy.plain import PolicyError
from carpool_operator.api.model import Reading
from carpool_operator.api.spec import MetricsSource
from carpool_operator.cluster.kube import ApiError, path_of
from carpool_operator.delivery.signing import SECRET
from carpool_operator.tuning.sources.endpoint import endpoint, needed
from carpool_operator.tuning.sources.prometheus import Prometheus
from carpool_operator.tuning.sources.scrapes import LabelNames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import aiohttp

    from carpool.generation.observed import Counters
    from carpool_operator.api.model import Pod, Policy
    from carpool_operator.api.spec import Prometheus as Settings
    from carpool_operator.cluster.writing import Backoff, Writer
    from carpool_operator.delivery.signing import Signer
    from carpool_operator.tuning.sources.endpoint import Key
    from carpool_operator.tuning.sources.sidecar import Sidecars

SECRETS = 60.0
"""Seconds for which the credentials for a Prometheus are cached."""

REUSED = 500
"""Fleet size up to which connections to pods are kept: one costs 15 KiB here and a file descriptor."""


class _Data(msgspec.Struct):
    data: dict[str, str] = msgspec.field(default_factory=dict)


class _Server(NamedTuple):
    settings: Settings
    stale_after: float
    values: dict[Key, bytes]
    read_at: float
    """When the values were read."""
    client: Prometheus | None
    error: str
    asked_at: float
    """Time of the last query for sidecars' counters; ``engines_at`` for those of engines."""
    engines_at: float


class Sources:
    """Reads the pods of policies. Those that don't answer are read less often."""

    def __init__(
        self,
        writer: Writer,
        signer: Signer,
        sidecars: Sidecars,
        session: aiohttp.ClientSession,
        backoff: Backoff,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._signer = signer
        self._sidecars = sidecars
        self._session = session
        self._backoff = backoff
        self._clock = clock
        self._wall = wall
        self._errors: dict[str, Reading] = {}
        self._servers: dict[str, _Server] = {}

    async def read(self, policy: Policy, pods: Sequence[Pod], *, fleet: int) -> dict[str, Reading]:
        """Return new readings of pods, by UID; ``fleet``: number of all pods."""
        there = [pod for pod in pods if pod.ip and not pod.deleting]
        if not there:
            return {}
        if policy.spec is not None and policy.spec.metrics.source is MetricsSource.PROMETHEUS:
            return await self._ask(policy, there)
        now = self._clock()
        due = [pod for pod in there if self._backoff.ready(pod.uid, now)]
        wall = self._wall()
        read = await asyncio.gather(
            *(self._sidecars.read(pod, self._signer.ticket(pod.target, wall), reuse=fleet <= REUSED) for pod in due)
        )
        readings = {pod.uid: self._errors[pod.uid] for pod in there if pod.uid in self._errors}
        for pod, reading in zip(due, read, strict=True):
            readings[pod.uid] = reading
            if reading.report is None:
                self._backoff.failed(pod.uid, reading.at)
                self._errors[pod.uid] = reading
            else:
                self._backoff.succeeded(pod.uid)
                self._errors.pop(pod.uid, None)
        return readings

    async def directly(self, pod: Pod) -> Reading:
        """Return a reading of one pod from its sidecar, wherever its policy's metrics come from."""
        return await self._sidecars.read(pod, self._signer.ticket(pod.target, self._wall()), reuse=False)

    def forget(self, pods: Collection[str], policies: Collection[str]) -> None:
        """Forget all but these, by UID."""
        self._errors = {uid: each for uid, each in self._errors.items() if uid in pods}
        self._backoff.forget(lambda uid: uid in pods)
        self._servers = {uid: each for uid, each in self._servers.items() if uid in policies}

    async def engines(self, policy: Policy, pods: Sequence[str]) -> dict[str, Counters | str] | None:
        """Return the engines' metrics from the policy's Prometheus, by the pod's name; None: too early to query."""
        server = await self._server(policy, "engines_at") if pods else None
        if server is None:
            return None
        if server.client is None:
            return dict.fromkeys(pods, server.error)
        return await server.client.engines(policy.namespace, pods, self._clock())

    async def _ask(self, policy: Policy, pods: Sequence[Pod]) -> dict[str, Reading]:
        """Query the policy's Prometheus, at most as often as its interval says."""
        server, now = await self._server(policy, "asked_at"), self._clock()
        if server is None:
            return {}
        if server.client is None:
            return {pod.uid: Reading(now, None, server.error) for pod in pods}
        return await server.client.read(policy.namespace, pods, now)

    async def _server(self, policy: Policy, turn: Literal["asked_at", "engines_at"]) -> _Server | None:
        """Return the policy's Prometheus if it is time to query it."""
        spec = policy.spec
        assert spec is not None and spec.metrics.prometheus is not None  # noqa: S101, PT018 - its source says so
        settings, stale_after = spec.metrics.prometheus, spec.metrics.stale_seconds
        now = self._clock()
        server = self._servers.get(policy.uid)
        if server is None or server.settings != settings or server.stale_after != stale_after:
            long_ago = -float(settings.interval)
            server = _Server(settings, stale_after, {}, -SECRETS, None, "", long_ago, long_ago)
        if now >= server.read_at + SECRETS:
            values = await self._values(policy.namespace, needed(settings))
            if server.client is None or values != server.values:
                client, error = None, ""
                try:
                    where = endpoint(settings, values)
                    client = Prometheus(where, self._session, stale_after=stale_after, labels=_labels(settings))
                except PolicyError as wrong:
                    error = str(wrong)
                server = server._replace(client=client, error=error)
            server = server._replace(values=values, read_at=now)
        # A pass is a little early or late: 90 % of the interval suffices.
        due = now >= getattr(server, turn) + 0.9 * float(settings.interval)
        asked = server._replace(asked_at=now) if turn == "asked_at" else server._replace(engines_at=now)
        self._servers[policy.uid] = asked if due else server
        return server if due else None

    async def _values(self, namespace: str, keys: Sequence[Key]) -> dict[Key, bytes]:
        """Read the values that the settings refer to; unreadable ones are left out, and reported where needed."""
        values: dict[Key, bytes] = {}
        for kind, name in dict.fromkeys((kind, name) for kind, name, _ in keys):
            if (kind, name) == ("Secret", SECRET):
                continue  # the operator's own Secrets are not for servers that a policy names
            plural = "secrets" if kind == "Secret" else "configmaps"
            try:
                body = await self._writer.read(path_of("v1", plural, namespace, name))
            except ApiError:
                continue
            for entry, value in msgspec.json.decode(body, type=_Data).data.items():
                values[kind, name, entry] = b64decode(value) if kind == "Secret" else value.encode()
        return values


def _labels(settings: Settings) -> LabelNames:
    matchers = tuple((each.label, each.value) for each in settings.matchers)
    return LabelNames(settings.labels.namespace, settings.labels.pod, matchers)
