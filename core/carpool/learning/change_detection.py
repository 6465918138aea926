"""What is news of t(b): what decisions have to be looked at again for, and what makes another model of it."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.learning.latency_model import ServiceTime

NEWS = 0.02
"""Relative change of t(b) at a measured size that is worth a new search."""

SURE = 0.2
"""Width of a confidence interval, relative to t(b), from which more evidence is worth one: of a noisy model's sizes one
or other has twice as much of it every second."""

ANOTHER_MODEL = 0.10
"""Relative change of t(b), beyond what both fits are sure of, after which what was tried may be tried again."""


def is_news(service: ServiceTime, known: ServiceTime | None) -> bool:
    """Whether a search by what was known so far may have found something else than one by ``service`` would."""
    if (
        known is None
        or service.executors != known.executors
        or service.largest_in_flight != known.largest_in_flight
        or service.largest_measured >= 1.2 * known.largest_measured
    ):
        return True
    # Twice the evidence on a size replaces a first guess; after that only a contradiction does, not chance.
    return any(
        abs(service.time(b) / known.time(b) - 1) > NEWS
        and (_contradicts(service, known, b) or width(service, b) < min(width(known, b) / sqrt(2), SURE))
        for b in service.sizes
    )


def is_another(service: ServiceTime, known: ServiceTime | None) -> bool:
    """Whether t(b) differs so much from when the last configurations were tried that they may be tried again."""
    if known is None or service.executors != known.executors:
        return True
    return any(
        abs(service.time(b) / known.time(b) - 1) > ANOTHER_MODEL and _contradicts(service, known, b)
        for b in known.sizes
        if b <= service.largest_measured
    )


def width(service: ServiceTime, rows: int) -> float:
    """Width of the confidence interval of t(b), relative to it."""
    return (service.upper(rows) - service.lower(rows)) / service.time(rows)


def _contradicts(service: ServiceTime, known: ServiceTime, rows: int) -> bool:
    return service.lower(rows) > known.upper(rows) or service.upper(rows) < known.lower(rows)
