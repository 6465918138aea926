"""The entry points of the two commands: signals are handled before anything else is loaded.

A container's first process ignores signals without a handler, and loading takes a second. A process stopped meanwhile
would go on until it is killed.
"""

from __future__ import annotations

import os
import signal


def operator() -> int:
    """Run ``carpool-operator``; returns the exit code."""
    _heed_signals()
    from carpool_operator.main import main  # noqa: PLC0415 - see above

    return main()


def injector() -> int:
    """Run ``carpool-injector``; returns the exit code."""
    _heed_signals()
    from carpool_operator.webhook.main import main  # noqa: PLC0415 - likewise

    return main()


def _heed_signals() -> None:
    """Exit at once on a signal, until the command installs its own handlers: there is nothing to finish yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # No exception: one raised in a callback of the import system is lost.
        signal.signal(number, lambda *_: os._exit(0))
