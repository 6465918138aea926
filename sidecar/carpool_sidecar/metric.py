"""One metric, and how samples are written."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Metric(NamedTuple):
    """One metric; a counter's name is written with ``_total`` outside."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    text: str


class Families:
    """Metrics, and how values are added to them. ``by_name``: prometheus_client's families."""

    def __init__(self, by_name: dict[str, Any]) -> None:
        self._by_name = by_name

    def put(self, name: str, value: float, *labels: object) -> None:
        """Add the value of a counter or a gauge."""
        self._by_name[name].add_metric([str(label) for label in labels], value)

    def histogram(self, name: str, bounds: tuple[float, ...], counts: list[int], total: float, *labels: str) -> None:
        """Add a histogram: ``counts`` between its bounds, the last beyond them all, and the sum of its values."""
        self._by_name[name].add_metric(list(labels), cumulative(bounds, counts), total)

    def summary(self, name: str, count: int, total: float, *labels: str) -> None:
        """Add a summary: the number of its values, and their sum."""
        self._by_name[name].add_metric(list(labels), count, total)


def cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Return Prometheus's buckets, each with all values below its bound; the last is unbounded."""
    buckets, total = [], 0
    for bound, count in zip((*(f"{bound:.6g}" for bound in bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
