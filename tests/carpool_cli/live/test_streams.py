import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from carpool.batching.counters import ModelStats, Stats
from carpool.exchange.report import Queue, Report
from carpool.exchange.token_streams import BOUNDS, EngineSays, GateState, ModelStreams, TokenStreams
from carpool_cli.commands.explain import token_streams
from carpool_cli.live.admin_client import Explanation
from carpool_cli.live.dashboard import Watch
from carpool_cli.live.streams import engine_line, learned_line, streamed

GATE = GateState(
    ttft=2.0, tpot=0.05, forecast_tpot=0.042, margin=1.1, step_seconds=0.0115, sequence_seconds=4e-5,
    kv_token_seconds=8e-8, prompt_token_seconds=5.5e-5, kv_size=400_000.0,
)  # fmt: skip


def durations(**counts):
    found = [0] * (len(BOUNDS) + 1)
    for place, count in counts.items():
        found[int(place[1:])] = count
    return found


def counted(requests, hits, **ends):
    return ModelStreams(
        model="llama", ends={"stop": requests, **ends}, prompt_tokens=100 * requests, output_tokens=200 * requests,
        hits=hits, ttft=durations(_16=requests), tpot=durations(_10=requests), gaps=durations(), durations=durations(),
    )  # fmt: skip


def report(at, model, **changes):
    return Report(
        stats=Stats(at=at),
        uptime_seconds=at,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=2.0,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes={},
        token_streams=TokenStreams(running=80, queued=3, kv_tokens=45_000, gate=GATE, models=[model], **changes),
    )


def test_streams_between_two_looks():
    (seen,) = streamed(report(10.0, counted(100, 90)), report(20.0, counted(140, 120, ttft=5, cancelled=5)), 10.0)
    assert (seen.requests, seen.refused, seen.cancelled, seen.failed) == (50, 5, 5, 0)
    assert seen.good_share == 30 / 45
    assert seen.output_tokens_rate == 800.0
    assert 0.18 < seen.ttft_p50 < seen.ttft_p99 < 0.26
    assert str(seen) == (
        "llama: 5/s, 800 tokens/s; TTFT p50 215ms, p99 255ms; TPOT p50 26.9ms, p99 31.9ms; 66.7% within both targets; "
        "5 refused; 5 cancelled"
    )
    assert streamed(report(10.0, counted(100, 90)), report(20.0, counted(100, 90)), 10.0) == []


def test_what_is_with_the_engine():
    streams = report(1.0, counted(1, 1)).token_streams
    assert engine_line(streams) == (
        "80 running, 3 waiting, 45,000 KV tokens of 400,000; forecast TPOT 42ms of 50ms, TTFT within 2s"
    )
    assert learned_line(streams) == (
        "learned: 11.5ms per step, 40us per further sequence, 80us per 1,000 KV tokens, "
        "55ms per 1,000 prompt tokens; TPOT is planned with the target over 1.10"
    )
    assert engine_line(replace(streams, gate=None)).endswith("not gated: the policy has no slo.ttft")
    assert engine_line(replace(streams, gate=None, gate_faults=1)).endswith("not gated: it failed; see the log")
    said = replace(streams, engine=EngineSays(kv_share=0.31, preemptions=2.0))
    assert "45,000 KV tokens (the engine: 31% of its cache, 2 preempted) of 400,000; forecast" in engine_line(said)
    assert engine_line(TokenStreams()) == learned_line(TokenStreams()) == ""


def test_explain_and_top_show_them():
    after = report(20.0, counted(140, 120))
    lines = token_streams(after)
    assert [line.partition(":")[0] for line in lines] == ["token streams", "llama", "learned"]
    assert token_streams(replace(after, token_streams=TokenStreams())) == []
    watch = Watch("carpool")
    nothing = Explanation(tuned=True, decisions=[])
    watch.look(report(10.0, counted(100, 90)), nothing, 0.0)
    text = io.StringIO()
    Console(file=text, width=160, legacy_windows=False).print(watch.look(after, nothing, 0.0, hint="curl"))
    assert "streams" in text.getvalue()
    assert "llama: 4/s, 800 tokens/s; TTFT p50" in text.getvalue()
    assert "no request yet" not in text.getvalue()


def test_where_only_streams_are_served_top_shows_them_before_the_first_and_nothing_of_batches():
    before = replace(report(10.0, counted(1, 1)), token_streams=TokenStreams(gate=GATE))
    assert token_streams(before) == [
        "token streams: 0 running, 0 waiting, 0 KV tokens of 400,000; forecast TPOT 42ms of 50ms, TTFT within 2s"
    ]
    for seen in (before, report(10.0, counted(1, 1))):
        text = drawn(seen)
        assert "streams  " in text
        assert not {"goodput", "queue", "decisions"} & set(text.split())
    batched = replace(before, stats=Stats(at=10.0, models={"m": ModelStats(arrivals=1)}))
    assert {"goodput", "queue", "decisions", "streams"} <= set(drawn(batched).split())


def drawn(seen):
    text = io.StringIO()
    sight = Watch("carpool").look(seen, Explanation(tuned=True, decisions=[]), 0.0)
    Console(file=text, width=160, legacy_windows=False).print(sight)
    return text.getvalue()


@pytest.mark.parametrize(("how", "failed"), [("failed", 2), ("503", 2), ("other", 0)])
def test_failures_are_counted(how, failed):
    (seen,) = streamed(None, report(10.0, counted(1, 1, **{how: 2})), 10.0)
    assert seen.failed == failed
