"""`make engine`: an overload on a real engine (OpenVINO GenAI on a CPU), with the gate, without, and with fixed caps.

Also what the sidecar costs it: streams byte for byte, time to the first token when idle, and whether each client that
leaves ends its request in the engine. Everything is live, so this wants a quiet machine; pauses of the host are named.
Results land in `results/engine.json`.

Exit codes: 0, all within `engine-limits.json`; 1, not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httptools
import processes
import uvloop
from evidence import Figure, conclude

from carpool.generation.requests import Slo
from carpool_cli.demo.random_model import SIZES, write
from carpool_cli.demo.streams_load import Lengths, arrivals, at_once, body, offered
from carpool_cli.load.stream_report import StreamReport, summarize
from carpool_sidecar.generation.engine_metrics import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
SLO = Slo(2.0, 0.1)
"""Seconds to the first token and per further token."""
POLICY: dict[str, Any] = {"ttft": {"p99": "2s"}, "tpot": {"p99": "100ms"}}
CAPS = (32, 64, 128)
FULL = 64
"""Requests at once at which the engine computes about as much as it can."""
OVERLOAD = 1.5
"""Offered load over what the engine completes with so many."""
WARM_UP = 8.0


def metrics(port: int) -> tuple[int, int]:
    """Return how many requests the engine computes, and how many wait in it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        said = parse(answer.read())
    assert said is not None  # noqa: S101 - it is ours
    return int(said.running or 0), int(said.waiting or 0)


def left(port: int, seconds: float) -> int:
    """Wait until the engine has nothing to do; return what it still has after ``seconds``."""
    deadline = time.monotonic() + seconds
    while sum(metrics(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sum(metrics(port))


@contextmanager
def engine(model: Path) -> Iterator[int]:
    """Run the engine without a sidecar; gives its port."""
    port = processes.free_port()
    config = {"path": str(model), "threads": 1, "kvTokens": 65536}
    command = [sys.executable, "-m", "carpool_sidecar.llm.main", json.dumps(config), f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                    break
            except OSError as error:  # 503 among them
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the engine did not start") from error
                time.sleep(0.1)
        yield port
    finally:
        assert process.stdin is not None  # noqa: S101 - it was asked for
        process.stdin.close()
        process.wait(30)


def gated(folder: Path, upstream: int, cap: int | None = None) -> processes.Process:
    """Start a sidecar with the gate; with ``cap``: so many requests in the engine, whatever TPOT is, and TTFT kept."""
    slo, more = POLICY, {}
    if cap is not None:
        slo, more = {**POLICY, "tpot": {"p99": "60s"}}, {"generation": {"maxRunning": cap}}
    return processes.sidecar(folder, upstream, policy={"slo": slo, **more}, upstream_options={"ready": "/health"})


async def overload(
    port: int, rate: float, seconds: float, seed: int, slo: Slo = SLO, warm_up: float = WARM_UP
) -> StreamReport:
    """Send requests at a rate; those that are unanswered at the end leave."""
    recording = await offered(arrivals("127.0.0.1", port, rate, seconds, seed), seconds)
    report = summarize(recording, slo=slo, warm_up=warm_up, seconds=seconds - warm_up)
    print(
        f"  good {report.goodput:.2f}/s of {rate:.2f}/s offered; complete {report.complete}, refused "
        f"{report.errors.get('429', 0)}, left {recording.left_out}; TTFT p50 {_of(report.ttft)}, TPOT p50 "
        f"{_of(report.tpot)}, p99 {report.tpot.p99 if report.tpot else 0:.3f} s; {report.pauses} pauses, "
        f"{report.paused_seconds:.2f} s",
        flush=True,
    )
    return report


def _of(found: Any) -> str:  # noqa: ANN401 - percentiles or none
    return "none" if found is None else f"{found.p50:.3f} s"


class Tap(asyncio.Protocol):
    """Passes bytes between a sidecar and the engine, and keeps the engine's."""

    def __init__(self, port: int, kept: list[bytearray]) -> None:
        self._port = port
        self._kept = kept
        self._waiting: list[bytes] = []
        self._there: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the engine."""
        self._here = transport
        self._said = bytearray()
        self._kept.append(self._said)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        tap = self

        class Back(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                tap._said += data
                tap._here.write(data)  # type: ignore[attr-defined]

            def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
                tap._here.close()

        self._there, _ = await asyncio.get_running_loop().create_connection(Back, "127.0.0.1", self._port)
        self._there.write(b"".join(self._waiting))

    def data_received(self, data: bytes) -> None:
        """Pass a piece of a request on."""
        if self._there is None:
            self._waiting.append(data)
        else:
            self._there.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        """Close the other side."""
        if self._there is not None:
            self._there.close()


class Bodies:
    """The bodies of the answers on a connection."""

    def __init__(self, data: bytes) -> None:
        self.found: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Begin another."""
        self.found.append(b"")

    def on_body(self, piece: bytes) -> None:
        """Take a piece."""
        self.found[-1] += piece


async def same_bytes(folder: Path, upstream: int, streams: int, slo: dict[str, Any] = POLICY) -> int:
    """Return how many of so many streams at once came as the engine sent them."""
    kept: list[bytearray] = []
    tap = await asyncio.get_running_loop().create_server(lambda: Tap(upstream, kept), "127.0.0.1", 0)
    with processes.sidecar(
        folder, tap.sockets[0].getsockname()[1], policy={"slo": slo}, upstream_options={"ready": "/health"}
    ) as sidecar:
        rng = random.Random(5)
        # Any token, so that characters break within and between events.
        bodies = [body(Lengths(16, 48), rng, temperature=2.0, seed=at) for at in range(streams)]
        answers = await asyncio.gather(*(_raw(sidecar.port, each) for each in bodies))
        tap.close()
    sent = {each for data in kept for each in Bodies(bytes(data)).found}
    return sum(
        found in sent and found.endswith(b"data: [DONE]\n\n") for data in answers for found in Bodies(data).found
    )


async def _raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (len(request), request)
    )
    data = await reader.read(-1)
    writer.close()
    return data


async def first_token(port: int, request: bytes) -> float:
    """Return the seconds to the first event of a request on an idle engine."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (len(request), request)
    )
    await reader.readuntil(b"data: ")
    seconds = time.perf_counter() - began
    await reader.read(-1)
    writer.close()
    return seconds


async def idle(direct: int, through: processes.Process, times: int) -> dict[str, float]:
    """Return times to a first token, without a sidecar and with it in turn, in ms; and its CPU per request, in us.

    ``more ms`` is the median of what each pair differs by.
    """
    rng = random.Random(9)
    seen: tuple[list[float], list[float]] = ([], [])
    cpu = 0.0
    for number in range(times):
        for which in (number % 2, 1 - number % 2):
            before = through.cpu_seconds()
            seen[which].append(await first_token((direct, through.port)[which], body(Lengths(16, 2), rng)))
            cpu += which * (through.cpu_seconds() - before)
    more = statistics.median(after - before for before, after in zip(*seen, strict=True))
    parts = {"direct p50 ms": statistics.median(seen[0]) * 1e3, "through p50 ms": statistics.median(seen[1]) * 1e3}
    return {**parts, "more ms": more * 1e3, "CPU us": cpu / times * 1e6}


async def leaving(port: int, upstream: int, clients: int) -> int:
    """Have so many clients leave, some before their first token; return how many requests the engine goes on with."""
    rng = random.Random(11)
    writers = []
    for _ in range(clients):
        request = body(Lengths(64, 2000), rng)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(request), request)
        )
        writers.append((reader, writer))
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(metrics, upstream))[0] < clients // 2:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    for _, writer in writers:
        writer.close()
    return await asyncio.to_thread(left, upstream, 30.0)


async def run(seconds: float, kept: Path | None) -> int:
    """Measure everything; returns the exit code."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "small.gguf"
        write(model, SIZES["small"])
        upstream = stack.enter_context(engine(model))
        # 1. What it costs
        with gated(folder, upstream) as sidecar:
            await idle(upstream, sidecar, 3)
            cost = await idle(upstream, sidecar, 200)
            print(", ".join(f"{name} {value:.2f}" for name, value in cost.items()))
            figures.append(Figure("idle first token", cost["more ms"], 200, cost))
            figures.append(Figure("requests left", await leaving(sidecar.port, upstream, 24), 24))
        figures.append(Figure("streams unchanged", await same_bytes(folder, upstream, 16) / 16, 16))
        # 2. The overload
        with processes.sidecar(folder, upstream, upstream_options={"ready": "/health"}) as plain:
            await at_once("127.0.0.1", plain.port, FULL, 4.0, 1)
            capacity = await at_once("127.0.0.1", plain.port, FULL, 12.0, 2)
            rate = OVERLOAD * capacity
            print(
                f"{FULL} requests at once: {capacity:.2f}/s complete; offered: {rate:.2f}/s for {seconds:g} s",
                flush=True,
            )
            goods = {}
            for name, start in (
                ("gate", lambda: gated(folder, upstream)),
                *((f"cap {cap}", lambda cap=cap: gated(folder, upstream, cap)) for cap in CAPS),
                ("no gate", lambda: None),
            ):
                print(name, flush=True)
                started = start()
                with started or ExitStack():
                    goods[name] = await overload((started or plain).port, rate, seconds, 3)
                    # Requests without an answer have left: the engine must be idle before the next part begins.
                    remaining = await asyncio.to_thread(left, upstream, 30.0)
                    figures[1] = Figure("requests left", figures[1].value + remaining, figures[1].trials + 1)
    caps = max(goods[f"cap {cap}"].goodput for cap in CAPS)
    parts = {f"{name} good/s": each.goodput for name, each in goods.items()}
    parts |= {f"{name} paused s": each.paused_seconds for name, each in goods.items()}
    parts |= {"offered/s": rate, "closed loop/s": capacity}
    gate = goods["gate"].goodput
    figures.append(Figure("gate over the best cap", gate / caps, 1, parts))
    # One good answer in the whole time stands for none, so that there is a ratio.
    figures.append(Figure("gate over no gate", gate / max(goods["no gate"].goodput, 1 / (seconds - WARM_UP)), 1))
    return conclude(figures, HERE / "engine-limits.json", kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each of the five loads")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args()
    sys.exit(uvloop.run(run(options.seconds, HERE / "results" / "engine.json" if options.write else None)))
