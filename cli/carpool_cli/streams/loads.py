"""Load of token streams: arrival times, lengths of prompts and answers, and an engine's capacity."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool.generation.profiles import EngineProfile
from carpool.generation.requests import Request, Slo
from carpool.generation.simulation import Arrival
from carpool.generation.step_model import StepModel
from carpool.policy.plain import PolicyError, from_plain
from carpool_cli.answers import UNREADABLE, BadFile, read_text
from carpool_cli.planning.traces import azure_llm_2023

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from random import Random

SLOWEST = 1.0
"""Largest mean seconds per output token in the search."""


class Lengths(NamedTuple):
    """Pairs of prompt and output tokens, in the order in which they were recorded or drawn."""

    pairs: list[tuple[int, int]]
    described: str

    def draw(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return ``count`` pairs from ``start`` on, over and over."""
        return [self.pairs[(start + i) % len(self.pairs)] for i in range(count)]


class Stretch(NamedTuple):
    """A time of constant rate: seconds, requests per second."""

    seconds: float
    rate: float


def recorded(path: Path) -> tuple[Lengths, list[float]]:
    """Read recorded requests in the format of the Azure LLM inference dataset: lengths, and times in seconds.

    Raises ``BadFile`` naming the file and the line.
    """
    try:
        trace = azure_llm_2023(read_text(path).splitlines())
    except ValueError as error:
        raise BadFile(f"{path}: {error}") from None
    pairs = [(max(1, p), max(1, o)) for p, o in zip(trace.context, trace.generated, strict=True)]
    if len(pairs) < 2 or trace.times[0] == trace.times[-1]:
        raise BadFile(f"{path}: needs at least two requests at different times")
    return Lengths(pairs, path.name), list(trace.times)


def lognormal(prompt: float, output: float, random: Random, spread: float = 0.8, most: int = 16_000) -> Lengths:
    """Draw 2,000 log-normal lengths with the given medians, of ``most`` tokens at most unless a median is larger."""

    def one(median: float) -> int:
        drawn = max(1, round(median * random.lognormvariate(0.0, spread)))
        return drawn if median >= most else min(most, drawn)

    return Lengths(
        [(one(prompt), one(output)) for _ in range(2000)], f"log-normal, medians {prompt:g} and {output:g} tokens"
    )


def poisson(random: Random, count: int, shape: float = 1.0) -> list[float]:
    """Return arrival times at one a second: Poisson, or gamma with ``shape`` below 1 for bursts (cv = shape^-0.5)."""
    return list(accumulate(random.gammavariate(shape, 1 / shape) for _ in range(count)))


def stretched(times: Sequence[float], stretches: Sequence[Stretch]) -> list[float]:
    """Map arrival times at one a second to times at the rate of each stretch, up to the end of the last."""
    ends = list(accumulate(each.seconds * each.rate for each in stretches))
    starts = [0.0, *accumulate(each.seconds for each in stretches)]
    mapped = []
    for time in times:
        if time >= ends[-1]:
            break
        i = bisect_left(ends, time)
        if ends[i] == time:
            i += 1
        before = ends[i - 1] if i else 0.0
        mapped.append(starts[i] + (time - before) / stretches[i].rate)
    return mapped


def arrivals(
    times: Sequence[float], lengths: Sequence[tuple[int, int]], *, tenant: str = "", batch: bool = False, first: int = 0
) -> list[Arrival]:
    """Make requests from times and lengths, with keys from ``first`` on."""
    return [
        Arrival(Request(first + i, time, prompt, tenant=tenant, batch=batch), output)
        for i, (time, (prompt, output)) in enumerate(zip(times, lengths, strict=False))
    ]


def read_profile(path: Path) -> EngineProfile:
    """Read an engine profile.

    Raises ``BadFile`` naming the file and the field, or the kind of profile that it is.
    """
    try:
        plain = msgspec.json.decode(path.read_bytes())
        if isinstance(plain, dict) and "rows" in plain:
            raise BadFile(
                f"{path}: that is a device's profile, with the latency of batches, as commands take it without "
                "--generative; for an engine's, with the time of a step, see benchmarks/generation/profiles"
            )
        return from_plain(plain, EngineProfile, what="profile")
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    except (*UNREADABLE, PolicyError) as error:
        raise BadFile(f"{path}: {error}") from None


class Capacity(NamedTuple):
    """The steady load at which the mean time per output token reaches its target: requests/s, sequences, KV tokens."""

    rate: float
    sequences: float
    kv_tokens: float


def capacity(profile: EngineProfile, lengths: Lengths, slo: Slo) -> Capacity:
    """Return an engine's mean capacity: where the decode step over the time left by prompts equals the target.

    By Little's law B = rate x (output tokens - 1) x TPOT sequences decode, each with its prompt and half its answer
    cached. If the cache is full earlier, that is the limit. All values are 0 if one request alone misses the target.
    Answers of one token have no time per output token: prompts alone are the limit.
    """
    mean = _Means.of(lengths)
    target = min(slo.tpot, SLOWEST) if mean.decoded else SLOWEST
    low, high = 0.0, 1e4
    for _ in range(60):
        rate = (low + high) / 2
        tpot = _pace(profile, mean, rate, target)
        fits = rate * mean.held * tpot <= profile.kv_tokens and rate * mean.decoded * tpot <= profile.max_running
        low, high = (rate, high) if tpot <= target and fits else (low, rate)
    if not low:
        return Capacity(0.0, 0.0, 0.0)
    tpot = _pace(profile, mean, low, target)
    return Capacity(low, low * mean.decoded * tpot, low * mean.held * tpot)


def rate_at(profile: EngineProfile, lengths: Lengths, sequences: float) -> float:
    """Return the steady requests per second that a number of sequences serve."""
    mean = _Means.of(lengths)
    low, high = 0.0, 1e4
    for _ in range(60):
        rate = (low + high) / 2
        running = rate * mean.decoded * _pace(profile, mean, rate, SLOWEST)
        low, high = (rate, high) if running <= sequences else (low, rate)
    return low


class _Means(NamedTuple):
    """Per request: prompt tokens, tokens after the first, and cached tokens summed over its decode steps."""

    prompt: float
    decoded: float
    held: float

    @classmethod
    def of(cls, lengths: Lengths) -> _Means:
        count = len(lengths.pairs)
        return cls(
            sum(p for p, _ in lengths.pairs) / count,
            sum(o - 1 for _, o in lengths.pairs) / count,
            sum((o - 1) * (p + o / 2) for p, o in lengths.pairs) / count,
        )


def _pace(profile: EngineProfile, mean: _Means, rate: float, target: float) -> float:
    """Return the mean time per output token at a rate; ``inf`` beyond the target."""
    step, piece = profile.step, min(profile.max_batched_tokens // 2, 1024)
    pace = step.seconds(1, mean.prompt, 0)
    for _ in range(200):
        sequences, kv = max(1, ceil(rate * mean.decoded * pace)), rate * mean.held * pace
        alone = step.seconds(sequences, kv, 0)
        left = 1 - rate * mean.prompt * (step.seconds(sequences, kv, piece) - alone) / piece
        if left <= 0 or alone > target * left:
            return inf
        if alone / left <= pace * 1.0001:
            break
        pace = alone / left
    return pace


def guess(profile: EngineProfile, wrong: float = 1.0) -> StepModel:
    """Return a step model close to the profile's at 1 to 64 sequences, times ``wrong``."""
    step = profile.step
    one, many, long = (step.seconds(*load) for load in ((1, 1000, 0), (64, 64_000, 0), (64, 128_000, 0)))
    kv_token = max(0.0, (long - many) / 64_000)
    sequence = max(0.0, (many - one) / 63 - 1000 * kv_token)
    prompt = step.seconds(64, 64_000, 512) - many
    base = max(0.0, one - sequence - 1000 * kv_token)
    return StepModel(wrong * base, wrong * sequence, wrong * kv_token, wrong * prompt / 512)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of finite values; ``inf`` of none."""
    ordered = sorted(value for value in values if value < inf)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else inf
