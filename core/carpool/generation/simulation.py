"""A gate in front of the simulated engine, in virtual time."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from carpool.generation.engine import Sequence
from carpool.generation.requests import Action, Admit, Request, Slo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from carpool.generation.engine import Engine, Progress

REPORT = 1.0
"""Seconds between the engine's reports, as a scrape of its ``/metrics``."""


class Admission(Protocol):
    """Admission to an engine: the gate, or another rule."""

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Queue a request, or refuse it."""
        ...

    def poll(self, now: float) -> list[Action]:
        """Do what is due."""
        ...

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Count tokens that streams got after their first."""
        ...

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Note a first token."""
        ...

    def ended(self, request: Request, now: float, output_tokens: int, *, complete: bool = True) -> list[Action]:
        """Note an end."""
        ...

    def report(self, kv_share: float) -> None:
        """Take the engine's report."""
        ...

    def wake_at(self, now: float) -> float:
        """Return when to poll."""
        ...


class Arrival(NamedTuple):
    """A request and its course: ``output_tokens`` that the engine would answer, ``cancel``: when its client leaves."""

    request: Request
    output_tokens: int
    cancel: float = inf


class Served(NamedTuple):
    """The outcome of a request. ``first`` and ``end`` are ``inf`` without a first token, or without an end."""

    arrival: float
    first: float
    end: float
    prompt_tokens: int
    output_tokens: int
    tenant: str
    batch: bool
    refused: bool

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for one token."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def good(self, slo: Slo) -> bool:
        """Whether it met both targets."""
        return self.end < inf and self.ttft <= slo.ttft and self.tpot <= slo.tpot


class Outcome(NamedTuple):
    """The results of a simulation."""

    served: list[Served]
    seconds: float
    busy: float
    preemptions: int
    output_tokens: int


class Simulation:
    """One engine, one gate before it, and arrivals in order of time."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        engine: Engine,
        gate: Admission,
        *,
        until: float = inf,
        events: Iterable[tuple[float, Callable[[Engine], None]]] = (),
    ) -> None:
        self._arrivals = list(arrivals)
        self._engine = engine
        self._gate = gate
        self._until = until
        self._events = sorted(events, key=lambda event: event[0])
        self._sequences: dict[int, tuple[Sequence, Arrival]] = {}
        self._ended: dict[int, tuple[float, float, int]] = {}
        """Per request that ended: first token, end (``inf`` if cancelled), output tokens."""
        self._refused: set[int] = set()
        self._totals = [0.0, 0.0, 0]

    def run(self) -> Outcome:
        """Play all events, to the end of ``until`` or until none is left."""
        coming = iter(self._timeline())
        upcoming = next(coming, None)
        now, reported = 0.0, 0.0
        while now < self._until:
            while upcoming is not None and upcoming[0] <= now:
                upcoming[1](now)
                upcoming = next(coming, None)
            if now >= reported + REPORT:
                reported = now
                self._gate.report(self._engine.load[2])
            wake = self._gate.wake_at(now)
            if wake <= now:
                self._do(self._gate.poll(now))
                wake = self._gate.wake_at(now)
            following = upcoming[0] if upcoming is not None else inf
            progress = self._engine.run(now, min(following, wake, reported + REPORT))
            if progress is not None:
                self._totals[0] += progress.end - now
                now = progress.end
                self._advance(progress)
                continue
            self._gate.progress(now, 0.0)
            following = min(following, self._gate.wake_at(now))
            if now < self._engine.stalled_until:
                following = min(following, self._engine.stalled_until, reported + REPORT)
            if following == inf:
                break
            now = max(now, following)
        return Outcome(
            [self._outcome(arrival) for arrival in self._arrivals],
            now,
            self._totals[0],
            int(self._totals[2]),
            int(self._totals[1]),
        )

    def _timeline(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """Yield arrivals, cancels and events, in order of time."""
        moments: list[tuple[float, Callable[[float], None]]] = []
        for arrival in self._arrivals:
            moments.append((arrival.request.arrival, partial(self._arrive, arrival)))
            if arrival.cancel < inf:
                moments.append((arrival.cancel, partial(self._cancel, arrival.request.key)))
        moments += [(at, partial(self._change, change)) for at, change in self._events]
        return iter(sorted(moments, key=lambda moment: moment[0]))

    def _change(self, change: Callable[[Engine], None], _: float) -> None:
        change(self._engine)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        sequence = Sequence(request.key, request.prompt_tokens, arrival.output_tokens)
        self._sequences[request.key] = (sequence, arrival)
        self._do(self._gate.arrive(request, now))

    def _cancel(self, key: int, now: float) -> None:
        if key in self._ended or key in self._refused:
            return
        sequence, arrival = self._sequences[key]
        self._engine.cancel(sequence)
        self._ended[key] = (sequence.first_at if sequence.first_at is not None else inf, inf, sequence.generated)
        self._do(self._gate.ended(arrival.request, now, sequence.generated, complete=False))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Admit):
                self._engine.submit(self._sequences[action.request.key][0])
            else:
                self._refused.add(action.request.key)

    def _advance(self, progress: Progress) -> None:
        now = progress.end
        self._totals[1] += progress.tokens + len(progress.first)
        self._totals[2] += len(progress.preempted)
        self._do(self._gate.progress(now, progress.tokens))
        for sequence in progress.first:
            self._do(self._gate.first_token(self._sequences[sequence.key][1].request, now))
        for sequence in progress.finished:
            first = sequence.first_at if sequence.first_at is not None else inf
            self._ended[sequence.key] = (first, now, sequence.generated)
            self._do(self._gate.ended(self._sequences[sequence.key][1].request, now, sequence.generated))

    def _outcome(self, arrival: Arrival) -> Served:
        request = arrival.request
        first, end, output = self._ended.get(request.key, (inf, inf, 0))
        return Served(
            request.arrival,
            first,
            end,
            request.prompt_tokens,
            output,
            request.tenant,
            request.batch,
            request.key in self._refused,
        )
