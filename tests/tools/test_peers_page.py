from __future__ import annotations

import peers_page

TRIAL = {
    "rate": 200.0, "seconds": 15.0, "good_share": 0.987, "steady_good_share": 0.991, "p50": 0.0121, "p99": 0.0814,
    "steady_p99": None, "rows_a_batch": 3.14, "device_ms": 1.756, "cpu_ms": 0.4, "stalled": [2.0, 7.0],
    "longest_stall": 0.21, "others_cores": 1.51, "denied": 0.25, "generator_limits": [],
}  # fmt: skip
OVERLOADED = TRIAL | {"rate": 400.0, "p50": None, "p99": None, "stalled": [], "generator_limits": ["too busy"]}
FAULTS = {
    "rate": 200.0, "misbehaved": 10, "their_answers": {"500": 10}, "innocents": 90,
    "refused": {"500": 30, "503": 5}, "lost": {"timeout": 1},
    "wrong": 2, "rows_computed": 97, "rows_a_batch": 4.5, "serves_after": False,
}  # fmt: skip
TRIED = [
    {"settings": {"max_batch_size": 8}, "good_shares": [1.0, 0.5], "device_ms": [3.0, 1.5], "failed": ""},
    {"settings": {"max_batch_size": 0}, "good_shares": [], "device_ms": [], "failed": "must be positive"},
]


def peer(**changes):
    fields = {
        "engine": "mosec", "title": "mosec", "default": "batches of one", "commit": "c0ffee", "date": "2026-11-21",
        "machine": {"cpu": "a CPU", "cores": 2, "system": "Linux 6", "python": "3.11.7"},
        "command": "python benchmarks/peers mosec", "versions": {"python": "3.11.7", "mosec": "0.9"},
        "profile": "bert", "slo": 0.1, "rates": [200.0, 400.0], "tried": TRIED, "failed": "",
        "settings": [
            {
                "name": "tuned", "settings": {"max_batch_size": 8}, "trials": [TRIAL, OVERLOADED],
                "cancels": FAULTS, "poison": FAULTS,
            },
            {"name": "Carpool beside", "settings": {}, "trials": [TRIAL], "cancels": None, "poison": None},
        ],
    }  # fmt: skip
    return fields | changes


def lines(*peers):
    return peers_page.page(peers, "Generated.\n").splitlines()


def test_without_data_it_says_so():
    assert "has not been run" in lines()[-1]


def test_each_setting_has_a_line_of_its_own():
    page = lines(peer())
    assert "| mosec | tuned | 200 / 400 | 98.7% / 98.7% | 25.0% / 25.0% | 1.76 / - | 0.40 / - | 6 | 3.0 |" in page
    assert "| mosec | Carpool beside | 200 | 98.7% | 25.0% | 1.76 | 0.40 |  |  |" in page
    assert any("others took 1.5 to 1.5 cores" in line for line in page)


def test_loads_have_a_row_for_each_rate():
    page = lines(peer())
    expected = "mosec | tuned | 200 | 98.7% | 99.1% | 12 ms | 81 ms |  | 3.1 | 1.76 | 0.40 | 2 of 15 s | 1.5 | 25.0%"
    assert f"| {expected} |" in page
    assert any(line.startswith("| mosec | Carpool beside | 200 |") for line in page)


def test_what_nobody_got_has_no_cost_and_a_slow_generator_is_named():
    (row,) = (line for line in lines(peer()) if line.startswith("| mosec | tuned | 400"))
    assert "the generator was a bottleneck" in row
    assert "|  |  |  | 3.1 |  |  | 0 of 15 s |" in row


def test_faults_are_counted_by_what_the_others_got():
    page = lines(peer())
    assert "| mosec | tuned | 200 | 10 | 90 | 30 x 500, 5 x 503 | 1 x timeout | 2 | 97 | NO |" in page
    assert "| mosec | tuned | 200 | 10 | 90 | 30 x 500, 5 x 503 | 1 x timeout | 2 | 4.5 | 3.0 | NO |" in page
    assert not any(line.startswith("| mosec | Carpool beside | 200 | 10") for line in page)


def test_stalled_seconds_are_named():
    assert "| mosec | tuned | 200 | 2, 7 | 210 ms |" in lines(peer())


def test_all_that_was_tried_is_shown():
    page = lines(peer())
    assert "| mosec | `max_batch_size=8` | 100.0%, 50.0% | 3.00, 1.50 |" in page
    assert "| mosec | `max_batch_size=0` | must be positive |  |" in page


def test_a_failed_engine_says_why():
    page = lines(peer(settings=[], tried=[], failed="NotInstalled: no\n  such version"))
    assert "mosec gave no complete results: NotInstalled: no such version" in page


def test_every_row_is_as_long_as_its_head():
    columns = 0
    for line in lines(peer()):
        if line.startswith("|"):
            columns = columns or line.count("|")
            assert line.count("|") == columns, line
        else:
            columns = 0
