"""Tokens per byte and per event: learned by model from the counts in engines' answers.

A piece of text is not a token: engines hold back incomplete UTF-8, and some send several tokens at once.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_TOKEN = 4.0
"""Of English text in JSON, until a count has come."""

FADE = 0.99
"""Weight of a count when the next comes: the last hundred matter."""

MOST = 64
"""Most models counted separately; callers can invent names."""


class _Sums(NamedTuple):
    """Fading sums over bytes x and tokens y: 1, x, y, x², xy."""

    n: float
    x: float
    y: float
    xx: float
    xy: float

    def line(self) -> tuple[float, float]:
        """Return tokens of an empty prompt (chat templates have some), and tokens per byte."""
        spread = self.n * self.xx - self.x * self.x
        slope = (self.n * self.xy - self.x * self.y) / spread if spread > 1e-3 * self.n * self.xx else 0.0
        if not 0.01 <= slope <= 1.0:
            return 0.0, self.y / self.x
        return (self.y - slope * self.x) / self.n, slope


class TokenSizes:
    """A line of tokens over bytes for prompts, and tokens per event for answers, by model."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Sums] = {}
        self._events: dict[str, tuple[float, float]] = {}
        """Fading sums of events and of tokens."""

    def prompt_tokens(self, model: str, size: int) -> int:
        """Estimate the tokens of a prompt of ``size`` bytes."""
        sums = self._prompts.get(model)
        base, slope = (0.0, 1 / BYTES_PER_TOKEN) if sums is None else sums.line()
        return max(1, round(base + slope * size))

    def per_event(self, model: str) -> float:
        """Return the tokens of an event."""
        events, tokens = self._events.get(model, (1.0, 1.0))
        return tokens / events

    def learn_prompt(self, model: str, size: int, tokens: int) -> None:
        """Take a prompt's count."""
        if size > 0 and tokens > 0 and (model in self._prompts or len(self._prompts) < MOST):
            old = self._prompts.get(model, _Sums(0.0, 0.0, 0.0, 0.0, 0.0))
            new = (1.0, size, tokens, size * size, size * tokens)
            self._prompts[model] = _Sums(*(FADE * before + value for before, value in zip(old, new, strict=True)))

    def learn_answer(self, model: str, events: int, tokens: int) -> None:
        """Take a stream's count."""
        if events > 0 and tokens > 0 and (model in self._events or len(self._events) < MOST):
            before = self._events.get(model, (0.0, 0.0))
            self._events[model] = (FADE * before[0] + events, FADE * before[1] + tokens)
