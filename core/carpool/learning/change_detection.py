"""Changes of batch latency: those that need a new decision, and those that show another model."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.learning.latency_model import ServiceTime

CHANGE = 0.02
"""Relative change of batch latency at a measured size that is worth a new search."""

SURE = 0.2
"""Relative width of a confidence interval of batch latency from which more evidence is worth a search. Without it, some
size of a noisy model would have twice its evidence every second."""

ANOTHER_MODEL = 0.10
"""Relative change of batch latency, beyond both confidence intervals, after which settings may be explored again."""


def has_changed(service: ServiceTime, known: ServiceTime | None) -> bool:
    """Whether a search with ``service`` may choose another setting than one with the ``known`` fit."""
    if (
        known is None
        or service.executors != known.executors
        or service.largest_in_flight != known.largest_in_flight
        or service.largest_measured >= 1.2 * known.largest_measured
    ):
        return True
    # Twice the evidence on a size replaces a first guess; after that only a contradiction does, not chance.
    return any(
        abs(service.time(b) / known.time(b) - 1) > CHANGE
        and (_contradicts(service, known, b) or width(service, b) < min(width(known, b) / sqrt(2), SURE))
        for b in service.sizes
    )


def is_another_model(service: ServiceTime, known: ServiceTime | None) -> bool:
    """Whether batch latency differs so much from the ``known`` one that settings may be explored again."""
    if known is None or service.executors != known.executors:
        return True
    return any(
        abs(service.time(b) / known.time(b) - 1) > ANOTHER_MODEL and _contradicts(service, known, b)
        for b in known.sizes
        if b <= service.largest_measured
    )


def width(service: ServiceTime, rows: int) -> float:
    """Width of the confidence interval of batch latency, relative to it."""
    return (service.upper(rows) - service.lower(rows)) / service.time(rows)


def _contradicts(service: ServiceTime, known: ServiceTime, rows: int) -> bool:
    return service.lower(rows) > known.upper(rows) or service.upper(rows) < known.lower(rows)
