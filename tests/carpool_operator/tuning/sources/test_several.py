"""Series of one pod from several sources: a pair of Prometheuses, two jobs, or two clusters in one store.

Counted twice or mixed, they make requests that nobody sent: two clusters in one Prometheus once made 89,150 in 15 s.
"""

from __future__ import annotations

import pytest

from carpool_operator.api.model import Pod, Target
from carpool_operator.tuning.evidence import Evidence
from carpool_operator.tuning.sources import prometheus
from carpool_operator.tuning.sources.endpoint import Endpoint
from carpool_operator.tuning.sources.prometheus import Prometheus

POD = Pod(
    namespace="shop", name="resnet-0", uid="u1", target=Target("shop", "StatefulSet", "resnet"), ip="10.244.0.9",
    admin_port=14090, ready=True, deleting=False, template_hash="h",
)  # fmt: skip
EVERY = 15.0
WHERE = Endpoint(url="http://p/api/v1/query", base="http://p", headers={}, tls=True, server_name=None)


class Source:
    """One label set under which a process is scraped, every 15 s from ``first`` on."""

    def __init__(self, first, started, rate, *, skew=0.0, until=1e9, **labels):
        self.first, self.started, self.rate = first, started, rate
        self.skew, self.until, self.labels = skew, until, labels

    def scrapes(self, stored, now, window):
        """What is stored of it in a window before a time, by the times that its Prometheus noted."""
        before = max(0, (now - window - self.skew - self.first) // EVERY)
        found, at = {}, self.first + EVERY * before
        while at <= min(now, self.until):
            arrivals = round(self.rate * (at - self.started))
            stats = stored.model_stats(arrivals=arrivals, served=arrivals, hits=arrivals, dispatched=arrivals,
                                       misses={}, batchable=arrivals)  # fmt: skip
            found[round(at + self.skew, 3)] = stored.scrape({"m": stats}, started=self.started)
            at += EVERY
        return found


async def arrivals(stored, monkeypatch, *sources, passes=40):
    """Arrivals that the tuner is shown in 600 s of questions every 15 s, and the last error."""
    now = 10_000.0

    async def ask(self, question, kind):
        result = []
        for each in sources:
            scrapes = {at: one for at, one in each.scrapes(stored, now, 60).items() if at > now - 60}
            if not scrapes:
                continue
            if kind == "vector":
                result += stored.vector(now, {POD.name: now - max(scrapes)}, **each.labels)
            else:
                result += stored.matrix(scrapes, pod=POD.name, **each.labels)
        return prometheus.msgspec.convert(result, list[prometheus.Series])

    monkeypatch.setattr(Prometheus, "_ask", ask)
    client = Prometheus(WHERE, None, stale_after=60.0)
    evidence = Evidence(str(POD.target))
    evidence.turn([POD])
    counted, error = 0, ""
    for _ in range(passes):
        readings = await client.read(POD.namespace, [POD], now)
        for reading in readings.values():
            error = reading.error
        for sample in evidence.gather(now, [POD], readings, 60.0).samples:
            counted += sample.models["m"].arrivals
        now += EVERY
    return counted, error


ONE = {"first": 9_000.0, "started": 8_900.0, "rate": 10.0}


async def test_one_source_is_counted_once(stored, monkeypatch):
    counted, error = await arrivals(stored, monkeypatch, Source(**ONE))
    assert (counted, error) == (39 * 150, "")


async def test_a_pair_of_prometheuses_is_counted_once(stored, monkeypatch):
    """One clock is 2 s ahead, so that now this replica's scrape is the newest, now that one's."""
    pair = [
        Source(**ONE, prometheus_replica="a"),
        Source(**(ONE | {"first": 9_007.0}), skew=2.0, prometheus_replica="b"),
    ]
    counted, error = await arrivals(stored, monkeypatch, *pair)
    assert error == ""
    assert counted == 39 * 150


async def test_the_other_of_a_pair_is_read_where_one_ends(stored, monkeypatch):
    pair = [
        Source(**ONE, until=10_200.0, prometheus_replica="a"),
        Source(**(ONE | {"first": 9_007.0}), prometheus_replica="b"),
    ]
    counted, error = await arrivals(stored, monkeypatch, *pair)
    assert error == ""
    assert 0.9 * 39 * 150 < counted <= 39 * 150 + 100


@pytest.mark.parametrize("started", [8_900.01, 8_905.0, 5_000.0, 9_500.0])
async def test_two_clusters_are_not_mixed(stored, monkeypatch, started):
    """The same namespace and pod in both, one with 100 times the other's load."""
    clusters = [
        Source(**ONE, cluster="a"),
        Source(9_007.0, started, 1_000.0, cluster="b"),
    ]
    counted, error = await arrivals(stored, monkeypatch, *clusters)
    assert counted == 0
    assert "cluster" in error
    assert "spec.metrics.prometheus.matchers" in error


async def test_a_process_that_starts_again_is_no_second_one(stored, monkeypatch):
    """Both Prometheuses see the new process after the old one, each at its own time."""
    pair = []
    for name, offset in (("a", 0.0), ("b", 7.0)):
        pair.append(Source(9_000.0 + offset, 8_900.0, 10.0, until=10_200.0, prometheus_replica=name))
        pair.append(Source(10_215.0 + offset, 10_210.0, 10.0, prometheus_replica=name))
    counted, error = await arrivals(stored, monkeypatch, *pair)
    assert error == ""
    assert 0.9 * 39 * 150 < counted <= 39 * 150
