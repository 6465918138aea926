from __future__ import annotations

from carpool_operator.reporting.metrics import METRICS, Metrics


def test_what_is_counted_is_served():
    metrics = Metrics()
    metrics.count("decisions", "Held", "TooFewSamples")
    metrics.count("pass_cpu_seconds", by=0.25)
    metrics.set("objects", 3, "pods")
    metrics.observe("pass_seconds", 0.02)
    metrics.before_scrape.append(lambda: metrics.set("leader", 1))

    text = metrics.text().decode()

    assert 'carpool_operator_decisions_total{action="Held",reason="TooFewSamples"} 1.0' in text
    assert "carpool_operator_pass_cpu_seconds_total 0.25" in text
    assert 'carpool_operator_objects{kind="pods"} 3.0' in text
    assert 'carpool_operator_pass_seconds_bucket{le="0.03"} 1.0' in text
    assert "carpool_operator_leader 1.0" in text
    assert "process_resident_memory_bytes" in text


def test_names_and_texts_are_in_order():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.text and not metric.text.endswith(".") for metric in METRICS)
