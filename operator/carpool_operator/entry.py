"""The entry points of the two commands: signals are handled before anything else is loaded.

A container's first process ignores signals without a handler, and loading takes a second. A process stopped meanwhile
would go on until it is killed.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def operator() -> int:
    """Run ``carpool-operator``; returns the exit code."""
    _heed_signals()
    with _extra("carpool-operator"):
        from carpool_operator.main import main  # noqa: PLC0415 - see above
    return main()


def injector() -> int:
    """Run ``carpool-injector``; returns the exit code."""
    _heed_signals()
    with _extra("carpool-injector"):
        from carpool_operator.webhook.main import main  # noqa: PLC0415 - likewise
    return main()


@contextmanager
def _extra(command: str) -> Iterator[None]:
    """Name the extra to install if another package is missing: the scripts are installed without it, too."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("carpool"):
            raise
        raise SystemExit(
            f"{command} needs {error.name.partition('.')[0]}, which comes with the extra `operator`: in Carpool's "
            "folder, pip install '.[operator]'"
        ) from None


def _heed_signals() -> None:
    """Exit at once on a signal, until the command installs its own handlers: there is nothing to finish yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # No exception: one raised in a callback of the import system is lost.
        signal.signal(number, lambda *_: os._exit(0))
