"""Where the two commands begin: signals are heeded before anything else is loaded.

The first process of a container is not ended by a signal that it does not handle, and loading takes a second: whoever
was told to stop meanwhile would go on until it is killed.
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
    """End at once when told to, until the command has handlers of its own: there is nothing to finish yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # No exception: one that is raised in a callback of the import system is lost.
        signal.signal(number, lambda *_: os._exit(0))
