"""Plays a demonstration to its end: makes its folder, heeds Ctrl-C, and sets the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import uvloop
from rich.markup import escape

from carpool_cli.demo.processes import DemoError
from carpool_cli.stopped import STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from carpool_cli.demo.screen import Screen


def play(folder: Path, screen: Screen, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a demonstration. Exits 130 after Ctrl-C, 1 if something went wrong."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        uvloop.run(_stoppable(screen, work))
    except (DemoError, OSError) as error:
        screen.console.print(f"\n[red]{escape(str(error))}[/]", soft_wrap=True)
        sys.exit(1)


async def _stoppable(screen: Screen, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None  # noqa: S101 - for the type checker: this is a coroutine
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        await work()
    except asyncio.CancelledError:
        screen.console.print("\nstopped; nothing is left running")
        # All processes have ended. A thread may compute for seconds yet, and a usual exit would wait for it.
        os._exit(STOPPED)
