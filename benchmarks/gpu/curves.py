"""Batch latency of torch on this device: eager, and replayed as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from gpu.models import build, example

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def timed(call: Callable[[], object], *, rounds: int, device: str) -> list[float]:
    """Return seconds of each call, waited for."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return taken


@torch.inference_mode()
def curve(name: str, *, device: str, graphs: bool, rounds: int) -> dict[str, Any]:
    """Return median and spread by batch size, copies to and from the device included."""
    model, found = build(name, device), {}
    for rows in SIZES:
        given = example(name, rows, "cpu")
        given = given.pin_memory() if device == "cuda" else given
        call = (
            replayed(model, given) if graphs else (lambda given=given: model(given.to(device, non_blocking=True)).cpu())
        )
        timed(call, rounds=5, device=device)
        taken = sorted(timed(call, rounds=rounds, device=device))
        kept = taken[: max(3, int(len(taken) * 0.99))]
        found[rows] = {
            "median": statistics.median(taken),
            "least": taken[0],
            "mean": statistics.fmean(kept),
            "cv": statistics.pstdev(kept) / statistics.fmean(kept),
        }
    return {"model": name, "runtime": "torch, CUDA graph" if graphs else "torch, eager", "sizes": found}


def eager(model: torch.nn.Module, given: torch.Tensor, device: str) -> torch.Tensor:
    """Run one batch, there and back."""
    return model(given.to(device, non_blocking=True)).cpu()


def replayed(model: torch.nn.Module, given: torch.Tensor) -> Callable[[], object]:
    """Capture one batch of this size; return what replays it on new input."""
    inside = given.to("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(inside)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outside = model(inside)

    def call() -> object:
        inside.copy_(given, non_blocking=True)
        graph.replay()
        return outside.cpu()

    return call
