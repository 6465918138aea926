"""`carpool simulate`: the digital twin, for a load and a device that exist as numbers only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from carpool.outcome import End
from carpool.policy import Duration, Parameters, ShedAt, format_seconds
from carpool.tuning import Assessor, Reason, Situation
from carpool.twin import Tuned, tuned
from carpool_cli import device_profile, planning
from carpool_cli.options import DURATION
from carpool_cli.recommending import best_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.outcome import Summary
    from carpool.policy import BatchingPolicy
    from carpool.tuner import Decision
    from carpool_cli.device_profile import DeviceProfile

TYPICAL = Parameters(max_batch=8, max_wait=Duration(0.005), max_in_flight=1)
"""What people set by hand, for comparison."""


class Step(Struct, frozen=True, rename="camel"):
    """A change that the tuner made; ``at`` in seconds."""

    at: float
    reason: Reason
    message: str
    parameters: Parameters
    capped_by: str


class Figures(Struct, frozen=True, kw_only=True, rename="camel"):
    """What became of one configuration. Seconds, and requests per second; shares of all requests."""

    name: str
    parameters: Parameters
    """At the end."""
    p50: float
    p99: float
    goodput: float
    miss_share: float
    misses: dict[str, int]
    device_seconds_per_request: float
    mean_batch: float
    steps: list[Step] = []


@click.command(
    epilog="""\b
Examples:
  carpool simulate --profile benchmarks/profiles/bert-large-128-a100.json --slo-p99 50ms --rate 800 --tune
  carpool simulate --profile p.json --slo-p99 50ms --rate 800 --cv 2 --max-batch 8 --max-wait 5ms
  carpool simulate --profile p.json --slo-p99 50ms --trace azure --rate 300 --for 2m --compare

Traces: seconds, one a line, or the Azure LLM inference trace of 2023; `--trace azure` looks for it in the folder that
CARPOOL_TRACES names. It is at https://github.com/Azure/AzurePublicDataset.
"""
)
@click.option(
    "--profile",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    help="Profile of the device (JSON), of `carpool profile`.",
)
@click.option("--slo-p99", "slo", type=DURATION, help="Latency that 99 % must keep, e.g. 50ms.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A sidecar's configuration instead: its policy, and what it starts with.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second; rescales a --trace.")
@click.option(
    "--cv",
    "--gamma-cv",
    "cv",
    type=click.FloatRange(0.05, 20),
    default=1.0,
    show_default=True,
    help="Of the gaps: 1 Poisson, above: bursts (gamma).",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Recorded arrivals, or `azure`.")
@click.option("--rows", type=click.IntRange(1, 65536), default=1, show_default=True, help="Rows of each request.")
@click.option("--executors", type=click.IntRange(1, 256), help="Batches computed at once.  [default: the profile's]")
@click.option("--max-batch", type=click.IntRange(1, 65536), default=32, show_default=True, help="Largest batch, rows.")
@click.option("--max-wait", type=DURATION, default=0.0, help="How long the oldest waits for company.  [default: 0s]")
@click.option(
    "--max-in-flight", type=click.IntRange(1, 1024), default=1, show_default=True, help="Batches sent at once."
)
@click.option("--pass-through", is_flag=True, help="Merge nothing and hold nothing.")
@click.option("--tune", is_flag=True, help="Put the tuner in the loop; it starts from the three above.")
@click.option("--compare", is_flag=True, help="Set side by side: no batching, zero-wait, by hand, the best, the tuner.")
@click.option(
    "--shed-at",
    type=click.Choice([each.value for each in ShedAt], case_sensitive=False),
    default=ShedAt.AUTOMATIC.value,
    show_default=True,
    help="Refuse who will miss this. Automatic: the SLO while more waits than it leaves time for, else the deadline.",
)
@click.option("--timeout", type=DURATION, default=10.0, help="Deadline of requests.  [default: 10s]")
@click.option("--for", "seconds", type=DURATION, default=60.0, help="How long requests come.  [default: 60s]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of arrivals and service times.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    *,
    path: Path,
    slo: float | None,
    config: Path | None,
    rate: float | None,
    cv: float,
    trace: Path | None,
    rows: int,
    executors: int | None,
    max_batch: int,
    max_wait: float,
    max_in_flight: int,
    pass_through: bool,
    tune: bool,
    compare: bool,
    shed_at: str,
    timeout: float,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    """Forecast what a configuration, or the tuner, would do to a load, by simulating both.

    Batcher and tuner are the sidecar's own; only the device and the clock are not real. A minute takes a few seconds.
    The same arguments give the same figures.
    """
    # 1. The load, the device and the policy
    profile = device_profile.load(path)
    if executors is not None:
        profile = msgspec.structs.replace(profile, executors=executors)
    load = planning.arrivals(rate, cv, trace, seconds, seed)
    if (slo is None) == (config is None):
        raise click.UsageError("name --slo-p99 or --config, one of the two")
    if config is not None:
        policy, asked = planning.configured(config)
    else:
        asked = Parameters(
            max_batch=max_batch, max_wait=Duration(max_wait), max_in_flight=max_in_flight, pass_through=pass_through
        )
        policy = planning.slo_policy(
            slo or 0.0,
            largest_batch=profile.largest_safe or max(64, max_batch),
            timeout=timeout,
            shed_at=ShedAt(shed_at),
        )
    if asked.max_batch > 2 * profile.rows[-1] and not as_json:
        click.echo(f"{path} ends at {profile.rows[-1]} rows: what lies beyond follows its last slope", err=True)
    twin = _Twin(profile, policy, load.times, rows, seconds, seed)
    # 2. What is asked for
    if compare:
        found = [twin.fixed(name, parameters) for name, parameters in _compared(twin, asked, cv, trace is not None)]
        found.append(twin.tuned("tuned", asked))
    else:
        found = [twin.tuned("tuned", asked) if tune else twin.fixed("fixed", asked)]
    # 3. Say it
    if as_json:
        document = {
            "profile": profile.name,
            "sloSeconds": policy.slo.due,
            "load": load.described,
            "requests": len(load.times),
            "seconds": seconds,
            "seed": seed,
            "results": found,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1))
        return
    click.echo(f"{profile.name}; {load.described}, {len(load.times)} requests; due in {format_seconds(policy.slo.due)}")
    _show(found, policy.slo.due)


class _Twin:
    """One load on one device, to be run with different configurations."""

    def __init__(
        self,
        profile: DeviceProfile,
        policy: BatchingPolicy,
        times: list[float],
        rows: int,
        seconds: float,
        seed: int,
    ) -> None:
        self.profile = profile
        self.policy = policy
        self.times = times
        self.rows = rows
        self._device = planning.device(profile, rows)
        self._arrivals: Sequence[float | tuple[float, ...]] = times if rows == 1 else [(time, rows) for time in times]
        self._seconds = seconds
        self._seed = seed

    def fixed(self, name: str, parameters: Parameters) -> Figures:
        """Run a configuration that stays: as a sidecar with fixed parameters, it learns t(b) and sheds by it."""
        outcome, _ = self._run(planning.held(self.policy, parameters), parameters)
        return _figures(name, parameters, outcome.summary(), [])

    def tuned(self, name: str, start: Parameters) -> Figures:
        """Run the tuner, which knows nothing but the policy and where to start."""
        outcome, decisions = self._run(self.policy, start)
        last = decisions[-1].parameters if decisions else start
        return _figures(name, last, outcome.summary(), decisions)

    def _run(self, policy: BatchingPolicy, start: Parameters) -> Tuned:
        return tuned(self._arrivals, self._device, policy, parameters=start, seconds=self._seconds, seed=self._seed)


def _compared(twin: _Twin, asked: Parameters, cv: float, recorded: bool) -> list[tuple[str, Parameters]]:
    """Return the configurations worth a look, each once."""
    executors = twin.profile.executors
    largest = twin.policy.limits().max_batch
    rate = len(twin.times) / twin.times[-1]
    situation = Situation(
        process=planning.burstiness(twin.times) if recorded else planning.process_of(rate, cv),
        service=planning.known(twin.profile),
        target=twin.policy.slo.due,
        budget=planning.budget(twin.policy),
        limits=twin.policy.limits(),
        rows=twin.rows,
    )
    best = best_of(Assessor(situation)).parameters
    named = [
        ("no batching", Parameters(max_batch=twin.rows, max_in_flight=executors)),
        ("zero wait", Parameters(max_batch=largest, max_in_flight=executors)),
        ("by hand", TYPICAL),
        ("as given", asked),
        ("best fixed", best),
    ]
    seen: dict[Parameters, str] = {}
    for name, parameters in named:
        seen.setdefault(parameters, name)
    return [(name, parameters) for parameters, name in seen.items()]


def _figures(name: str, parameters: Parameters, summary: Summary, decisions: list[Decision]) -> Figures:
    return Figures(
        name=name,
        parameters=parameters,
        p50=summary.p50,
        p99=summary.p99,
        goodput=summary.goodput,
        miss_share=summary.miss_fraction,
        misses={end.value: count for end, count in summary.misses.items() if end is not End.PENDING},
        device_seconds_per_request=summary.device_time,
        mean_batch=summary.mean_batch,
        steps=[
            Step(decision.at, decision.reason, decision.message, decision.parameters, decision.capped_by)
            for decision in decisions
            if decision.change
        ],
    )


def _show(found: list[Figures], slo: float) -> None:
    rows = [("", "p50", "p99", "goodput", "misses", "device a request", "mean batch")]
    rows += [
        (
            f"{figures.name}: {figures.parameters.describe()}",
            format_seconds(figures.p50),
            format_seconds(figures.p99) + ("" if figures.p99 <= slo else " !"),
            f"{figures.goodput:.1f}/s",
            planning.percent(figures.miss_share),
            format_seconds(figures.device_seconds_per_request),
            f"{figures.mean_batch:.1f}",
        )
        for figures in found
    ]
    click.echo(planning.lines(rows))
    for figures in found:
        if figures.misses:
            reasons = ", ".join(f"{reason} {count}" for reason, count in figures.misses.items())
            click.echo(f"misses, {figures.name}: {reasons}")
    for figures in found:
        for step in figures.steps:
            click.echo(f"{step.at:7.1f}s {step.reason}: {step.message}")
