"""A demonstration's output while it runs: steps with their times, and a bar for each load."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDE = 140
"""Columns that the tables need."""


class Screen:
    """Output for users; a file or a pipe gets the same lines without the bars."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, width=None if Console().is_terminal else WIDE)
        self._wide = Console(highlight=False, width=max(self.console.width, WIDE))
        self._started = time.monotonic()

    def title(self, text: str) -> None:
        """Begin a part."""
        self.console.print()
        self.console.rule(f"[bold]{text}[/]", align="left")

    def step(self, text: str) -> None:
        """Print the next step."""
        self.console.print(f"[dim]{time.monotonic() - self._started:5.0f}s[/]  {text}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note on the step."""
        self.console.print(f"        {text}", soft_wrap=True)

    def table(self, table: RenderableType) -> None:
        """Print a table; a narrower terminal wraps its lines, as columns of three letters can't be read."""
        self._wide.print(table)

    @contextmanager
    def load(self, seconds: float) -> Iterator[Callable[[float, str], None]]:
        """Show a bar; calls update it with the seconds passed and a text."""
        columns = (TextColumn("       "), BarColumn(30), TimeRemainingColumn(), TextColumn("[cyan]{task.description}"))
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task("", total=seconds)
            yield lambda passed, text: progress.update(bar, completed=min(passed, seconds), description=text)
