"""`carpool top`: the live view of a running sidecar."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool_cli.admin_client import AdminClient, AdminError, Explanation, key_of
from carpool_cli.options import ADDRESS, Address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INTERVAL = 0.5
"""Seconds between two looks."""

EXPLAIN_EVERY = 4
"""Looks between two questions for decisions: they come once a second at most, and their answer is longer."""


@click.command(
    epilog="""\b
Examples:
  carpool top
  carpool top http://127.0.0.1:9090 --key-file key
"""
)
@click.argument("admin", type=ADDRESS, default="http://127.0.0.1:9090")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the admin key.")
def command(*, admin: Address, key_file: Path | None) -> None:
    """Watch the sidecar whose admin port is at ADMIN (http://127.0.0.1:9090 by default). Ctrl-C ends it."""
    client = AdminClient(admin, key_of(key_file))
    try:
        client.snapshot()
        watch(client, f"carpool {admin}", lambda: True)
    except AdminError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo()


def watch(
    client: AdminClient,
    title: str,
    goes_on: Callable[[], bool],
    notes: Callable[[], Sequence[str]] = tuple,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Draw the view twice a second while ``goes_on``; ``notes`` are lines to stand below it.

    Raises ``AdminError`` when the sidecar stops answering while it should.
    """
    from rich.console import Console  # noqa: PLC0415 - not for --help
    from rich.live import Live  # noqa: PLC0415 - likewise

    from carpool_cli.dashboard import Watch  # noqa: PLC0415 - likewise

    seen = Watch(title)
    explanation = Explanation(tuned=True, decisions=[])
    look = 0
    with Live(console=Console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        while goes_on():
            try:
                figures = seen.add(client.snapshot())
                if look % EXPLAIN_EVERY == 0:
                    explanation = client.explanation()
            except AdminError:
                if goes_on():
                    raise
                return
            look += 1
            live.update(seen.render(figures, explanation, time.time(), notes()), refresh=True)
            pause(INTERVAL)
