"""`carpool bench`: open-loop load on a V1 or V2 server."""

from __future__ import annotations

import math
import random
import sys
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from carpool.policy.durations import format_seconds
from carpool_cli import options
from carpool_cli.answers import BadFile
from carpool_cli.load import servers
from carpool_cli.load.loadgen import MISMATCH, LoadGenerator, Recording, due_times, until_interrupted
from carpool_cli.load.report import Percentiles, Report, deliver, problems, summarize, to_json
from carpool_cli.load.servers import Goal, InputSpec, Protocol, Request
from carpool_cli.load.tensors import Malformed
from carpool_cli.options import ADDRESS, DURATION, INPUT_FILE, Address, FiniteRange, WithStreams, is_typed
from carpool_cli.planning import assumptions
from carpool_cli.planning.traces import lasts
from carpool_cli.stopped import STOPPED

if TYPE_CHECKING:
    from pathlib import Path

    from carpool_sidecar.http1.messages import Headers

JSON = (b"content-type", b"application/json")

MOST_REQUESTS = 5_000_000

MADE_UP = ("rows", "shape", "datatype", "input_name")
"""Options of made-up rows."""

BODIES = 64
"""Number of different generated bodies, sent in turn: enough to detect a mixed-up answer."""


def _rates(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        rates = tuple(float(part) for part in value.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate < math.inf for rate in rates) or not any(rates):
        raise click.BadParameter(f"{value!r}: write requests per second, e.g. 200 or 100,400,100", param=parameter)
    return rates


class Asked(NamedTuple):
    """The options."""

    server: Address
    model: str | None
    protocol: Protocol | None
    rates: tuple[float, ...] | None
    cv: float
    trace: Path | None
    seconds: float | None
    requests: int | None
    warm_up: float
    slo: float
    timeout: float
    connections: int
    bodies: tuple[Path, ...]
    rows: int
    shape: tuple[int, ...] | None
    datatype: str
    input_name: str
    headers: Headers
    verify: bool
    seed: int
    out: Path | None
    as_json: bool


@click.command(
    cls=WithStreams,
    streams="carpool_cli.commands.bench_streams",
    epilog="""\b
Examples:
  carpool bench http://127.0.0.1:9000 --rate 200 --for 20s --slo-p99 50ms
  carpool bench :9000 --model bert --protocol v2-binary --rate 100,400,100 --for 30s --out report.json
  carpool bench http://127.0.0.1:9000/v2/models/bert/infer --rate 100
  carpool bench http://127.0.0.1:9000/embed --body request.json --rate 100
  carpool bench http://127.0.0.1:9000 --trace arrivals.txt --rate 300 --body request.json
  carpool bench --generative --help
""",
)
@click.argument("server", type=ADDRESS)
@click.option("--model", help="Name of the model.  [default: standin]")
@click.option("--protocol", type=click.Choice(servers.PROTOCOLS), help="Form of the bodies.  [default: v1]")
@click.option(
    "--rate",
    "rates",
    callback=_rates,
    help="Requests per second. Several run one after another, for equal times: 100,400,100.  [default: 100]",
)
@options.cv(
    type=FiniteRange(0, 20), help="Coefficient of variation of the gaps. 0: even, 1: Poisson, above: bursts (gamma)."
)
@options.trace(
    type=INPUT_FILE,
    help="Recorded arrivals: seconds, one a line, or `azure`, as simulate takes it. --rate rescales.",
)
@click.option("--for", "seconds", type=DURATION, help="Length of the measured part.  [default: 10s]")
@click.option(
    "--requests", type=click.IntRange(1, MOST_REQUESTS), help="Measure this many instead of a time; one --rate."
)
@options.warm_up(default=2.0, help="Load before the measured part, not counted.  [default: 2s]")
@options.slo(default=0.05, help="Latency within which an answer is good.  [default: 50ms]")
@options.timeout(default=10.0, help="Silence after which a request has failed.  [default: 10s]")
@click.option(
    "--connections", type=click.IntRange(1, 16384), default=1024, show_default=True, help="Connections at most."
)
@click.option(
    "--body", "bodies", type=INPUT_FILE, multiple=True, help="File with a request's body; several are sent in turn."
)
@options.rows(help="Rows of a made-up request.")
@options.shape(help="Shape of a made-up row.  [default: 8; V2: as the model's metadata says]")
@click.option(
    "--datatype",
    type=click.Choice(servers.DATATYPES),
    metavar="TEXT",
    default="FP32",
    show_default=True,
    help="Datatype of made-up rows, with --shape; V2's, e.g. INT64 or BYTES.",
)
@click.option("--input", "input_name", default="input", show_default=True, help="V2 input's name, with --shape.")
@options.header()
@click.option("--verify", is_flag=True, help="The server is an echo: check every answer, count others as mismatch.")
@options.seed(help="Seed of arrivals and made-up bodies.")
@options.report_file()
@options.as_json()
def command(**typed: Any) -> None:  # noqa: ANN401 - `Asked` has the types
    """Send open-loop load to SERVER and report latency, goodput and errors.

    SERVER is a URL. Without a path, requests go to the model's path of --protocol. A URL with a path is used as it is;
    a path that is neither V1's nor V2's needs --body. With --model too, the path is a prefix:
    /PREFIX/v2/models/MODEL/infer.

    Requests leave when they are due, whether or not earlier ones were answered; latency counts from then, so it is
    never too short, and up to 1 ms too long (timers). Reports when this host paused, and when the generator was the
    bottleneck rather than the server. Ctrl-C ends the load; what was measured until then is reported.

    Exits 0 when a request was answered well, with success within --slo-p99; 1 when none was, or --verify found a wrong
    answer; 130 after Ctrl-C.
    """
    asked = Asked(**typed)
    # 1. Arrival times
    rng = random.Random(asked.seed)  # noqa: S311 - load, not secrets
    due, seconds = _due(asked, rng)
    # 2. Requests
    goal = servers.goal(asked.server, asked.model, asked.protocol)
    if not goal.known and (asked.verify or not asked.bodies):
        fix = (
            "leave --verify out"
            if asked.bodies
            else "give the body to send with --body FILE, or the model with --model"
        )
        raise click.UsageError(f"{asked.server} is no path of V1 or V2: {fix}")
    _check_rows(asked, goal)
    servers.check_reachable(asked.server, asked.timeout)
    prepared = _prepared(asked, goal, rng)
    # 3. Run
    warm_up = asked.warm_up
    if sys.stderr.isatty():
        click.echo(f"sending {len(due)} requests in {format_seconds(warm_up + seconds)} ...", err=True)
    recording = _run(asked, goal, prepared, due)
    stopped = ""
    if recording.stopped_at is not None:
        seconds = min(seconds, recording.stopped_at - warm_up)
        if not recording.due or recording.due[-1] < warm_up:
            raise Stopped("stopped before a measured request was answered: let it run longer, or lower --warm-up")
        span = format_seconds(round(max(seconds, 0.001), 3))
        stopped = f"stopped after {span}; requests without an answer yet, left out: {recording.left_out}"
    # 4. Report
    report = summarize(recording, slo=asked.slo, warm_up=warm_up, seconds=seconds, connections=asked.connections)
    deliver(
        to_json(report, server=str(asked.server), url=goal.url, sloSeconds=asked.slo),
        lambda: _show(report, asked.slo, goal),
        stopped=stopped,
        good=bool(report.good) and MISMATCH not in report.errors,
        as_json=asked.as_json,
        out=asked.out,
    )


def _check_rows(asked: Asked, goal: Goal) -> None:
    """Reject options of made-up rows that would change nothing.

    Raises ``click.UsageError``.
    """
    typed = [f"--{name.removesuffix('_name')}" for name in MADE_UP if is_typed(name)]
    if asked.bodies and typed:
        raise click.UsageError(f"{typed[0]} is for made-up rows: it does not go with --body")
    if goal.protocol == "v1" and "--input" in typed:
        raise click.UsageError("--input names an input of V2: --protocol v1 has none")
    if goal.protocol != "v1" and asked.shape is None and (given := [each for each in typed if each != "--rows"]):
        raise click.UsageError(f"{given[0]} goes with --shape: without it, V2's metadata says what the inputs are")


def _due(asked: Asked, rng: random.Random) -> tuple[list[float], float]:
    """Return the times of requests, and how many seconds the measured part of them lasts.

    Raises ``click.ClickException`` naming options that contradict each other, or if no request is due.
    """
    rates, warm_up = asked.rates or (100.0,), asked.warm_up
    if asked.requests is not None and (asked.seconds is not None or asked.trace is not None or len(rates) > 1):
        raise click.UsageError("--requests goes with a single --rate, without --for and --trace")
    assumptions.refuse_cv_of(asked.trace)
    if asked.requests is not None:
        due = _some(rates[0], asked.cv, warm_up, asked.requests, rng)
        return due, max(due[-1] - warm_up, 1e-3) * (asked.requests + 1) / asked.requests
    seconds = 10.0 if asked.seconds is None else asked.seconds
    horizon, end = warm_up + seconds, math.inf
    if asked.trace is not None:
        if len(rates) > 1:
            raise click.UsageError("--trace goes with a single --rate")
        recorded, _ = assumptions.read_trace(asked.trace, asked.rates[0] if asked.rates else None)
        due = list(takewhile(lambda time: time < horizon, recorded))
        end = lasts(recorded)
    else:
        if max(rates) * horizon > MOST_REQUESTS:
            raise click.UsageError(f"that is over {MOST_REQUESTS} requests: lower --rate or --for")
        due = due_times(rates[:1], asked.cv, warm_up, rng) if warm_up else []
        due += [warm_up + time for time in due_times(rates, asked.cv, seconds, rng)]
    if not due or due[-1] < warm_up:
        raise assumptions.nothing_due(seconds, warm_up, end)
    # After the end of a trace there is no load: that time is no part of the rates.
    return due, min(seconds, end - warm_up)


class Stopped(click.ClickException):
    """Ctrl-C came before there was anything to report."""

    exit_code = STOPPED


def _some(rate: float, cv: float, warm_up: float, count: int, rng: random.Random) -> list[float]:
    """Draw a warm-up and then exactly ``count`` arrivals."""
    due = due_times((rate,), cv, warm_up, rng) if warm_up else []
    length = 2 * count / rate
    while len(measured := due_times((rate,), cv, length, rng)) < count:
        length *= 2  # rare: only half of the expected number arrived
    return due + [warm_up + time for time in measured[:count]]


def _prepared(asked: Asked, goal: Goal, rng: random.Random) -> list[Request]:
    """Read or generate the bodies."""
    if asked.bodies:
        return [_request(path, goal) for path in asked.bodies]
    if asked.shape is None and goal.protocol != "v1":
        inputs = servers.inputs_of(goal.server, goal.model, asked.timeout, asked.headers)
    else:
        shape = (servers.GUESSED_DIM,) if asked.shape is None else asked.shape
        inputs = [InputSpec(asked.input_name, asked.datatype, shape)]
    return [
        servers.request_of(goal.protocol, [servers.random_tensor(spec, asked.rows, rng) for spec in inputs])
        for _ in range(BODIES)
    ]


def _request(path: Path, goal: Goal) -> Request:
    """Read a body from a file.

    Raises ``BadFile``.
    """
    try:
        body = path.read_bytes()
        return servers.request_from(goal.protocol, body) if goal.known else Request(body, [JSON])
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    except Malformed as error:
        raise BadFile(f"{path} is no body for --protocol {goal.protocol}: {error}") from None


def _run(asked: Asked, goal: Goal, prepared: list[Request], due: list[float]) -> Recording:
    import uvloop  # noqa: PLC0415 - not for --help

    from carpool_sidecar.http1.client.pool import Pool  # noqa: PLC0415 - likewise

    async def run() -> Recording:
        pool = Pool(goal.server.host, goal.server.port, max_connections=asked.connections, shared=False)
        generator = LoadGenerator(
            pool,
            goal.target,
            prepared,
            due,
            protocol=goal.protocol,
            timeout=asked.timeout,
            headers=asked.headers,
            verify=asked.verify,
        )
        try:
            return await until_interrupted(generator.run(), generator.stop)
        finally:
            await pool.close()

    return uvloop.run(run())


def _show(report: Report, slo: float, goal: Goal) -> None:
    click.echo(
        f"{report.requests} requests in {format_seconds(report.seconds)}: intended {report.intended_rate:.1f}/s, "
        f"achieved {report.achieved_rate:.1f}/s"
    )
    click.echo(f"goodput {report.goodput:.1f}/s: {report.good_share:.2%} answered well within {format_seconds(slo)}")
    _show_latency("latency", report.latency)
    stalled = sum(window.stalled for window in report.windows)
    if stalled:
        total = sum(span.seconds for span in report.stalls)
        worst = max((span.seconds for span in report.stalls), default=0.0)
        click.echo(
            f"this host paused {len(report.stalls)} times, {format_seconds(total)} in all, "
            f"up to {format_seconds(worst)}; {stalled} of {len(report.windows)} seconds were touched"
        )
        _show_latency("without them", report.steady)
    for line in problems(goal.url, report.errors, report.complaints, report.generator_limits):
        click.echo(line)
    if not goal.known:
        click.echo(f"POST {goal.target} is not a path of V1 or V2: Carpool forwards it and does not batch it")


def _show_latency(label: str, found: Percentiles | None) -> None:
    if found is None:
        click.echo(f"{label}: no answers to judge by")
        return
    named = {"p50": found.p50, "p90": found.p90, "p99": found.p99, "p99.9": found.p999, "max": found.max}
    click.echo(f"{label}: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in named.items()))
