"""`carpool top`: the live view of a running sidecar."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from carpool_cli import options
from carpool_cli.live.admin_client import AdminClient, AdminError, client_of
from carpool_cli.options import ADDRESS, Address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

INTERVAL = 0.5
"""Seconds between two polls."""

ONCE = 2.0
"""Seconds between the two polls of --once."""


@click.command(
    epilog="""\b
Examples:
  carpool top
  carpool top http://127.0.0.1:9090 --key-file key
  carpool top --once > now.txt
"""
)
@click.argument("admin", type=ADDRESS, default="http://127.0.0.1:9090")
@click.option(
    "--once", is_flag=True, help="Observe for two seconds, print the result, and end; the default without a terminal."
)
@options.admin_access
def command(*, admin: Address, once: bool, key_file: Path | None, workload: str | None) -> None:
    """Watch the sidecar with the admin port ADMIN (http://127.0.0.1:9090 by default). Ctrl-C ends it.

    Rates and percentiles are over the last 10 s. If the terminal is too low, older decisions are left out; `carpool
    explain` has more.
    """
    client = client_of(admin, key_file, workload)
    try:
        client.report()
        if once or not sys.stdout.isatty():
            _once(client)
            return
        with suppress(KeyboardInterrupt):  # the usual end of a live view; for --once it is an error
            watch(client, "carpool")
    except AdminError as error:
        raise click.ClickException(str(error)) from None


def watch(
    client: AdminClient,
    title: str,
    *,
    hint: Callable[[bool], str] = lambda _: "",
    goes_on: Callable[[], bool] = lambda: True,
    notes: Callable[[], Sequence[str]] = tuple,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Draw the view twice a second while ``goes_on``, on a screen of its own; the last frame stays.

    ``hint`` is called with whether the model is ready; its result is shown until the first request comes, ``notes``
    below all. Raises ``AdminError`` if the sidecar stops answering while it should.
    """
    from rich.console import Console  # noqa: PLC0415 - not for --help
    from rich.live import Live  # noqa: PLC0415 - likewise

    from carpool_cli.live.dashboard import Watch  # noqa: PLC0415 - likewise

    console = Console()
    seen = Watch(title)
    last = None
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while goes_on():
                report = client.report()
                last = seen.look(report, client.explanation(), time.time(), notes(), hint(report.ready))
                live.update(last, refresh=True)
                pause(INTERVAL)
    except AdminError:
        if goes_on():
            raise
    finally:
        if last is not None:
            console.print(last)


def _once(client: AdminClient) -> None:
    from rich.console import Console  # noqa: PLC0415 - not for --help

    from carpool_cli.live.dashboard import Watch  # noqa: PLC0415 - likewise

    seen = Watch("carpool")
    seen.look(client.report(), client.explanation(), time.time())
    time.sleep(ONCE)
    Console().print(seen.look(client.report(), client.explanation(), time.time()))
