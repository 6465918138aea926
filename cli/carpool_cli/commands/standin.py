"""`carpool standin`: an echo server with the latency of a given accelerator."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
import socket
import time
from typing import TYPE_CHECKING

import click
import uvloop

from carpool.policy.durations import Duration
from carpool_cli import options
from carpool_cli.load.standin_engine import StandinEngine
from carpool_cli.load.standin_server import Device, Nastiness, Standin
from carpool_cli.options import DURATION, INPUT_FILE
from carpool_cli.profiling import device_profile
from carpool_cli.streams.loads import read_profile
from carpool_sidecar.http1.server.server import Server

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from carpool.generation.profiles import EngineProfile
    from carpool_cli.profiling.device_profile import DeviceProfile
    from carpool_sidecar.http1.server.application import Application


async def serve(
    profile: DeviceProfile, nastiness: Nastiness, *, model: str, max_batch: int, host: str, port: int, seed: int
) -> None:
    """Serve until SIGTERM or SIGINT. Prints the address once it listens."""
    device = Device(profile.service_time(), random.Random(seed), nastiness.cold)  # noqa: S311 - noise, not a secret
    started = time.monotonic()
    app = Standin(model, device, nastiness, max_batch, lambda: time.monotonic() - started)
    await _listen(app, profile.name, model, host, port)
    device.close()


async def serve_engine(profile: EngineProfile, *, model: str, host: str, port: int, seed: int) -> None:
    """Do the same for an engine of token streams."""
    app = StandinEngine(model, profile, seed)
    playing = asyncio.get_running_loop().create_task(app.play())
    await _listen(app, profile.name, model, host, port)
    playing.cancel()


async def _listen(app: Application, name: str, model: str, host: str, port: int) -> None:
    server = Server(app)
    await server.listen(host, port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    where, bound = server.addresses[0][:2]
    click.echo(f"standin for {name}: model {model!r} at http://{where}:{bound}")
    await stop.wait()
    server.stop_accepting()
    server.abort()


def _outage(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[float, float], ...]:
    spans = []
    for value in values:
        start, dash, stop = value.partition("-")
        try:
            span = (float(Duration.parse(start)), float(Duration.parse(stop)))
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r}: {error}; an outage is FROM-TO, e.g. 10s-15s", param=parameter
            ) from None
        if not dash or span[0] >= span[1]:
            raise click.BadParameter(f"{value!r} must end after it begins, e.g. 10s-15s", param=parameter)
        spans.append(span)
    return tuple(spans)


def _poison(_: click.Context, __: click.Parameter, value: str | None) -> str | float | None:
    try:
        return float(value) if value is not None else None
    except ValueError:
        return value


@click.command(
    epilog="""\b
Examples:
  carpool standin --profile benchmarks/profiles/bert-large-128-a100.json --port 9000
  curl -d '{"instances": [[1, 2]]}' http://127.0.0.1:9000/v1/models/standin:predict
  carpool standin --profile benchmarks/profiles/synthetic-5-0.5.json --poison 666
  carpool standin --profile benchmarks/generation/profiles/8b-a100.json
  curl -N -d '{"prompt": "Hello", "max_tokens": 9, "stream": true}' http://127.0.0.1:9000/v1/completions
"""
)
@options.profile(type=INPUT_FILE, required=True, help="Profile file (JSON): batch latencies, or an engine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="Port to listen on; 0: any free one."
)
@options.model(help="Name of the model.")
@options.executors(help="Batches served at once.  [default: as the profile says]")
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=65536,
    show_default=True,
    help="Rows a request may have; more is a 400.",
)
@options.seed(help="Seed of the service times' noise.")
@click.option("--poison", callback=_poison, help="A request holding this value fails as a whole with 500.")
@click.option("--wrong-rows", is_flag=True, help="Leave the last row out of answers to more than one.")
@click.option("--cold", type=DURATION, default=0.0, help="Extra time of the first batch of each size.  [default: none]")
@click.option("--ready-after", type=DURATION, default=0.0, help="503 for this long after the start.  [default: none]")
@click.option(
    "--outage", multiple=True, callback=_outage, help="503 FROM-TO after the start, e.g. 10s-15s; repeatable."
)
def command(
    *,
    path: Path,
    host: str,
    port: int,
    model: str,
    executors: int | None,
    max_batch: int,
    seed: int,
    poison: str | float | None,
    wrong_rows: bool,
    cold: float,
    ready_after: float,
    outage: tuple[tuple[float, float], ...],
) -> None:
    """Serve an echo of every request after the time that a device's profile gives for its rows.

    Speaks KServe V1 and Open Inference V2 (JSON and binary tensors) with metadata and health. V1 predictions are the
    instances; V2 outputs are the inputs, by the same names. GET /stats has the batches served and the device's busy
    seconds. The options below --seed make it misbehave, to test the proxy in front of it.

    With the profile of an engine (benchmarks/generation/profiles) it is a language model's server: OpenAI's completions
    and chat completions, streamed or whole, with tokens at the pace that such an engine would have. Only --host,
    --port, --model and --seed go with it.
    """
    if device_profile.is_engine(path):
        if executors is not None or poison is not None or wrong_rows or cold or ready_after or outage:
            raise click.UsageError("an engine takes --host, --port, --model and --seed: drop the other options")
        _run(serve_engine(read_profile(path), model=model, host=host, port=port, seed=seed), host, port)
        return
    profile = device_profile.load(path, executors)
    nastiness = Nastiness(poison, wrong_rows, cold, ready_after, outage)
    served = serve(profile, nastiness, model=model, max_batch=max_batch, host=host, port=port, seed=seed)
    _run(served, host, port)


def _run(serving: Coroutine[None, None, None], host: str, port: int) -> None:
    try:
        uvloop.run(serving)
    except (OSError, UnicodeError) as error:
        # A name that is not known, or has letters that none may have; or an address that this machine does not have.
        is_host = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
        why = error if isinstance(error, UnicodeError) else error.strerror
        fix = "name an address of this machine with --host" if is_host else "name another --port"
        raise click.ClickException(f"can't listen on {host}:{port}: {why}; {fix}") from None
