"""Alternatives to the gate before an engine: none, a fixed cap, and a limit of queued tokens.

`Cap` rejects requests whose first token would be late. For that it gets the engine's step times; the gate does not.
"""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from typing import TYPE_CHECKING

from carpool.generation.requests import Action, Admit, Reason, Refuse, Request, Slo, State

if TYPE_CHECKING:
    from carpool.generation.profiles import EngineProfile

TYPICAL_CONTEXT = 1200
"""Tokens per sequence from which `Cap` computes the length of a step."""


class Cap:
    """At most ``most`` requests in the engine; others wait in order. ``margin``: usable share of TTFT."""

    def __init__(self, most: float, slo: Slo, profile: EngineProfile, *, margin: float = 1.0) -> None:
        self.most = most
        self.slo = slo
        self.waiting: deque[Request] = deque()
        self.running = 0
        self._profile = profile
        self._margin = margin
        self._backlog = 0
        with_prompt, alone = (profile.step.seconds(64, 64 * TYPICAL_CONTEXT, tokens) for tokens in (512, 0))
        self._prompt_token = (with_prompt - alone) / 512

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Queue a request."""
        self.waiting.append(request)
        return self.poll(now)

    def poll(self, now: float) -> list[Action]:
        """Admit up to the cap; reject what is too late."""
        actions: list[Action] = []
        while self.waiting:
            request = self.waiting[0]
            if now > self._latest(request):
                actions.append(Refuse(self.waiting.popleft(), Reason.TTFT, 1.0))
                continue
            if self.running >= self.most:
                break
            self.waiting.popleft()
            self.running += 1
            self._backlog += request.prompt_tokens
            request.state = State.PREFILLING
            actions.append(Admit(request))
        return actions

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Learn nothing."""
        del now, tokens
        return []

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Record that a prompt is computed."""
        self._backlog -= request.prompt_tokens
        request.state = State.DECODING
        return self.poll(now)

    def ended(self, request: Request, now: float, output_tokens: int, *, complete: bool = True) -> list[Action]:
        """Make room for the next."""
        del output_tokens, complete
        if request.state is State.QUEUED:
            self.waiting.remove(request)
        else:
            self.running -= 1
            if request.state is State.PREFILLING:
                self._backlog -= request.prompt_tokens
        request.state = State.ENDED
        return self.poll(now)

    def report(self, kv_share: float) -> None:
        """Ignore the cache."""

    def wake_at(self, now: float) -> float:
        """Return when the first waiting request becomes too late."""
        del now
        return self._latest(self.waiting[0]) + 1e-3 if self.waiting else inf

    def _latest(self, request: Request) -> float:
        tokens = self._backlog + request.prompt_tokens
        pieces = ceil(tokens / max(256, self._profile.max_batched_tokens - self.running))
        step = self._profile.step.seconds(self.running, self.running * TYPICAL_CONTEXT, 0) if self.running else 0.0
        return request.arrival + self._margin * self.slo.ttft - self._prompt_token * tokens - pieces * step


class Nothing(Cap):
    """No gate: the engine gets everything at once."""

    def __init__(self, slo: Slo, profile: EngineProfile) -> None:
        super().__init__(inf, slo, profile)

    def _latest(self, request: Request) -> float:
        del request
        return inf


class QueuedTokens(Nothing):
    """vLLM's ``--max-num-queued-tokens``: at most ``limit`` prompt tokens that have no first token yet.

    The default limit is vLLM's recommendation: the target TTFT times the prefill throughput.
    """

    def __init__(self, slo: Slo, profile: EngineProfile, limit: float | None = None) -> None:
        super().__init__(slo, profile)
        self._limit = slo.ttft / self._prompt_token if limit is None else limit

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Reject a request if earlier prompts fill the limit; else pass it on."""
        if self._backlog > self._limit:
            request.state = State.ENDED
            return [Refuse(request, Reason.QUEUE_FULL, 1.0)]
        return super().arrive(request, now)
