"""The capacity of one engine within a target for TPOT: sequences, requests and tokens per second."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.generation.step_model import StepModel


class Load(NamedTuple):
    """A mean request: prompt tokens, tokens after the first, cached tokens summed over its steps."""

    prompt: float
    decoded: float
    held: float

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int, int]]) -> Load:
        """Average requests: prompt tokens, output tokens of each choice, and choices, which share their prompt."""
        count = len(lengths)
        decoded = [max(0, output - 1) for _, output, _ in lengths]
        return cls(
            sum(prompt for prompt, _, _ in lengths) / count,
            sum(d * choices for d, (_, _, choices) in zip(decoded, lengths, strict=True)) / count,
            sum(d * (prompt + choices * d / 2) for d, (prompt, _, choices) in zip(decoded, lengths, strict=True))
            / count,
        )

    def throughput(self, model: StepModel, tpot: float) -> float:
        """Return the requests per second at which the mean time per output token is ``tpot``.

        By Little's law, rate x decoded x tpot sequences decode, in the time not used for prompts.
        """
        low, high = 0.0, 1 / max(1e-6, model.prompt_token * self.prompt)
        high = min(high, 1e4)
        for _ in range(40):  # a slow engine carries one long answer a minute
            rate = (low + high) / 2
            decode = model.decode_seconds(rate * self.decoded * tpot, rate * self.held * tpot)
            low, high = (rate, high) if decode <= tpot * (1 - rate * self.prompt * model.prompt_token) else (low, rate)
        return low

    def tpot(self, model: StepModel, sequences: float) -> float:
        """Return the mean seconds per output token while so many sequences decode, in steady load.

        step / (1 - rate x prompt x d), with rate = sequences / (decoded x tpot).
        """
        share = sequences / self.decoded
        return model.decode_seconds(sequences, share * self.held) + share * self.prompt * model.prompt_token


class Carried(NamedTuple):
    """``sequences`` decode at once, ``rate`` requests and ``tokens`` output tokens end per second."""

    sequences: float
    rate: float
    tokens: float


def carried(
    model: StepModel, load: Load, tpot: float, *, kv_tokens: float | None = None, most: float | None = None
) -> Carried | None:
    """Return an engine's capacity at ``tpot`` seconds per output token.

    ``kv_tokens``: what the KV cache may hold; ``most``: sequences at once. None where answers have one token only, or
    a sequence alone is slower than the target.
    """
    if load.decoded <= 0:
        return None
    rate = load.throughput(model, tpot)
    sequences = rate * load.decoded * tpot
    held = kv_tokens * load.decoded / load.held if kv_tokens and load.held > 0 else None
    limits = [limit for limit in (most, held) if limit is not None]
    if limits and sequences > min(limits):
        sequences = min(limits)
        rate = sequences / (load.decoded * load.tpot(model, sequences))
    return Carried(sequences, rate, rate * (load.decoded + 1)) if sequences >= 1 else None
