import pytest

from carpool.generation.requests import Slo
from carpool_cli.load.stream_report import summarize
from carpool_cli.load.streaming import Streamed, StreamRecording
from carpool_sidecar.tuning.stalls import Stall

SLO = Slo(1.0, 0.1)


def streamed(due, first=0.5, step=0.05, tokens=11, late=0.0, failure="", complaint=""):
    start = due + first
    gaps = (step,) * (tokens - 1)
    return Streamed(due, due + late, start, start + sum(gaps), gaps, 100, tokens, failure, complaint)


def recording(*streams, stalls=(), cpu=0.1):
    return StreamRecording(list(streams), list(stalls), cpu, 20.0, 5, None, 0)


def test_good_is_complete_and_within_both_targets():
    found = summarize(
        recording(
            streamed(1.0),
            streamed(2.0, first=1.5),
            streamed(3.0, step=0.2),
            streamed(4.0, failure="429", complaint="too many"),
            streamed(5.0, failure="429", complaint="other"),
        ),
        slo=SLO,
        warm_up=0.0,
        seconds=10.0,
    )
    assert (found.requests, found.complete, found.good) == (5, 3, 1)
    assert found.goodput == pytest.approx(0.1)
    assert found.errors == {"429": 2}
    assert found.complaints == {"429": {"too many": 1, "other": 1}}
    assert (found.prompt_tokens, found.output_tokens) == (300, 33)
    assert found.ttft.max == pytest.approx(1.5)
    assert found.tpot.max == pytest.approx(0.2)
    assert found.itl.count == 30
    assert found.whole.max == pytest.approx(2.5)


def test_the_warm_up_is_left_out():
    found = summarize(recording(streamed(1.0, first=9.0), streamed(6.0)), slo=SLO, warm_up=5.0, seconds=10.0)
    assert (found.requests, found.good_share) == (1, 1.0)


def test_a_pause_of_the_host_is_named_and_what_it_touched_is_left_out_of_the_steady_share():
    pause = Stall(2.2, 2.4)
    found = summarize(
        recording(streamed(1.0), streamed(2.0, first=1.5), stalls=[pause]), slo=SLO, warm_up=0.0, seconds=5.0
    )
    assert (found.pauses, found.good_share, found.steady_good_share) == (1, 0.5, 1.0)


def test_answers_of_one_token_have_no_time_per_token():
    found = summarize(recording(streamed(1.0, tokens=1)), slo=SLO, warm_up=0.0, seconds=5.0)
    assert (found.good, found.tpot, found.itl) == (1, None, None)


def test_a_late_or_busy_generator_is_named():
    found = summarize(recording(streamed(1.0, late=0.02), cpu=19.0), slo=SLO, warm_up=0.0, seconds=5.0)
    assert len(found.generator_limits) == 2
    assert summarize(recording(streamed(1.0)), slo=SLO, warm_up=0.0, seconds=5.0).generator_limits == []
