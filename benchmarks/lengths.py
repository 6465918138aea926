"""Device time of requests of different lengths, padded or not: ``python benchmarks/lengths.py``.

A real sidecar, tuning itself to a p99 of 50 ms, stands before a model server whose batches take as long as published
times say: a row of a length takes what as much of a 128-token row does (TensorRT, BERT-large on an A100). It answers
with the sum of the tokens that are not masked, so that every answer is checked. Lengths are log-normal, as those of
texts are. Each load is sent without a sequence axis in the policy and with one, for ``--seconds`` after a warm-up.

Real time on a shared machine: device time and batches are counted, not measured, so pauses move them little. Latency is
measured, and moves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from bisect import bisect_left
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.messages import content_length, encode_request_head
from carpool_sidecar.http1.server.server import Server

if TYPE_CHECKING:
    from carpool_sidecar.http1.server.exchange import Exchange

HERE = Path(__file__).parent
PROFILE = json.loads((HERE / "profiles" / "bert-large-128-a100.json").read_text("utf-8"))
REFERENCE = 128
"""Tokens of a row in the profile."""
MEDIAN, SIGMA, LONGEST = 64, 0.8, 512
PAD = {"input_ids": 0, "attention_mask": 0}
LENGTHS = [16 << power for power in range(10)]
HEADER = b"Inference-Header-Content-Length"
WARM_UP = 20.0


def seconds(tokens: float) -> float:
    """Return how long a batch of so many tokens takes, along straight lines between the published sizes."""
    known = [(rows * REFERENCE, time) for rows, time in zip(PROFILE["rows"], PROFILE["seconds"], strict=True)]
    at = min(max(bisect_left(known, (tokens,)), 1), len(known) - 1)
    (low, first), (high, second) = known[at - 1], known[at]
    return first + (second - first) * (tokens - low) / (high - low)


class Model:
    """The model server: one batch at a time."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        """Rows and length of each."""
        self._free_at = 0.0

    def head(self, exchange: Exchange) -> None:
        """Take the whole body."""
        exchange.buffer(1 << 28)

    def request(self, exchange: Exchange) -> None:
        """Answer once the device would have computed it."""
        if exchange.method == b"GET":
            tensor = {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
            outputs = [{"name": "total", "datatype": "INT64", "shape": [-1, 1]}]
            about = {"name": "bert", "inputs": [tensor, {**tensor, "name": "attention_mask"}], "outputs": outputs}
            known = exchange.target in {b"/v2/models/bert", b"/v2/health/ready"}
            exchange.respond(200 if known else 404, [], json.dumps(about).encode())
            return
        body = bytes(exchange.body)
        at = int(next(value for name, value in exchange.headers if name.lower() == HEADER.lower()))
        rows, length = json.loads(body[:at])["inputs"][0]["shape"]
        ids, mask = np.frombuffer(body[at:], np.int64).reshape(2, rows, length)
        self.batches.append((rows, length))
        now = perf_counter()
        self._free_at = max(self._free_at, now) + seconds(rows * length)
        data = (ids * mask).sum(1, dtype=np.int64).tobytes()
        output = {
            "name": "total",
            "datatype": "INT64",
            "shape": [rows, 1],
            "parameters": {"binary_data_size": len(data)},
        }
        text = json.dumps({"outputs": [output]}).encode()
        later = (exchange.respond, 200, [(HEADER, b"%d" % len(text))], text + data)
        asyncio.get_running_loop().call_later(self._free_at - now, *later)

    def sent(self, exchange: Exchange) -> None:
        """Nothing is left to do."""

    def disconnected(self, exchange: Exchange) -> None:
        """Nobody leaves here."""

    def refused(self, error: Exception) -> None:
        """Nothing is refused here."""


class Caller:
    """One request, checked and timed."""

    def __init__(self, pool: Pool, ids: list[int]) -> None:
        self._total, self._at = sum(ids), perf_counter()
        self.took: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        numbers = np.array([ids, [1] * len(ids)], np.int64).tobytes()
        head: dict[str, Any] = {"datatype": "INT64", "shape": [1, len(ids)]}
        head["parameters"] = {"binary_data_size": len(numbers) // 2}
        inputs = [{"name": name, **head} for name in ("input_ids", "attention_mask")]
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = [(b"host", b"bench"), (HEADER, b"%d" % len(text)), content_length(len(text) + len(numbers))]
        pool.send(encode_request_head(b"POST", b"/v2/models/bert/infer", headers), text + numbers, self)

    def answered(self, status: int, headers: Any, body: bytes | memoryview) -> None:  # noqa: ANN401, ARG002
        """Compare the answer; one that is wrong ends the benchmark."""
        if status == 200 and int.from_bytes(bytes(body)[-8:], "little") != self._total:
            raise SystemExit(f"a wrong answer: {bytes(body)!r} for {self._total}")
        self.took.set_result(perf_counter() - self._at if status == 200 else None)

    def failed(self, error: Exception) -> None:
        """Count it as none."""
        self.took.set_result(None)
        print(error, file=sys.stderr)


async def measured(rate: float, duration: float, lengths: list[int] | None, objective: str) -> dict[str, Any]:
    """Send one load through a sidecar that begins anew; ``lengths``: its length buckets, ``[]`` the default's."""
    sequence = {"pad": PAD, **({"lengths": lengths} if lengths else {})}
    model = Model()
    server = Server(model)
    await server.listen("127.0.0.1", 0)
    port = server.addresses[0][1]
    config = {
        "listen": "127.0.0.1:18480",
        "admin": "127.0.0.1:18490",
        "upstream": {"url": f"http://127.0.0.1:{port}"},
        "policy": {
            "slo": {"latency": {"p99": "50ms"}},
            "objective": objective,
            "models": [{"name": "bert"} if lengths is None else {"name": "bert", "sequence": sequence}],
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sidecar.json"
        file.write_text(json.dumps(config))
        log = (Path(folder) / "log").open("w")
        command = [sys.executable, "-m", "carpool_sidecar.main", "--config", str(file)]
        sidecar = await asyncio.create_subprocess_exec(*command, stderr=log)
        await asyncio.sleep(3)
        pool = Pool("127.0.0.1", 18480, max_connections=1024)
        random = Random(5)
        callers: list[Caller] = []
        begin, at, first = perf_counter(), 0.0, 0
        while at < WARM_UP + duration:
            at += random.expovariate(rate)
            await asyncio.sleep(max(begin + at - perf_counter(), 0.0))
            if not first and at >= WARM_UP:
                first = len(callers)
                model.batches.clear()
            length = min(max(round(MEDIAN * random.lognormvariate(0, SIGMA)), 3), LONGEST)
            callers.append(Caller(pool, [random.randrange(1, 30_000) for _ in range(length)]))
        batches = list(model.batches)
        took = [await each.took for each in callers[first:]]
        sidecar.terminate()
        await sidecar.wait()
        log.close()
    await pool.close()
    server.stop_accepting()
    server.abort()
    good = sorted(each for each in took if each is not None)
    rows = sum(count for count, _ in batches)
    spent = sum(seconds(count * length) for count, length in batches)
    ends = lengths or LENGTHS
    tops = sum(seconds(count * ends[bisect_left(ends, length)]) for count, length in batches)
    return {
        "requestsPerSecond": rate,
        "objective": objective,
        "lengths": "each by itself" if lengths is None else lengths or "default",
        "requests": len(took),
        "inTimePercent": round(100 * sum(each <= 0.05 for each in good) / len(took), 2),
        "p50Ms": round(1e3 * good[len(good) // 2], 1),
        "p99Ms": round(1e3 * good[int(0.99 * len(good))], 1),
        "rowsPerBatch": round(rows / len(batches), 2),
        "deviceMsPerRequest": round(1e3 * spent / rows, 3),
        "deviceMsPerRequestPaddedToTheBucket": round(1e3 * tops / rows, 3),
    }


async def main() -> None:
    """Measure every load both ways, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rates", default="100,300,500")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--objective", default="Balanced")
    parser.add_argument("--lengths", action="append", default=[], help="other length buckets, e.g. 128,512; repeatable")
    options = parser.parse_args()
    for rate in map(float, options.rates.split(",")):
        for lengths in (None, [], *([*map(int, each.split(","))] for each in options.lengths)):
            print(json.dumps(await measured(rate, options.seconds, lengths, options.objective)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
