"""Engines as data: the time of a step, the size of the KV cache, and the scheduling."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta

from carpool.policy.plain import Camel, PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Linear(Camel, frozen=True, tag_field="form", tag="linear"):
    """t = base + sequence B + kvToken KV + promptToken P.

    B sequences decode, with KV tokens in the cache, and the step computes P prompt tokens.

    Decode steps read all weights once (base) and the cache of every sequence (kvToken); see Pope et al. 2023, section
    3.
    """

    base: Seconds
    sequence: Seconds
    kv_token: Seconds
    prompt_token: Seconds

    def seconds(self, sequences: int, kv_tokens: float, prompt_tokens: int) -> float:
        """Return what a step takes."""
        return self.base + self.sequence * sequences + self.kv_token * kv_tokens + self.prompt_token * prompt_tokens


class Table(Camel, frozen=True, tag_field="form", tag="table"):
    """Measured steps, linear between the points of a grid and beyond its last.

    ``decode_seconds[i][j]`` is a step of ``sequences[i]`` with ``contexts[j]`` tokens each; ``added_seconds[k][l]`` is
    the time that ``prompt_tokens[k]`` add to one of ``mixed_sequences[l]``; the first of these is 0: prompts only.
    """

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_seconds: tuple[tuple[float, ...], ...]
    prompt_tokens: tuple[int, ...]
    mixed_sequences: tuple[int, ...]
    added_seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuse a table whose rows and axes differ; raises ``PolicyError``."""
        for name, rows, down, across in (
            ("decodeSeconds", self.decode_seconds, self.sequences, self.contexts),
            ("addedSeconds", self.added_seconds, self.prompt_tokens, self.mixed_sequences),
        ):
            if len(rows) != len(down) or {len(row) for row in rows} != {len(across)}:
                raise PolicyError(f"step.{name}", f"takes {len(down)} rows of {len(across)} values")

    def seconds(self, sequences: int, kv_tokens: float, prompt_tokens: int) -> float:
        """Return what a step takes."""
        decode = 0.0
        if sequences:
            decode = _between(self.sequences, self.contexts, self.decode_seconds, sequences, kv_tokens / sequences)
        if not prompt_tokens:
            return decode
        mixed = min(sequences, self.mixed_sequences[-1])
        return decode + _between(self.prompt_tokens, self.mixed_sequences, self.added_seconds, prompt_tokens, mixed)


Step: TypeAlias = Linear | Table


class EngineProfile(Camel, frozen=True):
    """One engine on one device. Defaults are vLLM's on an A100."""

    name: str
    source: str
    kv_tokens: Count
    """Tokens that the KV cache holds."""
    step: Step
    max_running: Count = 256
    """Sequences that it runs at once: ``--max-num-seqs``."""
    max_batched_tokens: Count = 2048
    """Tokens that a step takes, prompt tokens and one for each sequence that decodes: ``--max-num-batched-tokens``."""
    block_tokens: Count = 16
    prefill: Literal["chunked", "first"] = "chunked"
    """Chunked: prompts fill up steps of decoding, in pieces (vLLM). First: whole prompts in steps of their own, before
    all decoding, and only what surely fits into the cache (TGI)."""


def _between(down: Sequence[int], across: Sequence[int], rows: Sequence[Sequence[float]], y: float, x: float) -> float:
    """Interpolate bilinearly; constant below the first point, extrapolated beyond the last."""
    i, part = _place(down, y)
    j, share = _place(across, x)
    upper = rows[i][j] + (rows[i][j + 1] - rows[i][j]) * share
    lower = rows[i + 1][j] + (rows[i + 1][j + 1] - rows[i + 1][j]) * share
    return upper + (lower - upper) * part


def _place(points: Sequence[int], value: float) -> tuple[int, float]:
    i = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return i, max(0.0, (value - points[i]) / (points[i + 1] - points[i]))
