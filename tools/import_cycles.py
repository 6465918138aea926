"""Import cycles between modules, including imports for types alone: ``python tools/import_cycles.py``.

Exits 1 if there is a cycle that ``ALLOWED`` does not explain, or an entry of ``ALLOWED`` that no cycle needs any more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import grimp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PACKAGES = ("carpool", "carpool_sidecar", "carpool_operator", "carpool_cli")

Import: TypeAlias = tuple[str, str]
"""Importer and imported."""

ALLOWED: dict[Import, str] = {
    ("carpool.batching.requests", "carpool.batching.model_state"): "a batch names the lane that it was taken from",
    ("carpool_sidecar.admin.app", "carpool_sidecar.sidecar"): "it shows the state of the whole sidecar",
    ("carpool_sidecar.admin.metrics", "carpool_sidecar.sidecar"): "it reads the counters of the whole sidecar",
    (
        "carpool_sidecar.http1.client.answer",
        "carpool_sidecar.http1.client.calls",
    ): "it is passed on to a call's receiver",
    ("carpool_sidecar.http1.client.calls", "carpool_sidecar.http1.client.pool"): "a call knows its pool",
    ("carpool_sidecar.http1.client.upstream", "carpool_sidecar.http1.client.pool"): "a connection knows its pool",
    (
        "carpool_sidecar.http1.client.upstream",
        "carpool_sidecar.http1.client.calls",
    ): "a connection knows its call",
    ("carpool_sidecar.http1.server.connection", "carpool_sidecar.http1.server.server"): "a connection knows its server",
    (
        "carpool_sidecar.http1.server.application",
        "carpool_sidecar.http1.server.exchange",
    ): "it is called with exchanges",
    (
        "carpool_sidecar.http1.server.exchange",
        "carpool_sidecar.http1.server.connection",
    ): "it knows its connection",
    (
        "carpool_sidecar.http1.server.incoming",
        "carpool_sidecar.http1.server.connection",
    ): "it makes its exchanges",
}
"""Imports that close a cycle, each for types alone, and the reason."""


def groups(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the modules that import each other, directly or not, in groups of two or more; sorted."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        """Tarjan's strongly connected components."""
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in imports.get(module, ()):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            at = stack.index(module)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return sorted(found)


def without(imports: Mapping[str, Iterable[str]], left_out: Iterable[Import]) -> dict[str, list[str]]:
    """Remove some imports."""
    out = set(left_out)
    return {module: [other for other in others if (module, other) not in out] for module, others in imports.items()}


def wrong(imports: Mapping[str, Iterable[str]], allowed: Iterable[Import]) -> list[str]:
    """Return the errors, a line each: cycles that are not allowed, and allowances without a cycle."""
    kept = list(allowed)
    cyclic = groups(without(imports, kept))
    lines = [f"import cycle: {', '.join(group)}: move what they share to a module below them" for group in cyclic]
    if not cyclic:
        lines += [
            f"{module} -> {other} closes no cycle: take it out of ALLOWED"
            for module, other in kept
            if not groups(without(imports, [each for each in kept if each != (module, other)]))
        ]
    return lines


def main() -> int:
    """Check the project's packages."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    lines = wrong(imports, ALLOWED)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
