"""The engine's content and speed, from what the proxy sees: admissions, first tokens, chunks and ends.

Engines don't report their steps. But each step gives every decoding sequence one token, so there were ``tokens /
decoding`` steps, and a stream's tokens since its first are the steps since then: nothing is stored per chunk.
"""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.generation.requests import State
from carpool.generation.step_model import COUNT, FADE, KNOTS, sections

if TYPE_CHECKING:
    from carpool.generation.requests import Request
    from carpool.generation.step_model import StepModel

WINDOW = 0.5
"""Seconds of decoding in an equation of the step model."""

PREFILL_HORIZON = 1.0
"""Seconds over which prompts count as load: about the time in which a stream of average length averages them out."""

MOST_PREFILL = 0.95
"""Most time, as a share, that the forecast assumes for prompts: a higher share leaves no time for decoding."""

OWN_PROMPT = 0.3
"""Most seconds of a request's own prompt that count against it. A prompt is computed once, and delays streams equally
whenever it comes: waiting saves nothing. If 0.9 s of a horizon of 1 s counted, only an empty engine would admit it."""


class Totals(NamedTuple):
    """Sums over the engine's steps: one equation of the step model, and prompt tokens per second times seconds."""

    seconds: float
    row: tuple[float, ...]
    prompt_rate: float

    def since(self, before: Totals) -> Totals:
        """Return the difference."""
        return Totals(
            self.seconds - before.seconds,
            tuple(after - first for after, first in zip(self.row, before.row, strict=True)),
            self.prompt_rate - before.prompt_rate,
        )

    def of(self, steps: float) -> Totals:
        """Return the same time with so many decode steps, and in each the content that a step had in the mean."""
        scale = steps / self.row[0] if self.row[0] else 0.0
        return self._replace(row=(*(value * scale for value in self.row[:-1]), self.row[-1]))


class Equations:
    """Where the equations of the step model begin."""

    def __init__(self, start: Totals) -> None:
        self.window = start
        """Everything before the present window."""
        self.seen = True
        """Whether the tokens of the window were seen, and not assumed."""
        self.admitted: dict[int, Totals] = {}
        """Everything before each request with the engine."""
        self.last = 0.0
        """Seconds of decoding at the last equation."""
        self.prompts = PromptSteps()


class PromptSteps:
    """Steps of prompts only, since a sequence last decoded: all that answers of one token show of the engine."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self._at = -inf
        """When the last step ended."""

    def first_token(self, now: float, tokens: int, base: float) -> None:
        """Count a prompt; first tokens that come within half a ``base`` step are of one step."""
        self.tokens += tokens
        if now - self._at > base / 2:
            self.steps += 1
            self._at = now

    def teach(self, model: StepModel) -> None:
        """Let ``model`` learn what a prompt token takes.

        Steps and tokens grow alike, so the time of a step is taken as known, up to half of what was measured.
        """
        steps = min(self.steps * model.coefficients[0], self.seconds / 2)
        model.learn((*[0.0] * (COUNT - 1), self.tokens), self.seconds - steps)


class Meter:
    """The engine as seen from outside, in sequences, tokens and seconds. ``model`` learns as windows close."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.streams: dict[int, Request] = {}
        """Admitted and not ended."""
        self.decoding = 0
        """Sequences that got their first token."""
        self.kv = 0.0
        """Tokens of the sequences that decode."""
        self.backlog = 0
        """Prompt tokens whose first token has not come."""
        self._computing_since = 0.0
        """When the engine began with the prompts of the backlog: when they came, or at the last first token, or when
        the request being computed left."""
        self.ends = 0
        """Streams that have left the engine."""
        self._at = 0.0
        self._sums = [0.0] * (COUNT + 2)
        """The row of all steps, their seconds, and the prompt rate times seconds."""
        self._equations = Equations(self.totals)
        self._prompted = 0.0
        """Prompt tokens, fading over the horizon."""
        self._before: dict[int, float] = {}
        """Steps before the first token of each stream that decodes; later ones each gave a token to each choice."""

    @property
    def sequences(self) -> int:
        """Sequences that were admitted and have not ended; a request with several choices has as many."""
        return sum(request.sequences for request in self.streams.values())

    @property
    def steps(self) -> float:
        """Decode steps so far."""
        return self._sums[0]

    @property
    def totals(self) -> Totals:
        """Everything so far."""
        return Totals(self._sums[-2], tuple(self._sums[:-2]), self._sums[-1])

    @property
    def ahead(self) -> int:
        """Prompt tokens that the engine still has to compute.

        It computes one prompt after the other, so the time since it began the first one counts as done.
        """
        computed = (self._at - self._computing_since) / max(1e-9, self.model.prompt_token)
        return max(0, self.backlog - int(computed))

    def admitted(self, request: Request) -> None:
        """Count a request that was sent to the engine."""
        self.streams[request.key] = request
        self._equations.admitted[request.key] = self.totals
        if not self.backlog:
            self._computing_since = self._at
        self.backlog += request.prompt_tokens

    def progress(self, now: float, tokens: float, *, seen: bool = True) -> float:
        """Count tokens that streams got after their first, up to now; return the seconds since the last call.

        Not ``seen``: they are assumed, and are not learned from.
        """
        elapsed = now - self._at
        self._at = now
        if self.decoding:
            self._equations.seen &= seen
            steps = tokens / self.decoding
            sums = self._sums
            sums[0] += steps
            for i, part in enumerate(sections(self.decoding), 1):
                if not part:
                    break
                sums[i] += steps * part
            sums[len(KNOTS) + 1] += steps * (self.kv + tokens / 2)
            sums[-2] += elapsed
            sums[-1] += elapsed * (self._prompted + self.backlog) / PREFILL_HORIZON
            self.kv += tokens
            if self._equations.prompts.tokens or self._equations.prompts.seconds:
                self._equations.prompts = PromptSteps()
        elif self.backlog:
            self._equations.prompts.seconds += elapsed
        self._prompted *= exp(-elapsed / PREFILL_HORIZON)
        return elapsed

    def first_token(self, request: Request) -> None:
        """Count a request whose first token has come."""
        self._computing_since = self._at
        self.backlog -= request.prompt_tokens
        self._prompted += request.prompt_tokens
        if self.decoding:
            self._sums[COUNT - 1] += request.prompt_tokens
        else:
            self._equations.prompts.first_token(self._at, request.prompt_tokens, self.model.coefficients[0])
        if request.max_tokens == 1:
            return  # its only token has come
        self.decoding += request.sequences
        self.kv += request.prompt_tokens
        self._before[request.key] = self.steps

    def choice_ended(self, request: Request) -> None:
        """Count a choice that has ended before others of a request that decodes."""
        if request.max_tokens == 1:
            return
        self.decoding -= 1
        self.kv = max(0.0, self.kv - self.generated(request))

    def ended(self, request: Request) -> None:
        """Count a request that left the engine, in ``request.state``."""
        oldest = next((each for each in self.streams.values() if each.state is State.PREFILLING), None)
        del self.streams[request.key], self._equations.admitted[request.key]
        self.ends += 1
        if request.state is State.PREFILLING:
            if request is oldest:
                # The engine was computing this one. The next prompt has not begun.
                self._computing_since = self._at
            self.backlog -= request.prompt_tokens
        if request.key not in self._before:
            return
        self.decoding -= request.sequences
        # Tokens are attributed by steps, exactly as they were added.
        held = request.prompt_tokens + request.sequences * self.generated(request)
        self.kv = max(0.0, self.kv - held) if self.decoding else 0.0
        del self._before[request.key]

    def close(self) -> bool:
        """End the window if it is long enough, and learn from it if its tokens were seen."""
        equations = self._equations
        prompts = equations.prompts
        if prompts.seconds >= WINDOW and prompts.steps:
            prompts.teach(self.model)
            equations.prompts = PromptSteps()
            return True
        window = self.totals.since(equations.window)
        # An engine that computes prompts first may have no decode step for seconds: prompts alone are an equation too.
        if window.seconds < WINDOW or (window.row[0] < 1 and not window.row[-1]):
            return False
        if equations.seen:
            self.model.learn(window.row, window.seconds)
            equations.last = self._sums[-2]
        equations.window, equations.seen = self.totals, True
        return True

    def learn_answer(self, request: Request, tokens: int) -> None:
        """Learn from an answer that came whole: its ``tokens`` took as many steps, from its admission to now.

        That is an equation, too. Only the content of the steps, in the mean, follows from an assumed pace.
        """
        equations = self._equations
        work = self.totals.since(equations.admitted[request.key])
        if not work.row[0]:
            return
        fade = FADE ** ((self._sums[-2] - equations.last) / WINDOW)
        equations.last = self._sums[-2]
        self.model.learn(work.of(tokens).row, work.seconds, fade)

    def generated(self, request: Request) -> float:
        """Return the tokens of a stream after its first, so far; of each choice, where it has several."""
        return self.steps - self._before.get(request.key, self.steps)

    def forecast(self, more: int = 0, prompt_tokens: int = 0) -> float:
        """Return the mean time per output token with ``more`` sequences of ``prompt_tokens`` in all."""
        sequences = self.sequences + more
        decode = self.model.decode_seconds(sequences, self.kv + self.backlog + prompt_tokens)
        own = min(self.model.prompt_token * prompt_tokens, OWN_PROMPT) / PREFILL_HORIZON
        return decode / (1 - min(MOST_PREFILL, self.prefill_share() + own))

    def prefill_share(self) -> float:
        """Return the share of time for prompts that the engine has or recently had."""
        return self.model.prompt_token * (self._prompted + self.backlog) / PREFILL_HORIZON

    def first_token_seconds(self, prompt_tokens: int) -> float:
        """Return the time to the first token of a prompt that is admitted now, after the prompts before it."""
        return self.model.first_token_seconds(self.ahead + prompt_tokens, self.sequences, self.kv)
