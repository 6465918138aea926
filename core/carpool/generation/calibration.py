"""How far requests exceed their forecast, and the safety margin on the targets that follows.

For every ended request, the engine's work while it ran is stored. From this the *present* model forecasts how long it
should have taken, with prompts spread evenly; so errors of an earlier model, or of an earlier engine, have no effect
here. The ratio of the measured time to this forecast varies by request: a short answer may have met another
request's prompt, for example.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from carpool.generation.capacity import Load

if TYPE_CHECKING:
    from carpool.generation.meter import Meter, Totals
    from carpool.generation.requests import Request, Slo
    from carpool.generation.step_model import StepModel

MEMORY = 300
"""Number of last requests that count."""

FIRSTS_MEMORY = 60.0
"""Seconds for which a first token counts, as long as `ENOUGH` later ones are known. Where one comes in two seconds, a
stall would count for ten minutes by number alone."""

ENOUGH = 20
"""First tokens needed before their ratios count."""

ENOUGH_ANSWERS = 100
"""Answers needed before their ratios count: the first to end are short ones, which have the largest errors."""

ENOUGH_WINDOWS = 8
"""Windows of the step model needed for a capacity. After one or two windows some coefficients are 0: for a small model
a capacity of 150,000 requests/s was reported for 13 s."""

MARGINS = [0.8 * 1.06**k for k in range(26)]
"""Candidates, from 0.8 to 3.4."""

FREE = 0.03
"""Share of the goodput that may be lost for fewer misses: near the best margin it hardly changes, but misses do."""

EVERY = 4
"""Windows of the step model between two updates of the margins: 2 s."""

GENTLE = 0.7
"""Share of the way to a new margin in one step."""

TTFT_QUANTILE = 0.95
"""Share of the admitted requests whose first token has to be in time."""

LEAST_TTFT, MOST_TTFT = 0.5, 4.0
"""Bounds of the time planned for a first token over its forecast. Engines need 1.3 to 3.5. A stall is no multiple of
the forecast: with 15 s over 70 ms only requests to an empty engine would be in time."""


class Answer(NamedTuple):
    """A complete request: the engine's work meanwhile, and its lengths; output tokens of each of its choices."""

    totals: Totals
    prompt_tokens: int
    output_tokens: int
    choices: int = 1


class FirstToken(NamedTuple):
    """A first token: when, and seconds from admission; prompt tokens up to its own, sequences and KV tokens then."""

    at: float
    seconds: float
    tokens: int
    sequences: int
    kv: float


class Calibration:
    """``tpot``: the target over the planned TPOT; ``ttft``: the time planned for a first token over its forecast."""

    def __init__(self) -> None:
        self.tpot = 1.1
        self.ttft = 1.3
        self._windows = 0
        self._answers: deque[Answer] = deque(maxlen=MEMORY)
        self._firsts: deque[FirstToken] = deque(maxlen=MEMORY)
        self._admitted: dict[int, FirstToken] = {}
        """By request without a first token: its record, as if the token had come at once."""
        self._began: dict[int, Totals] = {}

    def admitted(self, request: Request, now: float, meter: Meter) -> None:
        """Note the work before a request, which is not counted in ``meter`` yet."""
        tokens = meter.ahead + request.prompt_tokens
        self._admitted[request.key] = FirstToken(now, 0.0, tokens, meter.sequences, meter.kv)

    def first_token(self, request: Request, now: float, meter: Meter, *, seen: bool = True) -> None:
        """Note how long it took, if that was ``seen``, and the engine's totals."""
        before = self._admitted.pop(request.key)
        if seen:
            self._firsts.append(before._replace(at=now, seconds=now - before.at))
            while len(self._firsts) > ENOUGH and self._firsts[0].at < now - FIRSTS_MEMORY:
                self._firsts.popleft()
        self._began[request.key] = meter.totals

    def ended(self, request: Request, meter: Meter, whole: int | None = None) -> None:
        """Note a complete request; ``whole``: the output tokens of its longest choice, where it came whole."""
        totals = meter.totals.since(self._began.pop(request.key))
        if whole is not None:
            totals = totals.of(whole - 1)
        self._answers.append(Answer(totals, request.prompt_tokens, request.output_tokens, request.choices))

    def dropped(self, request: Request) -> None:
        """Forget a request that did not end by itself."""
        self._admitted.pop(request.key, None)
        self._began.pop(request.key, None)

    def window(self, model: StepModel, slo: Slo) -> None:
        """Note that the model has learned from another window; every few of them update the margins."""
        self._windows += 1
        if self._windows % EVERY == 0:
            self.refit(model, slo)

    def refit(self, model: StepModel, slo: Slo) -> None:
        """Find the margins that the last requests would have needed."""
        if len(self._firsts) >= ENOUGH:
            ratios = sorted(
                first.seconds / max(1e-9, model.first_token_seconds(first.tokens, first.sequences, first.kv))
                for first in self._firsts
            )
            self.ttft = min(MOST_TTFT, max(LEAST_TTFT, ratios[int(TTFT_QUANTILE * len(ratios))]))
        if len(self._answers) >= ENOUGH_ANSWERS and slo.tpot < 10 and self._load().decoded:
            best = self._best_margin(model, slo.tpot)
            self.tpot += GENTLE * (best - self.tpot)

    def load(self) -> Load | None:
        """Return the mean of the last requests; None before enough of them have ended, or too little was learned."""
        if len(self._answers) < ENOUGH or self._windows < ENOUGH_WINDOWS:
            return None
        return self._load()

    def _load(self) -> Load:
        return Load.of([(each.prompt_tokens, each.output_tokens, each.choices) for each in self._answers])

    def _best_margin(self, model: StepModel, target: float) -> float:
        """Return the widest margin with about the most goodput.

        That is throughput at target / margin, times the share of requests that meets the target then.
        Fewer sequences make more of them meet it, but not all can: one prompt of 2,000 tokens takes 110 ms on an A100,
        and an answer of three tokens has no time to make up for it.
        """
        ratios = sorted(ratio(answer, model) for answer in self._answers)
        load = self._load()
        values = [
            bisect_right(ratios, margin) / len(ratios) * load.throughput(model, target / margin) for margin in MARGINS
        ]
        enough = (1 - FREE) * max(values)
        return max(margin for margin, value in zip(MARGINS, values, strict=True) if value >= enough)


def ratio(answer: Answer, model: StepModel) -> float:
    """Return a request's measured time over the model's time for its steps; 0 for an answer of one token."""
    totals = answer.totals
    if answer.output_tokens < 2 or totals.seconds <= 0:
        return 0.0
    share = model.prompt_token * totals.prompt_rate / totals.seconds
    return totals.seconds * max(0.05, 1 - share) / max(1e-9, model.decoding(totals.row))
