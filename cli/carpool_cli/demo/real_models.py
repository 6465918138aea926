"""Real models in a sidecar: first single requests, then tuned for a p99, with every answer checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import format_seconds
from carpool_cli.demo.load import Aim, Driven, drive, report_on
from carpool_cli.demo.observed import Look, Span, between, decisions, look
from carpool_cli.demo.processes import Client, DemoError, Processes
from carpool_cli.load import tensors
from carpool_cli.load.loadgen import due_times
from carpool_cli.profiling.arrays import Array, Arrays, from_tensors
from carpool_cli.profiling.measuring import interleave
from carpool_sidecar.http1.messages import find

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool_cli.demo.screen import Screen
    from carpool_cli.load.report import Report
    from carpool_cli.load.servers import Request

SLO = 0.15
"""Allows for a shared CPU's pauses, whose misses show nothing about batching. With a much longer SLO, a batch waits so
long that the cost of waking up decides, and not the model: 8 % of wall time in a batch of 8, none of CPU time."""
TOLERANCE = 1e-3
"""Absolute, on outputs of the order of 1. float32 sums depend on whether a row is alone: onnxruntime's own batches of
`magika`, called directly, differ from single rows by up to 2.85e-3 on files of this repository, and from each other by
2.4e-7. So a batched answer is compared with a batched one."""

SHOWN = 10
"""Most changes of parameters that are printed, the latest ones."""

SAID = 12
"""Most answers that are printed."""

SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes that are timed without a sidecar, to measure what batching saves here."""

ROUNDS = 6
"""Repetitions of each, if there is time for them."""

ONE_BY_ONE = {"parameters": {"*": {"maxBatch": 1, "maxWait": "0s", "maxInFlight": 1, "passThrough": False}}}


class RealModel(NamedTuple):
    """An ONNX file, requests of one row each, and its answers when called directly."""

    name: str
    title: str
    path: Path
    output: str
    inputs: Sequence[Arrays]
    """One row each."""
    requests: Sequence[Request]
    """The same inputs as requests."""
    expected: Sequence[Array]
    in_batch: Sequence[Array]
    """The same answers, of each row in a batch with itself."""
    words: Sequence[tuple[str, str]]
    """Each request's subject and the meaning of its answer; empty if answers are only numbers."""
    rate: float
    """Requests per second to be sent."""


class Stretch(NamedTuple):
    """A part of a load; ``how`` its requests were batched most of that time.

    ``chosen``: by a change during the load; else it was so from the start.
    """

    how: str
    chosen: bool
    span: Span
    report: Report


class Outcome(NamedTuple):
    """The results of one model."""

    model: RealModel
    direct: ServiceTime
    """Timed without a sidecar."""
    before: Stretch
    after: Stretch

    @property
    def worth(self) -> float:
        """Cost of a single row relative to one in the best batch, timed without a sidecar."""
        return self.direct.per_row(1) / min(self.direct.per_row(rows) for rows in self.direct.sizes)


def direct(path: Path, inputs: Sequence[Arrays], output: str, *, copies: int = 1) -> list[Array]:
    """Run an ONNX file on each of the inputs, ``copies`` of it in a batch, without a sidecar."""
    session = _session(path)
    batches = ({name: np.concatenate([row] * copies) for name, row in one.items()} for one in inputs)
    return [session.run([output], batch)[0][0] for batch in batches]


def worth(path: Path, inputs: Sequence[Arrays], seconds: float) -> ServiceTime:
    """Time batches of an ONNX file, without a sidecar, for about ``seconds``: the minimum of many rounds.

    In CPU time: on a busy machine a long batch is interrupted every time, and would seem expensive.
    """
    session = _session(path)
    runs, cold = {}, {}
    for size in SIZES:
        rows = [inputs[index % len(inputs)] for index in range(size)]
        batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        runs[size] = partial(session.run, None, batch)
        before = time.process_time()
        runs[size]()
        cold[size] = time.process_time() - before
    timings = interleave(runs, cold, rounds=ROUNDS, budget=seconds, clock=time.process_time)
    return ServiceTime.measured({timing.rows: timing.best for timing in timings})


def _session(path: Path) -> Any:  # noqa: ANN401 - onnxruntime has no types
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


async def show(
    model: RealModel, processes: Processes, screen: Screen, before_seconds: float, after_seconds: float
) -> Outcome:
    """Serve a model with single requests, then tuned; return the results.

    Raises ``DemoError`` for a wrong answer.
    """
    screen.title(model.title)
    timed = await asyncio.to_thread(worth, model.path, model.inputs, before_seconds)
    best = min(timed.sizes, key=timed.per_row)
    screen.step(
        f"onnxruntime by itself, one core: a row takes {timed.per_row(1) * 1e3:.2f} ms of CPU alone, at best "
        f"{timed.per_row(best) * 1e3:.2f} ms, in a batch of {best}"
    )
    config = {
        "onnx": {"path": str(model.path), "name": model.name, "threads": 1},
        "policy": {"slo": {"latency": {"p99": format_seconds(SLO)}}},
    }
    server = await processes.sidecar(model.name, {**config, **ONE_BY_ONE})
    screen.step(f"carpool-sidecar --config {escape(str(server.config))}, fixed at batch size 1 to begin with")
    aim = Aim(server, model.name, model.requests)
    client = Client(server.admin)
    try:
        screen.step(f"{before_seconds:.0f} s of {model.rate:.0f} requests/s, each computed alone")
        driven, looks = await _stretch(aim, client, before_seconds, model.rate, processes, screen)
        # Nobody needs a tuner to have every request computed alone.
        before = _seen(model.name, driven, looks, before_seconds / 4, before_seconds, tuned=False)
        before = before._replace(how="one by one")
        checks = [_check(model, driven)]
        await processes.configure(server, config)
        screen.step(
            f"the parameters are taken out of that file while it runs: now all it knows is a p99 of "
            f"{format_seconds(SLO)}. {after_seconds:.0f} s of the same load"
        )
        changed = time.time()
        driven, looks = await _stretch(aim, client, after_seconds, model.rate, processes, screen)
        checks.append(_check(model, driven))
        await _explain(client, screen, changed)
        after = _seen(model.name, driven, looks, after_seconds * 2 / 3, after_seconds)
    finally:
        await client.close()
    screen.step("what a row takes, ms, by the rows in its batch")
    screen.table(Padding(_prices(timed, looks[-1], model.name), (0, 0, 0, 8), expand=False))
    checked, merged, furthest = (sum(c[0] for c in checks), sum(c[1] for c in checks), max(c[2] for c in checks))
    if model.words:
        screen.step(f"some of the {len(model.words)} answers, all of them the same as those of {model.name}'s own API")
        width = max(len(asked) for asked, _ in model.words[:SAID])
        for asked, said in model.words[:SAID]:
            screen.note(f"{escape(f'{asked:<{width}}')}  [green]{said}[/]")
    how_close = f"no value off by more than {furthest:.1e}" if furthest else "every value equal to the last bit"
    screen.step(
        f"{checked} answers ({merged} of them computed in a batch with others) agree with direct onnxruntime calls: "
        f"same argmax, {how_close} (tolerance {TOLERANCE:g})"
    )
    return Outcome(model, timed, before, after)


def _prices(timed: ServiceTime, seen: Look, model: str) -> Table:
    """Compare the direct timings with the latencies that the sidecar learned from its own batches."""
    learned = seen.times or []  # none: nothing was learned yet
    largest = min(max(cell[1] for cell in seen.stats.models[model].cells), len(learned) - 1)
    table = Table(box=None, padding=(0, 1), show_header=False)
    for row in (
        ("", *(str(rows) for rows in timed.sizes)),
        ("by itself, CPU time, the least of many", *(f"{timed.per_row(rows) * 1e3:.2f}" for rows in timed.sizes)),
        (
            "by Carpool, wall time, under its load",
            *(f"{learned[rows] / rows * 1e3:.2f}" if rows <= largest else "-" for rows in timed.sizes),
        ),
    ):
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


async def _stretch(
    aim: Aim, client: Client, seconds: float, rate: float, processes: Processes, screen: Screen
) -> tuple[Driven, list[Look]]:
    looks: list[Look] = []
    with screen.load(seconds) as show_bar:

        async def tick(at: float) -> None:
            processes.check()
            if (seen := await look(client, aim.server, aim.model, at)) is not None:
                looks.append(seen)
                show_bar(at, seen.parameters.describe())

        due = due_times([rate], 1.0, seconds, random.Random(1))  # noqa: S311 - load, no secret
        (driven,) = await drive([aim], due, tick)
    return driven, looks


def _seen(
    model: str, driven: Driven, looks: Sequence[Look], start: float, stop: float, *, tuned: bool = True
) -> Stretch:
    # From the last poll before it: the window begins there, so that it is never empty.
    first = max(sum(seen.at <= start for seen in looks) - 1, 0)
    window = looks[first:]
    how, chosen = mostly([seen.parameters.describe() for seen in looks], first)
    report = report_on(driven.recording, start, stop - start, SLO)
    return Stretch(how, chosen, between(window[0], window[-1], model, tuned=tuned), report)


def mostly(settings: Sequence[str], first: int) -> tuple[str, bool]:
    """Return the most frequent setting from the poll ``first`` on, and whether a change of this load led to it."""
    (most, _), *others = Counter(settings[first:]).most_common()
    changed = dropwhile(lambda each: each == settings[0], settings)
    return f"{most} (mostly)" if others else most, most in changed


async def _explain(client: Client, screen: Screen, since: float) -> None:
    """Print the changes and the last decision."""
    taken = await decisions(client)
    screen.step("the tuner's own account (/v1/explain)")
    changes = [one for one in taken if one[3]]
    if len(changes) > SHOWN:
        screen.note(f"[dim]({len(changes) - SHOWN} earlier changes)[/]")
    for at, reason, message, change in [*changes[-SHOWN:], *(one for one in taken[-1:] if not one[3])]:
        mark = "->" if change else "= "
        screen.note(f"[dim]after {at - since:4.0f} s[/] {mark} [bold]{reason}[/]: {escape(message)}")


def _check(model: RealModel, driven: Driven) -> tuple[int, int, float]:
    """Compare every answer with the direct one; return the counts of all and of batched ones, and the worst error."""
    furthest, merged = 0.0, 0
    for index, headers, body in driven.answers:
        which = index % len(model.requests)
        answer = tensors.decode_answer(body, find(headers, tensors.HEADER_LENGTH))
        scores = from_tensors(answer.tensors)[model.output][0]
        batched = find(headers, b"x-carpool-batch-size") not in {None, b"1"}
        off = float(np.abs(scores - (model.in_batch if batched else model.expected)[which]).max())
        # Not `off > TOLERANCE`: NaN must not count as equal.
        if not off <= TOLERANCE or scores.argmax() != model.expected[which].argmax():
            raise DemoError(f"{model.name}: the answer to request {index} is off by {off:g}, tolerance {TOLERANCE:g}")
        furthest = max(furthest, off)
        merged += batched
    return len(driven.answers), merged, furthest
