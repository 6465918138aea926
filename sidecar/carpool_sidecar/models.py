"""The table of models, and along which axis their requests may be merged.

Callers name models, so the table is bounded: names that never had a good answer make room for others, and then those
that the server no longer knows. Without room, or with a very long name, a request is not batched and is counted under
``<other>``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from carpool.policy.spec import Axis as AxisChoice
from carpool_sidecar.axis_verification.record import REFUTED, Record
from carpool_sidecar.protocols.headers import Separation
from carpool_sidecar.protocols.models import Axis, axis_from_config, axis_from_metadata, fix
from carpool_sidecar.protocols.padding import Sequence as SequenceAxis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from carpool.policy.spec import Model
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.protocols.common import Endpoint

OTHER = "<other>"
"""The lane, and the label in metrics, of models that the table has no room for; no server uses this name."""

MAX_ENTRIES = 256
"""Model versions known at a time: more than servers serve, few enough for a scrape."""

LONGEST = 256
"""Most bytes of a model's name and version together: a scrape has each name in over a hundred lines."""

NAMED = 3
"""Most models named in a sentence."""

REFRESH = 30.0
"""Seconds between two reads of a model's metadata from the server."""

SOON = 5.0
"""Seconds until a server is asked again about a model that it may be loading."""


class Known:
    """What is known of a model version from its server: from answers to requests, and from its metadata."""

    __slots__ = ("axis", "loading", "metadata", "missing", "proven", "unanswered")

    def __init__(self) -> None:
        self.proven = False
        """Whether it ever answered a request for it with success."""
        self.missing = False
        """Whether it has answered that there is no such model, and not with success since."""
        self.metadata: bytes | None = None
        """Its last metadata."""
        self.axis: Axis | None = None
        self.loading = False
        """Whether it may describe it soon: its last answer was a failure of its own, or none."""
        self.unanswered = "the server has not been asked yet"
        """Why the axis is not known."""

    @property
    def reason(self) -> str:
        """A sentence on the axis."""
        return self.unanswered if self.axis is None else self.axis.reason


class Entry:
    """One model version: its lane, and why its requests may not be merged.

    ``alone`` is the reason for requests whose batch axis depends on the model, ``alone_by_protocol`` for those whose
    protocol defines it; ``None``: they merge once ``record`` shows that batches were verified.
    """

    __slots__ = (
        "alone",
        "alone_by_protocol",
        "configured",
        "headers",
        "known",
        "lane",
        "model",
        "record",
        "sequence",
        "version",
        "waiters",
    )  # fmt: skip

    def __init__(self, model: str, version: str, configured: Model | None, *, lane: str | None = None) -> None:
        self.model = model
        self.version = version
        self.lane = lane or model
        self.known = Known()
        self.waiters = 0
        """Requests that wait or are in a batch."""
        self.headers = Separation()
        """Which headers separate its requests."""
        self.record = Record()
        """The checks of its batches."""
        self.configured = configured
        self.sequence: SequenceAxis | None = None
        """Along which axis its requests may be padded."""
        self.alone: str | None = "axis-unknown"
        self.alone_by_protocol: str | None = None
        self.configure(configured)

    def configure(self, configured: Model | None) -> None:
        """Apply the policy's entry for the model."""
        self.configured = configured
        sequence = None if configured is None else configured.sequence
        if sequence != (None if self.sequence is None else self.sequence.policy):
            self.sequence = None if sequence is None else SequenceAxis(sequence)
        choice = AxisChoice.AUTO if configured is None else configured.axis
        self.alone_by_protocol = "axis-none" if choice is AxisChoice.NONE else None
        if choice is AxisChoice.NONE:
            self.alone = "axis-none"
        elif choice is AxisChoice.FIRST:
            self.alone = None
        elif self.record.disagreed:
            self.alone = self.alone_by_protocol = REFUTED
        elif (axis := self.known.axis) is None:
            self.alone = "axis-unknown"
        else:
            self.alone = None if axis.kind == "First" else "axis-none"
            if axis.by_file:
                self.alone_by_protocol = self.alone

    @property
    def in_use(self) -> bool:
        """Whether requests or the policy refer to it."""
        return self.waiters > 0 or self.configured is not None

    @property
    def needed(self) -> bool:
        """Whether it must not make room for another."""
        return self.known.proven or self.in_use

    @property
    def unloaded(self) -> bool:
        """Whether it may make room nevertheless, if nothing else can: the server knew it once."""
        return self.known.missing and not self.in_use

    def answered(self) -> None:
        """Note that the upstream has answered a request for it with success."""
        self.known.proven, self.known.missing = True, False

    @property
    def max_batch(self) -> int | None:
        """The most rows that the policy or the server allows."""
        caps = [
            cap
            for cap in (
                None if self.configured is None else self.configured.max_batch,
                None if self.known.axis is None else self.known.axis.max_batch,
            )
            if cap is not None
        ]
        return min(caps, default=None)

    @property
    def reason(self) -> str:
        """A sentence on its axis, with the fix where requests are not batched."""
        if self.configured is not None and self.configured.axis is not AxisChoice.AUTO:
            return f"the policy says axis {self.configured.axis}"
        return self.known.reason


class ModelTable:
    """Every model version in use. ``forget`` is called with a lane when no request is in it any more."""

    def __init__(self, configured: Sequence[Model], forget: Callable[[str], None]) -> None:
        self._configured = {model.name: model for model in configured}
        self._entries: dict[tuple[str, str], Entry] = {}
        self._forget = forget
        self._lanes: dict[str, int] = {}
        """Entries by lane."""
        self._other = Entry("", "", None, lane=OTHER)
        self._other.alone = self._other.alone_by_protocol = "too-many-models"
        self._unresolved: dict[tuple[str, str], Entry] = {}
        self._asked = asyncio.Event()
        self._admit_configured()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, entry: Entry) -> bool:
        return self._entries.get((entry.model, entry.version)) is entry

    def entry(self, endpoint: Endpoint) -> Entry:
        """Return the entry of a request's model, made on first sight."""
        key = (endpoint.model, endpoint.version)
        known = self._entries.get(key)
        if known is not None:
            return known
        return self._admit(key) if len("".join(key).encode()) <= LONGEST else self._other

    def label(self, model: str) -> str:
        """Return a model's name as metrics may carry it."""
        return model if model in self._lanes else OTHER

    def reason(self, entry: Entry) -> str:
        """Return a sentence on an entry's axis, and on a name that is perhaps misspelt in the policy."""
        others = {each.model for each in self if each.known.proven}
        if entry.configured is None or entry.known.metadata is not None or not others or entry.model in others:
            return entry.reason
        named = ", ".join(sorted(others)[:NAMED])
        return f"{entry.reason}, but the server does not describe it and only answered for {named}: check its name"

    def configure(self, configured: Sequence[Model]) -> None:
        """Apply a new policy's models."""
        self._configured = {model.name: model for model in configured}
        for entry in self:
            entry.configure(self._configured.get(entry.model))
        self._admit_configured()
        self.ask_again()

    def ask_again(self, *, loading: bool = False) -> None:
        """Read the server's metadata of every model again; ``loading``: only of those that it may describe soon."""
        again = {key: entry for key, entry in self._entries.items() if not loading or entry.known.loading}
        self._unresolved.update(again)
        self._asked.set()

    async def unresolved(self) -> Entry:
        """Wait for an entry that the server is to be asked about."""
        while not self._unresolved:
            self._asked.clear()
            await self._asked.wait()
        return self._unresolved.pop(next(iter(self._unresolved)))

    def missing(self, entry: Entry) -> None:
        """Note that the upstream does not know a model; one that it never knew makes room once it has no requests."""
        entry.known.missing = True
        self._let_go(entry)

    def left(self, entry: Entry) -> None:
        """Note that one of its requests has ended."""
        entry.waiters -= 1
        if entry.known.missing:
            self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        if entry in self and not entry.needed:
            self._drop(entry)

    def cap(self, lane: str) -> int | None:
        """Return the most rows that every version in a lane takes."""
        caps = [entry.max_batch for entry in self if entry.lane == lane and entry.max_batch is not None]
        return min(caps, default=None)

    def _admit_configured(self) -> None:
        """Add the policy's models from the start: their metadata are read before the first request."""
        for name in self._configured:
            if (name, "") not in self._entries:
                self._admit((name, ""))

    def _admit(self, key: tuple[str, str]) -> Entry:
        if len(self._entries) >= MAX_ENTRIES:
            old = next((entry for entry in self if not entry.needed), None)
            old = old or next((entry for entry in self if entry.unloaded), None)
            if old is None:
                return self._other
            self._drop(old)
        entry = self._entries[key] = Entry(*key, self._configured.get(key[0]))
        self._lanes[entry.lane] = self._lanes.get(entry.lane, 0) + 1
        self._unresolved[key] = entry
        self._asked.set()
        return entry

    def _drop(self, entry: Entry) -> None:
        self._unresolved.pop((entry.model, entry.version), None)
        del self._entries[entry.model, entry.version]
        self._lanes[entry.lane] -= 1
        if not self._lanes[entry.lane]:
            del self._lanes[entry.lane]
            self._forget(entry.lane)


class Resolver:
    """Reads models' metadata from the server, one after the other, in the background.

    ``learned`` is called with an entry once its axis is known; ``changed`` when a model's metadata have changed, so
    that its service times are another model's.
    """

    def __init__(
        self, table: ModelTable, backend: Backend, learned: Callable[[Entry], None], changed: Callable[[Entry], None]
    ) -> None:
        self._table = table
        self._backend = backend
        self._learned = learned
        self._changed = changed

    async def run(self) -> None:
        """Resolve the table's entries until cancelled; ask again every ``REFRESH``, ``SOON`` if loading."""
        clock = asyncio.get_running_loop().time
        soon, refresh = clock() + SOON, clock() + REFRESH
        while True:
            # The deadline does not move with each entry: a client may name unknown models all the time.
            entry = None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(soon):
                    entry = await self._table.unresolved()
            if entry is not None:
                await self.resolve(entry)
            if clock() >= soon:
                is_due = clock() >= refresh
                self._table.ask_again(loading=not is_due)
                soon = clock() + SOON
                if is_due:
                    refresh = clock() + REFRESH

    async def resolve(self, entry: Entry) -> None:
        """Ask about one entry: Triton's configuration first, as only that names the largest batch."""
        path = f"/v2/models/{quote(entry.model, safe='')}" + (
            f"/versions/{quote(entry.version, safe='')}" if entry.version else ""
        )
        answer = await self._backend.ask(path.encode())
        known = entry.known
        known.loading = known.axis is None and _is_no_answer(answer.status)
        if answer.status == 200:
            said = _outline(answer.body)
            axis = self._backend.axis(entry.model)
            if axis is None:
                configuration = await self._backend.ask(f"{path}/config".encode())
                axis = axis_from_config(configuration.body) if configuration.status == 200 else None
                if known.axis is not None and known.metadata == said and _is_no_answer(configuration.status):
                    axis = known.axis  # a largest batch that was known still holds
            changed = known.metadata not in {None, said}
            known.metadata = said
            self._learn(entry, axis or axis_from_metadata(answer.body))
            if changed and entry in self._table:
                self._changed(entry)
        elif answer.status in {404, 405, 501} and known.axis is None:
            axis = Axis(
                "None",
                None,
                f"the server answers {path} with {answer.status}: `instances` of V1 are batched once the first "
                f"requests have verified it; the batch axis of other requests is not known: {fix(entry.model)}",
            )
            self._learn(entry, axis)
        else:
            why = f"the server answers {path} with {answer.status}" if answer.status else answer.why or "no answer came"
            known.unanswered = f"{why}, so its batch axis is not known yet"

    def _learn(self, entry: Entry, axis: Axis) -> None:
        if axis != entry.known.axis and entry in self._table:
            entry.known.axis = axis
            entry.configure(entry.configured)
            self._learned(entry)


def _is_no_answer(status: int) -> bool:
    """Whether a server says nothing for now: no connection, overload, or an error of its own."""
    return status in {0, 429} or status >= 500


def _outline(metadata: bytes) -> bytes:
    """Return the part of a model's metadata that distinguishes versions, independent of order."""
    try:
        model: Any = msgspec.json.decode(metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return metadata
    if not isinstance(model, dict):
        return metadata
    return msgspec.json.encode([model.get(name) for name in ("versions", "platform", "inputs", "outputs")])
