"""`carpool simulate --autoscaler`: a day of a fleet, by the autoscaler of a manifest and by others beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import FULL
from carpool.forecasting.forecaster import Situation
from carpool.tuning.objective import Aim
from carpool_cli.planning import assumptions, autoscaling, replica
from carpool_cli.planning.autoscaling import LOAD, Autoscaler, AutoscalerError, Day, Steps
from carpool_sidecar.config.yaml_text import problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool.policy.spec import BatchingPolicy
    from carpool_cli.profiling.device_profile import DeviceProfile


class Asked(NamedTuple):
    """What is to be played."""

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
    """Play, print and draw.

    Raises ``click.ClickException`` saying what to do.
    """
    scaler = _manifest(asked)
    rates, described, cv = _load(asked)
    situation = Situation(
        process=assumptions.process_of(1.0, cv),
        service=assumptions.known(profile),
        target=policy.slo.due,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
    )
    found = days(situation, policy, scaler, rates, cold_start=asked.cold_start, seed=asked.seed)
    least = found[-1].day.replica_hours
    if as_json:
        document = {
            "profile": profile.name,
            "load": described,
            "autoscaler": scaler,
            "days": [one.day for one in found],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1))
    else:
        click.echo(f"{profile.name}; {described}; {autoscaling.described(scaler)}")
        rows = [("", "replica-hours", "of the minimum", "misses", "most replicas", "changes")]
        rows += [
            (
                one.day.name,
                f"{one.day.replica_hours:.1f}",
                f"{one.day.replica_hours / least:.2f}x",
                assumptions.percent(one.day.misses),
                str(one.day.most),
                str(one.day.scalings),
            )
            for one in found
        ]
        click.echo(assumptions.lines(rows))
    if plot is not None:
        from carpool_cli.planning import day_plot  # noqa: PLC0415 - matplotlib is not for every run

        day_plot.draw(plot, f"{profile.name}; {described}", [(one.day.name, one.steps) for one in found])
        click.echo(f"drew {plot}", err=as_json)


def days(
    situation: Situation,
    policy: BatchingPolicy,
    scaler: Autoscaler,
    rates: Sequence[float],
    *,
    cold_start: float,
    seed: int = 0,
) -> list[Played]:
    """Play a day by the autoscaler of zero-wait replicas, of tuned ones, by Carpool's load, and with foresight."""
    zero, tuned = replica.zero_wait(situation), replica.tuned(situation, Aim.of(policy))
    efficient = replica.tuned(situation, Aim())
    ours = replace(scaler, metric=LOAD, target=FULL)
    plays = [
        ("as given, replicas with zero wait", autoscaling.play(scaler, zero, rates, cold_start=cold_start, seed=seed)),
        (
            f"as given, Carpool ({policy.objective})",
            autoscaling.play(scaler, tuned, rates, cold_start=cold_start, seed=seed),
        ),
        (
            f"Carpool's load at {FULL:g} (Efficiency)",
            autoscaling.play(ours, efficient, rates, cold_start=cold_start, seed=seed),
        ),
        ("the fewest possible, knowing the load", autoscaling.clairvoyant(efficient, rates, cold_start=cold_start)),
    ]
    return [Played(autoscaling.summary(name, steps), steps) for name, steps in plays]


def _manifest(asked: Asked) -> Autoscaler:
    try:
        documents = [each for each in yaml.safe_load_all(asked.manifest.read_text("utf-8")) if isinstance(each, dict)]
    except OSError as error:
        raise click.ClickException(f"{asked.manifest}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{asked.manifest}: {problem(error)}") from None
    scalers = [each for each in documents if each.get("kind") in {"HorizontalPodAutoscaler", "ScaledObject"}]
    if len(scalers) != 1:
        raise click.ClickException(
            f"{asked.manifest}: it has {len(scalers)} HPAs or ScaledObjects, name a file with one"
        )
    try:
        scaler = autoscaling.read(scalers[0])
    except (AutoscalerError, KeyError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise click.ClickException(f"{asked.manifest}: {what}") from None
    if asked.replicas is None:
        return scaler
    least, _, most = asked.replicas.partition("..")
    if not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise click.UsageError(f"--replicas {asked.replicas}: write the least and the most, e.g. 1..8")
    return replace(scaler, least=int(least), most=int(most))


def _load(asked: Asked) -> tuple[list[float], str, float]:
    """Return rates by step, what they are, and how bursty requests come within a step."""
    if asked.trace is not None:
        times, described = assumptions.read_trace(asked.trace, None)
        rates = autoscaling.binned(times)
        if asked.rate is not None:
            factor = asked.rate * len(rates) / sum(rates)
            rates = [factor * each for each in rates]
            described = f"{asked.trace.name} at its own pace, {factor:,.0f} times as many requests"
        return rates, described, max(asked.cv, 1.0)
    if asked.rate is None:
        raise click.UsageError("name a load: --rate REQUESTS_PER_SECOND in the mean of a day, or --trace FILE")
    shape = autoscaling.diurnal(1.0)
    mean = sum(shape) / len(shape)
    return [asked.rate / mean * each for each in shape], f"a day at {asked.rate:,g} requests/s in the mean", asked.cv
