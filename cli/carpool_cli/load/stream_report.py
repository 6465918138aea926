"""The report on token streams: goodput by both targets, percentiles, and whether the generator kept up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from carpool_cli.load.report import Percentiles, by_status, generator_limits, nearest_rank, percentiles

if TYPE_CHECKING:
    from carpool.generation.requests import Slo
    from carpool_cli.load.streaming import Streamed, StreamRecording


class StreamReport(Struct, frozen=True, kw_only=True, rename="camel"):
    """On the requests due in the measured part of a test. Times are seconds, rates per second.

    ``good`` are complete answers within TTFT and TPOT. Percentiles are of complete answers; ``itl``: gaps between
    chunks with text.
    """

    seconds: float
    requests: int
    intended_rate: float
    achieved_rate: float
    complete: int
    good: int
    goodput: float
    good_share: float
    steady_good_share: float | None
    """Without requests that were in progress while this host paused; None if none is left."""
    prompt_tokens: int
    """As counted by the server; 0 if it reports none."""
    output_tokens: int
    """As counted by the server, else chunks with text."""
    output_rate: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    whole: Percentiles | None
    errors: dict[str, int]
    complaints: dict[str, dict[str, int]]
    """Beginnings of answers of each kind in ``errors``, with counts, the most frequent first."""
    pauses: int
    paused_seconds: float
    most_outstanding: int
    generator_limits: list[str]
    """Why the generator rather than the server may determine the figures; empty if it kept up."""


def summarize(recording: StreamRecording, *, slo: Slo, warm_up: float, seconds: float) -> StreamReport:
    """Report on the requests due from ``warm_up`` on, for ``seconds``; at least one."""
    measured = [each for each in recording.streams if each.due >= warm_up]
    complete = [each for each in measured if not each.failure]
    good = sum(_good(each, slo) for each in complete)
    steady = [
        each
        for each in measured
        if not any(stall.start < max(each.last, each.due) and stall.end > each.due for stall in recording.stalls)
    ]
    pauses = [stall for stall in recording.stalls if stall.end > warm_up]
    late = nearest_rank(sorted(each.sent - each.due for each in steady or measured), 0.99)
    errors = Counter(each.failure for each in measured if each.failure)
    said = Counter((each.failure, each.complaint) for each in measured if each.complaint)
    output = sum(each.output_tokens for each in complete)
    return StreamReport(
        seconds=seconds,
        requests=len(measured),
        intended_rate=len(measured) / seconds,
        achieved_rate=sum(each.sent <= warm_up + seconds for each in measured) / seconds,
        complete=len(complete),
        good=good,
        goodput=good / seconds,
        good_share=good / len(measured),
        steady_good_share=sum(_good(each, slo) for each in steady) / len(steady) if steady else None,
        prompt_tokens=sum(each.prompt_tokens for each in complete),
        output_tokens=output,
        output_rate=output / seconds,
        ttft=percentiles([each.ttft for each in complete]),
        tpot=percentiles([each.tpot for each in complete if each.output_tokens > 1]),
        itl=percentiles([gap for each in complete for gap in each.gaps]),
        whole=percentiles([each.last - each.due for each in complete]),
        errors=dict(errors.most_common()),
        complaints=by_status(said),
        pauses=len(pauses),
        paused_seconds=sum(stall.end - stall.start for stall in pauses),
        most_outstanding=recording.most_outstanding,
        generator_limits=generator_limits(late, recording.cpu_seconds / recording.seconds),
    )


def _good(each: Streamed, slo: Slo) -> bool:
    return not each.failure and each.ttft <= slo.ttft and each.tpot <= slo.tpot
