"""Leader election among operators: a Lease of our own for each shard.

Clocks of different machines are never compared. A candidate measures on its own monotonic clock how long the lease has
not changed. The leader measures the time since it began its last successful renewal. So each begins its count before
the other can.

The leader stops after ``RENEW`` seconds and the lease is free after ``DURATION``. The 5 s between are for a write that
was sent just before; it times out within them. A lease can't stop a write that the server itself delays longer: such a
write conflicts with newer resource versions and generations.

If the number of shards changes, shards of the old and the new division share namespaces. So a candidate also waits
until no lease of another division is held. It checks before it takes its own lease, and once more after: two candidates
may check at the same time.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from carpool_operator.cluster.kube import ApiError, Kube, path_of
from carpool_operator.cluster.objects import ObjectsPage

if TYPE_CHECKING:
    import logging
    import random
    from collections.abc import Callable, Iterable

DURATION = 15.0
"""Seconds without a renewal after which any candidate may take it."""

RENEW = 10.0
"""Seconds without a renewal after which the leader stops."""

RETRY = 2.0
"""Seconds between two renewals, and between a candidate's checks."""

LEASES = "coordination.k8s.io/v1"


class Spec(Struct, rename="camel", frozen=True):
    """A lease's ``spec``."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class LeaseMeta(Struct, rename="camel", frozen=True, omit_defaults=True):
    """The part of its ``metadata`` that is read and written."""

    name: str
    namespace: str
    resource_version: str = ""


class Lease(Struct, rename="camel", frozen=True, kw_only=True):
    """A Lease as the server writes it."""

    api_version: str = LEASES
    kind: str = "Lease"
    metadata: LeaseMeta
    spec: Spec = Spec()


class Overlapping:
    """Leases of shards that share namespaces with ours. Time is an argument, as in ``Candidate``."""

    def __init__(self) -> None:
        self._changed: dict[str, tuple[str, float]] = {}
        """By name: the version, and when it was first seen."""

    def held(self, leases: Iterable[Lease], now: float) -> list[str]:
        """Record the existing leases; return the names of those that another operator may still rely on."""
        before, self._changed, held = self._changed, {}, []
        for lease in leases:
            name, version, spec = lease.metadata.name, lease.metadata.resource_version, lease.spec
            known, since = before.get(name, ("", now))
            since = since if known == version else now
            self._changed[name] = (version, since)
            if spec.holder_identity and now < since + _duration(spec):
                held.append(name)
        return held


class Candidate:
    """One operator's view of the lease. No clock of its own: ``now`` is monotonic, ``wall`` in UTC."""

    def __init__(self, identity: str, name: str, namespace: str) -> None:
        self.lease: Lease | None = None
        """As last seen or written; its version goes with the next write."""
        self._identity = identity
        self._new = LeaseMeta(name, namespace)
        self._changed = 0.0
        """When a new version of it was first seen."""
        self._renewed: float | None = None
        """When the last successful renewal began; ``None``: not the leader."""

    def leads(self, now: float) -> bool:
        """Whether it may write now."""
        return self._renewed is not None and now < self._renewed + RENEW

    def held(self) -> bool:
        """Whether the lease names this operator, as last seen."""
        return self.lease is not None and self.lease.spec.holder_identity == self._identity

    def saw(self, lease: Lease | None, now: float) -> None:
        """Record the lease on the server; ``None``: there is none."""
        if (
            self.lease is None
            or lease is None
            or lease.metadata.resource_version != self.lease.metadata.resource_version
        ):
            self._changed = now
        self.lease = lease
        if not self.held():
            self._renewed = None

    def proposal(self, now: float, wall: datetime) -> Lease | None:
        """Return the lease to write to become or remain leader; ``None`` while another leads."""
        time = _written(wall)
        if self.lease is None:
            return Lease(metadata=self._new, spec=Spec(self._identity, int(DURATION), time, time, 0))
        spec = self.lease.spec
        if self.held():
            # Its own lease from before a restart under the same name counts, too: no other operator can have used it.
            return msgspec.structs.replace(self.lease, spec=msgspec.structs.replace(spec, renew_time=time))
        if spec.holder_identity and now < self._changed + _duration(spec):
            return None
        taken = Spec(self._identity, int(DURATION), time, time, (spec.lease_transitions or 0) + 1)
        return msgspec.structs.replace(self.lease, spec=taken)

    def wrote(self, lease: Lease, begun: float) -> None:
        """Record the server's result of a proposal; ``begun``: when it was sent."""
        self.lease = lease
        self._changed = begun
        self._renewed = begun

    def release(self, wall: datetime) -> Lease | None:
        """Stop leading, and return the lease to write so that others need not wait; ``None`` where it isn't held."""
        self._renewed = None
        if self.lease is None or not self.held():
            return None
        spec = msgspec.structs.replace(
            self.lease.spec, holder_identity="", lease_duration_seconds=1, renew_time=_written(wall)
        )
        return msgspec.structs.replace(self.lease, spec=spec)


def _duration(spec: Spec) -> float:
    """Return the seconds after which a lease expires without renewal."""
    return max(DURATION, float(spec.lease_duration_seconds or 0))


def _written(wall: datetime) -> str:
    return wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """Acquires and renews the lease. ``led`` is set while it leads, ``lost`` while it doesn't."""

    def __init__(
        self,
        kube: Kube,
        candidate: Candidate,
        *,
        name: str,
        namespace: str,
        clock: Callable[[], float],
        log: logging.Logger,
        random: random.Random,
        overlaps: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        """Start without leading. ``overlaps``: whether a Lease, by name, belongs to another division."""
        self.led, self.lost = asyncio.Event(), asyncio.Event()
        self.lost.set()
        self._kube = kube
        self._candidate = candidate
        self._collection = path_of(LEASES, "leases", namespace)
        self._path = path_of(LEASES, "leases", namespace, name)
        self._clock = clock
        self._log = log
        self._random = random
        self._overlaps = overlaps
        self._overlapping = Overlapping()

    def leads(self) -> bool:
        """Whether it may write now; callable from any thread."""
        return self._candidate.leads(self._clock())

    async def run(self) -> None:
        """Take part in the election until cancelled; the lease is not released yet."""
        while True:
            wait = RETRY
            try:
                # Not ``wait_for``: in Python 3.11 it ignores a cancel in the event loop's turn in which the round ends.
                async with asyncio.timeout(RENEW / 2):
                    await self.round()
            except ApiError as error:
                wait = max(wait, error.retry_after)
                # A version conflict is normal in an election.
                if error.status != 409:
                    self._log.warning(
                        "the lease can't be read or renewed", extra={"status": error.status, "error": str(error)}
                    )
            except TimeoutError:
                self._log.warning("the lease can't be read or renewed", extra={"error": "no answer in time"})
            self._tell()
            # Candidates spread their checks, the leader renews on time.
            await asyncio.sleep(wait if self.leads() else wait * self._random.uniform(0.8, 1.2))
            self._tell()

    async def round(self) -> None:
        """Read the lease, and write it if needed.

        Raises ``ApiError``.
        """
        candidate, led = self._candidate, self.leads()
        if not led:
            candidate.saw(await self._read(), self._clock())
        begun = self._clock()
        proposal = candidate.proposal(begun, datetime.now(UTC))
        if proposal is None or not (led or await self._is_alone()):
            return
        try:
            candidate.wrote(await self._write(proposal), begun)
        except ApiError as error:
            if error.status in {404, 409}:
                candidate.saw(await self._read(), self._clock())
            raise
        if not (led or await self._is_alone()):
            await self.release()

    async def release(self) -> None:
        """Release the lease, if it is held."""
        try:
            # A renewal may have been under way when the election ended: its version is the one to overwrite.
            self._candidate.saw(await self._read(), self._clock())
            proposal = self._candidate.release(datetime.now(UTC))
            self._tell()
            if proposal is not None:
                await self._write(proposal)
        except ApiError as error:
            self._log.warning("the lease can't be released", extra={"status": error.status, "error": str(error)})

    def _tell(self) -> None:
        leads = self.leads()
        if leads == self.led.is_set():
            return
        self._log.info("leading" if leads else "not leading any more")
        on, off = (self.led, self.lost) if leads else (self.lost, self.led)
        off.clear()
        on.set()

    async def _read(self) -> Lease | None:
        try:
            return msgspec.json.decode(await self._kube.request("GET", self._path), type=Lease)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _is_alone(self) -> bool:
        """Return whether no lease of another division is held."""
        found = msgspec.json.decode(await self._kube.request("GET", self._collection), type=ObjectsPage[Lease]).items
        others = self._overlapping.held((each for each in found if self._overlaps(each.metadata.name)), self._clock())
        if others:
            self._log.info("waiting: operators with another number of shards are at work", extra={"leases": others})
        return not others

    async def _write(self, lease: Lease) -> Lease:
        method, path = ("PUT", self._path) if lease.metadata.resource_version else ("POST", self._collection)
        return msgspec.json.decode(await self._kube.request(method, path, lease), type=Lease)
