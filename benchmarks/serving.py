"""Cost of the data path: CPU seconds of the proxy's process for each request, and bytes that it copies."""

from __future__ import annotations

import json
import mmap
import re
import shutil
import struct
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import kserve_agent
import processes
from evidence import Figure, Skipped
from load import Load, answer, model, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CALLERS = 64
ROUNDS = 25
TRIAL = 0.2
"""Seconds: long enough for 2,000 requests, short enough that some trials meet no other work."""

PREDICT = "/v1/models/m:predict"
INFER = "/v2/models/m/infer"
MIB = 1 << 20
PASS_THROUGH = {"maxBatch": 1, "maxInFlight": CALLERS, "passThrough": True}


def body_of(size: int, caller: int) -> bytes:
    """Return a V1 body of so many bytes with one row, identified by its first number."""
    row = [caller + 0.5]
    while len(json.dumps({"instances": [[*row, 0.125]]})) <= size:
        row.append(0.125)
    return json.dumps({"instances": [row]}).ljust(size).encode()


def prediction(body: bytes) -> bytes:
    """Return the end of the answer to a body: its rows, as they were."""
    return body.strip().removeprefix(b'{"instances": [').replace(b" ", b"")


def echo(message: bytes) -> bytes:
    """Answer with the rows that came."""
    rows = message[message.index(b"[", message.index(b'"instances"')) :].rstrip()
    return answer(b'{"predictions":' + rows.replace(b" ", b""))


async def rounds(loads: Sequence[Load], count: int) -> list[list[float]]:
    """Return the cost of a request (CPU seconds) at each of the proxies, in turn, in every round."""
    costs: list[list[float]] = [[] for _ in loads]
    for _ in range(count):
        for load, seen in zip(loads, costs, strict=True):
            seen.append(await load.trial(TRIAL))
    return costs


async def pass_through(folder: Path, count: int = ROUNDS) -> list[Figure]:
    """Compare the sidecar, passing requests through, with nginx and with a proxy on aiohttp.

    Callers and model take as much CPU as nginx does, so that it is not always busy; with 8, 64 or 256 callers a request
    costs it the same within a fifth.
    """
    bodies = [body_of(200, caller) for caller in range(CALLERS)]
    said = answer(b'{"predictions":[[0.5,0.125]]}')
    predict = [(post(PREDICT, body), b"]]}") for body in bodies]
    other = [(post("/other", body), b"]]}") for body in bodies]
    async with model(lambda _: said) as upstream:
        with (
            processes.nginx(folder, upstream) as nginx,
            processes.aiohttp_proxy(upstream) as aiohttp,
            processes.sidecar(folder, upstream, parameters=PASS_THROUGH) as sidecar,
        ):
            loads = [Load(sidecar, predict), Load(sidecar, other), Load(nginx, predict), Load(aiohttp, predict)]
            costs = await rounds(loads, count)
    ours, forwarded, of_nginx, of_aiohttp = (1 / min(seen) for seen in costs)
    parts = {"carpool": ours, "carpool, not inference": forwarded, "nginx": of_nginx, "aiohttp": of_aiohttp}
    return [
        Figure("pass-through to nginx", ours / of_nginx, count, parts),
        Figure("forwarding to nginx", forwarded / of_nginx, count, parts),
        Figure("pass-through to aiohttp", ours / of_aiohttp, count, parts),
    ]


def ranked() -> list[tuple[bytes, bytes]]:
    """Return what 128 callers ask and how their answers end: bodies of 200 bytes, each with a row of its own."""
    return [(post(PREDICT, body), prediction(body)) for body in (body_of(200, caller) for caller in range(4 * 32))]


MERGED = {"maxBatch": 32, "maxWait": "5ms", "maxInFlight": 2}


async def batched(folder: Path, count: int = ROUNDS) -> list[Figure]:
    """Measure requests merged 32 at a time."""
    sizes: list[int] = []
    async with counting(sizes) as upstream:
        with processes.sidecar(folder, upstream, parameters=MERGED) as sidecar:
            (costs,) = await rounds([Load(sidecar, ranked())], count)
    return [Figure("batched V1", 1 / min(costs), count, {"rows a batch": sum(sizes) / len(sizes)})]


async def kserve(folder: Path, count: int = ROUNDS) -> list[Figure]:
    """Compare requests merged 32 at a time with those that KServe's agent merges."""
    program = kserve_agent.program()
    sizes: tuple[list[int], list[int]] = ([], [])
    async with counting(sizes[0]) as upstream, counting(sizes[1]) as other:
        with (
            processes.sidecar(folder, upstream, parameters=MERGED) as sidecar,
            kserve_agent.start(program, other, max_batch=32, max_wait_ms=5) as agent,
        ):
            costs = await rounds([Load(sidecar, ranked()), Load(agent, ranked())], count)
    ours, theirs = (1 / min(seen) for seen in costs)
    rows = [sum(seen) / len(seen) for seen in sizes]
    parts = {"carpool": ours, "agent": theirs, "rows a batch": rows[0], "the agent's": rows[1]}
    return [Figure("batched V1 to KServe's agent", ours / theirs, count, parts)]


@asynccontextmanager
async def counting(sizes: list[int]) -> AsyncIterator[int]:
    """Serve a model that notes how many rows each batch has."""

    def reply(message: bytes) -> bytes:
        sizes.append(message.count(b"],[") + 1)
        return echo(message)

    async with model(reply) as upstream:
        yield upstream


async def footprint(folder: Path, count: int = ROUNDS) -> list[Figure]:
    """Measure what a start costs until the data port accepts, and memory after a load; with a tuner, as is usual."""
    costs, before = [], []
    async with model(echo) as upstream:
        for _ in range(count):
            with processes.sidecar(folder, upstream) as sidecar:
                costs.append(sidecar.listening_cpu_seconds)
                before.append(processes.rss_mib(sidecar.pid))
        with processes.sidecar(folder, upstream) as sidecar:
            await rounds([Load(sidecar, ranked())], count)
            after = processes.rss_mib(sidecar.pid)
            (tuner,) = map(processes.rss_mib, sidecar.children())
    return [
        Figure("start", min(costs), count),
        Figure("memory", after, 1, {"when listening": min(before), "the tuner's process": tuner}),
    ]


# ----------------------------------------------------------------------------------------------------- copies


class CopyCounter:
    """Counts the bytes that a process copies by memcpy and memmove in pieces of 4 KiB and more (see `copies.c`)."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise Skipped("no C compiler to build the counter of copies with (Debian: apt-get install gcc libc6-dev)")
        library, counter = folder / "copies.so", folder / "copies"
        source = Path(__file__).parent / "copies.c"
        command = [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        counter.write_bytes(bytes(mmap.PAGESIZE))
        self.env = {"LD_PRELOAD": str(library), "CARPOOL_COPIES": str(counter)}
        with counter.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        # It has to see a copy where there is one: compilers may put their own in the place of a call.
        before = self.read()
        subprocess.run([sys.executable, "-c", "bytearray(bytes(1 << 24))"], env=self.env, check=True)
        if not 1 << 24 <= self.read() - before < 1 << 25:
            raise RuntimeError(f"one copy of 16 MiB was counted as {self.read() - before} bytes")

    def read(self) -> int:
        """Return the bytes copied so far."""
        return int(struct.unpack_from("Q", self._shared)[0])


def tensor(size: int, caller: int) -> tuple[bytes, bytes]:
    """Return a V2 request with one row of so many bytes, and those bytes."""
    raw = bytes([caller]) * size
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [1, size],
                    "datatype": "UINT8",
                    "parameters": {"binary_data_size": size},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    kind = "Content-Type: application/octet-stream"
    return post(INFER, head + raw, kind, f"Inference-Header-Content-Length: {len(head)}"), raw


def tensor_reply(message: bytes, size: int) -> bytes:
    """Answer each row with so many bytes: the row's own first byte, repeated."""
    end = message.index(b"\r\n\r\n") + 4
    length = re.search(rb"(?i)inference-header-content-length: *(\d+)", message[:end])
    assert length is not None  # noqa: S101 - for the type checker: binary requests have one
    at = end + int(length[1])
    rows, width = json.loads(message[end:at])["inputs"][0]["shape"]
    raw = b"".join(message[at + row * width : at + row * width + 1] * size for row in range(rows))
    head = json.dumps(
        {
            "model_name": "m",
            "outputs": [
                {
                    "name": "y",
                    "shape": [rows, size],
                    "datatype": "UINT8",
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
        }
    ).encode()
    kind = "Content-Type: application/octet-stream"
    return answer(head + raw, kind, f"Inference-Header-Content-Length: {len(head)}")


async def copies(folder: Path) -> list[Figure]:
    """Count how often a tensor of 1 MiB is copied on its way in, and on its way out; four are batched together."""
    counter = CopyCounter(folder)
    figures = []
    for name, sent, received in (("copies in", MIB, 64), ("copies out", 64, MIB)):
        seen = {}
        for way, parameters in (
            ("merged", {"maxBatch": 4, "maxWait": "1s", "maxInFlight": 1}),
            ("passed through", PASS_THROUGH),
        ):
            asked = []
            for caller in range(4):
                request, _ = tensor(sent, caller)
                asked.append((request, bytes([caller]) * received))
            async with model(lambda message, size=received: tensor_reply(message, size)) as upstream:  # type: ignore[misc]
                with processes.sidecar(folder, upstream, parameters=parameters, env=counter.env) as sidecar:
                    load = Load(sidecar, asked)
                    # While the batch axis is verified, copies of requests are sent besides; then one after 1, 2, 4, ...
                    # 1,000 batches. Ten times as long as is counted leaves next to nothing of that.
                    await load.trial(10 * TRIAL)
                    before, answered = counter.read(), load.answered
                    await load.trial(TRIAL)
                    seen[way] = (counter.read() - before) / (load.answered - answered) / MIB
        figures.append(Figure(name, max(seen.values()), 1, seen))
    return figures
