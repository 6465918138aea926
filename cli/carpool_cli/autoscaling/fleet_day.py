"""`carpool simulate --autoscaler`: a day of a fleet, with the autoscaler of a manifest and others for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click
import yaml
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import FULL
from carpool.policy.durations import Duration
from carpool.tuning.objective import Aim
from carpool_cli.answers import BadFile, read_text
from carpool_cli.autoscaling import days, manifest
from carpool_cli.autoscaling.controller import LOAD, Autoscaler, Metric
from carpool_cli.autoscaling.days import Day, Steps
from carpool_cli.autoscaling.manifest import AutoscalerError
from carpool_cli.planning import assumptions, replica
from carpool_cli.printable import json_of
from carpool_sidecar.config.yaml_text import problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool.forecasting.forecaster import Situation
    from carpool.policy.spec import BatchingPolicy
    from carpool_cli.profiling.device_profile import DeviceProfile


class Asked(NamedTuple):
    """The options."""

    manifest: Path
    replicas: str | None
    cold_start: float
    rate: float | None
    """Mean, over all replicas."""
    cv: float
    trace: Path | None
    seed: int


class Played(Struct, frozen=True):
    """One autoscaler's day."""

    day: Day
    steps: Steps


def run(profile: DeviceProfile, policy: BatchingPolicy, asked: Asked, plot: Path | None, *, as_json: bool) -> None:
    """Simulate, print and draw.

    Raises ``click.ClickException`` with the fix.
    """
    scaler = _manifest(asked)
    rates, described, cv = _load(asked, whole=not scaler.least)
    situation = replica.situation(profile, policy, assumptions.process_of(1.0, cv))
    found = compared(situation, policy, scaler, rates, cold_start=asked.cold_start, seed=asked.seed)
    least = found[-1].day.replica_hours
    if as_json:
        document = {
            "profile": profile.name,
            "load": described,
            "autoscaler": scaler,
            "days": [one.day for one in found],
        }
        click.echo(json_of(document))
    else:
        click.echo(f"{profile.name}; {described}; {days.described(scaler)}")
        held = [] if scaler.least else ["held"]
        rows = [("", "replica-hours", "of the minimum", "misses", *held, "most replicas", "changes")]
        rows += [
            (
                one.day.name,
                f"{one.day.replica_hours:.1f}",
                f"{one.day.replica_hours / least:.2f}x" if least else "",
                assumptions.percent(one.day.misses),
                *(assumptions.percent(one.day.held) for _ in held),
                str(one.day.most),
                str(one.day.scalings),
            )
            for one in found
        ]
        click.echo(assumptions.lines(rows))
        if not scaler.least:
            cold = Duration(asked.cold_start)
            click.echo(f"held: requests that waited up to {cold} for a first replica; all of them count as misses")
    if plot is not None:
        from carpool_cli.autoscaling import day_plot  # noqa: PLC0415 - matplotlib is not for every run

        day_plot.draw(plot, f"{profile.name}; {described}", [(one.day.name, one.steps) for one in found])
        click.echo(f"drew {plot}", err=as_json)


def compared(
    situation: Situation,
    policy: BatchingPolicy,
    scaler: Autoscaler,
    rates: Sequence[float],
    *,
    cold_start: float,
    seed: int = 0,
) -> list[Played]:
    """Play a day with the autoscaler on zero-wait replicas, on tuned ones, on Carpool's load, and with foresight."""
    zero, tuned = replica.zero_wait(situation), replica.tuned(situation, Aim.of(policy))
    efficient = replica.tuned(situation, Aim())
    ours = replace(scaler, metrics=(Metric(LOAD, FULL),))
    plays = [
        ("as given, replicas with zero wait", days.play(scaler, zero, rates, cold_start=cold_start, seed=seed)),
        (
            f"as given, Carpool ({policy.objective})",
            days.play(scaler, tuned, rates, cold_start=cold_start, seed=seed),
        ),
        (
            f"Carpool's load at {FULL:g} (Efficiency)",
            days.play(ours, efficient, rates, cold_start=cold_start, seed=seed),
        ),
        (
            "the fewest possible, knowing the load",
            days.clairvoyant(efficient, rates, cold_start=cold_start, least=scaler.least),
        ),
    ]
    return [Played(days.summary(name, steps), steps) for name, steps in plays]


def _manifest(asked: Asked) -> Autoscaler:
    try:
        documents = [each for each in yaml.safe_load_all(read_text(asked.manifest)) if isinstance(each, dict)]
    except (yaml.YAMLError, RecursionError) as error:
        raise BadFile(f"{asked.manifest}: {problem(error)}") from None
    scalers = [each for each in documents if each.get("kind") in ("HorizontalPodAutoscaler", "ScaledObject")]
    if len(scalers) != 1:
        raise BadFile(f"{asked.manifest}: it has {len(scalers)} HPAs or ScaledObjects, name a file with one")
    try:
        scaler = manifest.read(scalers[0])
    except (AutoscalerError, KeyError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadFile(f"{asked.manifest}: {what}") from None
    if asked.replicas is None:
        return scaler
    least, _, most = asked.replicas.partition("..")
    if not least.isdecimal() or not most.isdecimal() or not int(least) <= int(most) or not int(most):
        raise click.UsageError(f"--replicas {asked.replicas}: write the least and the most, e.g. 1..8 or 0..8")
    return replace(scaler, least=int(least), most=int(most))


def _load(asked: Asked, *, whole: bool) -> tuple[list[float], str, float]:
    """Return rates by step, their description, and the burstiness of requests within a step.

    ``whole``: whole requests, so that some steps have none, as needed where replicas scale to zero.
    """
    if asked.trace is not None:
        times, described = assumptions.read_trace(asked.trace, None)
        rates = days.binned(times)
        if asked.rate is not None:
            factor = asked.rate * len(rates) / sum(rates)
            rates = [factor * each for each in rates]
            described = f"{asked.trace.name} at its own pace, {factor:,.0f} times as many requests"
        return rates, described, max(asked.cv, 1.0)
    if asked.rate is None:
        raise click.UsageError("name a load: --rate REQUESTS_PER_SECOND in the mean of a day, or --trace FILE")
    shape = days.diurnal(1.0)
    mean = sum(shape) / len(shape)
    rates = [asked.rate / mean * each for each in shape]
    described = f"a day at {asked.rate:,g} requests/s in the mean"
    return days.drawn(rates, asked.seed) if whole else rates, described, asked.cv
