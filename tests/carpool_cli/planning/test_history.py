"""A Prometheus is played by counters of the request-level simulator: what was counted is known to the last bit."""

from __future__ import annotations

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from random import Random
from urllib.parse import parse_qs

import pytest
from msgspec.structs import replace

from carpool.learning.arrivals import Gamma, Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, linear, table
from carpool_cli.planning import history, prometheus, replica
from carpool_cli.planning.history import HistoryError, Series, Unknown, pasts, questions
from carpool_cli.planning.money import Price
from carpool_cli.planning.savings import COUNTED, ZERO_WAIT, Stretch, savings, total

CURVE = replace(ServiceTime.measured({1: 0.0055, 16: 0.013}), largest_in_flight=2)
SINCE, EVERY = 400.0, 5.0
ZERO = Parameters(max_batch=16)
RATES = (150.0, 600.0, 300.0, 800.0)


def played(process=Poisson):
    """Counters every ``EVERY`` seconds of a replica that batches what waits anyway, under a load that moves."""
    part = SINCE / len(RATES)
    times = [
        index * part + time for index, rate in enumerate(RATES) for time in until(process(rate), part, Random(index))
    ]
    seen = []
    device = Device(times=table(CURVE.table(64)))
    run = Simulation(times, device, slo=0.05, parameters=ZERO, estimate=CURVE.believed(16), seconds=SINCE + 1)
    run.every(EVERY, lambda now, stats: seen.append((now, stats[0])))
    return times, run.run(), seen


def counters(stats):
    model = stats.models.get("")
    if model is None:
        return {}
    found = {
        ("arrivals",): model.arrivals, ("squared",): model.arrivals_squared, ("windows",): model.windows,
        ("rows",): model.rows, ("gaps",): model.gaps_squared, ("busy",): stats.device_busy,
    }  # fmt: skip
    for sample in model.samples():
        for metric, value in zip(history.CELLS, sample[4:], strict=True):
            found[(metric, *sample[:4])] = value
    return found


def slo_of(pod, seconds, quantile=0.99):
    return Series({"namespace": "shop", "pod": pod, "quantile": str(quantile)}, value=(1000, str(seconds)))


def answered(seen, asked, pods=1, target=None):
    """What a server that scraped so says to the questions, at 1000 s; ``target``: a label, where one is set."""
    at = {0.0: {}, **{now: counters(stats) for now, stats in seen}}
    steps = [round(asked.step * number, 3) for number in range(round(SINCE / asked.step) + 1)]
    own = {"namespace": "shop", "model": "m", **({} if target is None else {"target": target})}

    def grown(key, before, after):
        return str(pods * (at[after].get(key, 0) - at[before].get(key, 0)))

    ranges = {
        name: [Series(own, [(600 + high, grown((name,), low, high)) for low, high in pairwise(steps)])]
        for name in history.COUNTERS
    }
    ranges["pods"] = [Series(own, [(600 + high, str(pods)) for high in steps[1:]])]
    ranges["scraped"] = [Series({}, [(600 + high, "1") for high in steps[1:]])]
    last = at[SINCE]
    ends = {
        metric: [
            Series(
                {**own, **dict(zip(history.KIND, map(str, key[1:]), strict=True))},
                value=(1000, str(pods * value)),
            )
            for key, value in last.items()
            if key[0] == metric
        ]
        for metric in history.CELLS
    }
    names = [f"{target or 'pod'}-{number}" for number in range(pods)]
    ends["busy"] = [Series({"namespace": "shop", "pod": pod}, value=(1000, str(last["busy",]))) for pod in names]
    work = sum(value for key, value in last.items() if key[0] == history.CELLS[1] and key[-1] == 0)
    ends["work"] = [Series({"pod": pod, **own}, value=(1000, str(work))) for pod in names]
    ends["slo"] = ends["last slo"] = [slo_of(pod, 0.05) for pod in names]
    return ranges, ends


@pytest.fixture(scope="module")
def poisson():
    return played()


def test_device_seconds_are_those_that_were_counted_and_the_forecast_of_what_ran_agrees_within_two_percent(poisson):
    times, outcome, seen = poisson
    asked = questions(SINCE)
    (past,) = pasts(asked, *answered(seen, asked))
    busy = outcome.summary().device_busy
    assert past.name == "shop/m"
    assert past.counted.device_seconds * SINCE / 3600 == pytest.approx(busy, rel=0.005)
    assert (past.counted.replicas, past.counted.most_replicas) == (1.0, 1)
    found = savings(past.name, past.situation, past.policy, past.load, counted=past.counted, price=Price(2.0))
    ways = {way.name: way for way in found.ways}
    assert found.rate == pytest.approx(len(times) / SINCE, rel=0.01)
    assert found.ways[0].name == COUNTED
    assert ways[ZERO_WAIT].device_seconds == pytest.approx(ways[COUNTED].device_seconds, rel=0.02)
    assert ways[COUNTED].device_gain == pytest.approx(0.0, abs=0.02)
    assert ways[COUNTED].money == pytest.approx(2.0 * 730)
    assert ways["no batching"].device_seconds > 2 * ways[COUNTED].device_seconds


def test_replicas_add_up(poisson):
    _, _, seen = poisson
    asked = questions(SINCE)
    (one,), (three,) = (pasts(asked, *answered(seen, asked, pods)) for pods in (1, 3))
    assert three.counted.device_seconds == pytest.approx(3 * one.counted.device_seconds)
    assert (three.counted.replicas, three.counted.most_replicas) == (3.0, 3)
    assert [each.rate for each in three.load] == pytest.approx([3 * each.rate for each in one.load])


def test_a_load_that_moves_is_no_burst_and_bursts_are(poisson):
    asked = questions(SINCE)
    (calm,) = pasts(asked, *answered(poisson[2], asked))
    assert calm.situation.process.dispersion < 1.2
    ranges, ends = answered(played(lambda rate: Gamma(rate, 2.0))[2], asked)
    (bursty,) = pasts(asked, ranges, ends)
    (older,) = pasts(asked, {**ranges, "gaps": []}, ends)  # of sidecars that don't count gaps
    assert bursty.situation.process.cv == pytest.approx(2.0, rel=0.02)
    assert older.situation.process.cv == pytest.approx(2.0, rel=0.1)
    assert older.situation.process.cv != bursty.situation.process.cv


def test_the_slo_is_the_sidecars_own_unless_one_is_named(poisson):
    asked = questions(SINCE)
    ranges, ends = answered(poisson[2], asked)
    assert pasts(asked, ranges, ends)[0].situation.target == 0.05
    assert pasts(asked, ranges, ends, slo=0.08)[0].situation.target == 0.08
    ends["slo"] = [slo_of("pod-0", 0.04, 0.95), slo_of("another-models", 0.3)]
    assert pasts(asked, ranges, ends)[0].policy.slo.percentiles == ((0.95, 0.04),)
    ends["slo"] = []
    assert pasts(asked, ranges, ends)[0].situation.target == 0.05, "its pods are gone; their last one"
    ends["slo"] = ends["last slo"] = [slo_of("another-models", 0.3)]
    (unknown,) = pasts(asked, ranges, ends)
    assert unknown.name == "shop/m"
    assert "--slo-p99" in unknown.error


def together(*answers):
    """The answers of a server that holds all of them."""
    return tuple(
        {name: [one for each in part for one in each[name]] for name in part[0]} for part in zip(*answers, strict=True)
    )


def about_slos(past):
    return [note for note in past.beware if "its pods have a p" in note]


def test_workloads_with_a_model_of_one_name_are_apart(poisson):
    asked = questions(SINCE)
    alone = [pasts(asked, *answered(poisson[2], asked, pods))[0] for pods in (1, 2)]
    both = together(
        answered(poisson[2], asked, 1, "Deployment/a"),
        answered(poisson[2], asked, 2, "Deployment/b"),
    )
    found = pasts(asked, *both)
    assert [past.name for past in found] == ["shop/Deployment/a/m", "shop/Deployment/b/m"]
    assert [past.counted for past in found] == [past.counted for past in alone]
    assert [past.load for past in found] == [past.load for past in alone]
    ranges, ends = both
    ends["slo"] = [slo_of("Deployment/a-0", 0.05), *(slo_of(f"Deployment/b-{pod}", 0.3) for pod in range(2))]
    found = pasts(asked, ranges, ends)
    assert [past.situation.target for past in found] == [0.05, 0.3]
    assert [about_slos(past) for past in found] == [[], []]
    assert all("by (namespace, target, model" in text for name, text in asked.ends.items() if name in history.CELLS)


def halves(answers, pods):
    """The answers where a workload had another name from mid-time on; its ``pods`` of before and after."""
    ranges, ends = answers
    metrics = [{"target": f"Deployment/{name}"} for name in ("old", "new")]
    middle = len(ranges["arrivals"][0].values) // 2
    found = {name: [] for name in ranges}
    for name, (one,) in ranges.items():
        for metric, values in zip(metrics, (one.values[:middle], one.values[middle:]), strict=True):
            found[name].append(Series({**one.metric, **metric}, values))
    last = {}
    for name, series in ends.items():
        of_pod = "pod" in series[0].metric
        # What a pod counted is in the series of both names, where it had both.
        shares = 1 if name.endswith("slo") else 2
        last[name] = [
            Series({**one.metric, **metric, **({"pod": pod} if of_pod else {})},
                   value=(one.value[0], str(float(one.value[1]) / shares)))
            for one in series for metric, pod in zip(metrics, pods, strict=True)
        ]  # fmt: skip
    if len(set(pods)) == 1:
        last["busy"] = ends["busy"]
    else:
        last["slo"] = [each for each in last["slo"] if each.metric["pod"] == pods[1]]
    return found, last


@pytest.mark.parametrize("pods", [("pod-0", "pod-0"), ("old-0", "new-0")], ids=["relabelled", "replaced"])
def test_a_workload_that_follows_another_is_not_a_second_replica(poisson, pods):
    asked = questions(SINCE)
    answers = answered(poisson[2], asked)

    def sums(found):
        compared = [
            savings(each.name, each.situation, each.policy, each.load, counted=each.counted, price=Price(2.0))
            for each in found
        ]
        return {way.name: way for way in total(compared)}, sum(each.rate for each in compared)

    ways, rate = sums(pasts(asked, *answers))
    found = pasts(asked, *halves(answers, pods))
    assert [past.name for past in found] == ["shop/Deployment/new/m", "shop/Deployment/old/m"]
    both, of_both = sums(found)
    assert of_both == pytest.approx(rate)
    for name, way in ways.items():
        # The batch latency is of the whole time, in each of them; their burstiness may differ.
        assert both[name].device_seconds == pytest.approx(way.device_seconds, rel=0.02), name
        assert both[name].replicas == pytest.approx(way.replicas, rel=0.02), name
        assert both[name].money == pytest.approx(way.money, rel=0.02), name
    assert both[COUNTED].replicas == 1.0


def test_a_workload_that_had_no_pods_for_a_time_needed_none_and_an_idle_one_needed_one(poisson):
    asked = questions(SINCE)
    ranges, ends = answered(poisson[2], asked)
    assert len(ranges["arrivals"][0].values) == 10
    gone = {
        name: [Series(one.metric, [*one.values[:3], *one.values[6:]]) for one in some] for name, some in ranges.items()
    } | {"scraped": ranges["scraped"]}
    (past,) = pasts(asked, gone, ends)
    assert past.load[3:6] == [Stretch(asked.step, 0.0, least=0)] * 3
    assert past.counted.replicas == pytest.approx(0.7)
    assert past.counted.device_seconds == pytest.approx(pasts(asked, ranges, ends)[0].counted.device_seconds)
    found = savings(past.name, past.situation, past.policy, past.load, counted=past.counted)
    assert {way.name: way.replicas for way in found.ways}[ZERO_WAIT] == pytest.approx(0.7)
    (past,) = pasts(asked, {**gone, "pods": ranges["pods"]}, ends)
    found = savings(past.name, past.situation, past.policy, past.load, counted=past.counted)
    assert {way.name: way.replicas for way in found.ways}[ZERO_WAIT] == past.counted.replicas == 1.0


@pytest.mark.parametrize("pods", [1, 3])
def test_a_time_without_prometheus_is_no_time_without_load(poisson, pods):
    asked = questions(SINCE)
    ranges, ends = answered(poisson[2], asked, pods)
    (whole,) = pasts(asked, ranges, ends)
    away = {
        name: [Series(one.metric, [*one.values[:3], *one.values[8:]]) for one in some] for name, some in ranges.items()
    }
    (past,) = pasts(asked, away, ends)
    assert past.load == [*whole.load[:3], *whole.load[8:]]
    # The counters went on meanwhile.
    assert past.counted.device_seconds == pytest.approx(whole.counted.device_seconds)
    assert (past.counted.replicas, past.counted.most_replicas) == (float(pods), pods)
    found = savings(past.name, past.situation, past.policy, past.load, counted=past.counted)
    assert found.rate == pytest.approx(sum(each.rate for each in past.load) / 5)
    assert min(way.replicas for way in found.ways) >= 1.0
    # A server without the series "up" can't say that it was away.
    (unsure,) = pasts(asked, {**away, "scraped": []}, ends)
    assert len(unsure.load) == 10


def test_what_is_missing_of_one_hides_no_other(poisson):
    asked = questions(SINCE)
    names = ("Deployment/a", "Deployment/b", "Deployment/c")
    ranges, ends = together(*(answered(poisson[2], asked, 1, name) for name in names))
    first = history.CELLS[0]
    ends[first] = [each for each in ends[first] if each.metric["target"] != "Deployment/a"]
    ends["slo"] = ends["last slo"] = [each for each in ends["slo"] if each.metric["pod"] != "Deployment/b-0"]
    unmeasured, promised_nothing, past = pasts(asked, ranges, ends)
    assert (unmeasured.name, promised_nothing.name) == ("shop/Deployment/a/m", "shop/Deployment/b/m")
    assert "no batch was measured" in unmeasured.error
    assert "--slo-p99" in promised_nothing.error
    assert past.name == "shop/Deployment/c/m"


def test_pods_of_one_model_with_several_slos_are_planned_by_the_shortest(poisson):
    asked = questions(SINCE)
    ranges, ends = answered(poisson[2], asked, pods=2)
    assert about_slos(pasts(asked, ranges, ends)[0]) == []
    ends["slo"] = [slo_of("pod-0", 0.05), slo_of("pod-1", 0.3)]
    (past,) = pasts(asked, ranges, ends)
    assert past.situation.target == 0.05
    (note,) = about_slos(past)
    assert "from 50ms to 300ms" in note


def test_device_time_of_overlapping_batches_is_divided_by_the_server_concurrency():
    """At 30/s a batch is in flight for 48 % of the time, but server concurrency 4 is 16 % busy."""
    device = Device(times=linear(0.020, 0.002), executors=4)
    seen, rate = [], 30.0
    run = Simulation(
        list(until(Poisson(rate), SINCE, Random(4))), device, slo=0.2,
        parameters=Parameters(max_in_flight=4), seconds=SINCE + 1,
    )  # fmt: skip
    summary = run.every(EVERY, lambda now, stats: seen.append((now, stats[0]))).run().summary()
    asked = questions(SINCE)
    (past,) = pasts(asked, *answered(seen, asked))
    assert past.situation.service.executors == 4
    assert past.counted.device_seconds / 3600 == pytest.approx(summary.executor_busy / SINCE / 4, rel=0.03)
    table_of = replica.fixed(past.situation, Parameters(max_in_flight=4), [rate])
    assert past.counted.device_seconds / 3600 == pytest.approx(table_of.utilization(rate), rel=0.05)


def test_what_prometheus_does_not_hold_is_named(poisson):
    asked = questions(SINCE)
    ranges, ends = answered(poisson[2], asked)
    (unknown,) = pasts(asked, ranges, {**ends, history.CELLS[0]: []})
    assert unknown == Unknown("shop/m", "no batch was measured in that time; name a longer one with --since")
    with pytest.raises(HistoryError, match="podMonitor"):
        pasts(asked, {name: [] for name in ranges}, ends)
    odd = [Series(each.metric, [(at, "NaN") for at, _ in each.values]) for each in ranges["arrivals"]]
    with pytest.raises(HistoryError, match="podMonitor"):
        pasts(asked, {**ranges, "arrivals": odd}, ends)


@pytest.mark.parametrize(("since", "step"), [(30.0, 3.0), (3600.0, 120.0), (7 * 86400.0, 1209.6)])
def test_steps_hold_several_scrapes_and_are_at_most_five_hundred(since, step):
    asked = questions(since, 'namespace="shop"')
    assert asked.step == pytest.approx(step)
    # With the selector, a namespace whose pods are all gone would look like a server that was away.
    assert "shop" not in asked.ranges["scraped"]
    of_sidecars = [text for name, text in asked.ranges.items() if name != "scraped"]
    assert all('namespace="shop"' in text for text in (*of_sidecars, *asked.ends.values()))


@pytest.mark.parametrize(("since", "interval"), [(1300.0, 0.0), (23.0, 5.0), (300.0, 30.0), (900.0, 60.0), (10.0, 5.0)])
def test_steps_divide_the_time_evenly_and_each_has_several_scrapes(since, interval):
    # 11 steps of 120 s in 1,300 s: what was counted in 1,300 s would be shown as counted in 1,320 s.
    asked = questions(since, interval=interval)
    assert since / asked.step == pytest.approx(round(since / asked.step))
    # A step with one scrape has no increase: it would look like one without load.
    assert asked.step >= min(4 * interval, since)


class Samples:
    """Says when its first sample was, where it is asked for: at even points in time, up to its ``now``."""

    def __init__(self, monkeypatch, now, first, interval):
        self.now, self.first, self.interval = now, first, interval
        monkeypatch.setattr(prometheus, "_one", self.answer)

    def answer(self, _url, fields):
        step = float(re.search(r":(\d+)ms\]", fields["query"])[1]) / 1000
        after = step * math.ceil(self.first / step)
        if after > self.now:
            return []
        value = self.interval
        if fields["query"].startswith("min("):
            value = self.first + self.interval * math.floor((after - self.first) / self.interval)
        return [Series({}, value=(self.now, str(value)))]


@pytest.mark.parametrize("since", [600.0, 86400.0, 7 * 86400.0, 365 * 86400.0])
@pytest.mark.parametrize("held", [255.0, 300.0, 590.0])
def test_what_is_asked_for_begins_with_the_first_sample(monkeypatch, since, held):
    # Five minutes of samples in a step of 20 minutes would be a quarter of the load.
    now = 1_795_771_593.0
    Samples(monkeypatch, now, now - held, 5.0)
    found = prometheus.held("http://p:9090", since, "", now)
    assert held < found.since <= held + 5.0
    assert found.interval == 5.0


def test_where_there_is_no_sample_the_whole_time_is_asked_for(monkeypatch):
    Samples(monkeypatch, 1000.0, 2000.0, 5.0)
    assert prometheus.held("http://p:9090", 600.0, "", 1000.0) == history.Held(600.0, 0.0)


def test_large_batches_that_were_not_counted_are_named(poisson):
    asked = questions(SINCE)
    (past,) = pasts(asked, *answered(poisson[2], asked))
    (note,) = past.beware
    assert note.startswith(f"batches above {past.situation.service.largest_measured} rows are not in these counts")


class Server:
    """Answers with ``status`` and ``body`` over HTTP; ``asked``: (path, fields, headers)."""

    def __init__(self, status, body):
        self.asked = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                fields = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                server.asked.append((self.path, {name: text for name, (text,) in fields.items()}, dict(self.headers)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def test_a_server_is_asked_for_the_range_and_for_its_end(monkeypatch):
    monkeypatch.setenv(prometheus.TOKEN, "secret")
    asked = questions(600.0)
    result = [{"metric": {"namespace": "shop"}, "values": [[1000, "1"]]}]
    with Server(200, json.dumps({"status": "success", "data": {"result": result}}).encode()) as server:
        ranges, ends = prometheus.ask(f"{server.url}/prefix/", asked, 600.0, 1000.0)
    assert ranges["arrivals"] == [Series({"namespace": "shop"}, [(1000, "1")])]
    assert set(ends) == set(asked.ends)
    path, fields, headers = server.asked[0]
    assert path == "/prefix/api/v1/query_range"
    # The last step ends at 1000 s, and rounding may not lose it.
    assert (float(fields["start"]), float(fields["step"])) == (400 + asked.step, asked.step)
    assert 1000 < float(fields["end"]) < 1000 + asked.step
    assert headers["Authorization"] == "Bearer secret"
    assert server.asked[-1][:1] == ("/prefix/api/v1/query",)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"who are you", prometheus.TOKEN),
        (400, b'{"status": "error", "error": "parse error"}', "parse error"),
        (200, b"<html>", "no JSON"),
        (200, b'{"status": "success", "data": {"result": [{"metric": {}, "value": [1, "abc"]}]}}', "no JSON of Prom"),
        (200, b'{"status": "success", "data": {"result": [{"metric": {}, "values": [[1, ""]]}]}}', "no JSON of Prom"),
        (200, b'{"status": "error", "error": "too many samples"}', "too many samples"),
    ],
)
def test_what_a_server_refuses_is_said(carpool, status, body, words):
    with Server(status, body) as server:
        shown = carpool("savings", "--prometheus", server.url)
    assert shown.exit_code == 1
    assert words in shown.output
