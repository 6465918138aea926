"""What the engine holds and how fast it goes, from what passes by: admissions, first tokens, chunks and ends.

Engines say nothing of their steps. But each step gives every sequence that decodes one token, so ``tokens / decoding``
of them were made, and a stream's tokens since its first are the steps since then: nothing is kept per chunk.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

from carpool.generation.requests import State
from carpool.generation.step_model import StepModel, Window

if TYPE_CHECKING:
    from carpool.generation.requests import Request

WINDOW = 0.5
"""Seconds of decoding in an equation of the step model."""

PREFILL_HORIZON = 4.0
"""Seconds over which prompts count as load: about the time in which a stream of average length averages them out."""


class Meter:
    """The engine as seen from outside, in sequences, tokens and seconds. ``model`` learns as windows close."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.streams: dict[int, Request] = {}
        """Admitted and not ended."""
        self.decoding = 0
        self.kv = 0.0
        """Tokens of the sequences that decode."""
        self.backlog = 0
        """Prompt tokens whose first token has not come."""
        self.steps = 0.0
        self.windows = 0
        self.ends = 0
        """Streams that have left the engine."""
        self._at = 0.0
        self._window = Window()
        self._prefill = 0.0
        """Seconds of prefill, fading over the horizon."""

    def admitted(self, request: Request) -> None:
        """Count a request that was sent to the engine."""
        self.streams[request.key] = request
        self.backlog += request.prompt_tokens

    def progress(self, now: float, tokens: float) -> float:
        """Count tokens that streams got after their first, up to now; return the seconds since the last call."""
        elapsed = now - self._at
        self._at = now
        self._prefill *= exp(-elapsed / PREFILL_HORIZON)
        if not self.decoding:
            return elapsed
        steps = tokens / self.decoding
        self.steps += steps
        self._window.add(elapsed, steps, self.decoding, self.kv + tokens / 2)
        self.kv += tokens
        return elapsed

    def first_token(self, request: Request) -> None:
        """Count a request whose first token has come."""
        self.backlog -= request.prompt_tokens
        self._prefill += self.model.prompt_token * request.prompt_tokens
        if self.decoding:
            self._window.prompt_tokens += request.prompt_tokens
        self.decoding += 1
        self.kv += request.prompt_tokens
        request.steps_before = self.steps

    def ended(self, request: Request) -> None:
        """Count a request that left the engine, in ``request.state``."""
        del self.streams[request.key]
        self.ends += 1
        if request.state is State.PREFILLING:
            self.backlog -= request.prompt_tokens
            return
        self.decoding -= 1
        # Tokens are attributed by steps, exactly as they were added.
        self.kv = max(0.0, self.kv - request.prompt_tokens - self.generated(request)) if self.decoding else 0.0

    def close(self) -> bool:
        """Learn from the window if it is long enough."""
        window = self._window
        if window.seconds < WINDOW or window.steps < 1:
            return False
        self.model.learn(window)
        self._window = Window()
        self.windows += 1
        return True

    def generated(self, request: Request) -> float:
        """Return the tokens of a stream after its first, so far."""
        return self.steps - request.steps_before

    def forecast(self, more: int = 0, prompt_tokens: int = 0) -> float:
        """Return the mean time per output token with ``more`` requests of ``prompt_tokens`` in all."""
        sequences = len(self.streams) + more
        decode = self.model.decode_seconds(sequences, self.kv + self.backlog + prompt_tokens)
        return decode / max(0.05, 1 - self.prefill_share(prompt_tokens))

    def prefill_share(self, prompt_tokens: int = 0) -> float:
        """Return the share of time that prompts take."""
        return (self._prefill + self.model.prompt_token * (self.backlog + prompt_tokens)) / PREFILL_HORIZON

    def first_token_seconds(self, prompt_tokens: int) -> float:
        """Return the time to the first token of a prompt that is admitted now, after the prompts before it."""
        prefill = self.model.prompt_token * (self.backlog + prompt_tokens)
        return prefill + self.model.decode_seconds(len(self.streams), self.kv)
