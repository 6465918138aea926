"""Ctrl-C: one line, and the usual exit code of shells."""

from __future__ import annotations

import click

STOPPED = 130
"""128 and the number of SIGINT."""


class Interrupted(click.ClickException):
    """A command that was stopped by Ctrl-C."""

    exit_code = STOPPED
