"""`carpool simulate --generative`: the gate for token streams, no gate and fixed caps, on an engine's twin."""

from __future__ import annotations

from typing import Any

import click

from carpool_cli import options
from carpool_cli.live.figures import number
from carpool_cli.planning.assumptions import no_load
from carpool_cli.printable import json_of
from carpool_cli.streams import loads
from carpool_cli.streams.options import engine_options, load_options, read
from carpool_cli.streams.twin import StreamTwin, show

CAPS = (16, 32, 64, 128, 256)
"""Default of ``--cap``."""


@click.command(
    epilog="""\b
Examples:
  carpool simulate --generative --profile benchmarks/generation/profiles/8b-a100.json \\
    --slo-ttft-p99 2s --slo-tpot-p99 50ms --rate 10 --prompt-tokens 600 --output-tokens 150
  carpool simulate --generative --profile p.json --slo-ttft-p99 2s --slo-tpot-p99 50ms --trace azure --rate 8 --cap 48
  carpool simulate --generative --step 11.5,0.038,0.00008,0.06 --kv-tokens 400000 --slo-ttft-p99 2s \\
    --slo-tpot-p99 50ms --trace requests.csv --json
"""
)
@engine_options
@load_options
@click.option(
    "--cap",
    "caps",
    type=click.IntRange(1, 65536),
    multiple=True,
    help="Play this fixed number of requests in the engine; repeatable.  [default: 16, 32, 64, 128, 256]",
)
@options.as_json()
def command(*, caps: tuple[int, ...], as_json: bool, **typed: Any) -> None:  # noqa: ANN401 - `read` has the types
    """Forecast goodput and latencies of token streams with the gate, without one, and with fixed caps.

    The engine is a twin that schedules step by step as vLLM does. The gate is the sidecar's own: it knows the SLO only,
    and starts with step times that are off by 2x. A cap drops requests that would miss TTFT, and is given the true step
    times for that. Goodput counts requests that meet both TTFT and TPOT. The same arguments give the same figures.
    """
    asked = read(**typed)
    load = asked.load
    if not load.named:
        raise no_load()
    twin = StreamTwin(asked, load.rate)
    capacity = loads.capacity(asked.profile, load.lengths, asked.slo)
    played = caps or [cap for cap in CAPS if cap <= asked.profile.max_running]
    found = [twin.gate(), twin.no_gate(), *(twin.cap(cap) for cap in played)]
    if as_json:
        document = {
            "profile": asked.profile.name,
            "sloTtftSeconds": asked.slo.ttft,
            "sloTpotSeconds": asked.slo.tpot,
            "load": load.described(load.rate),
            "requests": len(twin.times),
            "seconds": load.seconds,
            "seed": load.seed,
            "capacity": capacity.rate,
            "results": found,
        }
        click.echo(json_of(document))
        return
    click.echo(f"{asked.profile.name}; {load.described(load.rate)}, {len(twin.times)} requests")
    click.echo(
        f"offered {number(twin.offered)}/s, capacity {number(capacity.rate)}/s; "
        f"TTFT {asked.slo.ttft:g} s, TPOT {1000 * asked.slo.tpot:g} ms\n"
    )
    show(found, asked.slo)
