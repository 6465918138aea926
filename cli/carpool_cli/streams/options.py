"""Shared by the commands for token streams: an engine, an SLO and a load, from the command line."""

from __future__ import annotations

from math import inf, isfinite
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from msgspec.structs import replace

from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Slo
from carpool_cli import options
from carpool_cli.live.figures import number
from carpool_cli.options import DURATION, SOME_TIME, FiniteRange
from carpool_cli.planning.assumptions import MOST_REQUESTS, find
from carpool_cli.planning.traces import Trace, lasts, scaled
from carpool_cli.streams import loads
from carpool_cli.streams.loads import Lengths, Stretch

if TYPE_CHECKING:
    from pathlib import Path

SPREAD = 0.8
"""For log-normal lengths: standard deviation of the logarithm, about that of conversations."""


class StreamLoad(NamedTuple):
    """Lengths and times of requests: ``recorded`` times, or a process with a rate."""

    lengths: Lengths
    seconds: float
    seed: int
    rate: float | None
    cv: float
    recorded: list[float] | None

    @property
    def named(self) -> bool:
        """Whether there is a load, and not only lengths."""
        return self.rate is not None or self.recorded is not None

    @property
    def lasts(self) -> float:
        """Seconds of a trace, at its rate; ``inf`` without one."""
        if self.recorded is None:
            return inf
        return lasts(self.recorded) if self.rate is None else len(self.recorded) / self.rate

    def times(self, rate: float | None) -> list[float]:
        """Return arrival times at a rate; without a rate those of the trace, at its own pace.

        Raises ``click.ClickException`` if there are none, or too many to play.
        """
        if self.recorded is not None:
            trace = self.recorded if rate is None else Trace.at_rate(self.recorded, rate).recorded
            times = [time for time in scaled(trace, 1.0) if time < self.seconds]
        else:
            assert rate is not None  # noqa: S101 - a load without a trace has a rate
            count = rate * self.seconds
            if count > MOST_REQUESTS:
                raise click.ClickException(f"that is over {MOST_REQUESTS} requests: lower --rate or --for")
            even = loads.poisson(Random(self.seed), int(1.5 * count) + 100, self.cv**-2)  # noqa: S311 - load
            times = loads.stretched(even, [Stretch(self.seconds, rate)])
        if not times:
            raise click.ClickException(f"no request comes in {self.seconds:g} s: raise --rate or --for")
        return times

    def described(self, rate: float | None) -> str:
        """Describe the load."""
        pace = "at its own pace" if rate is None else f"at {number(rate)}/s"
        if self.recorded is not None:
            return f"{self.lengths.described} {pace}"
        process = "Poisson" if self.cv == 1 else f"gamma, cv {self.cv:g},"
        return f"{process} {pace}, lengths {self.lengths.described}"


class Asked(NamedTuple):
    """An engine, its SLO and its load."""

    profile: EngineProfile
    slo: Slo
    load: StreamLoad


def _step(_: click.Context, parameter: click.Parameter, value: str | None) -> Linear | None:
    if value is None:
        return None
    try:
        parts = [float(part) / 1000 for part in value.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 4 or not all(0 <= part < inf and isfinite(part) for part in parts) or not parts[0] + parts[1]:
        raise click.BadParameter(f"{value!r}: write four numbers of ms, e.g. 11.5,0.038,0.00008,0.06", param=parameter)
    return Linear(*parts)


COUNT = click.IntRange(1, 10_000_000)

engine_options = options.together(
    options.profile(help="Profile of an engine on a device (JSON), e.g. of benchmarks/generation/profiles."),
    click.option(
        "--step",
        callback=_step,
        metavar="A,B,C,D",
        help="Instead, how long a step takes, in ms: A, and B more per sequence, C per token in the KV cache, "
        "D per prompt token; e.g. 11.5,0.038,0.00008,0.06. With --kv-tokens.",
    ),
    click.option("--kv-tokens", type=COUNT, help="Tokens that the KV cache holds.  [default: the profile's]"),
    click.option("--max-num-seqs", type=COUNT, help="The engine's present limit.  [default: the profile's]"),
    click.option("--max-num-batched-tokens", type=COUNT, help="Likewise, of tokens in a step."),
    click.option("--prompts-first", is_flag=True, help="The engine computes whole prompts first, as TGI does."),
)
"""Options of an engine; `read` takes their values, with those of `load_options`."""

load_options = options.together(
    click.option("--slo-ttft-p99", "ttft", type=SOME_TIME, required=True, help="Time to first token to meet, e.g. 2s."),
    click.option(
        "--slo-tpot-p99",
        "tpot",
        type=SOME_TIME,
        required=True,
        help="Mean time per output token after the first to meet, e.g. 50ms.",
    ),
    options.trace(help="Recorded requests, 'seconds,prompt tokens,output tokens' each, or `azure`."),
    options.rate(),
    click.option("--cv", type=FiniteRange(0.05, 20), help="Of the gaps: 1 Poisson, above: bursts.  [default: 1]"),
    click.option("--prompt-tokens", type=COUNT, help="Median of the prompts, without a --trace."),
    click.option("--output-tokens", type=COUNT, help="Median of the answers, without a --trace."),
    click.option(
        "--length-spread",
        type=FiniteRange(0, 2),
        help="Of both, log-normal: standard deviation of the logarithm; 0: all alike.  [default: 0.8]",
    ),
    click.option("--for", "seconds", type=DURATION, default=120.0, help="How long requests come.  [default: 2m]"),
    options.seed(help="Seed of arrivals and lengths."),
)
"""Options of an SLO and a load."""


def read(
    *,
    path: Path | None,
    step: Linear | None,
    kv_tokens: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    prompts_first: bool,
    ttft: float,
    tpot: float,
    **load: Any,  # noqa: ANN401 - `read_load` has the types
) -> Asked:
    """Combine an engine, its SLO and its load.

    Raises ``click.ClickException`` naming the option that is missing or contradicts another, or the file.
    """
    if (path is None) == (step is None):
        raise click.UsageError("name --profile or --step, one of the two")
    if path is not None:
        profile = loads.read_profile(path)
    elif kv_tokens is None or step is None:
        raise click.UsageError(
            "--step needs --kv-tokens: how many tokens the KV cache holds (vLLM logs it at its start)"
        )
    else:
        profile = EngineProfile(name="the given steps", source="typed", kv_tokens=kv_tokens, step=step)
    profile = replace(
        profile,
        kv_tokens=kv_tokens or profile.kv_tokens,
        max_running=max_num_seqs or profile.max_running,
        max_batched_tokens=max_num_batched_tokens or profile.max_batched_tokens,
        prefill="first" if prompts_first else profile.prefill,
    )
    if profile.max_batched_tokens < profile.max_running:
        raise click.UsageError(
            f"--max-num-batched-tokens {profile.max_batched_tokens} has to be at least --max-num-seqs "
            f"{profile.max_running}, as vLLM demands: each sequence takes one of them"
        )
    found = read_load(**load)
    longest = max(prompt + output for prompt, output in found.lengths.pairs)
    if longest > profile.kv_tokens:
        raise click.ClickException(f"a request of {longest} tokens does not fit into {profile.kv_tokens}: --kv-tokens")
    return Asked(profile, Slo(ttft, tpot), found)


def read_load(
    *,
    trace: Path | None,
    rate: float | None,
    cv: float | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    length_spread: float | None,
    seconds: float,
    seed: int,
) -> StreamLoad:
    """Return a load.

    Raises ``click.ClickException`` as `read` does.
    """
    if trace is not None:
        drawn = {
            "--cv": cv,
            "--prompt-tokens": prompt_tokens,
            "--output-tokens": output_tokens,
            "--length-spread": length_spread,
        }
        for name, value in drawn.items():
            if value is not None:
                raise click.UsageError(f"{name} does not go with --trace, which brings its own")
        lengths, recorded = loads.recorded(find(trace))
        load = StreamLoad(lengths, seconds, seed, rate, 1.0, recorded)
        return load._replace(seconds=min(seconds, load.lasts))
    if prompt_tokens is None or output_tokens is None:
        raise click.UsageError("name lengths: --prompt-tokens and --output-tokens, or --trace FILE")
    spread = SPREAD if length_spread is None else length_spread
    lengths = loads.lognormal(prompt_tokens, output_tokens, Random(seed), spread)  # noqa: S311 - load
    return StreamLoad(lengths, seconds, seed, rate, cv or 1.0, None)
