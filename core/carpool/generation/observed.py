"""An engine without a gate, learned from its own counters: its step model, its capacity, and limits for an SLO.

Two scrapes give one equation. Between them came G tokens after first ones, with S seconds of gaps in sum. By Little's
law, B = S / seconds sequences decoded in the mean, in G / B steps of S / G seconds each. If the engine counts
steps, that count is used. It counts KV tokens and prompt tokens. The fit is that of the gate
(`step_model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool.generation.capacity import Load, carried
from carpool.generation.step_model import StepModel, sections

if TYPE_CHECKING:
    from carpool.generation.capacity import Carried
    from carpool.generation.requests import Slo

GUESS = (0.0115, 4e-5, 8e-8, 5.5e-5)
"""Where learning starts: Llama-3.1-8B on an A100, seconds per step, sequence, cached token and prompt token."""

LEAST_TOKENS = 50
"""Tokens that a window needs to be used."""

ENOUGH = 8
"""Windows needed for a recommendation: two minutes of scrapes every 15 s."""

LATELY = 20
"""Windows over which lengths and rates are averaged."""

MARGIN = 1.15
"""The target for TPOT over the planned TPOT, since answers vary. In overload the simulated engine has 92 to 109 % of
the goodput of the best limits that a search finds (seven engines), and at most 105 % with 1.25. With 1.0 it has up to
15 points more, but no room for a mix of lengths that changes."""

KV_SHARE = 0.9
"""Mean share of the KV cache that sequences may fill."""

QUEUED_SHARE = 0.75
"""Share of the TTFT target that a full queue may take."""

BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
"""Candidates for the tokens of a step."""


class Counters(NamedTuple):
    """An engine's counters since it began, and its gauges, at one time."""

    at: float
    """Seconds of any clock."""
    prompt_tokens: float
    """Without those served from a prefix cache."""
    gaps: float
    """Tokens, without the first one of each answer."""
    gap_seconds: float
    """Sum of the seconds between them and the token before."""
    requests: float
    """Ended requests."""
    request_prompt_tokens: float
    request_output_tokens: float
    steps: float | None = None
    running: float = 0.0
    waiting: float = 0.0
    kv_share: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    kv_size: float | None = None
    """Tokens that the KV cache holds."""
    preemptions: float = 0.0


class Window(NamedTuple):
    """What happened between two scrapes."""

    seconds: float
    sequences: float
    kv: float
    """Cached tokens, mean."""
    requests: float
    prompt: float
    """Prompt tokens of the requests that ended."""
    output: float
    preemptions: float


class Advice(NamedTuple):
    """Limits for an engine's own settings, and why."""

    sequences: int
    """`--max-num-seqs`, or `maxConcurrency` of a gateway."""
    batched_tokens: int
    """`--max-num-batched-tokens`."""
    queued_tokens: int
    """`--max-num-queued-tokens`."""
    carried: Carried
    reason: str


class ObservedEngine:
    """One engine, or several equal ones, whose counters are read one by one."""

    def __init__(self) -> None:
        self.model = StepModel(*GUESS)
        self.windows: list[Window] = []
        """The last, oldest first."""
        self.learned = 0
        """Windows that the model has learned from."""
        self.kv_size: float | None = None

    def observe(self, before: Counters, after: Counters) -> bool:
        """Learn from two scrapes of one engine; return whether there was anything to learn."""
        seconds, gaps = after.at - before.at, after.gaps - before.gaps
        gap_seconds, prompts = after.gap_seconds - before.gap_seconds, after.prompt_tokens - before.prompt_tokens
        requests = after.requests - before.requests
        if seconds <= 0 or min(gaps, gap_seconds, prompts, requests) < 0:
            return False  # it was restarted
        self.kv_size = after.kv_size or self.kv_size
        sequences = max(1.0, gap_seconds / seconds)
        steps = gaps / sequences
        if before.steps is not None and after.steps is not None and after.steps > before.steps:
            # Steps without a token after a first one have prompts only: they are in no gap.
            steps = min(gaps, max(after.steps - before.steps, 1e-9))
            sequences = gaps / steps
        window = Window(
            seconds,
            sequences,
            self._kv(before, after, sequences),
            requests,
            after.request_prompt_tokens - before.request_prompt_tokens,
            after.request_output_tokens - before.request_output_tokens,
            after.preemptions - before.preemptions,
        )
        self.windows = [*self.windows, window][-LATELY:]
        if gaps < LEAST_TOKENS or not gap_seconds:
            return False
        row = [steps, *(steps * part for part in sections(sequences)), steps * window.kv, prompts]
        self.model.learn(row, steps * gap_seconds / gaps)
        self.learned += 1
        return True

    def load(self) -> Load | None:
        """Return the mean of the last requests; None without any."""
        requests = sum(window.requests for window in self.windows)
        if requests < 1:
            return None
        prompt = sum(window.prompt for window in self.windows) / requests
        decoded = max(0.0, sum(window.output for window in self.windows) / requests - 1)
        # Cached tokens of a sequence, as observed: longer answers count more, as they should.
        seen = sum(window.sequences for window in self.windows)
        return Load(prompt, decoded, decoded * sum(window.kv for window in self.windows) / seen)

    def advice(self, slo: Slo) -> Advice | None:
        """Return limits that meet ``slo``; None before enough was observed, or if one sequence alone is too slow."""
        load = self.load()
        if self.learned < ENOUGH or load is None:
            return None
        room = None if self.kv_size is None else KV_SHARE * self.kv_size
        found = carried(self.model, load, slo.tpot / MARGIN, kv_tokens=room)
        if found is None:
            return None
        sequences = max(1, int(found.sequences))
        kv = found.sequences * load.held / load.decoded
        step = self.model.decode_seconds(sequences, kv)
        # A step full of prompts takes exactly as long as the target.
        tokens = sequences + (slo.tpot - step) / max(1e-9, self.model.prompt_token)
        budget = max((size for size in BUDGETS if size <= tokens), default=BUDGETS[0])
        alone = self.model.decode_seconds(1, kv / sequences)
        bound = "the KV cache is 90 % full then" if room is not None and kv > 0.98 * room else "just below the target"
        reason = (
            f"{sequences} sequences have {1000 * load.tpot(self.model, sequences):.3g} ms per output token, prompts "
            f"included ({1000 * step:.3g} ms a step; one alone {1000 * alone:.3g} ms), {bound}: "
            f"{found.rate:.3g} requests/s of {load.prompt:.0f} prompt and {load.decoded + 1:.0f} output tokens"
        )
        queued = max(1, round(QUEUED_SHARE * slo.ttft * found.rate * load.prompt))
        return Advice(sequences, max(budget, sequences), queued, found, reason)

    def _kv(self, before: Counters, after: Counters, sequences: float) -> float:
        """Return the mean of cached tokens: by the engine's reports, else by the lengths of requests."""
        if before.kv_share is not None and after.kv_share is not None and self.kv_size:
            return (before.kv_share + after.kv_share) / 2 * self.kv_size
        load = after.request_prompt_tokens, after.request_output_tokens, after.requests
        return sequences * (load[0] + load[1] / 2) / load[2] if load[2] else 0.0
