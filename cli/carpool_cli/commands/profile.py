"""`carpool profile`: measures the batch latency of an ONNX file or of a server."""

from __future__ import annotations

import platform
import sys
import time
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from carpool.policy.durations import Duration, format_seconds
from carpool_cli import options
from carpool_cli.live.figures import number
from carpool_cli.load import servers
from carpool_cli.options import ADDRESS, DIMS, DURATION, INPUT_FILE, OUTPUT_FILE, Address, FiniteRange, without_secrets
from carpool_cli.profiling import device_profile, memory
from carpool_cli.profiling.device_profile import DeviceProfile
from carpool_cli.profiling.inflection import inflection, may_gain_more
from carpool_cli.profiling.measuring import (
    Stopped,
    Timing,
    advise,
    executors_of,
    interleave,
    sizes_up_to,
    throughputs,
)
from carpool_cli.stopped import STOPPED, Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from carpool_cli.profiling.arrays import Arrays
    from carpool_cli.profiling.memory import MemoryFit
    from carpool_cli.profiling.targets import Target, TargetError
    from carpool_sidecar.http1.messages import Headers

VERIFIED_ROWS = 8


class Asked(NamedTuple):
    """The options."""

    onnx: Path | None
    upstream: Address | None
    model: str
    protocol: servers.Protocol
    max_batch: int
    rounds: int
    budget: float
    concurrency: int
    threads: int
    inputs_path: Path | None
    shape: tuple[int, ...] | None
    dims: tuple[tuple[str, int], ...]
    slo: float | None
    verify: bool
    tolerance: float
    timeout: float
    headers: Headers
    seed: int
    out: Path | None
    plot: Path | None


@click.command(
    epilog="""\b
Examples:
  carpool profile --onnx model.onnx --slo-p99 50ms --plot t.png
  carpool profile --onnx model.onnx --inputs samples.npz --max-batch 128 --out profile.json --verify
  carpool profile --upstream http://127.0.0.1:9000 --model bert --protocol v2-binary --concurrency 4
"""
)
@click.option("--onnx", type=INPUT_FILE, help="Measure the model in this ONNX file.")
@click.option("--upstream", type=ADDRESS, help="Measure this server instead of an ONNX file.")
@options.model()
@click.option(
    "--protocol",
    type=click.Choice(servers.PROTOCOLS),
    default="v2-binary",
    show_default=True,
    help="Protocol of the requests, with --upstream.",
)
@options.max_batch(default=64, show_default=True, help="Largest batch, rows.")
@click.option(
    "--rounds", type=click.IntRange(3, 100_000), default=40, show_default=True, help="Times each size is run at most."
)
@click.option(
    "--for", "budget", type=DURATION, default=20.0, help="Time for the rounds, at least 3 of them.  [default: 20s]"
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Callers at once, to measure server concurrency.",
)
@options.threads()
@click.option("--inputs", "inputs_path", type=INPUT_FILE, help="npz file with rows to use.  [default: random]")
@options.shape(help="Shape of one random row, for a server without metadata.  [default: 8]")
@click.option(
    "--dim", "dims", type=DIMS, multiple=True, help="Size of an open ONNX dimension, e.g. sequence=128; repeatable."
)
@options.slo(help="Recommend a batch size for this p99, e.g. 50ms.")
@click.option("--verify", is_flag=True, help="Compare single with merged answers: is batching safe for this model?")
@click.option(
    "--tolerance",
    type=FiniteRange(0),
    default=1e-3,
    show_default=True,
    help="Of --verify: difference over the largest value.",
)
@options.timeout(default=60.0, help="For one batch of a server.  [default: 60s]")
@options.upstream_header()
@options.seed(help="Seed of random rows.")
@click.option("--out", type=OUTPUT_FILE, help="Write the profile (JSON) for simulate, recommend and standin.")
@options.plot(help="Draw batch latency and the time per row to this file (PNG, SVG, PDF).")
def command(**typed: Any) -> None:  # noqa: ANN401 - `Asked` has the types
    """Measure the latency of batches of 1, 2, 4, ... rows, on the model in the file ONNX or on a server.

    Shows the size beyond which larger batches gain little, the largest size that fits memory, the server concurrency,
    and, with --slo-p99, which batch size to use. Times are the minimum over interleaved rounds; the median is also
    shown.

    Ctrl-C ends the rounds; the profile is that of the complete ones.

    Exits 1 when --verify finds that merged answers differ, 130 after Ctrl-C.
    """
    from carpool_cli.profiling import arrays, targets  # noqa: PLC0415 - numpy is not for --help

    asked = Asked(**typed)
    _check(asked)
    given = None if asked.inputs_path is None else arrays.load_npz(asked.inputs_path)
    target, meter = _opened(asked, given)
    click.get_current_context().call_on_close(target.close)
    sample = (
        arrays.random_rows(target.inputs, max(VERIFIED_ROWS, 16), asked.seed)
        if given is None
        else targets.check_names(target, given)
    )
    # 1. Is batching safe?
    safe = not asked.verify or _verified(target, arrays.repeated(sample, VERIFIED_ROWS), asked.tolerance)
    if sys.stderr.isatty():
        click.echo(f"measuring for about {format_seconds(asked.budget)} ...", err=True)
    # 2. Cold runs, ascending; the first size that fails ends them
    runs, cold, used, stopped = _cold_runs(target, sample, asked.max_batch, meter)
    # 3. Rounds and concurrency
    try:
        timings, rates, missing = _rounds(runs, cold, asked.rounds, asked.budget, asked.concurrency)
    except targets.TargetError as error:
        text = (
            f"a batch that was answered before failed while it was measured: {error}; measure again once the model "
            "answers all (--concurrency 1 if it takes no two calls at once)"
        )
        raise _unanswered(target, error, text) from None
    fitted = memory.fit(used, meter.limit) if meter is not None else None
    profile = _profile(asked, target.name, timings, rates, fitted)
    # 4. The results
    _show(profile, timings, rates, stopped)
    if missing:
        click.echo(f"stopped; not measured: {missing}")
    if meter is not None:
        _show_memory(meter, fitted)
    _use(asked, profile, timings)
    if missing:
        sys.exit(STOPPED)
    if not safe:
        sys.exit(1)


def _check(asked: Asked) -> None:
    """Reject options that contradict each other.

    Raises ``click.UsageError`` with the fix.
    """
    if (asked.onnx is None) == (asked.upstream is None):
        raise click.UsageError("name --onnx FILE or --upstream URL, one of the two")
    if asked.headers and asked.upstream is None:
        raise click.UsageError("--header is for --upstream: a file needs none")
    if asked.dims and asked.onnx is None:
        raise click.UsageError("--dim is for --onnx: give the shape of one row of a server's model with --shape")


def _opened(asked: Asked, given: Arrays | None) -> tuple[Target, memory.Meter | None]:
    """Open the model; returns it, and what measures its memory, if that is visible from here."""
    from carpool_cli.profiling import targets  # noqa: PLC0415 - numpy is not for --help

    if asked.onnx is not None:
        model = targets.OnnxTarget(asked.onnx, asked.threads, dict(asked.dims))
        return model, (memory.gpu() if model.device == "gpu" else None) or memory.HostMemory()
    assert asked.upstream is not None  # noqa: S101 - one of the two, for the type checker
    server = targets.of_server(
        asked.upstream, asked.model, asked.protocol, asked.shape, given, asked.timeout, asked.headers
    )
    # A server's own memory is not visible from here, but the GPU that it shares with this host's processes is.
    return server, memory.gpu() if asked.upstream.host in {"127.0.0.1", "localhost", "::1"} else None


def _profile(
    asked: Asked, name: str, timings: list[Timing], rates: dict[int, float], fitted: MemoryFit | None
) -> DeviceProfile:
    """Return the profile that was measured."""
    served = {} if asked.onnx is None else {"onnx": str(asked.onnx.resolve())}
    if asked.upstream is not None and not asked.upstream.path:
        served = {"upstream": str(asked.upstream)}
    return DeviceProfile(
        name=name,
        source=f"measured by carpool profile: minimum of {timings[0].rounds} interleaved rounds",
        executors=executors_of(rates) if rates else 1,
        rows=tuple(timing.rows for timing in timings),
        seconds=tuple(round(timing.best, 7) for timing in timings),
        cv=round(median(timing.spread for timing in timings), 4),
        largest_safe=fitted.rows if fitted is not None else None,
        measured={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "command": " ".join(without_secrets(sys.argv)),
            **served,
        },
    )


def _use(asked: Asked, profile: DeviceProfile, timings: list[Timing]) -> None:
    """Advise for the SLO, write the profile and draw it, as far as asked."""
    curve, slo, out = profile.service_time(), asked.slo, asked.out
    if slo is not None:
        advice = advise(curve, slo=slo, limit=profile.largest_safe)
        click.echo(f"for a p99 of {format_seconds(slo)}: {advice.text}")
        click.echo(
            f"  {number(advice.rows_per_second)} rows/s at most; {advice.gain:.2f} times what single rows would give"
        )
    if out is not None:
        device_profile.save(profile, out)
        click.echo(f"wrote {out}; next: carpool recommend --profile {out} --slo-p99 {Duration(slo or 0.05)} --rate 100")
    if asked.plot is not None:
        from carpool_cli.planning import plots  # noqa: PLC0415 - matplotlib is not for every run

        plots.service_time(asked.plot, profile.name, timings, inflection(curve), slo)
        click.echo(f"drew {asked.plot}")


def _verified(target: Target, rows: Arrays, tolerance: float) -> bool:
    from carpool_cli.profiling import verifying  # noqa: PLC0415 - numpy is not for --help
    from carpool_cli.profiling.targets import TargetError  # noqa: PLC0415 - likewise

    try:
        verdict = verifying.compare(lambda batch: target.prepare(batch)(), rows, tolerance)
    except TargetError as error:
        raise _unanswered(target, error) from None
    if verdict.why:
        click.echo(f"NOT SAFE to batch: {verdict.why}")
    else:
        same = "exactly" if not verdict.worst else f"within {verdict.worst:.2g} of the largest value, with equal argmax"
        click.echo(f"safe to batch: {verdict.rows} rows answered alone and merged agree {same}")
    return not verdict.why


def _unanswered(target: Target, error: TargetError, text: str = "") -> click.ClickException:
    """Return the error for a batch without an answer: it names the model once. ``text`` repeats ``error``."""
    is_named = error.final or error.no_answer
    text = text or str(error)
    return click.ClickException(text if is_named else f"{target.name}: {text}")


def _cold_runs(
    target: Target, sample: Arrays, max_batch: int, meter: memory.Meter | None
) -> tuple[dict[int, Callable[[], Arrays]], dict[int, float], dict[int, int], str]:
    """Run each size once, ascending: return calls, cold seconds and memory by rows, and why it stopped early, if so."""
    from carpool_cli.profiling.arrays import repeated  # noqa: PLC0415 - numpy is not for --help
    from carpool_cli.profiling.targets import TargetError  # noqa: PLC0415 - likewise

    runs: dict[int, Callable[[], Arrays]] = {}
    cold: dict[int, float] = {}
    used: dict[int, int] = {}
    for rows in sizes_up_to(max_batch):
        run = target.prepare(repeated(sample, rows))
        before = time.perf_counter()
        try:
            run()
        except TargetError as error:
            if rows == 1:
                raise _unanswered(target, error) from None
            return runs, cold, used, f"a batch of {rows} failed: {error}"
        cold[rows] = time.perf_counter() - before
        runs[rows] = run
        if meter is not None:
            used[rows] = meter.used()
    return runs, cold, used, ""


def _rounds(
    runs: dict[int, Callable[[], Arrays]], cold: dict[int, float], rounds: int, budget: float, concurrency: int
) -> tuple[list[Timing], dict[int, float], str]:
    """Measure the sizes, and the rates by concurrent callers; the third value is what is missing after Ctrl-C."""
    unknown = "server concurrency, which is taken to be 1"
    try:
        timings = interleave(runs, cold, rounds=rounds, budget=budget, clock=time.perf_counter)
    except Stopped as stopped:
        done = stopped.timings[0].rounds
        left = f"rounds {done + 1} to {rounds}" if done + 1 < rounds else f"round {rounds}"
        return stopped.timings, {}, f"{left} of at most {rounds}, and {unknown}"
    except KeyboardInterrupt:
        raise Interrupted("stopped in the first round: there is nothing to keep") from None
    best = _cheapest(timings)
    try:
        rates = throughputs(
            runs[best.rows], concurrency, seconds=max(0.2, 4 * best.best), trials=2, clock=time.perf_counter
        )
    except KeyboardInterrupt:
        return timings, {}, unknown
    return timings, rates, ""


def _cheapest(timings: list[Timing]) -> Timing:
    """Return the size with the least time per row."""
    return min(timings, key=lambda timing: timing.best / timing.rows)


def _show(profile: DeviceProfile, timings: list[Timing], rates: dict[int, float], stopped: str) -> None:
    from rich.console import Console  # noqa: PLC0415 - not for --help
    from rich.table import Table  # noqa: PLC0415 - likewise
    from rich.text import Text  # noqa: PLC0415 - likewise

    table = Table(title=Text(profile.name, "table.title"), title_justify="left")
    for heading in ("rows", "first run", "minimum", "median", "a row", "rows/s"):
        table.add_column(heading, justify="right")
    for timing in timings:
        table.add_row(
            str(timing.rows),
            *(format_seconds(value) for value in (timing.cold, timing.best, timing.middle, timing.best / timing.rows)),
            number(timing.rows / timing.best),
        )
    Console(width=100).print(table)
    if stopped:
        click.echo(stopped)
    curve = profile.service_time()
    cheapest = inflection(curve)
    largest = curve.largest_measured
    if largest > 1:
        gain = curve.per_row(1) / curve.per_row(cheapest)
        if cheapest == 1:
            loss = curve.per_row(largest) / curve.per_row(1)
            click.echo(
                f"batching gains nothing: a row in a batch of {largest} costs {loss:.2f} times as much as a single row"
            )
        else:
            beyond = "larger ones gain little"
            if may_gain_more(curve):
                more = "those that fail might gain more" if stopped else "larger ones may gain more, raise --max-batch"
                beyond = f"it still falls at {largest}: {more}"
            click.echo(f"a row in a batch of {cheapest} costs {gain:.2f} times less than alone; {beyond}")
    if len(rates) > 1:
        at = _cheapest(timings).rows
        shown = ", ".join(f"{callers}: {number(rate * at)}" for callers, rate in rates.items())
        click.echo(f"rows/s by callers at once, in batches of {at}: {shown}; server concurrency: {profile.executors}")
        if profile.executors == len(rates):
            click.echo("  as many as were measured: there may be more, raise --concurrency")


def _show_memory(meter: memory.Meter, fitted: MemoryFit | None) -> None:
    if fitted is None:
        click.echo(f"{meter.name} memory: no growth with the batch; it sets no limit here")
        return
    click.echo(
        f"{meter.name} memory: {fitted.per_row / 2**20:.3g} MiB a row and {fitted.fixed / 2**20:.4g} MiB without; "
        f"80 % of {fitted.limit / 2**30:.3g} GiB holds {fitted.rows} rows"
    )
