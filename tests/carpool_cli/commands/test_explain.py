from __future__ import annotations

import json

from msgspec.structs import replace

from carpool.batching.counters import ModelStats, Stats
from carpool.exchange.decision import Reason
from carpool.exchange.report import ModelEntry, Queue, Report, RolledBack
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli.commands.explain import compared, news, not_merged, observe, taken_back, text_of
from carpool_cli.live.admin_client import Decided, Explained, Explanation, Predicted

PREDICTED = Predicted(
    p50=0.01, p99=0.03, p99_ahead=None, miss_fraction=0.001, goodput=299.0, device_time=0.0012, mean_batch=4.0
)
CHANGED = Decided(
    Parameters(max_batch=8),
    change=True,
    reason=Reason.SAVES_DEVICE_TIME,
    message="device time falls 20%",
    uncapped=Parameters(max_batch=64, max_wait=Duration(0.01)),
    capped_by="twice the largest size measured",
    predicted=PREDICTED,
    rate=300.0,
)
KEPT = Decided(Parameters(max_batch=8), change=False, reason=Reason.CONVERGED, message="nothing is better")


def test_a_decision_reads_when_what_why_and_what_keeps_it():
    lines = text_of(Explained("m", 0.0, replace(CHANGED, shed_slo=True))).splitlines()
    assert lines[0].split("  ", 1)[1] == "m  changed, SavesDeviceTime: device time falls 20%"
    assert lines[1].strip() == "at 300/s: p99 30ms, - at 1.25x; 1.2ms of device a request, 4 rows a batch"
    assert lines[2].strip().endswith("kept from it by: twice the largest size measured")
    assert "batch 64, wait 10ms" in lines[2]
    assert "refused" in lines[3]


def test_what_is_decided_again_and_again_says_how_often():
    assert "model  kept, Converged (7 times in a row): nothing is better" in text_of(Explained("", 0.0, KEPT, 7))


def test_what_was_predicted_stands_beside_what_is_so():
    model = ModelStats(arrivals=600, served=600, hits=594, misses={"late": 6}, cells=[(0, 4, 1, 0, 150, 0.0, 0.0)])
    before = Report(
        stats=Stats(at=10.0),
        uptime_seconds=10.0,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=0.05,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes={},
    )
    after = replace(before, stats=Stats(at=12.0, models={"m": model, "idle": ModelStats()}))
    observed = observe(before, after)
    assert list(observed) == ["m"]
    said = list(compared(Explanation(True, [Explained("m", 0.0, CHANGED)]), observed))
    assert said[0] == "m, observed over 2s (predicted):"
    assert [line.split() for line in said[3:]] == [
        ["goodput", "297/s", "(299/s)"],
        ["misses", "1.00%", "(0.10%)"],
        ["rows", "a", "batch", "4", "(4)"],
    ]
    assert said[1].endswith("(10ms)")
    assert "nothing" in next(iter(list(compared(Explanation(True, []), observed))[1:]))
    assert list(compared(Explanation(True, []), {})) == [
        "no request came meanwhile: --over 0s compares with all since the start"
    ]


def test_what_was_taken_back_says_what_and_why():
    gone = RolledBack(
        model="",
        generation=4,
        rejected=Parameters(max_batch=64),
        back_to=Parameters(max_batch=8),
        back_to_generation=3,
        reason="12 of 200 requests were late",
        at=0.0,
    )
    assert taken_back(gone) == (
        "model  taken back: batch 64, wait 0s, 1 in flight (generation 4) to batch 8, wait 0s, 1 in flight: "
        "12 of 200 requests were late"
    )


def test_models_whose_batches_are_not_verified_are_told():
    def entry(verified, version=""):
        return ModelEntry(
            name="m",
            version=version,
            lane="m",
            merges=False,
            max_batch=None,
            axis="",
            verified=verified,
            evidence="why",
        )

    states = ["", "off", "asserted", "verified", "unverified", "refuted", "contradicted"]
    report = Report(
        stats=Stats(at=10.0),
        uptime_seconds=10.0,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=0.05,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes={},
        models=[*map(entry, states), entry("refuted", "2")],
    )
    assert not_merged(report) == [
        "m  batches unverified: why",
        "m  batches refuted: why",
        "m  batches contradicted: why",
        "m version 2  batches refuted: why",
    ]


def test_following_tells_each_decision_once():
    told: dict[str, Explained] = {}
    first = Explanation(True, [Explained("m", 1.0, KEPT, 2)])
    assert [each.at for each in news(first, told)] == [1.0]
    assert news(first, told) == []
    again = Explanation(True, [Explained("m", 2.0, KEPT, 3)])
    assert news(again, told) == []
    then = Explanation(True, [Explained("m", 2.0, KEPT, 3), Explained("m", 3.0, CHANGED), Explained("m", 4.0, KEPT)])
    assert [each.at for each in news(then, told)] == [3.0, 4.0]


def test_a_running_sidecar_explains_itself(up, carpool):
    told = carpool("explain", up.admin, "--over", "0s")
    assert told.exit_code == 0
    assert told.output
    document = json.loads(carpool("explain", up.admin, "--over", "0s", "--json").output)
    assert document["tuned"] is True
    assert set(document) == {"tuned", "decisions", "observed"}


def test_nobody_there_is_one_line(carpool):
    for arguments in (["explain"], ["explain", "--follow"], ["top"]):
        result = carpool(*arguments, "127.0.0.1:9")
        assert result.exit_code == 1
        assert result.output.startswith("Error: no sidecar answers at http://127.0.0.1:9")
        assert result.output.count("\n") == 1
