"""Token streams that Prometheus stored of a sidecar are those that the sidecar itself reports."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, core, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from carpool.exchange.token_streams import TokenStreams
from carpool.generation.capacity import Carried
from carpool.policy.plain import from_plain
from carpool.policy.spec import BatchingPolicy
from carpool_operator.tuning.sources import streams
from carpool_operator.tuning.sources.samples import UnusableError
from carpool_operator.tuning.sources.scrapes import GENERATION, POD_MONITOR, Series, reports
from carpool_sidecar.admin.metrics import PREFIX
from carpool_sidecar.generation.engine_streams import Streams
from carpool_sidecar.generation.metrics import METRICS, fill
from carpool_sidecar.generation.reporting import report_of
from carpool_sidecar.metric import Families

KINDS = {
    "counter": core.CounterMetricFamily,
    "gauge": core.GaugeMetricFamily,
    "histogram": core.HistogramMetricFamily,
}
GATED = {"slo": {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}}


class Sidecar:
    """What a sidecar counts of token streams, and its metrics."""

    def __init__(self, policy=None):
        wanted = from_plain(policy or GATED, BatchingPolicy, what="policy")
        self.streams = Streams(wanted, clock=lambda: 0.0, log=logging.getLogger())
        for model, answers in (("llama", 5), ("other", 0)):
            counts = self.streams.models.proven(model)
            counts.prompt_tokens, counts.output_tokens, counts.hits = 100 * answers, 20 * answers, answers
            for number in range(answers):
                counts.ended("stop")
                counts.ttft.add(0.1 * number)
                counts.tpot.add(2000.0 * number)  # beyond the last bound, too
        self.streams.models.proven("llama").ended("queue-full")
        self.streams.rate.total = 7

    def collect(self):
        families = {each.name: KINDS[each.kind](PREFIX + each.name, each.text, labels=each.labels) for each in METRICS}
        fill(Families(families), self.streams)
        return list(families.values())

    def scrape(self):
        """By metric and own labels, as a Prometheus has read it."""
        registry = CollectorRegistry()
        registry.register(self)
        text = generate_latest(registry).decode()
        return {
            (sample.name, tuple(sample.labels[label] for label in streams.OWN[sample.name])): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in streams.OWN
        }

    def reported(self):
        """What it says of these itself."""
        said = report_of(self.streams)
        nothing = [0] * len(said.models[0].gaps)
        known = {"margin": 1.0, "kv_size": None} | dict.fromkeys(
            ("forecast_tpot", "step_seconds", "sequence_seconds", "kv_token_seconds", "prompt_token_seconds"), 0.0
        )
        return replace(
            said,
            kv_tokens=0,
            gate=None if said.gate is None else replace(said.gate, **known),
            models=[replace(each, gaps=nothing, durations=nothing) for each in said.models],
        )


def test_a_scrape_has_what_the_sidecar_reports():
    sidecar = Sidecar()
    found = streams.read(sidecar.scrape())
    assert found == sidecar.reported()
    assert found.models[0].ends == {"stop": 5, "queue-full": 1}
    assert (sum(found.models[0].ttft), found.models[0].tpot[-1]) == (5, 4)
    assert (found.gate.ttft, found.gate.tpot, found.gate.limit) == (2.0, 0.05, None)


def test_what_an_engine_carries_is_known_where_it_is_said(monkeypatch):
    sidecar = Sidecar()
    gate = sidecar.streams.gatekeeper.gate
    monkeypatch.setattr(gate, "carries", lambda: Carried(sequences=60.0, rate=8.0, tokens=1600.0))
    found = streams.read(sidecar.scrape())
    assert found == sidecar.reported()
    assert (found.gate.limit, found.gate.capacity, found.gate.capacity_tokens) == (60.0, 8.0, 1600.0)
    monkeypatch.setattr(gate, "carries", lambda: Carried(sequences=60.0, rate=float("inf"), tokens=1600.0))
    assert streams.read(sidecar.scrape()).gate.capacity is None


def test_without_targets_there_is_no_gate():
    sidecar = Sidecar({"slo": {"latency": {"p99": "1s"}}})
    assert streams.read(sidecar.scrape()) == sidecar.reported()
    assert sidecar.reported().gate is None


def test_sidecars_without_these_metrics_show_none():
    assert streams.read({}).arrivals == 0


@pytest.mark.parametrize(
    ("dropped", "says"),
    [
        ((streams.QUEUED, ()), "there is no carpool_generation_queued"),
        ((streams.OF_A_MODEL["output_tokens"], ("llama",)), "carpool_output_tokens_total{model='llama'}"),
        ((streams.TTFT, ("llama", "0.001")), "has no le='0.001'"),
    ],
)
def test_what_is_missing_is_named(dropped, says):
    scrape = Sidecar().scrape()
    del scrape[dropped]
    with pytest.raises(UnusableError, match=re.escape(says)):
        streams.read(scrape)


def matrix(stored, scrapes):
    """Scrapes of batched models and token streams together, as Prometheus answers."""
    return stored.matrix(
        {
            at: stored.scrape()
            | {(name, tuple(zip(streams.OWN[name], own, strict=True))): value for (name, own), value in found.items()}
            for at, found in scrapes.items()
        }
    )


def read(stored, scrapes, **labels):
    """Read what was scraped; ``labels``: of the scrape itself, before which Prometheus renames those of one name."""
    result = matrix(stored, scrapes)
    for each in result:
        metric = each["metric"]
        metric |= {f"exported_{name}": metric[name] for name in labels if name in metric} | labels
    series = msgspec.convert(result, list[Series])
    rest = next(dict(each.metric) for each in series if each.metric["__name__"] == GENERATION)
    rest.pop("__name__")
    pod = rest.pop("pod")
    return reports(series, POD_MONITOR, {pod: frozenset(rest.items())})[pod]


def test_batched_models_and_token_streams_stay_apart(stored):
    sidecar = Sidecar()
    found = read(stored, {5000.0: sidecar.scrape()}).report
    assert found.token_streams == sidecar.reported()
    assert (set(found.lanes), set(found.stats.models)) == ({"m"}, {"m"})


def test_a_limit_that_is_no_longer_said_spoils_no_scrape(stored, monkeypatch):
    sidecar = Sidecar()
    with monkeypatch.context() as patched:
        carried = Carried(sequences=60.0, rate=float("inf"), tokens=1600.0)
        patched.setattr(sidecar.streams.gatekeeper.gate, "carries", lambda: carried)
        before = sidecar.scrape()
    found = read(stored, {5000.0: before, 5015.0: sidecar.scrape()}).report
    assert (found.stats.at, found.token_streams.gate.limit) == (5015.0, None)


@pytest.mark.parametrize("dropped", [streams.TPOT, streams.OF_A_MODEL["hits"]])
def test_without_a_metric_of_token_streams_batched_models_are_read(stored, dropped):
    whole = Sidecar().scrape()
    part = {key: value for key, value in whole.items() if key[0] != dropped}
    found = read(stored, {5000.0: part, 5015.0: part})
    assert (found.report.stats.at, set(found.report.lanes)) == (5015.0, {"m"})
    assert found.report.token_streams == TokenStreams()
    assert dropped in found.note
    late = read(stored, {5000.0: whole, 5015.0: part})
    assert (late.report.stats.at, late.note) == (5000.0, ""), "samples that arrive in part are waited for"


def test_the_scrape_may_have_labels_of_the_same_names(stored):
    sidecar = Sidecar()
    found = read(stored, {5000.0: sidecar.scrape()}, target="Deployment/llm").report
    assert found.token_streams == sidecar.reported()
