"""What the sidecar says that this GPU carries, against what it carries; and what the sidecar costs an idle service."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.process import Process

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Of the capacity that was read after the last rate: the loads tried, lowest first."""

FEWEST = 0.5
"""Share of requests in time below which no higher load is tried."""

IDLE_RATE = 20
IDLE_ROUNDS = 3
"""Turns of the server alone and of the sidecar in front of it, at `IDLE_RATE` requests/s."""


def read(admin: str) -> dict[str, Any]:
    """Return `/capacity`, or why there is none yet."""
    try:
        with urllib.request.urlopen(f"{admin}/capacity", timeout=5) as answer:  # noqa: S310 - ours
            return json.loads(answer.read())
    except OSError as error:
        return {"failed": str(error)}


def shown(run: dict[str, Any]) -> str:
    """Return one run in a line."""
    latency = run.get("latency") or {}
    return (
        f"{run['rate']:.0f}/s: {run.get('goodShare', 0):.2%} in time, p50 {1e3 * (latency.get('p50') or 0):.2f} ms, "
        f"p99 {1e3 * (latency.get('p99') or 0):.1f} ms, busy {run.get('nvmlBusy', 0):.0%} {run.get('failed', '')} "
        f"{run.get('generatorLimits') or ''}"
    )


def capacity(
    options: argparse.Namespace,
    found: dict[str, Any],
    save: Callable[[], object],
    bench: Callable[[str, str, float, float, float], dict[str, Any]],
    sidecar: list[str],
    urls: tuple[str, str, str],
) -> None:
    """Read the capacity at each of the rates, then look for the load at which the SLO ends.

    `save` is called after each load that was added to `found`. `urls`: of the sidecar, of its admin port, and of the
    server.
    """
    public, admin, server = urls
    model = options.model
    found |= {"idle": [], "live": [], "ladder": []}
    command = [sys.executable, str(Path(__file__).with_name("server.py")), model, "8600", options.device]
    with Process(command, f"{server}/v2/health/ready", options.folder / "server.log"):
        with Process(sidecar, f"{admin}/readyz", options.folder / "up.log"):
            for _ in range(IDLE_ROUNDS):
                for name, url in (("alone", server), ("sidecar", public)):
                    run = bench(url, model, IDLE_RATE, options.idle_seconds, options.slo)
                    print(f"  idle, {name}: {shown(run)}", flush=True)
                    found["idle"].append({"path": name} | run)
                    save()
        with Process(sidecar, f"{admin}/readyz", options.folder / "up.log"):
            for rate in options.rates:
                run = bench(public, model, rate, options.live_seconds, options.slo)
                said = read(admin)
                print(f"  {shown(run)}\n    {said}", flush=True)
                found["live"].append(run | {"capacity": said})
                save()
            known = said.get("models", {}).get(model, {})
            whole = known.get("capacity") or 2 * options.rates[-1]
            for share in SHARES:
                run = bench(public, model, share * whole, options.seconds, options.slo)
                print(f"  {share:.0%} of the capacity, {shown(run)}", flush=True)
                found["ladder"].append({"share": share} | run | {"capacity": read(admin)})
                save()
                if run.get("goodShare", 0) < FEWEST:
                    break
                time.sleep(1)
