"""`carpool batch`: sends a file of inputs through a model, offline."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import click
from click.core import ParameterSource

from carpool.policy.durations import format_seconds
from carpool_cli import options
from carpool_cli.answers import BadFile
from carpool_cli.batch import shards as sharding
from carpool_cli.batch.journal import Journal
from carpool_cli.live.figures import number
from carpool_cli.load import servers
from carpool_cli.options import ADDRESS, INPUT_FILE, OUTPUT_FILE, Address
from carpool_cli.profiling import device_profile
from carpool_cli.profiling.inflection import inflection
from carpool_cli.stopped import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from carpool_cli.batch import requests
    from carpool_cli.batch.formats import Row, Source
    from carpool_cli.batch.job import SizeSearch
    from carpool_cli.profiling.device_profile import DeviceProfile
    from carpool_cli.profiling.targets import OnnxTarget, ServerTarget
    from carpool_sidecar.http1.messages import Headers

    Calls: TypeAlias = OnnxTarget | ServerTarget | requests.Sender

Spoken: TypeAlias = servers.Protocol | Literal["openai"]

REQUESTS: Literal["openai"] = "openai"
"""The protocol whose lines are requests of OpenAI's Batch API."""

TIMEOUT = 60.0
"""Default timeout in seconds for one batch of a server."""

NOTE_EVERY = 5.0
"""Seconds between two messages about retries: many requests may wait for one reason."""


class Asked(NamedTuple):
    """The options."""

    source_path: Path
    output: Path
    onnx: Path | None
    upstream: Address | None
    model: str
    protocol: Spoken | None
    batch_size: int | None
    max_batch: int
    profile_path: Path | None
    concurrency: int | None
    threads: int
    shape: tuple[int, ...] | None
    max_bad: int | None
    retries: int
    timeout: float | None
    headers: Headers
    shards: int | None
    shard: int | None
    join: bool

    @property
    def is_npz(self) -> bool:
        """Whether input and output are arrays, and not lines."""
        return self.output.suffix == ".npz"


@click.command(
    epilog="""\b
Examples:
  carpool batch rows.jsonl answers.jsonl --onnx model.onnx
  carpool batch rows.npz answers.npz --onnx model.onnx --profile profile.json
  carpool batch rows.jsonl answers.jsonl --upstream http://127.0.0.1:9000 --model bert --protocol v1
  carpool batch requests.jsonl answers.jsonl --upstream http://127.0.0.1:8000 --concurrency 64
  carpool batch rows.jsonl answers.jsonl --onnx model.onnx --shards 8 --shard 2
  carpool batch rows.jsonl answers.jsonl --onnx model.onnx --shards 8 --join
"""
)
@click.argument("source_path", metavar="INPUT", type=INPUT_FILE)
@click.argument("output", metavar="OUTPUT", type=OUTPUT_FILE)
@click.option("--onnx", type=INPUT_FILE, help="Run the model in this ONNX file.")
@click.option("--upstream", type=ADDRESS, help="Send requests to this server.")
@options.model()
@click.option(
    "--protocol",
    type=click.Choice([*servers.PROTOCOLS, REQUESTS]),
    help="Protocol of the requests, with --upstream.  [default: openai for lines of its Batch API, else v1]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 65536),
    help="Rows per batch.  [default: the cheapest size, measured while running]",
)
@options.max_batch(default=64, show_default=True, help="Largest size to try.")
@click.option("--profile", "profile_path", type=INPUT_FILE, help="Take batch size and concurrency from this profile.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 256),
    help="Batches at once.  [default: the profile's, or 1; with --protocol openai 16 requests]",
)
@options.threads()
@options.shape(help="Shape of one row of a V2 server without metadata.")
@click.option("--max-bad", type=click.IntRange(0), help="Stop after more bad rows than this.  [default: never]")
@click.option(
    "--retries",
    type=click.IntRange(0, 16),
    default=5,
    show_default=True,
    help="Of a batch that a server can't take now; waits 1 s, 2 s, 4 s, ...",
)
@options.timeout(help="For one batch of a server.  [default: 60s; with --protocol openai 10m]")
@options.upstream_header()
@click.option("--shards", type=click.IntRange(1, 99_999), help="Run one of so many parts of INPUT.")
@click.option(
    "--shard",
    type=click.IntRange(0),
    envvar="JOB_COMPLETION_INDEX",
    help="Which one, from 0.  [default: $JOB_COMPLETION_INDEX]",
)
@click.option("--join", is_flag=True, help="Join the outputs of all shards to OUTPUT.")
def command(**typed: Any) -> None:  # noqa: ANN401 - `Asked` has the types
    """Run every row of INPUT through a model and write the answers, in order, to OUTPUT.

    INPUT and OUTPUT are JSON lines (.jsonl: one V1 instance a line; several inputs as an object by name) or .npz
    (arrays by input name, dim 0 the rows). Line n of OUTPUT answers line n of INPUT. A row that the model refuses is
    null there (npz: left out), and OUTPUT.errors.jsonl has its line (npz: row, from 0) and the error. After an
    interruption, the same command continues where it stopped.

    Lines of OpenAI's Batch API (custom_id, method, url, body) are sent one by one to the path that each names, and
    answered in the form of its output files. OUTPUT has the answers, in order; OUTPUT.errors.jsonl has the lines that
    are no request or got an error, with their number.

    With --shards, each shard writes its own output (answers-00002-of-00008.jsonl), and --join makes one of them.

    Exits 0 when every row was answered, 3 when bad rows were skipped, 1 when it could not continue, 2 for wrong
    options or a file that can't be read.
    """
    from carpool_cli.batch import formats  # noqa: PLC0415 - numpy is not for --help

    asked = Asked(**typed)
    _check(asked)
    part = _shard(asked.shards, asked.shard, join=asked.join)
    if asked.join:
        assert asked.shards is not None  # noqa: S101 - for the type checker: checked
        bad = sharding.join(asked.output, asked.shards, formats.Npz.join if asked.is_npz else None)
        click.echo(f"{asked.shards} shards joined: {asked.output}")
        _skipped(bad, asked.output)
        return
    if part is not None:
        asked = asked._replace(output=part.output(asked.output))
    profile = None if asked.profile_path is None else device_profile.load(asked.profile_path)
    version = _version(asked.source_path)
    protocol = _protocol(asked)
    with Journal(asked.output, _identity(asked, version, protocol, part)) as journal:
        if journal.progress.complete:
            # The last run was killed between its last answer and its last rename.
            journal.complete(formats.Npz.assemble if asked.is_npz else None)
            how = "complete already"
        else:
            how = _run(asked, protocol, part, profile, journal)
    done = journal.progress
    click.echo(f"{_rows(done.answered)} answered ({how}): {asked.output}")
    _skipped(done.skipped, asked.output)


def _check(asked: Asked) -> None:
    """Reject options that contradict each other.

    Raises ``click.UsageError`` with the fix.
    """
    if (asked.onnx is None) == (asked.upstream is None):
        raise click.UsageError("name --onnx FILE or --upstream URL, one of the two")
    if {asked.source_path.suffix, asked.output.suffix} not in ({".jsonl"}, {".npz"}):
        raise click.UsageError("INPUT and OUTPUT must both end in .jsonl, or both in .npz")
    if asked.source_path.resolve() == asked.output.resolve():
        raise click.UsageError("INPUT and OUTPUT are the same file: name another OUTPUT")


def _protocol(asked: Asked) -> Spoken:
    """Return the protocol: by default, that of the input's lines.

    Raises ``click.UsageError`` for options that do not go with it, or with no server.
    """
    from carpool_cli.batch import requests  # noqa: PLC0415 - numpy is not for --help

    has_lines = asked.upstream is not None and not asked.is_npz
    protocol = asked.protocol
    if protocol is None:
        protocol = REQUESTS if has_lines and requests.is_request(asked.source_path) else "v1"
    if protocol == REQUESTS and (not has_lines or (asked.batch_size or 1) > 1):
        raise click.UsageError("--protocol openai is for .jsonl and --upstream, without --batch-size")
    if asked.headers and asked.upstream is None:
        raise click.UsageError("--header is for --upstream: a file needs none")
    return protocol


def _identity(asked: Asked, version: str, protocol: Spoken, part: sharding.Shard | None) -> str:
    """Return what distinguishes this job from others: only the same one can be resumed. ``version``: the input's."""
    model = _version(asked.onnx) if asked.onnx is not None and asked.onnx.exists() else None
    return " ".join(map(str, [version, model, asked.upstream, asked.model, protocol, *(part or ())]))


def _run(
    asked: Asked, protocol: Spoken, part: sharding.Shard | None, profile: DeviceProfile | None, journal: Journal
) -> str:
    """Run the job to its end; return how long it took, and its rate.

    Raises ``click.ClickException`` with what to do if it can't continue.
    """
    from carpool_cli.batch import requests  # noqa: PLC0415 - numpy is not for --help
    from carpool_cli.batch.job import Job, Stopped, Stopping, TooManyBad  # noqa: PLC0415 - likewise

    sends = protocol == REQUESTS
    sizes = _sizes(asked, profile, sends=sends)
    source, target, run = _opened(asked, protocol, part, journal)
    alone = requests.CONCURRENCY if sends else 1
    at_once = asked.concurrency or (profile.executors if profile is not None else alone)
    job = Job(
        source,
        run,
        journal,
        sizes,
        concurrency=at_once,
        ahead=requests.AHEAD * at_once if sends else at_once,
        abandon=target.abandon,
        retries=asked.retries,
        isolates=not sends,
        max_bad=asked.max_bad,
        clock=time.monotonic,
        stopping=Stopping(),
        waits=Waits(time.monotonic),
    )
    if journal.resumed:
        click.echo(f"continuing after row {journal.progress.number}: {journal.progress.answered} are answered")
    before, started = job.results.answered, time.monotonic()
    try:
        _with_bar(job.go, source)
    except TooManyBad as error:
        raise click.ClickException(
            f"stopped: {error}; {journal.errors} names all. To leave them out, give the same command a larger "
            f"--max-bad: it goes on from here. Or correct them, remove {journal.checkpoint}, and start over"
        ) from None
    except Stopped as error:
        raise click.ClickException(f"stopped: {error}. {_kept(journal)}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped. {_kept(journal)}") from None
    finally:
        source.close()
        target.close()
    seconds = time.monotonic() - started
    journal.finish(source.assemble)
    rate = (job.results.answered - before) / max(seconds, 1e-9)
    return f"{format_seconds(seconds)}, {number(rate)} rows/s, batches of {sizes.size}"


def _sizes(asked: Asked, profile: DeviceProfile | None, *, sends: bool) -> SizeSearch:
    """Return the batch size: given, the profile's, or to be found while running; requests are sent one by one."""
    from carpool_cli.batch.job import SizeSearch  # noqa: PLC0415 - numpy is not for --help

    if sends:
        return SizeSearch(1)
    size = asked.batch_size
    if size is None and profile is not None:
        size = inflection(profile.service_time(), profile.largest_safe)
    sizes = SizeSearch(asked.max_batch if size is None else size)
    if size is not None:
        sizes.size, sizes.settled = size, True
    return sizes


def _version(path: Path) -> str:
    """Return what distinguishes a file from others, and from what it was before.

    Raises ``BadFile`` if it can't be read.
    """
    try:
        with path.open("rb") as stream:
            stat = os.fstat(stream.fileno())
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _shard(shards: int | None, index: int | None, *, join: bool) -> sharding.Shard | None:
    """Return the part of the input to run; None: all of it."""
    if shards is None:
        if join:
            raise click.UsageError("--join needs --shards N: how many there are")
        if click.get_current_context().get_parameter_source("shard") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--shard {index} needs --shards N: how many there are")
        return None  # in a Kubernetes Job without --shards the index has another meaning
    if join:
        return None
    if index is None:
        raise click.UsageError("--shards needs --shard I, or JOB_COMPLETION_INDEX in the environment")
    if index >= shards:
        raise click.UsageError(f"--shard {index}: the shards of --shards {shards} are 0 to {shards - 1}")
    return sharding.Shard(index, shards)


def _opened(
    asked: Asked, protocol: Spoken, part: sharding.Shard | None, journal: Journal
) -> tuple[Source, Calls, Callable[[Sequence[Row]], list[Row]]]:
    """Open the input at the journal's position, and the model; returns both, and the function that runs a batch."""
    from carpool_cli.batch import formats, requests  # noqa: PLC0415 - numpy is not for --help
    from carpool_cli.profiling import arrays, targets  # noqa: PLC0415 - likewise

    path, upstream = asked.source_path, asked.upstream
    given = arrays.load_npz(path) if asked.is_npz else None
    rows = None if given is None else arrays.rows_of(given)
    if rows is not None:
        span = range(rows) if part is None else part.part(rows)
        begin = sharding.Lines(span.start, span.stop, 0)
    else:
        begin = sharding.Lines(0, path.stat().st_size, 0) if part is None else sharding.lines(path, part)
    progress = journal.progress
    position, number = (progress.position, progress.number) if journal.resumed else (begin.begin, begin.number)
    if protocol == REQUESTS:
        assert upstream is not None  # noqa: S101 - checked, for the type checker
        sender = requests.Sender(upstream, asked.headers, asked.timeout or requests.TIMEOUT)
        found = requests.RequestLines(formats.JsonLines(path, position, number, None, begin.end))
        return found, sender, sender.run
    timeout = asked.timeout or TIMEOUT
    target: OnnxTarget | ServerTarget
    if asked.onnx is not None:
        target = targets.OnnxTarget(asked.onnx, asked.threads, {})
    else:
        assert upstream is not None  # noqa: S101 - one of the two, for the type checker
        if protocol == "v1" and given is None:
            server = targets.ServerTarget(upstream, asked.model, protocol, [], timeout, asked.headers)
            lines = formats.JsonLines(path, position, number, None, begin.end)
            return lines, server, lambda rows: formats.run_json(server, rows)
        target = targets.of_server(upstream, asked.model, protocol, asked.shape, given, timeout, asked.headers)
    source: Source = (
        formats.Npz(targets.check_names(target, given), position, begin.end)
        if given is not None
        else formats.JsonLines(path, position, number, target.inputs, begin.end)
    )
    return source, target, lambda rows: formats.run_arrays(target, rows)


class Waits:
    """Reports why requests wait for a retry: one line per ``NOTE_EVERY`` seconds for all of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at = -math.inf

    def __call__(self, why: str) -> None:
        """Print it, unless a line was printed a moment ago."""
        now = self._clock()
        if now - self._said_at >= NOTE_EVERY:
            self._said_at = now
            click.echo(why, err=True)


def _with_bar(go: Callable[[Callable[[int], None]], None], source: Source) -> None:
    from rich.console import Console  # noqa: PLC0415 - not for --help
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn  # noqa: PLC0415 - likewise

    console = Console(stderr=True)
    with Progress(
        BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("rows", total=source.size, completed=source.position)
        go(lambda position: bar.update(task, completed=position))


def _kept(journal: Journal) -> str:
    return f"{journal.progress.answered} answers are kept; the same command resumes"


def _rows(count: int, kind: str = "") -> str:
    return f"{count} {kind}row{'' if count == 1 else 's'}"


def _skipped(bad: int, output: Path) -> None:
    """Name the bad rows and exit, if there are any."""
    if bad:
        click.echo(f"{_rows(bad, 'bad ')} skipped, named in {output}.errors.jsonl")
        sys.exit(3)
