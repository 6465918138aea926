"""The report on a load test: percentiles, goodput, stalls, and whether the generator was the bottleneck."""

from __future__ import annotations

import math
import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from carpool_cli.load.loadgen import FAILURES, MAX_COMPLAINTS, Recording
from carpool_cli.printable import json_of
from carpool_cli.stopped import STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

WINDOW = 1.0
"""Seconds of one window of the report."""

LATE = 0.005
"""Lateness in seconds of one request in a hundred from which the generator is reported as late: timers have 1 ms."""

MOST_TEXTS = 4
"""Most texts shown of the errors with one status."""

BUSY = 0.85
"""Share of a core from which the generator is reported as busy: Python uses one core, and near its limit requests
queue."""


class Percentiles(Struct, frozen=True, rename="camel"):
    """Seconds from due to answered, of answers with status 2xx (nearest rank), and their number."""

    count: int
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Window(Struct, frozen=True, rename="camel"):
    """One second of the test, by the due times of requests. ``stalled``: this host paused during it."""

    start: float
    requests: int
    good: int
    p50: float | None
    p99: float | None
    stalled: bool


class StallSpan(Struct, frozen=True, rename="camel"):
    """A pause of this host, seconds from the start."""

    start: float
    seconds: float


class Report(Struct, frozen=True, kw_only=True, rename="camel"):
    """On the requests due in the measured part of a test. Times are seconds, rates per second.

    ``good`` counts answers 2xx within their SLO, goodput is that per second. ``steady`` is ``latency`` without the
    windows in which this host stalled, ``None`` if none is left.
    """

    seconds: float
    requests: int
    intended_rate: float
    achieved_rate: float
    """Requests sent by the end of the measured part, per second of it."""
    ok: int
    good: int
    goodput: float
    good_share: float
    errors: dict[str, int]
    complaints: dict[str, dict[str, int]]
    """Beginnings of answers of each status in ``errors``, with counts, the most frequent first."""
    latency: Percentiles | None
    steady: Percentiles | None
    steady_good_share: float | None
    windows: list[Window]
    stalls: list[StallSpan]
    lateness_p99: float
    """Lateness in seconds that one request in a hundred exceeds, without stalled windows."""
    cpu_share: float
    most_outstanding: int
    generator_limits: list[str]
    """Why the generator rather than the server may determine the figures; empty if it kept up."""


def percentiles(latencies: Sequence[float]) -> Percentiles | None:
    """Return percentiles of latencies, ``None`` without any."""
    if not latencies:
        return None
    ordered = sorted(latencies)
    p50, p90, p99, p999 = (nearest_rank(ordered, q) for q in (0.5, 0.9, 0.99, 0.999))
    return Percentiles(len(ordered), p50, p90, p99, p999, ordered[-1])


def nearest_rank(ordered: Sequence[float], q: float) -> float:
    """Return the smallest of the ascending values (at least one) that a share ``q`` of them does not exceed."""
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


def problems(
    url: str, errors: Mapping[str, int], complaints: Mapping[str, Mapping[str, int]], limits: Sequence[str]
) -> Iterator[str]:
    """Yield the problems, a line each: errors by kind, and the generator's own limits."""
    for name, count in errors.items():
        line = f"{'status ' + name if name.isdigit() else name}: {count} from POST {url}"
        said = list(complaints.get(name, {}).items())
        if len(said) == 1:
            line += f"; the first: {said[0][0]}"
        yield line
        # The same status may have several causes: a missing model, and rejections as its result.
        if len(said) > 1:
            yield from (f"  {many} of them: {text}" for text, many in said[:MOST_TEXTS])
    for limit in limits:
        yield f"THE GENERATOR WAS A BOTTLENECK: {limit}"


def summarize(recording: Recording, *, slo: float, warm_up: float, seconds: float, connections: int) -> Report:
    """Report on the requests due from ``warm_up`` on, for ``seconds``; at least one.

    ``connections``: most connections of the generator.
    """
    due, status = recording.due, recording.status
    measured = [index for index in range(len(due)) if due[index] >= warm_up]
    windows, untouched = _windows(recording, measured, slo=slo, warm_up=warm_up, seconds=seconds)
    # 1. Outcomes
    latencies, steady = _latencies(recording, measured), _latencies(recording, untouched)
    good = sum(window.good for window in windows)
    failed = [index for index in measured if not _ok(status[index])]
    errors = Counter(_name(status[index]) for index in failed)
    said = Counter(
        (_name(status[index]), recording.complaints[recording.complained[index] - 1])
        for index in failed
        if recording.complained and recording.complained[index]
    )
    # 2. The generator itself
    sent = sum(recording.sent[index] <= warm_up + seconds for index in measured)
    late = nearest_rank(sorted(recording.sent[index] - due[index] for index in untouched or measured), 0.99)
    cpu = recording.cpu_seconds / recording.seconds
    limits = generator_limits(late, cpu)
    if recording.most_outstanding > connections:
        limits.append(
            f"{recording.most_outstanding} requests were under way on {connections} connections, the rest waited here: "
            "raise --connections"
        )
    return Report(
        seconds=seconds,
        requests=len(measured),
        intended_rate=len(measured) / seconds,
        achieved_rate=sent / seconds,
        ok=len(latencies),
        good=good,
        goodput=good / seconds,
        good_share=good / len(measured),
        errors=dict(errors.most_common()),
        complaints=by_status(said),
        latency=percentiles(latencies),
        steady=percentiles(steady),
        steady_good_share=sum(each <= slo for each in steady) / len(untouched) if untouched else None,
        windows=windows,
        stalls=[
            StallSpan(stall.start - warm_up, stall.end - stall.start)
            for stall in recording.stalls
            if stall.end > warm_up
        ],
        lateness_p99=late,
        cpu_share=cpu,
        most_outstanding=recording.most_outstanding,
        generator_limits=limits,
    )


def _windows(
    recording: Recording, measured: Sequence[int], *, slo: float, warm_up: float, seconds: float
) -> tuple[list[Window], list[int]]:
    """Return the windows, and the requests of those without a stall: during it, or during a request due in it."""
    by_window: dict[int, list[int]] = {int(step): [] for step in range(math.ceil(round(seconds / WINDOW, 6)))}
    for index in measured:
        by_window.setdefault(int((recording.due[index] - warm_up) / WINDOW), []).append(index)
    windows, untouched = [], []
    for number, members in sorted(by_window.items()):
        start = warm_up + number * WINDOW
        stop = max((recording.done[index] for index in members), default=start)
        stalled = any(stall.start < max(stop, start + WINDOW) and stall.end > start for stall in recording.stalls)
        latencies = _latencies(recording, members)
        good = sum(each <= slo for each in latencies)
        found = percentiles(latencies)
        p50, p99 = (None, None) if found is None else (found.p50, found.p99)
        windows.append(Window(round(start - warm_up, 6), len(members), good, p50, p99, stalled))
        if not stalled:
            untouched += members
    return windows, untouched


def _latencies(recording: Recording, indices: Sequence[int]) -> list[float]:
    """Return the seconds from due to answered of those requests whose answer has status 2xx."""
    return [recording.done[each] - recording.due[each] for each in indices if _ok(recording.status[each])]


def generator_limits(late: float, cpu: float) -> list[str]:
    """Return why this process limits a load: the lateness of one request in a hundred, and its share of a core."""
    limits = []
    if late > LATE:
        limits.append(f"one request in a hundred left over {late * 1e3:.1f} ms late: lower --rate or free this machine")
    if cpu > BUSY:
        limits.append(f"this process used {cpu:.0%} of a core: lower --rate or run several")
    return limits


def by_status(said: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Group texts of errors by their status, the most frequent first."""
    found: dict[str, dict[str, int]] = {}
    for (name, text), count in said.most_common():
        texts = found.setdefault(name, {})
        if len(texts) < MAX_COMPLAINTS:
            texts[text] = count
    return found


def _ok(status: int) -> bool:
    return 200 <= status < 300


def _name(status: int) -> str:
    return str(status) if status > 0 else FAILURES[-1 - status]


def deliver(
    document: bytes, show: Callable[[], None], *, stopped: str, good: bool, as_json: bool, out: Path | None
) -> None:
    """Show a report, or print it as JSON; write it to a file, too; exit with a code unless the load was ``good``.

    ``stopped``: a line about what Ctrl-C left out, empty if the load ended by itself. Raises ``click.ClickException``
    naming a file that can't be written, once the report has been shown.
    """
    if stopped:
        click.echo(stopped, err=as_json)
    if as_json:
        click.echo(document, nl=False)
    else:
        show()
    if out is not None:
        try:
            out.write_bytes(document)
        except OSError as error:
            raise click.ClickException(f"{out} could not be written: {error.strerror or error}") from None
    if stopped:
        sys.exit(STOPPED)
    if not good:
        sys.exit(1)


def to_json(report: Struct, **settings: object) -> bytes:
    """Return a report as JSON, after when, where and how it was made: what is needed to make it again."""
    try:
        installed = version("carpool-serving")
    except PackageNotFoundError:  # run from a checkout: the load has been sent, so its results are kept all the same
        installed = "unknown"
    made = {
        "command": sys.argv,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "carpool": installed,
    }
    fields = {**made, **settings, **msgspec.to_builtins(report)}
    return json_of(fields) + b"\n"
