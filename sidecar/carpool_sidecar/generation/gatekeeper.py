"""Drives the gate: what streams show goes in, and requests are sent or refused as it says.

If the gate fails, requests are forwarded as if there were none, and a new one starts a minute later.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Protocol

from carpool.generation.gate import Gate, Limits
from carpool.generation.requests import Admit, ClassTargets, Slo, State
from carpool.generation.step_model import StepModel

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.generation.requests import Action, Reason, Request
    from carpool.policy.spec import BatchingPolicy

TICK = 0.05
"""Seconds between two updates while the engine has requests."""

HIDDEN = 1.0
"""Seconds from the first event of a stream, without text, to its first token as it is assumed: engines hide the calls
of tools, or what a model thinks, for minutes. Until then its whole prompt would count as load."""

RESTART = 60.0
"""Seconds without a gate after a fault."""

GUESS = (0.0115, 4e-5, 8e-8, 5.5e-5)
"""Where learning starts: Llama-3.1-8B on an A100, seconds per step, sequence, cached token and prompt token."""


class Waiting(Protocol):
    """A request that waits for the gate: `admitted` or `refused` is called once, unless the request leaves before."""

    ticket: Request
    streams: bool
    """Whether its tokens are visible one by one."""

    def admitted(self) -> None:
        """Send the request to the engine."""

    def refused(self, reason: Reason, retry_after: float) -> None:
        """Answer with an error; ``retry_after`` in seconds."""


class Gatekeeper:
    """One gate, if the policy has targets for token streams; without, every request is admitted at once."""

    def __init__(self, policy: BatchingPolicy, *, clock: Callable[[], float], log: logging.Logger) -> None:
        self.gate: Gate | None = None
        self.faults = 0
        """Faults of the gate since the process started."""
        self._clock = clock
        self._log = log
        self._policy = policy
        self._waiting: dict[int, Waiting] = {}
        """By ticket: requests that are not admitted or refused yet."""
        self._admitted: dict[int, Waiting] = {}
        """Requests at the engine that this gate admitted."""
        self._assumed: dict[int, float] = {}
        """Assumed times of the first tokens of answers that are not streamed, or that hide their text."""
        self._seen = Seen()
        self._alarm = Alarm(self._look)
        self._restart_at = -inf
        self.configure(policy)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def configure(self, policy: BatchingPolicy) -> None:
        """Use another policy. The gate keeps what it has learned; without targets, all that wait are admitted."""
        self._policy = policy
        targets = slo_of(policy)
        if targets is None:
            self._open()
        elif self.gate is None:
            self._start(targets)
        else:
            self.gate.configure(targets, limits_of(policy))
            self._ask(lambda gate, now: gate.poll(now))

    def arrive(self, waiting: Waiting) -> None:
        """Add a request: it is admitted or refused, now or later."""
        targets = slo_of(self._policy)
        if self.gate is None and targets is not None and self._clock() >= self._restart_at:
            self._start(targets)
        if self.gate is None:
            waiting.admitted()
            return
        self._waiting[waiting.ticket.key] = waiting
        self._ask(lambda gate, now: gate.arrive(waiting.ticket, now))

    def begins(self, waiting: Waiting) -> None:
        """Note that a stream begins with an event without text."""
        if waiting.ticket.state is State.PREFILLING and waiting.ticket.key in self._admitted:
            self._assumed.setdefault(waiting.ticket.key, self._clock() + HIDDEN)

    def first_token(self, waiting: Waiting) -> None:
        """Note the first token that a request shows which was admitted."""
        if waiting.ticket.state is State.DECODING and not waiting.streams:
            self.shows(waiting, streams=True)  # its first token was assumed
        else:
            self._assumed.pop(waiting.ticket.key, None)
            self._first_token(waiting)

    def _first_token(self, waiting: Waiting) -> None:
        def event(gate: Gate, now: float) -> list[Action]:
            self._seen.streams += waiting.ticket.sequences if waiting.streams else 0
            return gate.first_token(waiting.ticket, now, seen=waiting.streams)

        if waiting.ticket.state is State.PREFILLING and waiting.ticket.key in self._admitted:
            self._ask(event)

    def shows(self, waiting: Waiting, *, streams: bool) -> None:
        """Note that the tokens of an answer turned out to be visible one by one, or not."""
        if waiting.streams is streams:
            return
        waiting.streams = streams
        if waiting.ticket.state is State.DECODING:
            self._seen.streams += waiting.ticket.sequences if streams else -waiting.ticket.sequences
        elif streams:
            self._assumed.pop(waiting.ticket.key, None)
        elif waiting.ticket.key in self._admitted:
            self._assumed[waiting.ticket.key] = self._clock()

    def progress(self, waiting: Waiting, tokens: float) -> None:
        """Count tokens of a stream after its first; the gate gets them with the next tick or event."""
        if waiting.ticket.state is State.DECODING:
            self._seen.tokens += tokens

    def choice_ended(self, waiting: Waiting) -> None:
        """Note the end of one of a stream's choices, unless it is the last."""

        def event(gate: Gate, now: float) -> list[Action]:
            self._seen.streams -= ticket.state is State.DECODING
            return gate.choice_ended(waiting.ticket, now)

        ticket = waiting.ticket
        if ticket.sequences > 1 and waiting.streams and ticket.key in self._admitted:
            self._ask(event)

    def ended(self, waiting: Waiting, output_tokens: int, *, complete: bool, longest: int = 0) -> None:
        """Note the end of a request; ``output_tokens``: the mean of its choices; ``longest``: the most, if known."""
        ticket = waiting.ticket

        def event(gate: Gate, now: float) -> list[Action]:
            actions, whole = [], None
            if ticket.state is State.DECODING:
                if waiting.streams:
                    self._seen.streams -= ticket.sequences
                elif not self._seen.streams:
                    whole = max(output_tokens, longest)
            elif ticket.state is State.PREFILLING and ticket.max_tokens == 1 and complete:
                actions = gate.first_token(ticket, now)  # the answer, although it comes whole
            return actions + gate.ended(ticket, now, output_tokens, complete=complete, whole=whole)

        self._assumed.pop(ticket.key, None)
        known = self._waiting.pop(ticket.key, None) or self._admitted.pop(ticket.key, None)
        if known is not None:
            self._ask(event)

    def report(self, kv_share: float | None, kv_tokens: float | None) -> None:
        """Use the engine's report: the used share of its KV cache, and the cache's size in tokens."""
        if self.gate is not None:
            self.gate.report(kv_share, kv_tokens)

    def close(self) -> None:
        """Stop updating."""
        self._alarm.cancel()

    # The gate

    def _start(self, targets: Slo) -> None:
        self.gate = Gate(targets, StepModel(*GUESS), limits_of(self._policy))
        self._seen = Seen()
        now = self._clock()
        self._seen.take(self.gate, now)
        self.gate.progress(now, 0.0)  # its clock begins here

    def _open(self) -> None:
        """Remove the gate: admit all waiting requests."""
        self.gate = None
        self._alarm.cancel()
        for waiting in self._admitted.values():
            waiting.ticket.state = State.ENDED  # to the next gate it is nobody's
        self._admitted.clear()
        self._assumed.clear()
        waiting_now, self._waiting = list(self._waiting.values()), {}
        for waiting in waiting_now:
            waiting.ticket.state = State.ENDED
            waiting.admitted()

    def _ask(self, event: Callable[[Gate, float], list[Action]]) -> None:
        """Pass an event to the gate, and execute its actions."""
        gate, now = self.gate, self._clock()
        if gate is None:
            return
        try:
            seen = self._seen.streams > 0
            actions = gate.progress(now, self._seen.take(gate, now), seen=seen)
            actions += event(gate, now)
            wake = gate.wake_at(now)
        except Exception:  # noqa: BLE001 - whatever it is, requests go on
            self.faults += 1
            self._restart_at = now + RESTART
            self._log.exception("the gate failed; requests are forwarded without it", extra={"seconds": RESTART})
            self._open()
            return
        self._alarm.set(min(wake - now, TICK if gate.meter.streams else inf))
        for action in actions:
            waiting = self._waiting.pop(action.request.key, None)
            if waiting is None:
                continue  # it has left
            if isinstance(action, Admit):
                self._admitted[action.request.key] = waiting
                if not waiting.streams and action.request.max_tokens != 1:
                    self._assumed[action.request.key] = now + gate.meter.first_token_seconds(0)
                waiting.admitted()
            else:
                waiting.refused(action.reason, action.retry_after)

    def _look(self) -> None:
        """Update the gate: time has passed."""
        gate, now = self.gate, self._clock()
        if gate is None:
            return
        # Of an answer that comes whole, only the end is seen. Its first token is taken to come when it is forecast.
        for key in [key for key, at in self._assumed.items() if at <= now]:
            if self._assumed.pop(key, None) is not None:
                self._admitted[key].streams = False  # its pace is not seen either, until it shows text
                self._first_token(self._admitted[key])
        self._ask(lambda gate, now: gate.poll(now))


class Seen:
    """Tokens since the gate was last asked, those of answers that come whole included.

    Each step gives every sequence that decodes a token. So streams show the pace of all. Where none is under way, it is
    that of the step model, which then learns from each answer's count at its end.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        """Tokens of streams, counted so far."""
        self.streams = 0
        """Sequences of streams that decode."""
        self._at = 0.0

    def take(self, gate: Gate, now: float) -> float:
        """Return the tokens of all sequences that decode, and reset the count."""
        elapsed, self._at = now - self._at, now
        seen, self.tokens = self.tokens, 0.0
        decoding = gate.meter.decoding
        if not decoding:
            return 0.0
        if self.streams:
            return seen * decoding / self.streams
        return decoding * elapsed / max(1e-4, gate.meter.forecast())


class Alarm:
    """A timer that only moves forward to earlier times until it rings."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay: float) -> None:
        """Ring in ``delay`` seconds, or earlier if already set so; ``inf``: don't ring."""
        if delay == inf:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, delay)
        if self._handle is not None:
            if self._handle.when() <= at:
                return
            self._handle.cancel()
        self._handle = loop.call_at(at, self._rings)

    def cancel(self) -> None:
        """Stop ringing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        self._ring()


def slo_of(policy: BatchingPolicy) -> Slo | None:
    """Return the targets of token streams, if the policy has any."""
    ttft, tpot = policy.slo.ttft, policy.slo.tpot
    if ttft is None:
        return None
    return Slo(float(ttft.p99), inf if tpot is None else float(tpot.p99))


def classes_of(policy: BatchingPolicy) -> dict[bytes, ClassTargets]:
    """Return the targets of each class, by the value of the header that asks for it."""
    usual = slo_of(policy)
    if usual is None:
        return {}
    found = {}
    for each in policy.slo.classes:
        ttft = usual.ttft if each.ttft is None else float(each.ttft.p99)
        tpot = usual.tpot if each.tpot is None else float(each.tpot.p99)
        found[each.priority.encode()] = ClassTargets(ttft, tpot, ttft - usual.ttft)
    return found


def limits_of(policy: BatchingPolicy) -> Limits:
    """Return the gate's limits."""
    given = policy.generation
    return Limits(
        order=given.order,
        weights=None if given.tenants is None else given.tenants.weights,
        max_running=given.max_running,
        max_queued_tokens=given.max_queued_tokens,
        kv_tokens=given.kv_tokens,
        kv_budget_percent=given.kv_budget_percent,
    )
