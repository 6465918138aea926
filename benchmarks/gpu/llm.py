"""An overload on an engine for language models: without a gate, with the gate, and with fixed caps.

The engine is `engine_server.py`. Before: how long its steps take, and what it completes. After: what the sidecar adds
to an idle engine's first token, streams byte for byte, and whether each client that leaves ends its request. Each stage
is kept as soon as it ends, and no stage begins that can't end within the limit.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import resource
import statistics
import sys
import tempfile
import time
import traceback
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine
import msgspec
import numpy as np
import processes
import uvloop

from carpool.generation.requests import Slo
from carpool_cli.demo.streams_load import ENDING, Lengths, at_once, body
from gpu.device import Watch
from gpu.process import Process, answers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

HERE = Path(__file__).parent
PORT, ADMIN = 8610, 8611
TTFT = 2.0
TOKENS = 24
"""Of each answer from which steps are measured."""

GRIDS = {
    "cuda": ((1, 16), (8, 64), (16, 64), (32, 64), (64, 64), (128, 64), (256, 64), (1, 2000), (8, 1000), (32, 1000)),
    "cpu": ((1, 16), (8, 64), (16, 64), (32, 64), (4, 500)),
}
"""Requests at once, and prompt tokens of each."""

STEADY = 16
"""Requests at once whose step sets the target for TPOT, half as much again."""

WARM_UP = 7.0
"""Seconds of an overload that don't count."""

KEPT = ("requests", "intendedRate", "complete", "good", "goodput", "goodShare", "steadyGoodShare", "outputRate",
        "ttft", "tpot", "itl", "errors", "pauses", "pausedSeconds", "mostOutstanding", "generatorLimits")  # fmt: skip
"""Of a report on token streams."""

Step = tuple[float, float, int, int, int]
"""When it ended, its seconds, decoding requests, KV tokens read for them, prompt tokens."""


def get(url: str) -> Any:  # noqa: ANN401 - JSON
    """Return what a GET answers."""
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - ours
        return json.loads(answer.read())


async def steps() -> list[Step]:
    """Return the engine's steps since the last time."""
    return [tuple(each) for each in await asyncio.to_thread(get, f"http://127.0.0.1:{PORT}/steps")]


def rounded(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the same with five digits of each number that is not whole."""
    return json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.5g}"))


class Stages:
    """Runs stages one by one, and keeps what each found."""

    def __init__(self, found: dict[str, Any], keep: Callable[[], None], stop: float) -> None:
        self.found, self._keep, self._stop = found, keep, stop

    async def run(self, name: str, work: Callable[[], Awaitable[Any]], seconds: float) -> Any:  # noqa: ANN401 - any JSON
        """Run one that takes so many seconds; return what it found, None if it failed or there was no time."""
        spare = self._stop - time.monotonic()
        if spare < seconds:
            self.found[name] = {"skipped": f"{spare:.0f} s were left of the limit, {seconds:g} are needed"}
        else:
            begun = time.monotonic()
            print(name, flush=True)
            try:
                async with asyncio.timeout(spare + 5):
                    self.found[name] = rounded(await work())
                if not await asyncio.to_thread(answers, f"http://127.0.0.1:{PORT}/health"):
                    raise RuntimeError("the engine computes no more: see engine.log")  # noqa: TRY301 - kept as failed
            except Exception as error:  # noqa: BLE001 - whatever it is, the other stages are to be measured
                traceback.print_exc()
                self.found[name] = {"failed": repr(error), "found": self.found.get(name)}
            print(f"  {time.monotonic() - begun:.0f} s: {json.dumps(self.found[name])[:1500]}", flush=True)
        self._keep()
        done = self.found[name]
        return None if isinstance(done, dict) and ("failed" in done or "skipped" in done) else done


async def step_times(grid: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Measure steps at many sizes, and fit the gate's step model to them."""
    rng = random.Random(7)
    measured, kept = [], []
    for running, prompt in ((16, 64), *grid):  # the first time is a warm-up
        await steps()
        bodies = [body(Lengths(prompt, TOKENS), rng) for _ in range(running)]
        async with asyncio.timeout(40):
            await asyncio.gather(*(engine._raw(PORT, each) for each in bodies))  # noqa: SLF001 - of this folder
        seen = await steps()
        kept.append(seen)
        full = [each for each in seen if each[2] == running and not each[4]]
        if full:
            measured.append(
                {
                    "running": running,
                    "kvTokens": round(statistics.median(each[3] for each in full)),
                    "ms": round(1e3 * statistics.median(each[1] for each in full), 3),
                    "steps": len(full),
                }
            )
            print(f"  {measured[-1]}", flush=True)
    return {"decoding": measured[1:], "fit": fit([each for seen in kept[1:] for each in seen])}


def fit(seen: list[Step]) -> dict[str, float]:
    """Return a, b, c and d of t = a + b B + c KV + d P, by least squares of the relative errors."""
    seconds = np.array([each[1] for each in seen])
    given = np.array([(1, each[2], each[3], each[4]) for each in seen], float)
    found, *_ = np.linalg.lstsq(given / seconds[:, None], np.ones(len(seen)), rcond=None)
    errors = np.abs(given @ found / seconds - 1)
    return {
        "a ms": 1e3 * found[0], "b ms": 1e3 * found[1], "c us": 1e6 * found[2], "d us": 1e6 * found[3],
        "mean error": float(errors.mean()), "p90 error": float(np.quantile(errors, 0.9)), "steps": len(seen),
    }  # fmt: skip


def shown(seen: list[Step], seconds: float) -> dict[str, float]:
    """Summarize the engine's steps in so many seconds."""
    if not seen:
        return {"steps": 0}
    tenths = statistics.quantiles([each[1] for each in seen], n=10) if len(seen) > 1 else [seen[0][1]]
    return {
        "steps": len(seen),
        "step p50 ms": 1e3 * statistics.median(each[1] for each in seen),
        "step p90 ms": 1e3 * tenths[-1],
        "running p50": statistics.median(each[2] for each in seen),
        "running most": max(each[2] for each in seen),
        "kv most": max(each[3] for each in seen),
        "busy": sum(each[1] for each in seen) / seconds,
    }


async def closed_loop(clients: int, seconds: float) -> dict[str, Any]:
    """Return the answers per second with so many requests at once, each followed by the next: the better of two."""
    tries = []
    for seed in (1, 2):
        await steps()
        begun = time.monotonic()
        rate = await at_once("127.0.0.1", PORT, clients, seconds, seed)
        tries.append({"complete/s": rate, **shown(await steps(), time.monotonic() - begun)})
    return {"clients": clients, "complete/s": max(each["complete/s"] for each in tries), "tries": tries}


async def overload(start: Callable[[], processes.Process], rate: float, seconds: float, slo: Slo) -> dict[str, Any]:
    """Offer more than the engine completes, through a sidecar."""
    with start() as sidecar:
        await steps()
        begun = time.monotonic()
        with Watch() as watch:
            report = await engine.overload(sidecar.port, rate, seconds, 3, slo, WARM_UP)
        took = time.monotonic() - begun
        found = msgspec.to_builtins(report)
        streams = (await asyncio.to_thread(get, f"http://127.0.0.1:{ADMIN}/v1/stats"))["tokenStreams"]
        left = await asyncio.to_thread(engine.left, PORT, 15.0)
        return {name: found[name] for name in KEPT} | {
            "engine": shown(await steps(), took),
            "gate": streams.get("gate"),
            "requests left in the engine": left,
            **watch.found,
        }


async def measure(options: argparse.Namespace, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Run all stages."""
    stop = time.monotonic() + options.limit
    stages = Stages(found, keep, stop)
    model = options.llm or ("tiny" if options.device == "cpu" else "llama-3.1-8b")
    found |= {"model": model, "engine": f"transformers {version('transformers')}, {options.attention}"}
    server = [sys.executable, str(HERE / "engine_server.py"), model, str(PORT), options.device, options.attention]
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as temporary,
        Process(server, f"http://127.0.0.1:{PORT}/health", options.folder / "engine.log"),
    ):
        folder = Path(temporary)
        found["start s"] = round(time.monotonic() - begun, 1)
        print(f"{model}: the engine answers after {found['start s']:.1f} s", flush=True)
        # 1. What the engine can do
        timed = await stages.run("steps", lambda: step_times(GRIDS[options.device]), 10)
        like = [each["ms"] for each in (timed or {"decoding": []})["decoding"] if each["running"] == STEADY]
        tpot = options.tpot / 1e3 or (math.ceil(1.5 * like[0] / 5) * 0.005 if like else 0.05)
        capacity = await stages.run("closed loop", lambda: closed_loop(options.full, 6.0), 20)
        if capacity is None or not capacity["complete/s"]:
            raise RuntimeError("no capacity was measured, so there is no overload of it")
        rate = options.overload * capacity["complete/s"]
        slo = Slo(TTFT, tpot)
        found["slo"], found["offered/s"] = {"ttft": TTFT, "tpot": tpot}, round(rate, 2)
        print(f"SLO: TTFT {TTFT:g} s, TPOT {1e3 * tpot:g} ms; offered: {rate:.1f}/s", flush=True)

        def behind(policy: dict[str, Any] | None) -> processes.Process:
            more = {"ready": "/health", "maxForwarded": 16384}
            return processes.sidecar(folder, PORT, policy=policy, upstream_options=more, admin=ADMIN)

        asked = {"ttft": {"p99": f"{TTFT:g}s"}, "tpot": {"p99": f"{1e3 * tpot:g}ms"}}
        gate = {"slo": asked}
        # 2. What the sidecar costs it
        await stages.run("idle first token", lambda: _with(behind(gate), lambda each: _idle(each, options.idle)), 15)
        await stages.run("clients that left", lambda: _with(behind(gate), _leaving), 15)
        await stages.run("streams unchanged", lambda: _same(folder, asked), 15)
        # 3. The overload
        found["overload"] = {}
        overloads = Stages(found["overload"], keep, stop)
        wide = {"slo": {**asked, "tpot": {"p99": "60s"}}}
        for name, policy in (
            ("gate", gate),
            ("no gate", None),
            *((f"cap {cap}", {**wide, "generation": {"maxRunning": cap}}) for cap in options.caps),
        ):
            await overloads.run(
                name,
                lambda policy=policy: overload(lambda: behind(policy), rate, options.overload_seconds, slo),
                options.overload_seconds + ENDING + 3,
            )


async def _with(sidecar: processes.Process, work: Callable[[processes.Process], Awaitable[Any]]) -> Any:  # noqa: ANN401 - any JSON
    with sidecar:
        return await work(sidecar)


async def _idle(sidecar: processes.Process, pairs: int) -> dict[str, float]:
    await engine.idle(PORT, sidecar, 3)
    return {**await engine.idle(PORT, sidecar, pairs), "pairs": pairs}


async def _leaving(sidecar: processes.Process) -> dict[str, int]:
    return {"clients": 24, "requests left in the engine": await engine.leaving(sidecar.port, PORT, 24)}


async def _same(folder: Path, slo: dict[str, Any]) -> dict[str, int]:
    return {"streams": 16, "unchanged": await engine.same_bytes(folder, PORT, 16, slo)}


def llm(options: argparse.Namespace, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measure; ``keep`` is called whenever ``found`` has more in it."""
    # Without a gate every request of the overload is in progress: two connections each.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 65536 if most == resource.RLIM_INFINITY else min(most, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    uvloop.run(measure(options, found, keep))
