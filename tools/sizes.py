"""`make check`: limits the size of the core, its classes and its functions.

Larger ones are listed below with their size, which may only shrink; one that is not larger any more must leave the
list.

Exit codes: 0, all within their limits; 1, otherwise.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE = Path(__file__).parents[1] / "core" / "carpool"

LINES, GOAL = 9_542, 5_500
"""Lines of the core without token streams: the limit, and the goal."""

GENERATION = ("generation/", "policy/generation.py", "exchange/token_streams.py")
"""Files for token streams."""

LIMITS = {"function lines": 60, "class lines": 250, "class attributes": 12}

LARGER: dict[tuple[str, str], int] = {
    # Plain records, flat because every request reads and writes them: an attribute is a count, or a fact of one
    # request.
    ("batching/counters.py", "Counters: class attributes"): 24,
    ("batching/requests.py", "Batch: class attributes"): 17,
    ("batching/requests.py", "Request: class attributes"): 20,
    ("generation/requests.py", "Request: class attributes"): 13,
}


def found(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """List (name, what, size) of every function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, "function lines", _lines(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, "class lines", _lines(node)
            attributes = {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            yield node.name, "class attributes", len(attributes)


def _lines(node: ast.FunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def wrong(folder: Path = CORE, larger: dict[tuple[str, str], int] = LARGER, lines: int = LINES) -> list[str]:
    """List what is too large, and unnecessary entries of the list."""
    told, total, left = [], 0, dict(larger)
    for path in sorted(folder.rglob("*.py")):
        text, name = path.read_text("utf-8"), path.relative_to(folder).as_posix()
        if not name.startswith(GENERATION):
            total += text.count("\n")
        for owner, what, size in found(ast.parse(text)):
            limit = LIMITS[what]
            known = left.pop((name, f"{owner}: {what}"), limit)
            if size > known:
                told.append(f"{name}: {owner} has {size} {what.partition(' ')[2]}; at most {known}")
            elif size <= limit < known:
                told.append(
                    f"{name}: {owner} has {size} {what.partition(' ')[2]}: take it off the list in tools/sizes.py"
                )
    told += [f"{name}: there is no {what} any more: take it off the list in tools/sizes.py" for name, what in left]
    if total > lines:
        told.append(f"the core has {total:,} lines; at most {lines:,}, and the goal is {GOAL:,}")
    return told


def main() -> int:
    """Print the errors."""
    told = wrong()
    print("\n".join(told), end="\n" if told else "")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
