"""`carpool recommend --generative`: limits of an LLM server for an SLO."""

from __future__ import annotations

import sys
from typing import Any

import click

from carpool.policy.durations import format_seconds
from carpool_cli import options
from carpool_cli.live.figures import number
from carpool_cli.printable import json_of
from carpool_cli.streams.limits import Recommendation, recommend
from carpool_cli.streams.options import Asked, engine_options, load_options, read
from carpool_cli.streams.twin import show


@click.command(
    epilog="""\b
Examples:
  carpool recommend --generative --profile benchmarks/generation/profiles/8b-a100.json \\
    --slo-ttft-p99 2s --slo-tpot-p99 50ms --prompt-tokens 600 --output-tokens 150
  carpool recommend --generative --profile p.json --slo-ttft-p99 2s --slo-tpot-p99 50ms --trace azure --rate 8 --json
"""
)
@engine_options
@load_options
@options.as_json()
def command(*, as_json: bool, **typed: Any) -> None:  # noqa: ANN401 - `read` has the types
    """Choose the limits of an LLM server for TTFT and TPOT: of vLLM, and of a gateway before it.

    Limits act in overload. They are therefore chosen by their goodput at 1.3 times the capacity, or at the load if that
    is more. Their figures are those at the load; without one, at 1.3 times the capacity. The table also has the gate,
    which finds its limit by itself and moves it with the load, and the engine without limits.

    Exits 1 if fewer than 99 % of the requests meet the SLO with these limits at --rate, or none can.
    """
    asked = read(**typed)
    found = recommend(asked)
    if found is None:
        raise click.ClickException(
            f"one request alone takes longer than {1000 * asked.slo.tpot:g} ms per token on {asked.profile.name}: "
            "raise --slo-tpot-p99, or take a faster device"
        )
    if as_json:
        document = {
            "profile": asked.profile.name,
            "sloTtftSeconds": asked.slo.ttft,
            "sloTpotSeconds": asked.slo.tpot,
            "recommendation": found,
        }
        click.echo(json_of(document))
    else:
        _show(asked, found)
    if not found.holds and asked.load.named:
        sys.exit(1)


def _show(asked: Asked, found: Recommendation) -> None:
    ttft, tpot = format_seconds(asked.slo.ttft), format_seconds(asked.slo.tpot)
    click.echo(f"{asked.profile.name}; TTFT p99 {ttft}, TPOT p99 {tpot}\n")
    click.echo("  # vLLM; from 0.31 on --max-num-active-seqs in place of --max-num-seqs limits admission only")
    click.echo(
        f"  --max-num-seqs {found.max_num_seqs} --max-num-queued-tokens {found.max_num_queued_tokens} "
        f"--max-num-batched-tokens {found.max_num_batched_tokens}"
    )
    click.echo("  # Gateway API Inference Extension: the plugin concurrency-detector")
    click.echo(f"  maxConcurrency: {found.max_concurrency}")
    click.echo(f"  maxTokenConcurrency: {found.max_token_concurrency}  # where it counts tokens instead of requests")
    click.echo("  # Carpool's sidecar, which finds these limits by itself")
    click.echo(f"  policy: {{slo: {{ttft: {{p99: {ttft}}}, tpot: {{p99: {tpot}}}}}}}\n")
    for reason in found.reasons:
        click.echo(f"- {reason}")
    click.echo(f"\nat {number(found.load)} requests/s:")
    show(found.results, asked.slo)
