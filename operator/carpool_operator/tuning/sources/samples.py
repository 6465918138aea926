"""One scrape as Prometheus stored it, and functions to read it."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

Key: TypeAlias = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its own labels."""

Scrape: TypeAlias = dict[Key, float]
"""All samples of one pod at one moment."""


class UnusableError(ValueError):
    """Prometheus' data about a pod is not usable; the message has the problem."""


def edges(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the upper bounds of a histogram's buckets, as ``edge`` reads them."""
    return (*(f"{bound:.6g}" for bound in bounds), "inf")


def edge(text: str) -> str:
    """Parse a bucket's ``le``: Prometheus 3 writes 1.0 where the sidecar wrote 1."""
    return f"{number(text):.6g}"


def histogram(name: str, known: tuple[str, ...], cumulative: dict[str, int]) -> list[int]:
    """Return the counts between each bound and the one before; raises ``UnusableError``."""
    missing = [each for each in known if each not in cumulative]
    if missing:
        raise UnusableError(f"{name} has no le={missing[0]!r}: metric relabeling drops buckets")
    ordered = [0, *(cumulative[each] for each in known)]
    counts = [above - below for below, above in pairwise(ordered)]
    if min(counts) < 0:
        raise UnusableError(f"{name} falls from one bound to the next")
    return counts


def count(scrape: Scrape, name: str, own: tuple[str, ...]) -> int:
    """Return a count of a scrape; raises ``UnusableError`` if it is invalid."""
    return whole(name, scrape[name, own])


def whole(name: str, value: float) -> int:
    """Return a count; raises ``UnusableError`` if it is invalid."""
    if value != int(value):
        raise UnusableError(f"{name} is {value:g}, which is no count: this is a rule's result, not the sidecar's")
    return int(value)


def number(text: str) -> float:
    """Parse a number as Prometheus writes it; anything else becomes NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
