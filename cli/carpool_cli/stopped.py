"""Ctrl-C: said in one line, with the exit code that shells expect."""

from __future__ import annotations

import click

STOPPED = 130
"""128 and the number of SIGINT."""


class Interrupted(click.ClickException):
    """A command that was stopped by Ctrl-C."""

    exit_code = STOPPED
