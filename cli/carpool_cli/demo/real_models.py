"""Real models in the sidecar's own process: one request a batch, then nothing but a p99, and every answer checked."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime

from carpool.policy import format_seconds
from carpool_cli import tensors
from carpool_cli.arrays import from_tensors
from carpool_cli.demo.load import Aim, drive, report_on
from carpool_cli.demo.observed import Look, Span, between, decisions, look
from carpool_cli.demo.processes import Client, DemoError
from carpool_cli.loadgen import due_times
from carpool_sidecar.http1.messages import find

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool_cli.arrays import Array, Arrays
    from carpool_cli.bench_report import Report
    from carpool_cli.demo.load import Driven
    from carpool_cli.demo.processes import Processes
    from carpool_cli.demo.screen import Screen
    from carpool_cli.servers import Request

SLO = 0.25
TOLERANCE = 1e-3
"""Absolute, on outputs of the order of 1. What float32 sums come to depends on the batch: called directly, without
anything between, onnxruntime's own batches of `magika` differ from single rows by up to 1.6e-4."""

SHOWN = 8
"""Changes of parameters that are printed, the latest."""

ONE_BY_ONE = {"parameters": {"*": {"maxBatch": 1, "maxWait": "0s", "maxInFlight": 1, "passThrough": False}}}


class RealModel(NamedTuple):
    """An ONNX file, requests of one row each, and what it answers to them when asked directly."""

    name: str
    title: str
    path: Path
    output: str
    requests: Sequence[Request]
    expected: Sequence[Array]
    words: Sequence[str]
    """What the answers mean, request by request; none where they are numbers only."""
    rate: float
    """Requests per second to be sent."""


class Stretch(NamedTuple):
    """A part of the load with one way to batch."""

    how: str
    span: Span
    report: Report


class Outcome(NamedTuple):
    """What was seen of one model."""

    model: RealModel
    before: Stretch
    after: Stretch
    checked: int
    merged: int
    """Answers checked that were computed with others."""
    furthest: float
    """The largest difference of any value from the direct answer's."""


def direct(path: Path, inputs: Sequence[Arrays], output: str) -> list[Array]:
    """Run an ONNX file on each of the inputs, one at a time, without anything between."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [session.run([output], one)[0][0] for one in inputs]


async def show(
    model: RealModel, processes: Processes, screen: Screen, before_seconds: float, after_seconds: float
) -> Outcome:
    """Serve a model one by one, then tuned; return what was seen.

    Raises ``DemoError`` for a wrong answer.
    """
    screen.title(model.title)
    config = {
        "onnx": {"path": str(model.path), "name": model.name, "threads": 1},
        "policy": {"slo": {"latency": {"p99": format_seconds(SLO)}}},
    }
    screen.step(f"carpool-sidecar --config {processes.folder / model.name}.yaml, batch size 1 to begin with")
    server = await processes.sidecar(model.name, {**config, **ONE_BY_ONE})
    aim = Aim(server, model.name, model.requests)
    client = Client(server.admin)
    try:
        screen.step(f"{before_seconds:.0f} s of {model.rate:.0f} requests/s, each computed alone")
        driven, looks = await _stretch(aim, client, model, before_seconds, processes, screen)
        before = _seen("one by one", model.name, driven, looks, before_seconds / 4, before_seconds)
        checks = [_check(model, driven)]
        processes.configure(model.name, config)
        screen.step(
            f"the same file without its parameters, taken while running: now there is nothing but a p99 of "
            f"{format_seconds(SLO)}. {after_seconds:.0f} s of the same load"
        )
        changed = time.time()
        while not (await client.get("/v1/config"))["tuned"]:
            processes.check()
        driven, looks = await _stretch(aim, client, model, after_seconds, processes, screen)
        checks.append(_check(model, driven))
        await _explain(client, screen, changed)
        times = looks[-1].times or ()
        learned = [f"{times[b] / b * 1e3:.2f} at {b}" for b in (1, 2, 4, 8, 16, 32, 64) if b < len(times)]
        screen.note(f"what it thinks a row takes, in ms, by the rows in a batch: {', '.join(learned)}")
        after = _seen(looks[-1].parameters.describe(), model.name, driven, looks, after_seconds * 2 / 3, after_seconds)
    finally:
        await client.close()
    checked, merged, furthest = (sum(c[0] for c in checks), sum(c[1] for c in checks), max(c[2] for c in checks))
    outcome = Outcome(model, before, after, checked, merged, furthest)
    for line in model.words[:12]:
        screen.note(f"[green]{line}[/]")
    how_close = f"no value off by more than {furthest:.1e}" if furthest else "every value equal to the last bit"
    screen.step(
        f"{checked} answers ({merged} of them computed in company) agree with direct onnxruntime calls of one row: "
        f"same argmax, {how_close} (tolerance {TOLERANCE:g})"
    )
    return outcome


async def _stretch(
    aim: Aim, client: Client, model: RealModel, seconds: float, processes: Processes, screen: Screen
) -> tuple[Driven, list[Look]]:
    looks: list[Look] = []
    with screen.load(seconds) as show_bar:

        async def tick(at: float) -> None:
            processes.check()
            if (seen := await look(client, model.name, at)) is not None:
                looks.append(seen)
                show_bar(at, seen.parameters.describe())

        due = due_times([model.rate], 1.0, seconds, random.Random(1))  # noqa: S311 - load, no secret
        (driven,) = await drive([aim], due, tick)
    return driven, looks


def _seen(how: str, model: str, driven: Driven, looks: Sequence[Look], start: float, stop: float) -> Stretch:
    first = next(seen for seen in looks if seen.at >= start)
    return Stretch(how, between(first, looks[-1], model), report_on(driven.recording, start, stop - start, SLO))


async def _explain(client: Client, screen: Screen, since: float) -> None:
    """Print the changes and the last word."""
    taken = await decisions(client)
    screen.step("the tuner's own account (/v1/explain)")
    changes = [one for one in taken if one[3]]
    if len(changes) > SHOWN:
        screen.note(f"[dim]({len(changes) - SHOWN} earlier changes)[/]")
    for at, reason, message, change in [*changes[-SHOWN:], *(one for one in taken[-1:] if not one[3])]:
        mark = "->" if change else "= "
        screen.note(f"[dim]after {at - since:4.0f} s[/] {mark} [bold]{reason}[/]: {message}")


def _check(model: RealModel, driven: Driven) -> tuple[int, int, float]:
    """Compare every answer with the direct one; return how many, how many were batched, and the largest difference."""
    furthest, merged = 0.0, 0
    for index, headers, body in driven.answers:
        which = index % len(model.requests)
        answer = tensors.decode_answer(body, find(headers, tensors.HEADER_LENGTH))
        scores = from_tensors(answer.tensors)[model.output][0]
        off = float(np.abs(scores - model.expected[which]).max())
        # Not `off > TOLERANCE`: NaN is no agreement.
        if not off <= TOLERANCE or scores.argmax() != model.expected[which].argmax():
            raise DemoError(f"{model.name}: the answer to request {index} is off by {off:g}, tolerance {TOLERANCE:g}")
        furthest = max(furthest, off)
        merged += find(headers, b"x-carpool-batch-size") not in {None, b"1"}
    return len(driven.answers), merged, furthest
