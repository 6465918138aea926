"""`carpool bench --generative`: open-loop load of token streams on a server with OpenAI's API."""

from __future__ import annotations

import socket
import sys
from random import Random
from typing import TYPE_CHECKING, Any

import click
import msgspec

from carpool.generation.requests import Slo
from carpool.policy.durations import format_seconds
from carpool_cli import options
from carpool_cli.answers import NO_ANSWER, UNREADABLE, get
from carpool_cli.live.figures import duration, number
from carpool_cli.load import servers
from carpool_cli.load.loadgen import until_interrupted
from carpool_cli.load.report import Percentiles, deliver, problems, to_json
from carpool_cli.load.stream_report import StreamReport, summarize
from carpool_cli.load.streaming import StreamGenerator, StreamRecording
from carpool_cli.options import ADDRESS, Address
from carpool_cli.planning.assumptions import no_load, nothing_due
from carpool_cli.stopped import STOPPED
from carpool_cli.streams.options import StreamLoad, load_options, read_load

if TYPE_CHECKING:
    from pathlib import Path

    from carpool_sidecar.http1.messages import Headers

CHAT = "/chat/completions"

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "are")
"""Words of generated prompts: each is about one token."""


@click.command(
    epilog="""\b
Examples:
  carpool bench --generative http://127.0.0.1:8000 --rate 5 --prompt-tokens 600 --output-tokens 150 \\
    --slo-ttft-p99 2s --slo-tpot-p99 50ms
  carpool bench --generative :8000/v1/completions --model llama --trace azure --rate 8 --for 5m \\
    --slo-ttft-p99 2s --slo-tpot-p99 50ms --ignore-eos --out report.json
"""
)
@click.argument("server", type=ADDRESS)
@click.option("--model", help="Name of the model.  [default: the first that /v1/models names]")
@load_options
@options.warm_up(default=5.0, help="Load before the measured part, not counted.  [default: 5s]")
@options.timeout(default=120.0, help="Time from sending after which an answer has failed.  [default: 2m]")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length, as vLLM can: `ignore_eos`.")
@options.header()
@options.report_file()
@options.as_json()
def command(
    *,
    server: Address,
    model: str | None,
    ttft: float,
    tpot: float,
    seconds: float,
    warm_up: float,
    timeout: float,
    ignore_eos: bool,
    headers: Headers,
    out: Path | None,
    as_json: bool,
    **typed: Any,  # noqa: ANN401 - `read_load` has the types
) -> None:
    """Send open-loop load of streamed chats to SERVER and report goodput, TTFT, TPOT and ITL.

    SERVER is a URL. Without a path, or with one that does not end in `completions`, /v1/chat/completions is asked.
    Prompts are made-up words, about one token each; `max_tokens` is the length of the answer.

    Requests leave when they are due, whether or not earlier ones were answered; TTFT counts from then. Goodput counts
    complete answers within both targets. TPOT is the mean time per token after the first, of each answer; ITL are the
    gaps between chunks. Token counts are the server's own (`usage`), else chunks. Reports when this host paused, and
    when the generator was the bottleneck rather than the server. Ctrl-C ends the load.

    Exits 0 when an answer was complete, 1 when none was, 130 after Ctrl-C.
    """
    # 1. Arrival times and requests
    slo, load = Slo(ttft, tpot), read_load(**typed | {"seconds": warm_up + seconds})
    due = _due(load, warm_up, seconds)
    seconds = load.seconds - warm_up  # a trace may end before
    servers.check_reachable(server, timeout)
    target = _target(server)
    name = model or _model(server, timeout, headers)
    bodies = _bodies(target, name, load.lengths.draw(0, len(due)), load.seed, ignore_eos=ignore_eos)
    # 2. Run
    if sys.stderr.isatty():
        click.echo(f"sending {len(due)} requests in {format_seconds(load.seconds)} ...", err=True)
    recording = _run(server, target, bodies, due, timeout, headers)
    stopped = ""
    if recording.stopped_at is not None:
        seconds = min(seconds, recording.stopped_at - warm_up)
        stopped = f"stopped; requests without an answer yet, left out: {recording.left_out}"
    if not any(each.due >= warm_up for each in recording.streams):
        click.echo("stopped before a measured request was answered: let it run longer, or lower --warm-up", err=True)
        sys.exit(STOPPED)
    # 3. Report
    report = summarize(recording, slo=slo, warm_up=warm_up, seconds=seconds)
    url = f"http://{server.host}:{server.port}{target}"
    deliver(
        to_json(report, url=url, model=name, sloTtftSeconds=slo.ttft, sloTpotSeconds=slo.tpot),
        lambda: _show(report, slo, url),
        stopped=stopped,
        good=bool(report.complete),
        as_json=as_json,
        out=out,
    )


def _due(load: StreamLoad, warm_up: float, seconds: float) -> list[float]:
    """Return the times of requests.

    Raises ``click.ClickException`` if no load is named, or no request is due in the ``seconds`` after the warm-up.
    """
    if not load.named:
        raise no_load()
    due = load.times(load.rate)
    if due[-1] < warm_up:
        raise nothing_due(seconds, warm_up, load.lasts)
    return due


def _target(server: Address) -> str:
    if server.path.endswith("completions"):
        return server.path
    return (server.path if server.path.endswith("/v1") else f"{server.path}/v1") + CHAT


def _model(server: Address, timeout: float, headers: Headers) -> str:
    """Ask the server for its first model.

    Raises ``click.ClickException`` naming the option that avoids the question, or the one for credentials.
    """
    path = _target(server).removesuffix(CHAT).removesuffix("/completions") + "/models"
    try:
        status, body = get(server, path, timeout, servers.fields_of(headers))
        servers.check_access(server, status)
        found: str = msgspec.json.decode(body)["data"][0]["id"]
    except (*NO_ANSWER, *UNREADABLE, LookupError, TypeError):
        raise click.ClickException(f"{server} names no model at {path}: name it with --model") from None
    return found


def _bodies(target: str, model: str, lengths: list[tuple[int, int]], seed: int, *, ignore_eos: bool) -> list[bytes]:
    """Make a request for each pair of prompt and output tokens; prompts begin differently, because of prefix caches."""
    rng = Random(seed)  # noqa: S311 - load, not secrets
    bodies = []
    for prompt, output in lengths:
        text = " ".join(rng.choices(WORDS, k=prompt))
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if target.endswith(CHAT) else {}
        asked = asked or {"prompt": text}
        asked |= {"model": model, "max_tokens": output, "stream": True, "stream_options": {"include_usage": True}}
        bodies.append(msgspec.json.encode(asked | {"ignore_eos": True} if ignore_eos else asked))
    return bodies


def _run(
    server: Address, target: str, bodies: list[bytes], due: list[float], timeout: float, headers: Headers
) -> StreamRecording:
    import uvloop  # noqa: PLC0415 - not for --help

    # Once, not for each request.
    host = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0][4][0]

    async def run() -> StreamRecording:
        generator = StreamGenerator(str(host), server.port, target, bodies, due, timeout=timeout, headers=headers)
        return await until_interrupted(generator.run(), generator.stop)

    return uvloop.run(run())


def _show(report: StreamReport, slo: Slo, url: str) -> None:
    click.echo(
        f"{report.requests} requests in {format_seconds(report.seconds)}: intended {report.intended_rate:.1f}/s, "
        f"achieved {report.achieved_rate:.1f}/s; {number(report.output_rate)} output tokens/s"
    )
    click.echo(
        f"goodput {report.goodput:.2f}/s: {report.good_share:.2%} within TTFT {format_seconds(slo.ttft)} "
        f"and TPOT {format_seconds(slo.tpot)}"
    )
    for label, found in (("TTFT", report.ttft), ("TPOT", report.tpot), ("ITL", report.itl), ("whole", report.whole)):
        _show_percentiles(label, found)
    if report.pauses:
        steady = "none is left without them"
        if report.steady_good_share is not None:
            steady = f"of the requests that none touched, {report.steady_good_share:.2%} were good"
        click.echo(f"this host paused {report.pauses} times, {duration(report.paused_seconds)} in all; {steady}")
    for line in problems(url, report.errors, report.complaints, report.generator_limits):
        click.echo(line)


def _show_percentiles(label: str, found: Percentiles | None) -> None:
    if found is not None:
        named = {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.max}
        click.echo(f"{label:>5}: " + ", ".join(f"{name} {duration(value)}" for name, value in named.items()))
