"""`carpool recommend`: parameters for a known device, load and SLO."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import yaml

from carpool.policy.durations import format_seconds
from carpool.policy.parameters import Parameters
from carpool.policy.plain import to_plain
from carpool.tuning.objective import Aim
from carpool_cli import options
from carpool_cli.live.figures import number
from carpool_cli.options import WithStreams
from carpool_cli.planning import assumptions, replica
from carpool_cli.planning.recommending import Recommendation, highest_load, recommend
from carpool_cli.printable import json_of
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from carpool.policy.spec import BatchingPolicy


@click.command(
    cls=WithStreams,
    streams="carpool_cli.commands.recommend_streams",
    epilog="""\b
Examples:
  carpool recommend --profile benchmarks/profiles/bert-large-128-a100.json --slo-p99 50ms --rate 800
  carpool recommend --profile p.json --slo-p99 20ms --rate 300 --cv 2 --max-batch 32 --json
  carpool recommend --profile p.json --slo-p99 50ms --trace azure --rate 300
  carpool recommend --generative --help
""",
)
@options.profile(required=True)
@options.slo(required=True)
@options.objective
@options.rate()
@options.cv(help="Of the gaps: 1 Poisson, above: bursts (gamma).")
@options.trace(help="Take rate and burstiness from arrivals, or `azure`.")
@options.rows(help="Rows of a usual request.")
@options.executors()
@options.max_batch(help="Rows at most.  [default: 64, and what fits memory]")
@options.max_wait(help="Wait at most.  [default: half the SLO]")
@options.max_in_flight(
    help="Batches sent at once at most.  [default: the profile's server concurrency if over 8, else 32]"
)
@options.as_json()
def command(
    *,
    path: Path,
    slo: float,
    objective: str | None,
    target_utilization: int | None,
    rate: float | None,
    cv: float,
    trace: Path | None,
    rows: int,
    executors: int | None,
    max_batch: int | None,
    max_wait: float | None,
    max_in_flight: int | None,
    as_json: bool,
) -> None:
    """Choose parameters among those that meet the SLO, now and at 1.25x the load, by an objective.

    Shows the reasons, the saving, the highest load, what bounds the choice, and the configuration to paste. The rule is
    the tuner's own. But the tuner knows only what it has measured: its wait may differ by a step or two.

    Exits 1 when no configuration meets the SLO at this load with the safety margin: half of the misses it allows; 2
    for an option or a file that can't be used.
    """
    profile = device_profile.load(path, executors)
    assumptions.refuse_cv_of(trace)
    if trace is not None:
        times, _ = assumptions.read_trace(trace, rate)
        process = assumptions.burstiness(times)
    elif rate is None:
        raise assumptions.no_load()
    else:
        process = assumptions.process_of(rate, cv)
    bounds = [bound for bound in (max_batch, profile.largest_safe) if bound is not None]
    policy = assumptions.slo_policy(
        slo,
        largest_batch=min(bounds, default=rows if rows > 64 else None),
        longest_wait=max_wait,
        most_in_flight=max_in_flight or (profile.executors if profile.executors > 8 else None),
        objective=objective,
        target_utilization=target_utilization,
    )
    situation = replica.situation(profile, policy, process, rows)
    found = recommend(situation, profile.largest_safe, aim=Aim.of(policy))
    pasted = _configuration(policy, found, profile.measured or {})
    if as_json:
        document = {
            "profile": profile.name,
            "sloSeconds": slo,
            "rate": process.rate,
            "recommendation": found,
            "config": pasted,
        }
        click.echo(json_of(document))
    else:
        click.echo(f"{profile.name} at {number(process.rate)} requests/s; SLO p99 {format_seconds(slo)}")
        _show(found, pasted)
    if not found.holds:
        sys.exit(1)


def _configuration(
    policy: BatchingPolicy, found: Recommendation, measured: Mapping[str, str | float]
) -> dict[str, object]:
    """Return the content of a sidecar's file; it serves what was ``measured``, if a profile has that."""
    bounds = {name: value for name, value in to_plain(policy.bounds).items() if value}
    fields = (("upstream", "url"), ("onnx", "path"))
    served = {name: {field: measured[name]} for name, field in fields if name in measured}
    return {
        **served,
        "policy": {
            "slo": to_plain(policy.slo),
            "objective": policy.objective.value,
            "targetUtilizationPercent": policy.target_utilization_percent,
            **({"bounds": bounds} if bounds else {}),
            # A baseline that equals the defaults counts as none.
            **({"baseline": to_plain(found.parameters)} if found.parameters != Parameters() else {}),
        },
    }


def _show(found: Recommendation, pasted: dict[str, object]) -> None:
    click.echo(f"\n  {found.parameters.describe()}\n")
    for reason in found.reasons:
        click.echo(f"- {reason}")
    for doubt in found.doubts:
        click.echo(f"- beware: {doubt}")
    rows = [
        ("", "this", "zero wait", "no batching"),
        (
            "device time per request",
            format_seconds(found.device_time),
            format_seconds(found.zero_wait_device_time),
            format_seconds(found.alone_device_time),
        ),
        ("device busy", f"{found.utilization:.0%}", f"{found.zero_wait_utilization:.0%}", ""),
        ("p50", format_seconds(found.p50), format_seconds(found.zero_wait_p50), ""),
        ("p99", format_seconds(found.p99), format_seconds(found.zero_wait_p99), ""),
        (
            "meets the SLO, with margin",
            _yes(found.holds),
            _yes(found.zero_wait_holds),
            _yes(found.alone_holds),
        ),
        (
            "device time saved",
            "",
            assumptions.percent(found.saving_over_zero_wait),
            assumptions.percent(found.saving_over_alone),
        ),
    ]
    click.echo(f"\n{assumptions.lines(rows)}\n")
    click.echo(
        f"forecast: p50 {format_seconds(found.p50)}, p99 {format_seconds(found.p99)}, at 1.25x the load "
        f"{format_seconds(found.p99_ahead)}; {1 - found.miss_fraction:.2%} in time, "
        f"{found.mean_batch:.3g} rows per batch, device {found.utilization:.0%} busy"
    )
    click.echo(highest_load(found))
    if "policy" in list(pasted)[:1]:
        click.echo(
            "\n# sidecar.yaml, for `carpool up --config sidecar.yaml --upstream http://127.0.0.1:9000` (or --onnx)."
        )
        click.echo('# carpool-sidecar also needs what it serves: add `upstream: {url: "http://127.0.0.1:9000"}`')
    else:
        click.echo(
            "\n# sidecar.yaml, for `carpool-sidecar --config sidecar.yaml` or `carpool up --config sidecar.yaml`"
        )
    if found.parameters != Parameters():
        click.echo("# the tuner starts from this baseline; `tuning: {mode: Hold}` beside it freezes it")
    else:
        click.echo(
            "# without a baseline: the setting is the default, and a baseline equal to it counts as none. The tuner "
            "begins\n# with first calls; `tuning: {mode: Hold}` freezes the default"
        )
    click.echo(yaml.safe_dump(pasted, sort_keys=False).rstrip())


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
