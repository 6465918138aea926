"""The figures of a large cluster on the operator's page are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured():
    figures = json.loads((ROOT / "benchmarks" / "results" / "whole_operator.json").read_text())["figures"]
    return {each["name"]: each for each in figures}


def test_the_page_has_the_figures_of_the_record(measured):
    page = (ROOT / "docs" / "operator.md").read_text()
    policies = measured["operator, memory"]["parts"]["policies"]
    steady, memory = measured["operator, time to settle"]["value"], measured["operator, memory"]["value"]
    settled = measured["operator, settled pass"]["value"]
    row = next(line for line in page.splitlines() if "whole_operator.json" in line)
    assert row.startswith(f"| {policies:,.0f} policies, ")
    assert row.endswith(f"| {steady:.0f} s | {memory:.0f} MiB |")
    assert f"| a pass without changes | {1e3 * settled / policies:.1f} ms |" in page
    assert ("missed it in this run" in page) == (steady > 300)
