"""docs/proof-figures.md: every rule in every scenario, a table a figure."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from proof.verdict import MEASURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from proof.rows import Proof, Recovery


class Matrix(NamedTuple):
    """A table: what each cell is, by scenario, for one contender."""

    title: str
    note: str
    cells: Callable[[Proof, str], dict[str, str]]


def _measured(name: str) -> Callable[[Proof, str], dict[str, str]]:
    measure = MEASURES[name]

    def cells(proof: Proof, contender: str) -> dict[str, str]:
        return {scenario: measure.show(value) for scenario, value in measure.values(proof, contender).items()}

    return cells


def _first(proof: Proof, contender: str) -> dict[str, str]:
    return {line.scenario: _recovery(line.phases[0]) for line in proof.timelines if line.contender == contender}


def _later(proof: Proof, contender: str) -> dict[str, str]:
    return {
        line.scenario: _recovery(max(line.phases[1:], key=lambda each: inf if each.seconds is None else each.seconds))
        for line in proof.timelines
        if line.contender == contender and len(line.phases) > 1
    }


def _recovery(recovery: Recovery) -> str:
    return "never" if recovery.seconds is None else f"{recovery.seconds:.0f} s, {recovery.requests:,}"


MATRICES = (
    Matrix("Highest load", "With at most 1 % of misses, of the oracle's own.", _measured("highest load")),
    Matrix(
        "Device time saved",
        "Of what the oracle saves against zero-wait at the largest batch: the least at 10 to 60 % load. Empty where "
        "that is less than 5 %; 0 for who misses more than 1 %.",
        _measured("saving"),
    ),
    Matrix("Misses", "Of all requests of the timeline, beyond the oracle's.", _measured("extra misses")),
    Matrix("First good", "Seconds and requests until the first good 5 s of the timeline.", _first),
    Matrix("Good again", "The same after what changes on the way: the longest.", _later),
    Matrix("Flips", "A, B, A within phases of constant load.", _measured("flips")),
    Matrix("Goodput at twice the capacity", "Of the rule's own peak.", _measured("overload")),
)


def page(proof: Proof) -> str:
    """Return the page."""
    lines = [
        "# The proof: every rule in every scenario",
        "",
        "Written by `make proof` from [its data](../benchmarks/results/proof.json); do not edit. What it means is in",
        "[the proof](proof.md).",
    ]
    for matrix in MATRICES:
        columns = {each.title: matrix.cells(proof, each.name) for each in proof.contenders}
        lines += ["", f"## {matrix.title}", "", matrix.note, ""]
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {about.name} | {' | '.join(cells.get(about.name, '') for cells in columns.values())} |"
            for about in proof.scenarios
        ]
    return "\n".join(lines) + "\n"
