from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from carpool_cli.load.loadgen import FAILURES, MAX_COMPLAINTS, Recording
from carpool_cli.load.report import by_status, nearest_rank, percentiles, problems, summarize, to_json
from carpool_sidecar.tuning.stalls import Stall


def recording(latencies, *, gap=0.1, status=None, late=0.0, stalls=(), cpu=0.1, outstanding=1):
    due = [index * gap for index in range(len(latencies))]
    return Recording(
        due,
        [time + late for time in due],
        [time + latency for time, latency in zip(due, latencies, strict=True)],
        status or [200] * len(latencies),
        list(stalls),
        cpu,
        due[-1] + 1,
        outstanding,
    )


def report(found, *, slo=0.05, warm_up=0.0, seconds=None, connections=8):
    return summarize(
        found, slo=slo, warm_up=warm_up, seconds=seconds or found.due[-1] + 0.1 - warm_up, connections=connections
    )


def test_percentiles_are_values_that_occurred():
    found = percentiles([index / 1000 for index in range(1, 1001)])
    assert (found.p50, found.p90, found.p99, found.p999, found.max) == (0.5, 0.9, 0.99, 0.999, 1.0)
    assert nearest_rank([3.0], 0.999) == 3.0
    assert percentiles([]) is None


def test_latency_counts_from_when_a_request_was_due():
    # Sent 40 ms late, answered 10 ms later: the caller would have waited 50 ms.
    found = report(recording([0.05] * 10, late=0.04))
    assert found.latency.p50 == pytest.approx(0.05)
    assert found.lateness_p99 == pytest.approx(0.04)
    assert "late" in found.generator_limits[0]


def test_goodput_counts_good_answers_in_time_only():
    timeout = -1 - FAILURES.index("timeout")
    found = report(recording([0.01, 0.01, 0.06, 0.01, 0.01], status=[200, 503, 200, timeout, 200]))
    assert (found.requests, found.ok, found.good) == (5, 3, 2)
    assert found.goodput == pytest.approx(2 / 0.5)
    assert found.errors == {"503": 1, "timeout": 1}
    assert found.latency.count == 3


def test_errors_of_one_status_are_distinguished_by_their_messages():
    late, gone = '{"reason":"predicted-late"}', '{"reason":"upstream-refused"}'
    seen = recording([0.01] * 6, status=[503, 503, 200, 503, 503, 500])
    # The first is in the warm-up.
    seen = seen._replace(complaints=[late, gone, "CUDA"], complained=[1, 1, 0, 2, 2, 3])
    found = report(seen, warm_up=0.05, seconds=0.6)
    assert found.errors == {"503": 3, "500": 1}
    assert found.complaints == {"503": {gone: 2, late: 1}, "500": {"CUDA": 1}}
    assert list(problems("u", found.errors, found.complaints, [])) == [
        "status 503: 3 from POST u",
        f"  2 of them: {gone}",
        f"  1 of them: {late}",
        "status 500: 1 from POST u; the first: CUDA",
    ]


def test_a_rare_status_is_shown_beside_one_of_many_texts():
    many = Counter({("500", f"request {index}"): 2 for index in range(2 * MAX_COMPLAINTS)})
    found = by_status(many + Counter({("503", "gone"): 1}))
    assert (len(found["500"]), found["503"]) == (MAX_COMPLAINTS, {"gone": 1})


def test_the_warm_up_does_not_count():
    found = report(recording([9.0] * 10 + [0.01] * 10), warm_up=1.0, seconds=1.0)
    assert (found.requests, found.latency.max) == (10, pytest.approx(0.01))


def test_a_stall_flags_its_window_and_those_it_held_up():
    # The request due at 0.9 s is answered at 1.9 s: a stall at 1.5 s touches both seconds, not the third.
    latencies = [0.01] * 9 + [1.0] + [0.01] * 20
    found = report(recording(latencies, stalls=[Stall(1.5, 1.6)]))
    assert [window.stalled for window in found.windows] == [True, True, False]
    assert found.steady.count == 10
    assert found.latency.max == pytest.approx(1.0)
    assert found.steady.max == pytest.approx(0.01)
    assert found.steady_good_share == 1.0
    assert found.stalls[0].seconds == pytest.approx(0.1)


def test_nothing_is_left_when_all_was_stalled():
    found = report(recording([0.01] * 5, stalls=[Stall(0.0, 9.0)]))
    assert found.steady is None
    assert found.steady_good_share is None


def test_the_generator_is_named_when_it_was_the_bottleneck():
    assert report(recording([0.01] * 10)).generator_limits == []
    busy = report(recording([0.01] * 10, cpu=1.8))
    assert "of a core" in busy.generator_limits[0]
    crowded = report(recording([0.01] * 10, outstanding=9))
    assert "raise --connections" in crowded.generator_limits[0]


def test_seconds_without_requests_are_windows_too():
    assert [window.requests for window in report(recording([0.01, 0.01], gap=2.5), seconds=3.0).windows] == [1, 0, 1]


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "checkout"])
def test_a_report_is_written_with_what_repeats_it_even_from_a_checkout(installed, monkeypatch, tmp_path):
    if not installed:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])  # no metadata of any package there
    written = json.loads(to_json(report(recording([0.01] * 10)), url="http://127.0.0.1:9"))
    assert (written["url"], written["requests"], written["command"]) == ("http://127.0.0.1:9", 10, sys.argv)
    assert (written["carpool"] == "unknown") is not installed
