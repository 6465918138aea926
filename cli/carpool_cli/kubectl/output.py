"""Output as data, for programs."""

from __future__ import annotations

import click
import msgspec
import yaml

FORMATS = click.Choice(["json", "yaml"])


def document(value: object, form: str) -> str:
    """Format plain data as ``json`` or ``yaml``."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    written: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return written
