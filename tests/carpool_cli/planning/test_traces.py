from __future__ import annotations

import math
from random import Random

import pytest

from carpool.learning.arrivals import first
from carpool_cli.planning.traces import Trace, azure_llm_2023, lasts, scaled


def test_a_trace_is_rescaled_and_reports_the_factor():
    recorded = [10.0, 11.0, 11.5, 14.0, 20.0]
    trace = Trace.at_rate(recorded, rate=4.0)
    assert trace.factor == pytest.approx(0.1)
    assert trace.rate == pytest.approx(4.0)
    assert list(trace.times(Random(0))) == pytest.approx([0.0, 0.1, 0.15, 0.4, 1.0])
    assert first(trace, 3, Random(0)) == pytest.approx([0.0, 0.1, 0.15])


def test_scaled_keeps_the_first_at_zero():
    assert scaled([5.0, 6.0, 9.0], 2.0) == [0.0, 2.0, 8.0]


def test_azure_trace_is_read():
    trace = azure_llm_2023(
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "2023-11-16 18:15:46.6805900,374,44\n",
            "2023-11-16 18:15:50.9951690,396,109\n",
            "2023-11-17 00:00:00.0000000,10,5\n",
            "\n",
        ]
    )
    assert trace.times == pytest.approx((0.0, 4.314579, 20653.31941), abs=1e-5)
    assert trace.context == (374, 396, 10)
    assert trace.generated == (44, 109, 5)
    assert azure_llm_2023([]).times == ()


def test_azure_trace_crosses_a_leap_day():
    trace = azure_llm_2023(["2024-02-28 23:59:59,1,1", "2024-03-01 00:00:00,1,1"])
    assert trace.times == (0.0, 86_401.0)


@pytest.mark.parametrize("line", ["18:15,1,2", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,many,2", "1,-5,10", "x"])
def test_azure_trace_names_the_broken_line(line):
    with pytest.raises(ValueError, match="line 2"):
        azure_llm_2023(["TIMESTAMP,ContextTokens,GeneratedTokens", line])


def test_a_recording_lasts_until_the_next_arrival_would_come():
    assert lasts([5.0, 6.0, 7.0]) == 3.0
    assert lasts([5.0, 5.0]) == math.inf
