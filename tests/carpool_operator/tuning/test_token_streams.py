from __future__ import annotations

import pytest
from fleets import RESNET, World, pod_of, report_of, spec
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.exchange.token_streams import BOUNDS, GateState, ModelStreams, TokenStreams
from carpool.policy.durations import Duration
from carpool.policy.generation import TokenTarget
from carpool.policy.spec import SLO
from carpool_operator.api.model import Reading
from carpool_operator.reporting.metrics import OperatorMetrics
from carpool_operator.tuning.evidence import Evidence
from carpool_operator.tuning.token_streams import SELDOM, FleetStreams, difference

TARGETS = SLO(ttft=TokenTarget(Duration(2.0)), tpot=TokenTarget(Duration(0.05)))
GATE = GateState(
    ttft=2.0,
    tpot=0.05,
    forecast_tpot=0.03,
    margin=1.1,
    step_seconds=0.0115,
    sequence_seconds=4e-5,
    kv_token_seconds=8e-8,
    prompt_token_seconds=5e-5,
    kv_size=400_000.0,
    limit=60.0,
    capacity=8.0,
    capacity_tokens=1600.0,
)


def spread(count, seconds):
    """``count`` durations of so many seconds."""
    place = next(i for i, bound in enumerate(BOUNDS) if bound >= seconds)
    return [count if i == place else 0 for i in range(len(BOUNDS) + 1)]


def streams(hits=0, late=0, refused=0, cancelled=0, *, ttft=0.5, tpot=0.03, gate=GATE, **changes):
    ended = hits + late
    model = ModelStreams(
        model="llama",
        ends={"stop": ended, "ttft": refused, "cancelled": cancelled},
        prompt_tokens=1000 * ended,
        output_tokens=200 * ended,
        hits=hits,
        ttft=spread(ended, ttft),
        tpot=spread(ended, tpot),
        gaps=spread(0, 1.0),
        durations=spread(ended, 5.0),
    )
    return TokenStreams(arrivals=ended + refused + cancelled, gate=gate, models=[model], **changes)


class Fleet:
    """Pods that are read every five seconds, each with the same rates."""

    def __init__(self, pods=2):
        self.fleet, self.now, self.pods = FleetStreams(), 0.0, [str(i) for i in range(pods)]

    def pass_by(self, seconds, **rates):
        five = {name: 5 * rate for name, rate in rates.items() if name in {"hits", "late", "refused", "cancelled"}}
        others = {name: value for name, value in rates.items() if name not in five}
        for _ in range(round(seconds / 5)):
            self.now += 5
            sample = difference(TokenStreams(), streams(**five, **others))
            self.fleet.observe(self.now, [(uid, 5.0, sample) for uid in self.pods], self.pods)
        return self.fleet.status(self.now, "Deployment/llama")


def test_rates_and_latencies_are_those_of_all_pods_together():
    said = Fleet(pods=3).pass_by(60, hits=4, late=1, refused=3, running=20, queued=2)
    assert (said.gated, said.requests_per_second, said.goodput, said.miss_fraction) == (3, 24.0, 12.0, 0.5)
    assert (said.tokens_per_second, said.running, said.queued, said.limit) == (3000.0, 60, 6, 60)
    assert 0.35 < said.ttft_p50 <= said.ttft_p99 < 0.55
    assert 0.02 < said.tpot_p50 <= said.tpot_p99 < 0.035


def test_who_gave_up_neither_met_nor_missed():
    assert Fleet().pass_by(20, hits=4, cancelled=4).miss_fraction == 0.0


def test_nothing_is_said_before_there_are_streams():
    assert Fleet().pass_by(30) is None


def test_a_status_changes_seldom_and_only_clearly():
    fleet = Fleet()
    first = fleet.pass_by(60, hits=100)
    assert fleet.pass_by(SELDOM + 5, hits=104) is first
    moved = fleet.pass_by(60, hits=100, refused=60)
    assert moved.miss_fraction == pytest.approx(0.375, rel=0.01)
    assert fleet.pass_by(SELDOM - 10, hits=100) is moved, "it differs, and was said lately"
    assert fleet.pass_by(20, hits=100).miss_fraction == 0.0


def test_a_pod_that_is_gone_counts_no_more():
    fleet = Fleet(pods=2)
    fleet.pass_by(60, hits=4)
    fleet.pods = ["0"]
    assert fleet.pass_by(SELDOM, hits=4).goodput == 4.0


def test_the_slo_is_reported_as_missed_after_refusals_and_as_met_without():
    fleet = Fleet()
    fleet.pass_by(300, hits=8)
    assert fleet.fleet.slo_status.met
    fleet.pass_by(60, hits=8, refused=2)
    assert fleet.fleet.slo_status.met is False


def test_another_versions_histogram_says_nothing_and_counters_never_fall():
    after = streams(hits=5)
    short = replace(after, models=[replace(after.models[0], ttft=[1, 2, 3])])
    assert difference(TokenStreams(), short) is None
    assert difference(streams(hits=9), streams(hits=5)) is None
    assert difference(TokenStreams(), replace(after, queued=-1)) is None
    assert difference(TokenStreams(), replace(after, gate=replace(GATE, capacity=float("inf")))).capacity is None


def test_evidence_has_what_came_between_two_readings():
    evidence, samples, pod = Evidence(str(RESNET)), [], pod_of(0)
    evidence.turn([pod])
    for at, hits in ((10.0, 50), (12.0, 60)):
        report = replace(report_of(Stats(at=at), uptime=at), token_streams=streams(hits=hits))
        samples += evidence.gather(at, [pod], {pod.uid: Reading(at, report)}, 30.0).samples
    (sample,) = samples
    assert (sample.streams.hits, sample.streams.arrivals, sample.streams.output_tokens) == (10, 10, 2000)
    absurd = replace(report_of(Stats(at=14.0), uptime=14.0), token_streams=streams(hits=10**9))
    (sample,) = evidence.gather(14.0, [pod], {pod.uid: Reading(14.0, absurd)}, 30.0).samples
    assert (sample.streams, sample.partial) == (None, True)


def test_streams_that_were_left_out_are_not_counted_from_0_when_they_are_there_again():
    evidence, samples, pod = Evidence(str(RESNET)), [], pod_of(0)
    evidence.turn([pod])
    for at, hits, note in ((10.0, 50, ""), (12.0, 0, "dropped"), (14.0, 70, ""), (16.0, 80, "")):
        report = report_of(Stats(at=at), uptime=at)
        report = report if note else replace(report, token_streams=streams(hits=hits))
        samples += evidence.gather(at, [pod], {pod.uid: Reading(at, report, note=note)}, 30.0).samples
    assert [each.streams and each.streams.hits for each in samples] == [None, None, 10]
    assert [each.partial for each in samples] == [True, True, False]


class Serving:
    """A world whose pods answer so many token streams per second each, from its begin on."""

    def __init__(self, *, pods=2, wanted=None, **rates):
        self.world = World(wanted or replace(spec(), slo=TARGETS), pods=pods)
        self.rates, self.counts = rates, dict.fromkeys(rates, 0.0)
        for pod in self.world.pods:
            pod.spoil = lambda report: replace(report, token_streams=streams(**self.whole, running=20, queued=3))

    @property
    def whole(self):
        return {name: round(count) for name, count in self.counts.items()}

    def run(self, seconds):
        for _ in range(round(seconds / 2)):
            for name, rate in self.rates.items():
                self.counts[name] += 2 * rate
            self.world.step(self.world.now + 2)
        return self.world


def test_the_status_has_goodput_latencies_limit_and_capacity_in_tokens():
    world = Serving(hits=12, refused=2).run(90)
    (said,) = world.status["tokenStreams"]
    assert (said["target"], said["gated"], said["limit"], said["running"]) == ("Deployment/resnet", 2, 60, 40)
    assert said["goodput"] == pytest.approx(24.0, rel=0.05)
    assert said["ttftP99"].endswith("ms")
    (capacity,) = world.status["capacity"]
    # 14/s a pod of 8/s that each carries: 3.5 full ones, and at 90 % of their capacity four.
    assert capacity["load"] == pytest.approx(3.5, rel=0.05)
    assert (capacity["replicas"], capacity["serving"], capacity["tokensPerSecond"]) == (4, 2, 1600.0)
    assert capacity["requestsPerSecond"] == pytest.approx(8.0, rel=0.01)


def test_the_slo_is_missed_where_token_streams_miss_it():
    world = Serving(hits=8, late=2).run(120)
    condition = world.condition("SLOMet")
    assert (condition["status"], condition["reason"]) == ("False", "Missed")
    assert "TTFT p99 within 2s, TPOT p99 within 50ms is missed for resnet token streams" in condition["message"]
    assert "slo.ttft or slo.tpot" in condition["message"]


def test_another_operator_goes_on_with_what_was_said():
    serving = Serving(hits=4)
    world = serving.run(60)
    before = world.status["tokenStreams"]
    world.restart_operator()
    serving.run(2)
    assert world.status["tokenStreams"] == before


def test_metrics_have_the_figures_of_the_status():
    world = Serving(hits=4).run(60)
    metrics = OperatorMetrics()
    metrics.read_policies(lambda: [world.policy])
    lines = metrics.text().decode()
    labels = '{kind="Deployment",policy="resnet",policy_namespace="vision",target="resnet"}'
    for name, value in (("tokens_per_second", "1600.0"), ("streams_running", "40.0"), ("streams_limit", "60.0")):
        assert f"carpool_target_{name}{labels} {value}" in lines
