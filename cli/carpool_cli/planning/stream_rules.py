"""Other rules before an engine: none, fixed caps, AIMD on TPOT, and a limit of queued tokens.

All but `Nothing` and `QueuedTokens` refuse requests whose first token would come too late. For that they are given how
long the engine's steps take; the gate is not.
"""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from typing import TYPE_CHECKING

from carpool.generation.requests import Action, Admit, Reason, Refuse, Request, Slo, State

if TYPE_CHECKING:
    from carpool.generation.profiles import EngineProfile

TYPICAL_CONTEXT = 1200
"""Tokens of a sequence, from which `Cap` takes the length of a step."""


class Cap:
    """At most ``most`` requests in the engine; others wait in order. ``margin``: share of TTFT that may be planned."""

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
        """Admit up to the cap; refuse what is too late."""
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
            request.admitted_at = now
            actions.append(Admit(request))
        return actions

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Learn nothing."""
        del now, tokens
        return []

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Note that a prompt is computed."""
        self._backlog -= request.prompt_tokens
        request.state = State.DECODING
        request.first_at = now
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
        """Return when the first that waits becomes too late."""
        del now
        return self._latest(self.waiting[0]) + 1e-3 if self.waiting else inf

    def _latest(self, request: Request) -> float:
        tokens = self._backlog + request.prompt_tokens
        pieces = ceil(tokens / max(256, self._profile.max_batched_tokens - self.running))
        step = self._profile.step.seconds(self.running, self.running * TYPICAL_CONTEXT, 0) if self.running else 0.0
        return request.arrival + self._margin * self.slo.ttft - self._prompt_token * tokens - pieces * step


class Aimd(Cap):
    """A cap that grows by one a second while requests wait, and falls by a tenth where TPOT is missed.

    As congestion control does it (Chiu and Jain 1989), by the mean time per token of the last second.
    """

    def __init__(self, slo: Slo, profile: EngineProfile, *, start: float = 16.0) -> None:
        super().__init__(start, slo, profile, margin=0.85)
        self._decoding = 0
        self._since = 0.0
        self._at = 0.0
        self._steps = 0.0
        self._seconds = 0.0

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Compare the last second with the target, and change the cap."""
        if self._decoding:
            self._steps += tokens / self._decoding
            self._seconds += now - self._at
        self._at = now
        if now - self._since < 1.0 or not self._steps:
            return []
        if self._seconds / self._steps > self.slo.tpot:
            self.most = max(1.0, 0.9 * self.most)
        elif self.waiting:
            self.most += 1
        self._since, self._steps, self._seconds = now, 0.0, 0.0
        return self.poll(now)

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Count a stream."""
        self._decoding += 1
        return super().first_token(request, now)

    def ended(self, request: Request, now: float, output_tokens: int, *, complete: bool = True) -> list[Action]:
        """Count it no more."""
        self._decoding -= request.state is State.DECODING
        return super().ended(request, now, output_tokens, complete=complete)


class Nothing(Cap):
    """No gate: the engine gets everything at once."""

    def __init__(self, slo: Slo, profile: EngineProfile) -> None:
        super().__init__(inf, slo, profile)

    def _latest(self, request: Request) -> float:
        del request
        return inf


class QueuedTokens(Nothing):
    """vLLM's rule for ``--max-num-queued-tokens``: at most the target TTFT times the prefill throughput."""

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Refuse a request if the prompts before it take longer than the target; else pass it on."""
        if self._backlog * self._prompt_token > self.slo.ttft:
            request.state = State.ENDED
            return [Refuse(request, Reason.QUEUE_FULL, 1.0)]
        return super().arrive(request, now)
