"""Shared by `simulate` and `recommend`: a load, a device and a policy, from the command line."""

from __future__ import annotations

import math
import os
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec.structs import replace

from carpool.learning.arrivals import Fitted, Gamma, Poisson, WindowCounts, fitted, until
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.plain import PolicyError
from carpool.policy.spec import (
    SLO,
    TARGET_UTILIZATION,
    Admission,
    BatchingPolicy,
    Bounds,
    DurationRange,
    IntRange,
    Latency,
    Objective,
    ShedAt,
    TuningMode,
)
from carpool.simulation.simulator import Device, table
from carpool_cli.answers import BadFile, read_text
from carpool_cli.live.figures import duration, number
from carpool_cli.options import is_typed
from carpool_cli.planning.traces import TokenTrace, Trace, azure_llm_2023, scaled
from carpool_sidecar.config.settings import parse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Parameters
    from carpool_cli.profiling.device_profile import DeviceProfile

MOST_REQUESTS = 2_000_000
"""Half a minute of simulation."""

LONGEST_TRACE = 400 * 86_400.0
"""Seconds from the first arrival of a trace to the last: more are milliseconds, or a time that is missing (0)."""

TRACES = "CARPOOL_TRACES"
"""Environment variable with the folder of traces."""

AZURE = "AzureLLMInferenceTrace_conv.csv"

NO_TRACE = (
    f"no such file, neither here nor in the folder that {TRACES} names; the Azure LLM inference traces are at "
    "https://github.com/Azure/AzurePublicDataset (data/AzureLLMInferenceTrace_conv.csv, CC-BY-4.0)"
)


def for_p99(target: float, objective: Objective = Objective.BALANCED) -> BatchingPolicy:
    """Return the policy of somebody who names nothing but a p99 (seconds), and perhaps an objective."""
    return BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(target))), objective=objective).validate()


def slo_policy(
    slo: float,
    *,
    largest_batch: int | None = None,
    longest_wait: float | None = None,
    most_in_flight: int | None = None,
    timeout: float | None = None,
    shed_at: ShedAt = ShedAt.AUTOMATIC,
    objective: str | None = None,
    target_utilization: int | None = None,
) -> BatchingPolicy:
    """Return the policy of a p99 (seconds) and bounds.

    Raises ``click.UsageError`` naming the option that contradicts the p99: only the longest wait can.
    """
    policy = BatchingPolicy(
        slo=SLO(latency=Latency(p99=Duration(slo))),
        objective=Objective(objective or Objective.BALANCED),
        target_utilization_percent=target_utilization or TARGET_UTILIZATION,
        bounds=Bounds(
            max_batch=IntRange(max=largest_batch),
            max_wait=DurationRange(max=None if longest_wait is None else Duration(longest_wait)),
            max_in_flight=IntRange(max=most_in_flight),
        ),
        admission=Admission(timeout=None if timeout is None else Duration(timeout), shed_at=shed_at),
    )
    try:
        # The default baseline may be outside of narrow bounds, and the user did not choose it.
        return replace(policy, baseline=policy.limits().clamp(policy.baseline)).validate()
    except PolicyError as error:
        raise click.UsageError(f"--max-wait: {str(error).removeprefix(f'{error.field}: ')}") from None


def held(policy: BatchingPolicy, parameters: Parameters) -> BatchingPolicy:
    """Return a policy fixed at ``parameters``, whatever its own bounds are."""
    size, wait, slots = parameters.max_batch, parameters.max_wait, parameters.max_in_flight
    return replace(
        policy,
        bounds=Bounds(
            max_batch=IntRange(min=size, max=size),
            max_wait=DurationRange(min=wait, max=wait),
            max_in_flight=IntRange(min=slots, max=slots),
        ),
        tuning=replace(policy.tuning, mode=TuningMode.HOLD),
    )


def configured(path: Path) -> tuple[BatchingPolicy, Parameters]:
    """Return the policy of a sidecar's file, and the initial parameters of a model that it does not name.

    Raises ``BadFile`` naming the field.
    """
    try:
        config = parse(read_text(path))
    except PolicyError as error:
        raise BadFile(f"{path}: {error}") from None
    return config.policy, config.parameters_of("")


def budget(policy: BatchingPolicy) -> float:
    """Return the share of requests that a plan may miss: half of what the SLO allows, as in the tuner."""
    quantile, _ = policy.slo.percentiles[-1]
    return (1 - quantile) / 2


def known(profile: DeviceProfile) -> ServiceTime:
    """Return a profile's curve with certain server concurrency: more batches in flight would only queue."""
    return replace(profile.service_time(), largest_in_flight=2 * profile.executors)


def device(profile: DeviceProfile, largest_request: int = 1) -> Device:
    """Return a device with the profile's times, for batches and single requests of any size in use."""
    largest = max(1024, 2 * profile.rows[-1], largest_request)
    return Device(
        times=table(profile.service_time().table(largest)),
        executors=profile.executors,
        cv=profile.cv,
        largest=profile.largest_safe,
    )


def refuse_cv_of(trace: Path | None) -> None:
    """Reject --cv beside a trace: it would change nothing.

    Raises ``click.UsageError``.
    """
    if trace is not None and is_typed("cv"):
        raise click.UsageError("--cv does not go with --trace, which brings its own")


def no_load() -> click.UsageError:
    """Return the error of options that name no load."""
    return click.UsageError("name a load: --rate REQUESTS_PER_SECOND, or --trace FILE")


def nothing_due(seconds: float, warm_up: float, lasts: float = math.inf) -> click.ClickException:
    """Return the error of a load without a request in ``seconds`` after the warm-up; ``lasts``: how long a trace is."""
    if lasts <= warm_up + seconds:
        return click.ClickException(
            f"the trace lasts {duration(lasts)}, and no request of it is due after {duration(warm_up)}: lower --warm-up"
        )
    return click.ClickException(f"no request is due in {format_seconds(seconds)}: raise --rate or --for")


class Arrivals(NamedTuple):
    """The times of requests, seconds from 0, and their description."""

    times: list[float]
    described: str


def arrivals(rate: float | None, cv: float, trace: Path | None, seconds: float, seed: int) -> Arrivals:
    """Draw or read the arrivals of the first ``seconds``.

    Raises ``click.ClickException`` if there are none, or too many to simulate.
    """
    if trace is not None:
        times, described = read_trace(trace, rate)
        times = list(takewhile(lambda time: time < seconds, times))
        if times and not times[-1]:
            raise click.ClickException(
                f"only the first request of the trace comes in {format_seconds(seconds)}: raise --rate or --for"
            )
    else:
        if rate is None:
            raise no_load()
        if rate * seconds > MOST_REQUESTS:
            raise click.ClickException(f"that is over {MOST_REQUESTS} requests: lower --rate or --for")
        times = until(process_of(rate, cv), seconds, Random(seed))  # noqa: S311 - load, not secrets
        described = f"{'Poisson' if cv == 1 else f'gamma, cv {cv:g}'} at {rate:g}/s"
    if not times:
        raise click.ClickException(f"no request comes in {format_seconds(seconds)}: raise --rate or --for")
    if len(times) > MOST_REQUESTS:
        raise click.ClickException(f"that is over {MOST_REQUESTS} requests: lower --rate or --for")
    return Arrivals(times, described)


def process_of(rate: float, cv: float) -> Fitted:
    """Return the process whose gaps have the coefficient of variation ``cv``."""
    return Poisson(rate) if cv == 1 else Gamma(rate, cv)


LONGER = 0.5
"""Seconds over which counts show whether bursts are longer than a window: the tuner's interval."""


def burstiness(times: list[float]) -> Fitted:
    """Return the simplest process that fits a recording, by the tuner's rule."""
    counts, longer = WindowCounts.of(times, times[-1]), WindowCounts.of(times, times[-1], LONGER)
    return fitted(counts.rate, counts, longer.dispersion, longer.window)


def read_trace(path: Path, rate: float | None) -> tuple[list[float], str]:
    """Read recorded arrivals: seconds, one per line, or the Azure LLM trace of 2023; rescaled to ``rate`` if given.

    Raises ``BadFile`` naming the file and the line.
    """
    found = find(path)
    lines = read_text(found).splitlines()
    try:
        azure: TokenTrace | None = azure_llm_2023(lines) if lines and "," in lines[0] else None
        recorded = list(azure.times) if azure else sorted(float(line) for line in lines if line.strip())
    except ValueError as error:
        raise BadFile(f"{found}: {error}; a trace has one arrival a line, in seconds") from None
    if no_time := [each for each in recorded if not math.isfinite(each)]:
        raise BadFile(f"{found}: {no_time[0]} is no time; a trace has one arrival a line, in seconds")
    if len(recorded) < 2 or recorded[0] == recorded[-1]:
        raise BadFile(f"{found}: needs at least two arrivals at different times")
    if recorded[-1] - recorded[0] > LONGEST_TRACE:
        days = (recorded[-1] - recorded[0]) / 86_400
        apart = f"{number(days)} days" if days < 1e6 else "over a million days"
        raise BadFile(f"{found}: the arrivals are {apart} apart, more than 400: are these seconds?")
    if rate is None:
        mean = (len(recorded) - 1) / (recorded[-1] - recorded[0])
        return scaled(recorded, 1.0), f"{found.name} at its own pace, {number(mean)}/s"
    trace = Trace.at_rate(recorded, rate)
    # A factor of 0.01: an hour in 36 s. Changes slower than the queue are compressed, too, so the factor is reported.
    return list(trace.recorded), f"{found.name} at {number(rate)}/s, its clock times {trace.factor:.4g}"


def find(path: Path) -> Path:
    """Return the path of a trace: here, or in the folder that `TRACES` names; ``azure`` is the one of 2023."""
    named = Path(AZURE) if str(path) == "azure" else path
    folders = (Path(), Path(os.environ.get(TRACES, "../shared/data")))
    for candidate in (folder / named for folder in folders):
        if candidate.is_file():
            return candidate
    raise BadFile(f"{named}: {NO_TRACE}")


def percent(share: float) -> str:
    """Format a share for users: ``0.35 %``."""
    return f"{share * 100:.3g} %"


def lines(rows: Iterable[tuple[str, ...]]) -> str:
    """Format a table, first column to the left, the others to the right, with minimal widths."""
    listed = list(rows)
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in listed
    )
