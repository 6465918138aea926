"""Run the demonstration: ``make demo``."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.markup import escape

from carpool_cli.demo import day, filetypes, picture, real_models, tables, tower
from carpool_cli.demo.play import play
from carpool_cli.demo.processes import Processes
from carpool_cli.demo.screen import Screen
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.profiling.device_profile import DeviceProfile


class Scale(NamedTuple):
    """How long each part takes, in seconds, and how wide the ranking tower is."""

    one_by_one: float
    tuned: float
    day: float
    hours: Sequence[tuple[str, float]]
    width: int

    @property
    def minutes(self) -> float:
        """Duration of the loads, and about half a minute for everything else."""
        return (2 * (self.one_by_one + self.tuned) + self.day + 30) / 60


FULL = Scale(one_by_one=5.0, tuned=16.0, day=96.0, hours=day.HOURS, width=2048)
QUICK = Scale(one_by_one=1.0, tuned=1.5, day=2.0, hours=(("night", 15.0), ("morning", 40.0)), width=256)


async def run(folder: Path, files: Path, profile: DeviceProfile, screen: Screen, scale: Scale) -> None:
    """Show everything; raises ``DemoError`` if something is wrong."""
    started = time.monotonic()
    screen.step(
        f"[bold]Carpool[/], about {scale.minutes:.0f} minutes: two real models in the sidecar itself, then a day on a "
        "stand-in for an accelerator. Real processes and requests on 127.0.0.1; Ctrl-C ends them all"
    )
    outcomes = []
    for make in (partial(filetypes.model, files, 20.0), partial(tower.model, folder, scale.width, 100.0)):
        model = await asyncio.to_thread(make)
        with Processes(folder) as processes:
            outcomes.append(await real_models.show(model, processes, screen, scale.one_by_one, scale.tuned))
    with Processes(folder) as processes:
        lived = await day.live(profile, scale.hours, scale.day, processes, screen)
    screen.title("In short")
    for line in tables.verdicts(lived, outcomes):
        screen.console.print(line)
    screen.title("The figures")
    screen.table(tables.of_models(outcomes))
    screen.table(tables.of_day(lived))
    for line in tables.notes(lived):
        screen.console.print(f"[dim]{escape(line)}[/]")
    screen.step("Carpool's changes of the day, and why" if lived.decisions else "Carpool changed nothing in the day")
    for hour, reason, message in lived.decisions:
        screen.note(f"[dim]{hour:<10}[/] [bold]{reason}[/]: {escape(message)}")
    await asyncio.to_thread(picture.draw, folder / "demo.png", lived, outcomes)
    screen.console.print()
    screen.step(f"picture: {escape(str(folder / 'demo.png'))}; configurations and logs of all processes are beside it")
    screen.step(f"done in {time.monotonic() - started:.0f} s; nothing is left running")


@click.command()
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: shows that it works, not what it is worth.")
@click.option(
    "--out", "folder", type=click.Path(path_type=Path, file_okay=False), default=".demo", show_default=True,
    help="Folder for the picture, models, configurations and logs.",
)  # fmt: skip
@click.option(
    "--files", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".", show_default=True,
    help="Folder with files to classify.",
)  # fmt: skip
@click.option(
    "--profile", type=click.Path(path_type=Path), default="benchmarks/profiles/resnet50-v100.json", show_default=True,
    help="The accelerator.",
)  # fmt: skip
def command(*, quick: bool, folder: Path, files: Path, profile: Path) -> None:
    """Serve real models and a stand-in accelerator, and watch the batching tune itself.

    Starts real processes on 127.0.0.1 and ends them all, also on Ctrl-C. Exits 1 when something went wrong.
    """
    # At once, not after a minute of other work.
    if not profile.exists():
        raise click.ClickException(
            f"there is no {profile} here: start it in the repository's folder, or name --profile"
        )
    device = device_profile.load(profile)
    screen = Screen()
    play(folder, screen, partial(run, folder, files.resolve(), device, screen, QUICK if quick else FULL))


if __name__ == "__main__":
    command()
