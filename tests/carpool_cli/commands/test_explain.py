from __future__ import annotations

import json
import urllib.request

import pytest
from msgspec.structs import replace

from carpool.batching.counters import DURATION_BOUNDS, ModelStats, Stats
from carpool.exchange.decision import Reason
from carpool.exchange.report import NOT_FOUND, Alone, Forwarded, Lane, ModelEntry, Queue, Report, RolledBack
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.tuning import plan
from carpool_cli.commands.explain import (
    SCARCE,
    compared,
    new_decisions,
    observe,
    posted,
    taken_back,
    text_of,
)
from carpool_cli.live.admin_client import AdminClient, Decided, Explained, Explanation, LastBusy, Predicted
from carpool_cli.live.unbatched import not_batched, not_merged, too_slow

SLO = 0.05

FIX = "carpool up --axis m=First"
UNLESS = (
    "to batch without that, if dim 0 of every tensor is the batch, and no row's answer depends on the other rows of "
    "its batch"
)
UNDO = (
    "its requests are merged all the same: to stop that, remove the model's `axis: First` from the policy, or "
    "--axis m=First"
)

PREDICTED = Predicted(
    p50=0.01, p99=0.03, p99_ahead=None, miss_fraction=0.001, goodput=299.0, device_time=0.0012, mean_batch=4.0
)
CHANGED = Decided(
    Parameters(max_batch=8),
    change=True,
    reason=Reason.SAVES_DEVICE_TIME,
    message="device time falls 20%",
    uncapped=Parameters(max_batch=64, max_wait=Duration(0.01)),
    capped_by="step",
    predicted=PREDICTED,
    rate=300.0,
)
BUSY = replace(
    CHANGED,
    predicted=replace(PREDICTED, utilization=0.6),
    target_utilization=0.6,
    alternative="Efficiency would free 25% of the device for 6.6ms more p50",
)
ROOM = replace(PREDICTED, p99_ahead=0.04, utilization=0.2)
KEPT = Decided(Parameters(max_batch=8), change=False, reason=Reason.CONVERGED, message="nothing is better")


def test_a_decision_reads_when_what_why_and_what_keeps_it():
    lines = text_of(Explained("m", 0.0, CHANGED), SLO).splitlines()
    assert lines[0].split("  ", 1)[1] == "m  changed, SavesDeviceTime: device time falls 20%"
    assert (
        lines[1].strip()
        == "at 300/s: p99 30ms, - at 1.25x, 0.10% late or refused; 1.2ms device time per request, 4 rows per batch"
    )
    assert lines[2].strip().endswith("limited by: step")
    assert "batch 64, wait 10ms" in lines[2]
    assert len(lines) == 3


def test_utilization_target_and_what_another_objective_would_do_are_shown():
    lines = text_of(Explained("m", 0.0, BUSY), SLO).splitlines()
    expected = "device 60% busy (target 60%); Efficiency would free 25% of the device for 6.6ms more p50"
    assert lines[2].strip() == expected


def test_what_is_only_recommended_is_beside_the_forecast_of_what_is_in_force():
    better = replace(PREDICTED, p99=0.02, p99_ahead=0.025, miss_fraction=0.0, utilization=0.25)
    lines = text_of(Explained("m", 0.0, replace(BUSY, change=False, recommended=better)), SLO).splitlines()
    assert lines[2].strip().startswith("device 60% busy (target 60%)")
    assert lines[3].strip() == "recommended: p99 20ms, 25ms at 1.25x, 0.00% late or refused; device 25% busy"


@pytest.mark.parametrize(
    ("predicted", "says"),
    [
        (ROOM, "more requests wait than can be answered in time, or the policy's shedAt is SLO"),
        (replace(ROOM, utilization=0.42), "device time is scarce, more than 30% busy"),
        (PREDICTED, "device time is scarce, without room for 1.25x the load"),
        (replace(ROOM, p99_ahead=0.06), "device time is scarce, without room for 1.25x the load"),
        (replace(PREDICTED, p99=0.051), "the forecast misses it"),
        (replace(ROOM, utilization=0.42, miss_fraction=0.4), "the forecast misses it"),
        (replace(PREDICTED, p99=None), "the forecast misses it"),
        (None, "as when the last requests came; without requests nothing is forecast"),
    ],
)
def test_that_requests_are_refused_is_explained_by_the_forecast_beside_it(predicted, says):
    text = text_of(Explained("m", 0.0, replace(CHANGED, predicted=predicted, shed_slo=True)), SLO)
    assert (
        text.splitlines()[-1].strip() == f"requests that others would make late for the SLO are refused early: {says}"
    )


def test_device_time_is_scarce_from_where_the_tuner_says_so():
    assert SCARCE == plan.SCARCE


def test_what_is_decided_again_and_again_says_how_often():
    assert "model  kept, Converged (7 times in a row): nothing is better" in text_of(Explained("", 0.0, KEPT, 7), SLO)


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
    failed = ModelStats(misses={"failed": 3})  # requests that came before the first poll
    assert observe(before, replace(after, stats=Stats(at=12.0, models={"m": failed})))["m"].miss_share == 1
    said = list(compared(Explanation(True, [Explained("m", 0.0, CHANGED)]), observed, 0.0))
    assert said[0] == "m, observed over 2s (predicted):"
    assert [line.split() for line in said[3:]] == [
        ["goodput", "297/s", "(299/s)"],
        ["misses", "1.00%", "(0.10%)"],
        ["rows", "per", "batch", "4", "(4)"],
    ]
    assert said[1].endswith("(10ms)")
    assert "nothing" in next(iter(list(compared(Explanation(True, []), observed, 0.0))[1:]))
    assert list(compared(Explanation(True, []), {}, 0.0)) == []


def test_after_the_load_its_last_busy_minute_stands_beside_its_forecast():
    model = ModelStats(arrivals=600, served=600, hits=594, misses={"late": 6}, cells=[(0, 4, 1, 0, 150, 0.0, 0.0)])
    kept = {"m": LastBusy(at=1000.0, seconds=60.0, stats=model, predicted=PREDICTED)}
    said = list(compared(Explanation(True, [Explained("m", 1200.0, KEPT)], kept), {}, 1300.0))
    assert said[0] == "m, no request for 300s; its last busy minute, observed over 60s (predicted):"
    assert said[3].split() == ["goodput", "9.9/s", "(299/s)"]
    assert said[4].split() == ["misses", "1.00%", "(0.10%)"]
    assert len(said) == 6


def test_what_failed_is_no_matter_of_batching_and_says_where_to_look():
    model = ModelStats(arrivals=60, served=60, misses={"late": 2, "failed": 58})
    kept = {"m": LastBusy(at=1000.0, seconds=60.0, stats=model)}
    said = list(compared(Explanation(True, [], kept), {}, 1300.0))
    assert said[-1].startswith("  58 failed, by the model or on the way to it: carpool_requests_total")


def test_a_model_that_takes_longer_than_the_slo_says_that_no_setting_helps():
    def lane(seconds):
        return Lane(
            parameters=Parameters(), pass_through=False, queued_requests=0, cap=8, quarantined=False, executors=1,
            service_seconds=(0.0, seconds, 2 * seconds),
        )  # fmt: skip

    report = Report(
        stats=Stats(at=10.0),
        uptime_seconds=10.0,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=0.05,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes={"m": lane(0.05), "slow": lane(0.308), "new": replace(lane(0.1), executors=None, service_seconds=None)},
    )
    assert too_slow(report) == [
        "slow  takes 308ms for one row: no setting meets the SLO of 50ms; raise it, or make the model faster"
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


def entry(verified="", **changes):
    known = {"version": "", "merges": verified == "verified", "axis": "no axis", "evidence": "why"}
    return ModelEntry(name="m", lane="m", max_batch=None, verified=verified, **known | changes)


def test_models_whose_batches_are_not_verified_are_reported():
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
        models=[*map(entry, states), entry("refuted", version="2")],
    )
    assert not_merged(report) == [
        "m  is not batched: no axis",
        "m  is not batched: no axis",
        "m  is not batched: no axis",
        f"m  batches unverified: why; {UNLESS}: {FIX}",
        "m  batches refuted: why",
        f"m  batches contradicted: why; {UNDO}",
        "m version 2  batches refuted: why",
    ]


def test_a_contradicted_model_that_is_sent_alone_is_said_to_be():
    lane = Lane(parameters=Parameters(), pass_through=False, queued_requests=0, cap=8, quarantined=True)
    report = replace(of([entry("contradicted", merges=True, axis="First")]), lanes={"m": lane})
    assert not_merged(report) == ["m  batches contradicted: why; its requests are sent alone"]


@pytest.mark.parametrize("trouble", ["no request was answered with success: 3 with 401", "every request has its own x"])
def test_what_has_to_be_solved_first_stands_before_the_state_and_no_axis_is_offered(trouble):
    unverified, verified = entry("unverified", trouble=trouble), entry("verified", trouble=trouble)
    assert not_merged(of([unverified])) == [f"m  {trouble}", "m  batches unverified: why"]
    assert not_merged(of([verified])) == [f"m  {trouble}"]


def test_rejected_requests_are_counted_beside_the_misses():
    model = ModelStats(arrivals=60, misses={"rejected": 60})
    said = list(compared(Explanation(True, [], {"m": LastBusy(at=1000.0, seconds=60.0, stats=model)}), {}, 1300.0))
    assert said[-1] == "  60 rejected (4xx), which are no misses: carpool_requests_total has the codes"


def test_a_model_that_only_the_policy_names_is_reported():
    why = "the policy says axis First, but the server does not describe it and only answered for n: check its name"
    assert not_merged(of([entry("asserted", merges=True, axis=why)])) == [f"m  is only in the policy: {why}"]


def test_the_padding_state_of_a_model_is_reported_though_its_batches_are_verified():
    assert not_merged(of([entry("verified", axis="-1", padding="verified: why")])) == ["m  padding verified: why"]


def of(models=(), forwarded=()):
    return Report(
        stats=Stats(at=10.0),
        uptime_seconds=10.0,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=0.05,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes={},
        models=list(models),
        forwarded=list(forwarded),
    )


def test_a_model_that_cannot_be_batched_names_the_option_and_not_the_gain():
    why = "its metadata is missing: set `models: [{name: m, axis: First}]`"
    off = entry("off", axis=why)
    report = of([off])
    assert not_merged(report) == [f"m  is not batched: {why}, or start it with: {FIX}"]
    for reason in (Reason.PASSES_THROUGH, Reason.NOTHING_BATCHABLE):
        passing = Explained("m", 0.0, replace(KEPT, reason=reason, message="merging would save 0.0%"))
        assert text_of(passing, SLO).endswith(f"{reason}: merging would save 0.0%")
        assert text_of(passing, SLO, not_batched(report)).endswith(
            f"{reason}: its requests are not batched: see the line on this model"
        )
    assert not_batched(of([off, replace(off, version="2", merges=True)])) == set()


NOT_ASKED = "the server answers /v2/models/m with 404: set `models: [{name: m, axis: First}]`"


@pytest.mark.parametrize("verified", ["off", "unverified"])
def test_where_nearly_all_requests_have_a_reason_of_their_own_it_stands_for_an_axis_that_would_not_help(verified):
    report = of([entry(verified, axis=NOT_ASKED)])
    stats = Stats(at=10.0, models={"m": ModelStats(arrivals=200)})
    alone = [Alone("m", "no-rows", 180, "instances is an object, not an array"), Alone("m", "axis-unverified", 20)]
    (said,) = not_merged(replace(report, stats=stats, alone=alone))
    assert said.startswith("m  is not batched: 180 of its 200 requests are without an array of rows; only `{")
    assert said.endswith(" can be batched (instances is an object, not an array)")
    for others in (
        [replace(alone[0], requests=179)],
        [Alone("m", "axis-none", 200)],
        [Alone("n", "no-rows", 200)],
        [Alone("m", "limits", 200, "body: larger than bodies.maxRequest (64Mi)")],
    ):
        (said,) = not_merged(replace(report, stats=stats, alone=others))
        assert said.endswith(FIX)
    refuted = of([entry("refuted")])
    assert not_merged(replace(refuted, stats=stats, alone=alone)) == ["m  batches refuted: why"]


def test_posted_requests_that_are_not_batched_are_reported():
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[18] = 22
    embed = Forwarded(method="POST", path="/embed", requests=22, hits=11, durations=durations)
    (said,) = posted(of(forwarded=[embed, replace(embed, method="GET", path="/v2/health/ready")]))
    assert said.startswith("POST /embed: 22 requests, p99 ")
    assert said.endswith("50.00% good within the SLO; not batched: not a path of V1 or V2 (docs/protocols.md)")
    large = of(forwarded=[replace(embed, path="/v1/models/m:predict")])
    (said,) = posted(large)
    assert said.endswith("not batched: the body exceeds bodies.maxRequest, or bodies.maxBuffered had no room")
    why = "body: larger than bodies.maxRequest (64Mi)"
    for model in ("m", "<other>"):
        (said,) = posted(replace(large, alone=[Alone(model, "limits", 1, why)]))
        assert said.endswith(f"not batched: {why}")
    wrong = replace(embed, path=NOT_FOUND, requests=1)
    assert posted(of(forwarded=[wrong])) == [
        "1 request to paths that the server does not have (404 or 405): not batched; check the path"
    ]


def test_following_prints_each_decision_once():
    told: dict[str, Explained] = {}
    first = Explanation(True, [Explained("m", 1.0, KEPT, 2)])
    assert [each.at for each in new_decisions(first, told)] == [1.0]
    assert new_decisions(first, told) == []
    again = Explanation(True, [Explained("m", 2.0, KEPT, 3)])
    assert new_decisions(again, told) == []
    then = Explanation(True, [Explained("m", 2.0, KEPT, 3), Explained("m", 3.0, CHANGED), Explained("m", 4.0, KEPT)])
    assert [each.at for each in new_decisions(then, told)] == [3.0, 4.0]


def test_a_running_sidecar_explains_itself(up, carpool):
    told = carpool("explain", up.admin, "--over", "0s")
    assert told.exit_code == 0
    assert told.output
    document = json.loads(carpool("explain", up.admin, "--over", "0s", "--json").output)
    assert document["tuned"] is True
    assert set(document) == {"tuned", "decisions", "observed", "lastBusy", "forwarded", "tokenStreams"}


def test_a_sidecar_that_is_not_ready_says_so_first(up, carpool, monkeypatch):
    report = AdminClient.report
    why = "no connection to the upstream: Connection refused"
    monkeypatch.setattr(AdminClient, "report", lambda self: replace(report(self), ready=False, readiness=why))
    told = carpool("explain", up.admin, "--over", "0s")
    assert told.output.startswith(f"not ready: {why}\n")


def test_names_that_clients_made_up_do_not_control_the_terminal(launched, nasty, carpool):
    name = "%1B%5B31mred%C2%9B"
    with nasty("--model", name) as server, launched("--upstream", server, "--slo-p99", "50ms") as started:
        for _ in range(20):
            url = f"{started.data}/v1/models/{name}:predict"
            with urllib.request.urlopen(url, b'{"instances": [[1.5]]}', timeout=30) as answer:  # noqa: S310 - ours
                answer.read()
        looks = [("explain", "--over", "0s"), ("top", "--once"), ("savings",), ("simulate", "--from-running")]
        told = {look[0]: carpool(*look, started.admin).output for look in looks}
    for command, text in told.items():
        assert r"\x1b[31mred\x9b" in text, command
        assert text.replace("\n", "").isprintable(), command


@pytest.mark.parametrize("look", [("explain", "--over", "5s"), ("top", "--once")])
def test_ctrl_c_within_a_single_look_is_no_success(up, carpool, monkeypatch, look):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"carpool_cli.commands.{look[0]}.time.sleep", stopped)
    result = carpool(*look, up.admin)
    assert (result.exit_code, result.output) == (130, "Error: stopped\n")


def test_nobody_there_is_one_line(carpool):
    for arguments in (["explain"], ["explain", "--follow"], ["top"]):
        result = carpool(*arguments, "127.0.0.1:9")
        assert result.exit_code == 1
        assert result.output.startswith("Error: no sidecar answers at http://127.0.0.1:9")
        assert result.output.count("\n") == 1
