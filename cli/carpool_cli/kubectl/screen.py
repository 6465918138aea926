"""Printed tables and lines, with colour on a terminal only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

GOOD, BAD, UNSURE, FAINT, STRONG = "green", "red", "yellow", "dim", "bold"
OF_STATUS = {"True": GOOD, "False": BAD, "Unknown": UNSURE}


def text(value: object, style: str = "") -> Text:
    """Return text for the screen, without terminal control characters."""
    return Text("".join(each if each.isprintable() else " " for each in str(value)), style)


def show(*parts: Text | str, indent: int = 0) -> None:
    """Print a line."""
    line = Text(" " * indent)
    for part in parts:
        line.append_text(part if isinstance(part, Text) else text(part))
    # Long lines are not wrapped, for programs that read them.
    Console(file=sys.stdout, soft_wrap=True, highlight=False).print(line)


def table(rows: Sequence[Sequence[Text | str]], indent: int = 0) -> None:
    """Print rows in columns; the first row has the headings."""
    cells = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    cells[0] = [text(cell.plain, STRONG) for cell in cells[0]]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    for row in cells:
        padded: list[Text] = []
        for cell, width in zip(row[:-1], widths, strict=False):
            padded += [cell, Text(" " * (width - cell.cell_len + 3))]
        show(*padded, row[-1], indent=indent)
