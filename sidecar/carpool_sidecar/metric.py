"""One metric, and how a histogram is written."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One metric; a counter's name is written with ``_total`` outside."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    text: str


def cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Return Prometheus's buckets, each with all values below its bound; the last is unbounded."""
    buckets, total = [], 0
    for bound, count in zip((*(f"{bound:.6g}" for bound in bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
