from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.batching.counters import Stats, combine
from carpool.learning.latency_model import LatencyLearner
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_operator.tuning.sources import streams
from carpool_operator.tuning.sources.samples import UnusableError
from carpool_operator.tuning.sources.scrapes import (
    BATCHABLE,
    CAPACITIES,
    DURATIONS,
    GAPS_SQUARED,
    GENERATION,
    MISSES,
    MODE,
    OWN,
    POD_MONITOR,
    REQUEST_ROWS,
    STARTED,
    Fresh,
    LabelNames,
    Series,
    ages,
    everything,
    freshness,
    reports,
)
from carpool_sidecar.admin.metrics import METRICS, PREFIX


def read(result, labels=POD_MONITOR):
    """Read each pod by the source that has the newest of its samples."""
    series, newest = msgspec.convert(result, list[Series]), {}
    for each in series:
        rest = dict(each.metric)
        name, pod = rest.pop("__name__"), rest.pop(labels.pod, None)
        if name == GENERATION and each.values:
            newest[pod] = max(newest.get(pod, (0.0, None)), (each.values[-1][0], frozenset(rest.items())))
    found = reports(series, labels, {pod: source for pod, (_, source) in newest.items()})
    return {pod: getattr(each, "report", each) for pod, each in found.items()}


def read_one(result):
    (found,) = read(result).values()
    return found


def why(result):
    found = read_one(result)
    assert isinstance(found, UnusableError), found
    return str(found)


def test_what_is_asked_for_is_what_sidecars_write():
    written = {}
    for metric in METRICS:
        name = PREFIX + metric.name
        match metric.kind:
            case "counter":
                written[name + "_total"] = metric.labels
            case "gauge":
                written[name] = metric.labels
            case "histogram":
                written[name + "_bucket"] = (*metric.labels, "le")
                written |= {f"{name}_{end}": metric.labels for end in ("count", "sum")}
            case "summary":
                written |= {f"{name}_{end}": metric.labels for end in ("count", "sum")}
    asked = {name: own for name, own in OWN.items() if name != STARTED}
    assert asked == {name: written.get(name) for name in asked}


def test_questions_name_the_pods_and_nothing_else():
    labels = LabelNames("ns", "kubernetes_pod")
    selector = 'ns="shop",kubernetes_pod=~"a-1|b[.]c-0"'
    assert ages(labels, "shop", ["b.c-0", "a-1"]) == f"time() - timestamp(carpool_config_generation{{{selector}}})"
    matchers = LabelNames(matchers=(("cluster", 'eu"\\1\n'), ("stage", "")))
    assert ages(matchers, "shop", ["a"]).endswith(r',cluster="eu\"\\1\n",stage=""})')
    question = everything(labels, "shop", ["b.c-0", "a-1"], 30.0)
    assert question.endswith(f'",{selector}}}[30000ms]')
    assert "|carpool_arrivals_total|" in question
    assert re.search("increase|rate", question) is None


def test_a_scrape_is_the_report_that_the_sidecar_would_have_given(stored):
    stats = stored.model_stats()
    report = read_one(
        stored.matrix({5000.25: stored.scrape({"m": stats, "": stored.model_stats(misses={}, cells=[])})})
    )
    assert report.stats.at == 5000.25
    assert report.stats.models["m"] == stats
    assert report.stats.models[""].misses == {}
    assert (report.stats.device_busy, report.stats.queued_rows) == (0.04, 3)
    assert (report.generation, report.running, report.ready, report.uptime_seconds) == (7, 6, True, 4000.25)
    assert (report.queue.bytes, report.queue.in_flight, report.stalls.seconds) == (300, 1, 0.5)
    assert report.lanes["m"].parameters == Parameters(max_batch=8, max_wait=Duration(0.002), max_in_flight=2)
    assert not report.lanes["m"].pass_through
    assert report.lanes["m"].replaced == 3


def test_length_buckets_come_through_prometheus_and_the_fleet_s_sum_into_the_forecast(stored):
    def counted(factor):
        short, long = ((bucket, 4, 1, 0, 30 * factor, 0.3 * each * factor, 0.003 * each**2 * factor)
                       for bucket, each in ((32, 1), (256, 5)))  # fmt: skip
        return stored.model_stats(cells=[short, long])

    pods = [read_one(stored.matrix({5000.0: stored.scrape({"m": counted(factor)})})) for factor in (1, 2)]
    total = combine([report.stats.models["m"] for report in pods])
    assert {(each.bucket, each.batches) for each in total.samples()} == {(32, 90), (256, 90)}
    learner = LatencyLearner()
    learner.observe(1.0, total.samples())
    learner.observe(2.0, total.samples())
    estimate = learner.believed(8)
    assert {bucket: each.times[4] for bucket, each in estimate.buckets.items()} == pytest.approx({32: 0.01, 256: 0.05})
    assert [share for share, _ in learner.mixed().mix] == [0.5, 0.5]


def test_a_model_that_passes_is_said_to(stored):
    scrape = stored.scrape(model_ready=0)
    for (name, own), _ in list(scrape.items()):
        if name == "carpool_mode":
            scrape[name, own] = int(own[1][1] == "pass-through")
    report = read_one(stored.matrix({5000.0: scrape}))
    assert report.lanes["m"].pass_through
    assert (report.ready, report.readiness) == (False, "the model is not ready")


def test_a_sidecar_without_requests_has_no_models(stored):
    report = read_one(stored.matrix({5000.0: stored.scrape({})}))
    assert report.stats.models == {}


def test_newest_scrape_counts(stored):
    older, newer = stored.scrape(), stored.scrape({"m": stored.model_stats(arrivals=20)})
    report = read_one(stored.matrix({5000.0: older, 5015.0: newer}))
    assert (report.stats.at, report.stats.models["m"].arrivals) == (5015.0, 20)


def test_a_reset_leaves_only_the_counts_since_then_when_reports_are_subtracted(stored):
    """The process began anew: only the counts since the reset are left, as with sidecars."""
    before = read_one(stored.matrix({5000.0: stored.scrape()}))
    again = stored.scrape({"m": stored.model_stats(arrivals=4, served=4, hits=4, misses={}, cells=[])}, started=5010.0)
    after = read_one(stored.matrix({5000.0: stored.scrape(), 5015.0: again}))
    since = after.stats.since(before.stats)
    assert (since.models["m"].arrivals, since.models["m"].served) == (4, 4)
    assert after.uptime_seconds < after.stats.at - before.stats.at  # which shows the reset


@pytest.mark.parametrize(
    "drop",
    sorted(
        set(OWN) - set(streams.OWN) - {GENERATION, MODE, MISSES, BATCHABLE, GAPS_SQUARED, *CAPACITIES, REQUEST_ROWS}
    ),
)
def test_what_is_missing_is_named(stored, drop):
    scrape = {key: value for key, value in stored.scrape().items() if key[0] != drop}
    assert drop in why(stored.matrix({5000.0: scrape}))


def test_older_sidecars_do_not_count_what_can_share_a_batch_so_all_can(stored):
    scrape = {key: value for key, value in stored.scrape().items() if key[0] != "carpool_batchable_total"}
    assert read_one(stored.matrix({5000.0: stored.scrape()})).stats.models["m"].batchable == 8
    older = read_one(stored.matrix({5000.0: scrape})).stats.models["m"]
    assert older.batchable == older.arrivals == 10


def test_older_sidecars_do_not_count_gaps(stored):
    scrape = {key: value for key, value in stored.scrape().items() if key[0] != GAPS_SQUARED}
    assert read_one(stored.matrix({5000.0: stored.scrape()})).stats.models["m"].gaps_squared == 0.75
    assert read_one(stored.matrix({5000.0: scrape})).stats.models["m"].gaps_squared == 0.0


def test_older_sidecars_do_not_count_rows_per_request(stored):
    scrape = {key: value for key, value in stored.scrape().items() if key[0] != REQUEST_ROWS}
    assert read_one(stored.matrix({5000.0: stored.scrape()})).stats.models["m"].request_rows == [9, 0, 1, *[0] * 14]
    assert read_one(stored.matrix({5000.0: scrape})).stats.models["m"].request_rows == []


@pytest.mark.parametrize(("name", "edge"), [(DURATIONS, "0.001"), (REQUEST_ROWS, "8")])
def test_a_dropped_bucket_is_named(stored, name, edge):
    scrape = stored.scrape()
    del scrape[name, (("model", "m"), ("le", edge))]
    assert f"{name} has no le={edge!r}" in why(stored.matrix({5000.0: scrape}))


def test_half_a_scrape_is_passed_over_for_the_one_before(stored):
    """Samples that are written remotely come in no order: the newest moment may still lack some."""
    newer = stored.scrape({"m": stored.model_stats(arrivals=20)})
    for lost in [
        ("carpool_rows_total", (("model", "m"),)),
        ("carpool_slo_misses_total", (("model", "m"), ("reason", "late"))),
        next(key for key in newer if key[0] == "carpool_batches_total"),
    ]:
        partly = {key: value for key, value in newer.items() if key != lost}
        found = read_one(stored.matrix({5000.0: stored.scrape(), 5015.0: partly}))
        assert (found.stats.at, found.stats.models["m"].arrivals) == (5000.0, 10), lost


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1.5", "many"])
@pytest.mark.parametrize("name", ["carpool_arrivals_total", "carpool_config_generation", "carpool_slo_misses_total"])
def test_no_number_that_a_counter_cannot_be_is_taken(stored, name, value):
    def spoilt(scrapes):
        result = stored.matrix(scrapes)
        for series in result:
            if series["metric"]["__name__"] == name:
                series["values"][-1][1] = value
        return result

    assert name in why(spoilt({5000.0: stored.scrape()}))
    found = read_one(spoilt({5000.0: stored.scrape(), 5015.0: stored.scrape()}))
    assert found.stats.at == 5000.0


def test_bounds_may_be_written_otherwise(stored):
    result = stored.matrix({5000.0: stored.scrape()})
    for series in result:
        if "le" in series["metric"] and series["metric"]["le"] != "+Inf":
            series["metric"]["le"] = repr(float(series["metric"]["le"]))  # as Prometheus 3 does: 1.0 for 1
    assert read_one(result).stats.models["m"].served == 10


def test_buckets_that_fall_are_no_histogram(stored):
    result = stored.matrix({5000.0: stored.scrape()})
    next(series for series in result if series["metric"].get("le") == "+Inf")["values"][0][1] = "2"
    assert "falls" in why(result)


def test_a_pod_scraped_twice_is_counted_once(stored):
    twice = stored.matrix({5000.0: stored.scrape()}, job="one") + stored.matrix(
        {5003.0: stored.scrape({"m": stored.model_stats(arrivals=11)})}, job="two"
    )
    report = read_one(twice)
    assert (report.stats.at, report.stats.models["m"].arrivals) == (5003.0, 11)


def test_what_the_model_itself_exports_is_none_of_ours(stored):
    ours = stored.matrix({5000.0: stored.scrape()})
    theirs = stored.matrix({5009.0: {(STARTED, ()): 4000.0}}, container="server")
    assert read_one(ours + theirs).uptime_seconds == 4000.0
    assert read(theirs) == {}
    assert read(stored.matrix({5000.0: {("up", ()): 1}})) == {}


def test_labels_that_are_missing_are_named(stored):
    result = stored.matrix({5000.0: stored.scrape()})
    for series in result:
        series["metric"].pop("reason", None)
    assert "carpool_slo_misses_total has no label reason" in why(result)


def test_labels_that_are_no_numbers_are_named(stored):
    result = stored.matrix({5000.0: stored.scrape()})
    for series in result:
        if "rows" in series["metric"]:
            series["metric"]["rows"] = "four"
    assert "no numbers" in why(result)


def test_pods_are_distinguished_by_the_labels_that_are_named(stored):
    labels = LabelNames(pod="kubernetes_pod")
    result = stored.matrix({5000.0: stored.scrape()}, kubernetes_pod="a") + stored.matrix(
        {5000.0: stored.scrape(generation=8)}, kubernetes_pod="b"
    )
    found = read(result, labels)
    assert {pod: report.generation for pod, report in found.items()} == {"a": 7, "b": 8}


OTHERS = {"namespace": "shop", "container": "carpool", "instance": "10.244.0.9:14090"}
"""Labels of a series of the pod, without the pod."""


def test_ages_are_by_source(stored):
    result = stored.vector(6000.5, {"a": 3.25, "b": 70.0}, job="one") + stored.vector(6000.5, {"a": 2.0}, job="two")
    result += [*stored.vector(6000.5, {"c": "NaN", "d": "-1e300"}), {"metric": {}, "value": [6000.5, "1"]}]
    found = freshness(msgspec.convert(result, list[Series]), POD_MONITOR)
    one, two = (frozenset({**labels, "job": job}.items()) for labels, job in ((OTHERS, "one"), (OTHERS, "two")))
    assert found == {"a": {one: Fresh(5997.25, 3.25), two: Fresh(5998.5, 2.0)}, "b": {one: Fresh(5930.5, 70.0)}}


TEXT = st.text(max_size=8)
SERIES = st.builds(
    Series,
    metric=st.dictionaries(
        st.sampled_from(["pod", "model", "le", "reason", "rows", "__name__"]), TEXT | st.sampled_from(sorted(OWN))
    ),
    values=st.lists(st.tuples(st.floats(), TEXT | st.sampled_from(["1", "NaN", "1e400"])), max_size=3),
    value=st.none() | st.tuples(st.floats(), TEXT | st.just("1")),
)


@given(st.lists(SERIES, max_size=6))
def test_whatever_comes_is_a_report_or_says_why_not(series):
    sources = {pod: next(iter(each)) for pod, each in freshness(series, POD_MONITOR).items()}
    for found in reports(series, POD_MONITOR, sources).values():
        assert isinstance(found, UnusableError) or isinstance(found.stats, Stats)
