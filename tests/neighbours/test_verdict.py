from __future__ import annotations

from collections import Counter

import pytest
from neighbours import verdict
from neighbours.catalogue import NEIGHBOURS
from neighbours.trials import Seen
from neighbours.virtual import Played

FLOOD = next(neighbour for neighbour in NEIGHBOURS if neighbour.name == "flood")
NONE = NEIGHBOURS[0]
GOOD = Seen(Counter(ok=100), [0.001 * index for index in range(1, 101)], {"429": 7}, 9.0, 0.1, 0.002, 40.0)
LOST = GOOD._replace(outcomes=Counter({"ok": 97, "504 expired": 2, "429 queue-full": 1}))
SLOW = GOOD._replace(livez_cpu=9.0, livez_gap=2.5)


def row(*seen, neighbour=FLOOD, server=None, virtual=None):
    return verdict.row(neighbour, list(seen or [GOOD]), server, virtual)


def test_a_good_row_breaks_nothing():
    good = row(server=GOOD, virtual=Played(120.0, 1.2, 0))
    assert verdict.violations(good) == []
    assert (good.sidecar.sent, good.sidecar.p50_ms, good.sidecar.p99_ms) == (100, 50.0, 99.0)
    assert good.neighbour == {"429": 7}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (LOST, "3 healthy requests failed, beyond those of the server alone"),
        (GOOD._replace(outcomes=Counter(ok=99, wrong=1)), "1 wrong answers"),
        (GOOD._replace(outcomes=Counter(ok=98, foreign=2)), "2 answers with somebody else's error text"),
        (GOOD._replace(livez_cpu=0.0512, livez_gap=2.5), "51.2 ms of CPU for an answer to /livez"),
        (GOOD._replace(peak_mib=573.0), "573 MiB resident at the peak"),
    ],
)  # fmt: skip
def test_each_limit_is_named_with_its_figure_and_the_neighbour(seen, said):
    (line,) = verdict.violations(row(seen))
    assert line.startswith(f"flood: {said}, limit at most ")


def test_a_violation_says_how_requests_failed_and_how_long_probes_had_no_answer():
    assert verdict.violations(row(LOST))[0].endswith("(of 100: 2 x 504 expired, 1 x 429 queue-full)")
    assert "longest gap between answers 2,500 ms" in verdict.violations(row(SLOW))[0]
    assert "the sidecar was ended there" in verdict.violations(row(GOOD._replace(peak_mib=3100.0, ended=True)))[0]


def test_what_fails_at_the_server_too_is_not_the_sidecars():
    failed = GOOD._replace(outcomes=Counter({"ok": 90, "504 expired": 10}))
    assert verdict.violations(row(failed, server=failed)) == []
    assert row(failed, server=GOOD).failed_more == 10
    # Another's answer or text is never owed to load.
    foreign = GOOD._replace(outcomes=Counter(ok=90, foreign=10))
    assert verdict.violations(row(foreign, server=foreign))


def test_virtual_time_has_limits_of_its_own():
    assert len(verdict.violations(row(virtual=Played(150.0, 1.26, 3)))) == 2


def test_without_merging_the_trials_would_show_nothing():
    apart = GOOD._replace(rows_per_call=1.1)
    assert "rows a call" in verdict.violations(row(apart, neighbour=NONE))[0]
    assert verdict.violations(row(apart)) == []  # a neighbour may make batches small


def test_cpu_time_alone_may_be_noise_and_the_least_of_several_trials_counts():
    noisy = GOOD._replace(livez_cpu=0.2)
    assert verdict.only_noise(row(noisy))
    assert not verdict.only_noise(row(noisy._replace(peak_mib=9e3)))
    assert not verdict.only_noise(row())
    both = row(noisy, GOOD)
    assert (both.livez_cpu_ms, both.trials) == (2.0, 2)


def test_of_several_trials_the_worst_of_everything_else_counts():
    bad = GOOD._replace(outcomes=Counter(ok=99, wrong=1), peak_mib=600.0, livez_cpu=0.001)
    both = row(GOOD, bad)
    assert (both.sidecar.wrong, both.peak_mib) == (1, 600)


def test_no_right_answer_has_no_latency():
    nothing = GOOD._replace(outcomes=Counter({"connection lost": 5}), latencies=[])
    assert row(nothing).sidecar.p99_ms == 0.0
