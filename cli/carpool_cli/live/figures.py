"""Figures for users, from two polls of a sidecar's counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from carpool.batching.counters import ModelStats, combine
from carpool.policy.durations import format_seconds

if TYPE_CHECKING:
    from carpool.exchange.report import Report


class Figures(Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of ``seconds``; seconds, requests per second, shares; ``None`` where there is no data."""

    seconds: float
    rate: float
    goodput: float
    p50: float | None
    p99: float | None
    miss_share: float | None
    """Of the completed requests."""
    misses: dict[str, int]
    sizes: dict[int, int]
    """Batches by rows."""
    mean_batch: float | None
    device_seconds_per_request: float | None
    """Per request that reached the model. Only if the counters are those of all models: they share the device."""
    device_busy_share: float


def figures_of(models: list[ModelStats], seconds: float, device_busy: float = 0.0) -> Figures:
    """Return the figures of models' counters, with the seconds in which the device was busy for them.

    Rates are 0 where no time has passed.
    """
    total = combine(models)
    sizes: dict[int, int] = {}
    for _, rows, _, executors, batches, _, _ in total.cells:
        if not executors:  # the others count the same batches again
            sizes[rows] = sizes.get(rows, 0) + batches
    batches = sum(sizes.values())
    ended = total.hits + total.missed
    return Figures(
        seconds=seconds,
        rate=total.arrivals / seconds if seconds else 0.0,
        goodput=total.hits / seconds if seconds else 0.0,
        p50=total.quantile(0.5),
        p99=total.quantile(0.99),
        miss_share=total.missed / ended if ended else None,
        misses={reason: count for reason, count in sorted(total.misses.items()) if count},
        sizes=dict(sorted(sizes.items())),
        mean_batch=sum(rows * count for rows, count in sizes.items()) / batches if batches else None,
        device_seconds_per_request=device_busy / total.dispatched if total.dispatched and device_busy else None,
        device_busy_share=device_busy / seconds if seconds else 0.0,
    )


class Passed(Struct, frozen=True, kw_only=True, rename="camel"):
    """Requests of one path that were passed on and not batched in ``seconds``; seconds, requests per second."""

    name: str
    """Method and path."""
    seconds: float
    requests: int
    rate: float
    p50: float | None
    p99: float | None
    good_share: float
    """Share of the requests answered with success within the SLO."""

    def __str__(self) -> str:
        latency = f"p50 {duration(self.p50)}, p99 {duration(self.p99)}"
        return f"{self.name}: {number(self.rate)}/s, {latency}, {self.good_share:.2%} good within the SLO"


def passed_on(before: Report | None, after: Report, seconds: float) -> list[Passed]:
    """Return the requests passed on between two polls, most requests first; without the first poll, since the start."""
    earlier = {(each.method, each.path): each for each in before.forwarded} if before is not None else {}
    found = []
    for each in after.forwarded:
        requests, hits, durations = each.requests, each.hits, each.durations
        if (old := earlier.get((each.method, each.path))) is not None and old.requests <= requests:
            requests, hits = requests - old.requests, hits - old.hits
            durations = [new - was for new, was in zip(durations, old.durations, strict=True)]
        if requests:
            counted = ModelStats(durations=durations)
            found.append(
                Passed(
                    name=f"{each.method} {each.path}".strip(),
                    seconds=seconds,
                    requests=requests,
                    rate=requests / seconds if seconds else 0.0,
                    p50=counted.quantile(0.5),
                    p99=counted.quantile(0.99),
                    good_share=hits / requests,
                )
            )
    return sorted(found, key=lambda each: -each.requests)


def number(value: float) -> str:
    """Return a number to four digits, never in powers of ten: ``0.1235``, ``12.35``, ``49,760``."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return seconds with three digits, the precision of measured ones: ``22.7ms``; ``-`` for none."""
    return "-" if seconds is None else format_seconds(float(f"{seconds:.3g}"))
