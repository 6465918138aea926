"""Carpool on a real GPU: `python benchmarks/gpu curves onnx serve --out gpu.json`.

`curves`: batch latency of torch. `onnx`: `carpool up --onnx` on CUDA: right answers, what a change of the batch size
costs, load. `serve`: a torch server alone, and behind a sidecar with zero wait, Balanced and Efficiency. `llm`: an
engine for language models in overload: without a gate, with the gate, and with fixed caps. `capacity`: the load which
the sidecar says that the torch server carries, against what it carries, and what the sidecar costs an idle service.
Needs torch, onnx, aiohttp and onnxruntime-gpu beside Carpool; `llm` also transformers and psutil. `--device cpu` tries
the same on a CPU, slowly; `llm` has a tiny model there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)

try:
    import aiohttp  # noqa: F401 - the server's
    import numpy as np
    import onnx  # noqa: F401 - what torch exports with
    import torch
except ImportError as missing:
    raise SystemExit(f"{missing}: pip install torch onnx onnxscript aiohttp nvidia-ml-py '.[cli,gpu]'") from None

from carpool_sidecar.backends import sessions  # noqa: E402
from gpu import capacity, curves, llm, models  # noqa: E402
from gpu.device import Watch  # noqa: E402
from gpu.process import Process  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UP = ("up", "--plain", "--port", "8700", "--admin-port", "8701")
SIDECAR, ADMIN, SERVER = "http://127.0.0.1:8700", "http://127.0.0.1:8701", "http://127.0.0.1:8600"
ONE_BY_ONE = ("--fixed", "--max-batch", "1", "--max-wait", "0s", "--max-in-flight", "1")
EFFICIENCY = ("--objective", "efficiency")
ZERO_WAIT = ("--fixed", "--max-batch", "64", "--max-wait", "0s", "--max-in-flight", "1")
SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 128)
WARM_UP = 3
"""Seconds of load before the measured part."""

MOSTLY_LATE = 0.5
"""Share of answers in time below which higher rates are not tried."""

KEPT = ("requests", "ok", "good", "goodShare", "steadyGoodShare", "achievedRate", "errors", "latency", "stalls",
        "generatorLimits")  # fmt: skip
"""Of a report of `carpool bench`."""


def carpool(*options: str) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-c", "from carpool_cli.main import main; main()", *options]


def bench(url: str, model: str, rate: float, seconds: float, slo: float) -> dict[str, Any]:
    """Send load, and return what came of it and what the GPU did meanwhile."""
    load = ("--rate", f"{rate:g}", "--for", f"{seconds}s", "--warm-up", f"{WARM_UP}s", "--slo-p99", f"{slo}s")
    command = carpool("bench", url, "--model", model, "--protocol", "v2-binary", *load, "--json")
    with Watch() as watch:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return {"rate": rate, "failed": (done.stdout + done.stderr)[-600:]}
    found = {"rate": rate, "seconds": seconds} | {name: report[name] for name in KEPT} | watch.found
    found["windows"] = [[each["requests"], each["good"], each["p99"]] for each in report["windows"]]
    if joules := watch.found.get("joules"):
        found["joulesPerRequest"] = joules / max(1, report["ok"] * (seconds + WARM_UP) / seconds)
    return found


def decided() -> dict[str, Any] | None:
    """Return the sidecar's last decision that says something of load."""
    try:
        with urllib.request.urlopen(f"{ADMIN}/v1/explain", timeout=2) as answer:  # noqa: S310 - ours
            found = json.loads(answer.read())
    except (OSError, ValueError):
        return None
    found = found.get("decisions", found) if isinstance(found, dict) else found
    said = [each["decision"] for each in found if each["decision"].get("predicted")]
    return (
        {key: said[-1][key] for key in ("parameters", "reason", "predicted", "rate", "alternative")} if said else None
    )


def ladder(url: str, model: str, rates: Sequence[float], seconds: float, slo: float, *, tuned: bool) -> Iterator[Any]:
    """Yield the runs, lowest rate first, until most answers are late."""
    for rate in rates:
        found = bench(url, model, rate, seconds, slo)
        if tuned:
            found["decision"] = decided()
        shown = found.get("latency") or {}
        print(
            f"  {rate:g}/s: {found.get('goodShare', 0):.1%} in time, p50 {1e3 * (shown.get('p50') or 0):.1f} ms, "
            f"p99 {1e3 * (shown.get('p99') or 0):.1f} ms, busy {found.get('nvmlBusy', 0):.0%}, "
            f"{found.get('joulesPerRequest', 0):.3f} J, {found.get('failed', '')} {found.get('errors')} "
            f"{found.get('generatorLimits')} {(found.get('decision') or {}).get('parameters', '')}",
            flush=True,
        )
        yield found
        if found.get("goodShare", 0) < MOSTLY_LATE:
            return


def runs(command: Sequence[str], options: argparse.Namespace, *, tuned: bool) -> list[dict[str, Any]]:
    """Return a ladder of load behind one sidecar."""
    started = carpool(*UP, "--slo-p99", f"{options.slo}s", *command)
    with Process(started, f"{ADMIN}/readyz", options.folder / "up.log"):
        return list(ladder(SIDECAR, options.model, options.rates, options.seconds, options.slo, tuned=tuned))


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a torch server alone and behind the sidecar."""
    model, found = options.model, {}
    server = [sys.executable, str(HERE / "server.py"), model, "8600", options.device]
    with Process(server, f"{SERVER}/v2/health/ready", options.folder / "server.log"):
        print("torch server alone", flush=True)
        found["alone"] = list(ladder(SERVER, model, options.rates, options.seconds, options.slo, tuned=False))
        for name, extra in (("zero wait", ZERO_WAIT), ("Balanced", ()), ("Efficiency", EFFICIENCY)):
            print(f"sidecar, {name}", flush=True)
            found[name] = runs(("--upstream", SERVER, *extra), options, tuned=extra is not ZERO_WAIT)
    return found


def onnx_files(options: argparse.Namespace) -> dict[str, Any]:
    """Measure `carpool up --onnx` on the device."""
    name, found = options.model, {}
    path = options.folder / f"{name}.onnx"
    models.export(name, path, options.device)
    tried = SIZES if options.device == "cuda" else SIZES[:4]
    by_size = sessions.Model(path)
    begun = time.perf_counter()
    by_size.warm()
    found["warm"] = time.perf_counter() - begun
    found["right"] = right(by_size, name, options.device)
    print(name, "on the GPU" if by_size.on_gpu else "on the CPU", found["right"], f"warm: {found['warm']:.1f} s")
    found["sessions by size"] = sizes(by_size, name, tried)
    by_size._sized = False  # noqa: SLF001 - what it would cost without
    found["one session"] = sizes(by_size, name, tried)
    given = ("--onnx", str(path), *(("--set", "onnx.device=CUDA") if options.device == "cuda" else ()))
    found["one by one"] = runs((*given, *ONE_BY_ONE), options, tuned=False)
    for setting, extra in (("zero wait", ZERO_WAIT), ("Balanced", ())):
        print(f"carpool up --onnx, {setting}", flush=True)
        found[setting] = runs((*given, *extra), options, tuned=not extra)
    return found


def sizes(model: sessions.Model, name: str, tried: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return milliseconds of the first, and the median of the next runs of each size, each after another size."""
    found: dict[str, dict[str, float]] = {}
    for _ in range(2):
        for rows in tried:
            given = {"input": models.example(name, rows, "cpu").numpy()}
            taken = curves.timed(lambda given=given: model.run(None, given), rounds=12, device="cpu")
            found[str(rows)] = {"first": round(1e3 * taken[0], 3), "next": round(1e3 * float(np.median(taken[2:])), 3)}
    print("  after another size, and after itself, ms:", {rows: list(each.values()) for rows, each in found.items()})
    return found


def right(model: sessions.Model, name: str, device: str) -> dict[str, float]:
    """Compare a merged batch, filled up to 16, with single rows and with torch."""
    given = models.example(name, 13, "cpu")
    merged = model.run(None, {"input": given.numpy()}, pad=True)[0]
    single = np.concatenate([model.run(None, {"input": row[None].numpy()})[0] for row in given])
    with torch.inference_mode():
        expected = models.build(name, device)(given.to(device)).cpu().numpy()
    scale = float(abs(expected).max())
    return {
        "largest": scale,
        "mergedAgainstSingle": float(abs(merged - single).max()) / scale,
        "mergedAgainstTorch": float(abs(merged - expected).max()) / scale,
    }


def curves_of(options: argparse.Namespace) -> list[Any]:
    """Measure torch's batch latency."""
    found = []
    for name in models.MODELS:
        for graphs in (False, True) if options.device == "cuda" else (False,):
            made = curves.curve(name, device=options.device, graphs=graphs, rounds=options.rounds)
            print(name, made["runtime"], {rows: round(1e3 * each["median"], 3) for rows, each in made["sizes"].items()})
            sys.stdout.flush()
            found.append(made)
    return found


PARTS = {"curves": curves_of, "onnx": onnx_files, "serve": serve}


def numbers(text: str) -> list[float]:
    """Read numbers."""
    return [float(each) for each in text.split(",")]


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=__doc__)
    parser.add_argument("part", nargs="+", choices=[*PARTS, "capacity", "llm"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=sorted(models.MODELS), default="bert-base-128")
    parser.add_argument("--rates", type=numbers, default=[20, 150, 400, 1000])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured at each rate")
    parser.add_argument("--slo", type=float, default=0.05, help="seconds by which an answer is good")
    parser.add_argument("--rounds", type=int, default=100, help="of each batch size")
    of_capacity = parser.add_argument_group("capacity")
    of_capacity.add_argument("--idle-seconds", type=float, default=10.0, help="of each turn of the idle service")
    of_capacity.add_argument("--live-seconds", type=float, default=60.0, help="of each rate, then the capacity is read")
    of_llm = parser.add_argument_group("llm")
    of_llm.add_argument("--llm", choices=sorted(models.LLAMAS), help="default: llama-3.1-8b, on a CPU tiny")
    of_llm.add_argument("--tpot", type=float, default=0.0, help="target, ms; default: 1.5 times a step of 16 requests")
    of_llm.add_argument("--full", type=int, default=64, help="requests at once at which the engine is full")
    of_llm.add_argument("--overload", type=float, default=1.4, help="offered load over what it completes then")
    of_llm.add_argument("--overload-seconds", type=float, default=22.0, help="of each of the overloads")
    of_llm.add_argument("--caps", type=lambda text: [int(each) for each in numbers(text)], default=[64, 32, 128])
    of_llm.add_argument("--attention", default="paged|sdpa", help="of transformers; paged|eager is the other one here")
    of_llm.add_argument("--idle", type=int, default=50, help="first tokens of an idle engine")
    of_llm.add_argument("--limit", type=float, default=230.0, help="seconds in which all of it ends")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: --device cpu tries the same without")
    options.folder = options.out.resolve().parent
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "device": Watch().name or platform.processor(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cpus": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "command": sys.argv[1:],
    }  # fmt: skip

    def save() -> None:
        options.out.write_text(json.dumps(found, indent=1))

    for part in options.part:
        begun = time.monotonic()
        if part == "llm":
            found[part] = {}
            llm.llm(options, found[part], save)
        elif part == "capacity":
            found[part] = {}
            sidecar = carpool(*UP, "--slo-p99", f"{options.slo}s", "--upstream", SERVER)
            capacity.capacity(options, found[part], save, bench, sidecar, (SIDECAR, ADMIN, SERVER))
        else:
            found[part] = PARTS[part](options)
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
        save()


if __name__ == "__main__":
    main()
