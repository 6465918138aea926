from __future__ import annotations

import pytest
from proof.matrices import MATRICES, page
from tiny import proof


def rows(title):
    text = page(proof())
    section = text[text.index(f"## {title}\n") :].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("title", "row"),
    [
        ("Highest load", "| plain | 93.8% | 68.9% | 0.0% |"),
        ("Device time saved", "| plain | 75.0% | 0.0% | 0.0% |"),
        ("Misses", "| plain | +0.20% | +0.10% | +19.80% |"),
        ("First good", "| plain | 30 s, 3,000 | 0 s, 0 | never |"),
        ("Good again", "| plain | never | 2 s, 400 | never |"),
        ("Flips", "| plain | 1 | 0 | 0 |"),
    ],
)
def test_every_rule_has_a_cell_in_every_scenario(title, row):
    assert rows(title) == ["| | Carpool | greedy | fixed |", "|---|---|---|---|", row]


def test_all_tables_are_there():
    assert page(proof()).count("\n## ") == len(MATRICES)
