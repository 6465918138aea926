from __future__ import annotations

from neighbours_page import HEADS, cells, section

HEALTHY = {
    "sent": 2000,
    "ok": 1990,
    "wrong": 1,
    "foreign": 2,
    "failed": 7,
    "kinds": {},
    "p50_ms": 65.2,
    "p99_ms": 1412.3,
}
ROW = {
    "name": "flood", "what": "one caller", "sidecar": HEALTHY, "server": HEALTHY | {"failed": 3}, "neighbour": {},
    "rows_per_call": 12.34, "livez_gap_ms": 1250, "livez_cpu_ms": 3.21, "peak_mib": 61, "ended": False, "trials": 1,
    "virtual": {"p99_ms": 120.0, "ratio": 1.104, "failed": 0},
}  # fmt: skip
RESULTS = {
    "commit": "abc", "date": "2026-11-23", "command": "python benchmarks/neighbours", "rate": 200.0, "seconds": 10.0,
    "machine": {"cpu": "a CPU", "cores": 2, "system": "Linux", "python": "3.11"}, "rows": [ROW], "violations": [],
}  # fmt: skip


def test_a_row_has_a_cell_for_each_head():
    assert dict(zip(HEADS, cells(ROW), strict=True)) == {
        "neighbour": "flood", "failed": "7", "wrong": "1", "foreign": "2", "p50 ms": "65", "p99 ms": "1,412",
        "alone: failed": "3", "alone: p99 ms": "1,412", "rows a call": "12.3", "livez CPU ms": "3.2",
        "livez gap ms": "1,250", "peak MiB": "61", "p99 in virtual time": "1.10x",
    }  # fmt: skip


def test_what_was_not_measured_has_empty_cells():
    empty = cells(ROW | {"server": None, "virtual": None})
    assert (empty[6], empty[7], empty[-1]) == ("", "", "")
    assert len(empty) == len(HEADS)


def test_a_sidecar_that_was_ended_and_failures_in_virtual_time_are_said():
    shown = cells(ROW | {"ended": True, "virtual": {"p99_ms": 1.0, "ratio": 3.0, "failed": 12}})
    assert shown[-2:] == ["61, ended", "3.00x, 12 failed"]


def test_the_section_says_first_what_is_beyond_a_limit():
    good = "\n".join(section(RESULTS))
    assert "Nothing is beyond a limit." in good
    assert "| flood | 7 |" in good
    assert "| flood | one caller |" in good
    bad = "\n".join(section(RESULTS | {"violations": ["flood: 7 healthy requests failed"]}))
    assert "Beyond a limit: 1." in bad
    assert "- flood: 7 healthy requests failed" in bad
    assert "Nothing" not in bad


def test_without_a_record_the_section_says_so():
    assert "`make neighbours` has not been run" in "\n".join(section(None))
