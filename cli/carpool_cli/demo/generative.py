"""The same overload on a real LLM engine, without the gate and with it: ``make demo-llm``.

The model has random weights and is created here; OpenVINO GenAI computes it on a CPU. Real processes and requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import matplotlib as mpl
from rich.markup import escape
from rich.table import Table

mpl.use("Agg")

import matplotlib.pyplot as plt

from carpool.generation.requests import Slo
from carpool_cli.demo import random_model
from carpool_cli.demo.picture import BLUE, GREY, RED, STYLE
from carpool_cli.demo.play import play
from carpool_cli.demo.processes import DemoError, Processes, Running
from carpool_cli.demo.screen import Screen
from carpool_cli.demo.streams_load import arrivals, at_once, offered
from carpool_cli.load.stream_report import StreamReport, summarize
from carpool_cli.options import FiniteRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from carpool_cli.load.streaming import StreamGenerator, StreamRecording

SLO = Slo(2.0, 0.1)
"""Seconds to the first token, and per further token."""
TARGETS = {"ttft": {"p99": "2s"}, "tpot": {"p99": "100ms"}}
OVERLOAD = 1.6
"""Offered load, relative to the engine's answers per second when it always has 16 requests."""
WARM_UP = 8.0
"""Seconds in which the gate learns; the plot includes them, the figures do not."""


class Arm(NamedTuple):
    """One way to serve the load, and its results."""

    name: str
    recording: StreamRecording
    report: StreamReport


async def run(folder: Path, screen: Screen, seconds: float, size: str) -> None:
    """Show both; raises ``DemoError`` if something is wrong."""
    started = time.monotonic()
    if importlib.util.find_spec("openvino_genai") is None:
        raise DemoError("OpenVINO GenAI is not installed: in Carpool's folder, pip install '.[llm]'")
    screen.step("[bold]Carpool[/]: a language model of random weights, computed by OpenVINO GenAI on one core")
    model = folder / "random.gguf"
    await asyncio.to_thread(random_model.write, model, random_model.SIZES[size])
    llm = {"path": str(model), "threads": 1, "kvTokens": 65536}
    rate = 0.0
    arms: list[Arm] = []
    for name, slo in (("no gate", {"latency": {"p99": "60s"}}), ("Carpool's gate", TARGETS)):
        screen.title(name)
        with Processes(folder) as processes:
            sidecar = await processes.sidecar(name.replace(" ", "-"), {"llm": llm, "policy": {"slo": slo}})
            host, _, port = sidecar.address.rpartition(":")
            if not rate:
                await at_once(host, int(port), 16, 2.0, 1)  # the first runs are slow
                rate = OVERLOAD * await at_once(host, int(port), 16, 6.0, 2)
                screen.step(
                    f"it answers {rate / OVERLOAD:.1f} requests/s when it always has 16; {rate:.1f}/s are offered"
                )
            arms.append(await _live(name, arrivals(host, int(port), rate, seconds, 3), sidecar, screen, seconds))
    screen.title("The figures")
    screen.table(table(arms))
    await asyncio.to_thread(draw, folder / "generative.png", arms)
    name = escape(str(folder / "generative.png"))
    screen.step(f"picture: {name}; done in {time.monotonic() - started:.0f} s")


async def _live(name: str, generator: StreamGenerator, sidecar: Running, screen: Screen, seconds: float) -> Arm:
    """Serve the load, and show the progress."""
    with screen.load(seconds) as moved:

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.5)
                moved(max(0.0, generator.now()), f"{generator.under_way} requests under way on {sidecar.address}")

        watching = asyncio.get_running_loop().create_task(watch())
        try:
            recording = await offered(generator, seconds)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    report = summarize(
        recording, slo=SLO, warm_up=min(WARM_UP, seconds / 2), seconds=seconds - min(WARM_UP, seconds / 2)
    )
    screen.step(f"[bold]{report.goodput:.2f} good answers/s[/]: first token within 2 s, then 100 ms per token")
    return Arm(name, recording, report)


def table(arms: list[Arm]) -> Table:
    """Return the figures side by side."""
    found = Table(box=None, header_style="bold")
    for head in (
        "",
        "good/s",
        "complete",
        "refused",
        "given up",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "pauses",
    ):
        found.add_column(head, justify="left" if not head else "right")
    for name, recording, report in arms:
        ttft, tpot = report.ttft, report.tpot
        times = [f"{each:.2f}s" for each in (ttft.p50, ttft.p99)] if ttft is not None else ["", ""]
        times += [f"{each * 1e3:.0f}ms" for each in (tpot.p50, tpot.p99)] if tpot is not None else ["", ""]
        counts = (report.complete, report.errors.get("429", 0), recording.left_out)
        found.add_row(name, f"{report.goodput:.2f}", *map(str, counts), *times, f"{report.paused_seconds:.1f}s")
    return found


def draw(path: Path, arms: list[Arm]) -> None:
    """Draw every answer: its arrival, its time to the first token, and its time per token."""
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, len(arms), figsize=(10.5, 5.6), layout="constrained", sharex=True, sharey="row")
        for column, (name, recording, report) in enumerate(arms):
            answers = [each for each in recording.streams if each.first]
            refused = [each.due for each in recording.streams if each.failure == "429"]
            late = [not each.failure and (each.ttft > SLO.ttft or each.tpot > SLO.tpot) for each in answers]
            colors = [RED if one else BLUE for one in late]
            top, bottom = grid[0][column], grid[1][column]
            _dots(top, [each.due for each in answers], [each.ttft for each in answers], colors, SLO.ttft)
            _dots(bottom, [each.due for each in answers], [each.tpot * 1e3 for each in answers], colors, SLO.tpot * 1e3)
            top.plot(refused, [0.0] * len(refused), "|", color=GREY, markersize=9)
            title = (
                f"{name}: {report.goodput:.2f} good answers/s, {len(refused)} refused, {recording.left_out} given up"
            )
            top.set_title(title, fontsize=10, loc="left")
            bottom.set_xlabel("seconds at which a request was due")
        grid[0][0].set_ylabel("time to the first token, s")
        grid[1][0].set_ylabel("time per further token, ms")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _dots(axes: Axes, due: list[float], values: list[float], colors: list[str], target: float) -> None:
    axes.scatter(due, values, c=colors, s=11, linewidths=0)
    axes.axhline(target, color=GREY, linewidth=1)
    axes.set_ylim(bottom=-0.05 * target)


@click.command()
@click.option("--seconds", type=FiniteRange(2.0), default=40.0, show_default=True, help="Of each of the two loads.")
@click.option(
    "--out", "folder", type=click.Path(path_type=Path, file_okay=False), default=".demo", show_default=True,
    help="Folder for the picture, the model, configurations and logs.",
)  # fmt: skip
@click.option(
    "--size", type=click.Choice(list(random_model.SIZES)), default="small", show_default=True, help="Size of the model."
)
def command(*, seconds: float, folder: Path, size: str) -> None:
    """Overload a real engine for language models, without Carpool's gate and with it.

    Starts real processes on 127.0.0.1 and ends them all, also on Ctrl-C. Exits 1 when something went wrong.
    """
    screen = Screen()
    play(folder, screen, partial(run, folder, screen, seconds, size))


if __name__ == "__main__":
    command()
