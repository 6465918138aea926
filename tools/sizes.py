"""`make check`: limits the size of the core, and of classes and functions everywhere.

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
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "carpool"
PACKAGES = (
    CORE,
    *(ROOT / folder / f"carpool_{folder}" for folder in ("sidecar", "operator", "cli")),
)

LINES, GOAL = 9_540, 5_500
"""Lines of the core without token streams: the limit, and the goal."""

GENERATION = ("generation/", "policy/generation.py", "exchange/token_streams.py")
"""Files for token streams."""

LIMITS = {"function lines": 60, "class lines": 250, "class attributes": 12}

LARGER: dict[tuple[str, str], int] = {
    # Plain records, flat because every request reads and writes them: an attribute is a count, or a fact of one
    # request.
    ("carpool/batching/counters.py", "Counters: class attributes"): 24,
    ("carpool/batching/requests.py", "Batch: class attributes"): 17,
    ("carpool/batching/requests.py", "Request: class attributes"): 20,
    ("carpool/generation/requests.py", "Request: class attributes"): 13,
    ("carpool_sidecar/http1/client/calls.py", "Call: class attributes"): 14,
    # The request and the answer that an application has in its hands. Each part would need the exchange itself, since
    # the connection and its queue know requests by that; a reference back is a cycle, which only the garbage collector
    # frees.
    ("carpool_sidecar/http1/server/exchange.py", "Exchange: class attributes"): 17,
    # It puts the parts together: an attribute is a part, which reports and metrics read by its name.
    ("carpool_sidecar/sidecar.py", "Sidecar: class attributes"): 18,
    # Its transport, its pool, its call and tunnels call its methods, and each moves its deadline: a part that had the
    # deadline or the reading would call back for every step.
    ("carpool_sidecar/http1/client/upstream.py", "Upstream: class lines"): 298,
    # A plain record, as above: what is known of a request before it waits.
    ("carpool_sidecar/protocols/common.py", "Parsed: class attributes"): 14,
}
"""By file: what is larger, and its size."""


def found(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """List (name, what, size) of every function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
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


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def wrong(
    packages: Sequence[Path] = PACKAGES, larger: dict[tuple[str, str], int] = LARGER, lines: int = LINES
) -> list[str]:
    """List what is too large, and unnecessary entries of the list; ``lines``: those of the first package."""
    errors, total, left = [], 0, dict(larger)
    for path in (path for folder in packages for path in sorted(folder.rglob("*.py"))):
        folder = next(each for each in packages if path.is_relative_to(each))
        text, name = path.read_text("utf-8"), path.relative_to(folder.parent).as_posix()
        if folder == packages[0] and not path.relative_to(folder).as_posix().startswith(GENERATION):
            total += text.count("\n")
        for owner, what, size in found(ast.parse(text)):
            limit = LIMITS[what]
            known = left.pop((name, f"{owner}: {what}"), limit)
            has = f"{name}: {owner} has {size} {what.partition(' ')[2]}"
            if size > known:
                errors.append(f"{has}; at most {known}")
            elif size <= limit < known:
                errors.append(f"{has}: take it off the list in tools/sizes.py")
    errors += [f"{name}: there is no {what} any more: take it off the list in tools/sizes.py" for name, what in left]
    if total > lines:
        errors.append(f"the core has {total:,} lines; at most {lines:,}, and the goal is {GOAL:,}")
    return errors


def main() -> int:
    """Print the errors."""
    errors = wrong()
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
