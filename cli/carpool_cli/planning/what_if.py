"""`carpool simulate --from-running`: replays a running sidecar's recent requests with other parameters."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError
from carpool.policy.spec import PERCENTILES, SLO, Latency, Objective, ShedAt
from carpool.simulation.simulator import Device, table
from carpool.tuning.moves import is_gain
from carpool.tuning.objective import Aim, Choice
from carpool_cli.live import running
from carpool_cli.live.admin_client import AdminClient, AdminError
from carpool_cli.live.figures import duration, number
from carpool_cli.planning import assumptions, parameter_map
from carpool_cli.planning.parameter_map import Plane
from carpool_cli.planning.recommending import Recommendation, highest_load, recommend
from carpool_cli.planning.replaying import How, Load, load
from carpool_cli.planning.simulating import Figures, Twin, alternatives, distinct, show
from carpool_cli.printable import json_of, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from carpool_cli.live.running import Running

SHORT = 30.0
"""Seconds of arrivals below which a note says what that means: the tuner measures a steady load for as long."""

UNLIKE = 1.25
"""Factor between forecast and observation from which a note reports it: the sidecar's histogram has an error of 19
%."""

QUARTERS = 4
"""Parts of a recording whose percentiles are compared, from ``ENOUGH`` arrivals each."""
ENOUGH = 100


def too_few_arrivals(arrivals: int, quantile: float) -> bool:
    """Whether fewer than ten requests are expected beyond a quantile: 1,000 arrivals carry a p99, 200 a p95."""
    return arrivals * (1 - quantile) < 10 - 1e-9


class Asked(NamedTuple):
    """The requested changes. ``None``: as in the sidecar."""

    max_batch: int | None
    max_wait: float | None
    max_in_flight: int | None
    pass_through: bool
    slo: float | None
    """Seconds of a p99 target, instead of the policy's SLO."""
    objective: str | None
    target_utilization: int | None
    tune: bool
    compare: bool
    factor: float
    """How many times as fast as recorded the arrivals come."""
    how: How
    seconds: float
    seed: int


class Curve(Struct, frozen=True, rename="camel"):
    """Batch latency as learned."""

    rows: tuple[int, ...]
    """Measured sizes."""
    seconds: tuple[float, ...]
    noise: float
    executors: int
    batches: float


class Played(Struct, frozen=True, rename="camel"):
    """The load; seconds, and requests per second."""

    described: str
    recorded: int
    requests: int
    rate: float
    seconds: float
    rows: float
    """Mean of a request."""


class WhatIf(Struct, frozen=True, kw_only=True, rename="camel"):
    """All results."""

    sidecar: str
    model: str
    slo_seconds: float
    percentile: str
    load: Played
    service: Curve
    current: Parameters
    recommendation: Recommendation
    stays: bool
    """Whether the present configuration is good enough that the tuner would change nothing."""
    results: list[Figures]
    """By simulation, of each requested configuration."""
    planes: list[Plane]
    """By forecast: with the present number in flight, and with the recommended one if it differs."""
    notes: list[str]
    """Limits of these figures, and their assumptions."""


def run(client: AdminClient, model: str | None, asked: Asked, plot: Path | None, *, as_json: bool) -> None:
    """Query a sidecar, forecast, print and draw.

    Raises ``click.ClickException`` with the fix.
    """
    try:
        found = running.read(client, model)
    except AdminError as error:
        raise click.ClickException(str(error)) from None
    found = _changed(found, asked)
    played = load(found.arrivals, asked.how, factor=asked.factor, seconds=asked.seconds, seed=asked.seed)
    with _progress() as step:
        answer = what_if(found, played, asked, step)
    if as_json:
        click.echo(json_of(answer))
    else:
        _tell(found, answer)
    if plot is not None:
        from carpool_cli.planning import plots  # noqa: PLC0415 - matplotlib is not for every run

        title = f"{found.name} at {number(played.process.rate)} requests/s; {answer.percentile} SLO "
        title += format_seconds(answer.slo_seconds)
        try:
            plots.what_if(plot, title, answer.planes, _marked(answer), answer.slo_seconds)
        except OSError as error:
            raise click.ClickException(f"{plot} could not be written: {error.strerror or error}") from None
        click.echo(f"drew {plot}", err=as_json)


def what_if(found: Running, played: Load, asked: Asked, step: Callable[[int], object] = lambda _: None) -> WhatIf:
    """Forecast; ``step`` is called after each point with the number of points left."""
    policy, service = found.policy, found.service
    quantile, target = policy.slo.percentiles[-1]
    situation = Situation(
        process=played.process,
        service=service,
        target=target,
        budget=assumptions.budget(policy),
        limits=found.limits,
        rows=played.mean_rows,
        quantiles=policy.slo.percentiles[:-1],
    )
    # 1. The parameters that the tuner would choose, by its own search over these very arrivals
    aim = Aim.of(policy)
    best = recommend(
        situation, found.largest_safe, forecasting=played.forecaster, passing_mode=policy.pass_through.mode, aim=aim
    )
    given = _given(found.parameters, asked)
    # 2. The sidecar's own Batcher with each configuration
    results = _simulated(found, played, asked, situation, given, best.parameters)
    # 3. All sizes and waits
    percentile, forecaster = PERCENTILES[quantile], played.forecaster(situation)
    drawn = _planes(forecaster, (found.parameters, given, best.parameters), percentile, step)
    return WhatIf(
        sidecar=found.address,
        model=found.model,
        slo_seconds=target,
        percentile=percentile,
        load=Played(
            described=played.described,
            recorded=played.recorded,
            requests=len(played.times),
            rate=played.process.rate,
            seconds=played.times[-1],
            rows=played.mean_rows,
        ),
        service=Curve(service.sizes, service.means, service.noise, service.executors, service.samples),
        current=found.parameters,
        recommendation=best,
        stays=not _is_gain(aim, forecaster, best.parameters, found.parameters),
        results=results,
        planes=drawn,
        notes=[
            *found.notes,
            *(_observed(found, results[0].p99) if asked.factor == 1 else ()),
            *_trust(played, situation, found.parameters, percentile, quantile),
            *_reach(drawn[0]),
        ],
    )


def _simulated(
    found: Running, played: Load, asked: Asked, situation: Situation, given: Parameters, best: Parameters
) -> list[Figures]:
    """Play the load with each configuration that is compared."""
    service = found.service
    device = Device(
        times=table(service.table(max(1024, 2 * service.largest_measured))),
        executors=service.executors,
        cv=service.noise,
        largest=found.largest_safe,
    )
    twin = Twin(device, found.policy, played.arrivals, seconds=played.times[-1], seed=asked.seed)
    others = alternatives(situation.usual_rows, found.limits.max_batch, service.executors) if asked.compare else ()
    named = [("now", found.parameters), *others, ("as given", given), ("recommended", best)]
    sheds_slo = found.policy.admission.shed_at is not ShedAt.DEADLINE
    results = [twin.known(name, parameters, service, shed_slo=sheds_slo) for name, parameters in distinct(named)]
    if asked.tune or asked.compare:
        results.append(twin.tuned("tuned", given))
    return results


def _planes(
    forecaster: Forecaster,
    marked: tuple[Parameters, Parameters, Parameters],
    percentile: str,
    step: Callable[[int], object],
) -> list[Plane]:
    """Forecast all sizes and waits, with each number in flight; ``marked``: the present, given and best parameters."""
    flights = list(dict.fromkeys(each.max_in_flight for each in marked[1:]))
    sizes, waits = parameter_map.grid(forecaster.situation.limits, marked)
    left = iter(range(len(flights) * len(sizes) * len(waits) - 1, -1, -1))
    return [
        parameter_map.plane(forecaster, slots, sizes, waits, percentile, lambda: step(next(left))) for slots in flights
    ]


def _given(current: Parameters, asked: Asked) -> Parameters:
    """Return the present parameters with those of the command line; sizes and waits need batching."""
    typed: dict[str, int | float | bool] = {}
    if asked.max_batch is not None:
        typed["max_batch"] = asked.max_batch
    if asked.max_wait is not None:
        typed["max_wait"] = Duration(asked.max_wait)
    if asked.max_in_flight is not None:
        typed["max_in_flight"] = asked.max_in_flight
    if asked.pass_through or asked.max_batch is not None or asked.max_wait is not None:
        typed["pass_through"] = asked.pass_through
    return replace(current, **typed)


def _changed(found: Running, asked: Asked) -> Running:
    """Return the same with the objective and the SLO asked for; the tuner's range follows from the SLO.

    Raises ``click.ClickException`` naming the bound that contradicts it.
    """
    old = found.policy
    policy = replace(
        old,
        objective=Objective(asked.objective or old.objective),
        target_utilization_percent=asked.target_utilization or old.target_utilization_percent,
    )
    if asked.slo is None:
        return found._replace(policy=policy)
    policy = replace(policy, slo=SLO(latency=Latency(p99=Duration(asked.slo))))
    model = next((each for each in policy.models if each.name == found.model), None)
    try:
        # The baseline of the previous SLO does not apply.
        policy = replace(policy, baseline=policy.limits().clamp(policy.baseline)).validate()
    except PolicyError as error:
        raise click.ClickException(
            f"its policy does not go with --slo-p99 {format_seconds(asked.slo)}: {error}"
        ) from None
    limits = policy.limits(model)
    return found._replace(
        policy=policy, limits=replace(found.limits, min_wait=limits.min_wait, max_wait=limits.max_wait)
    )


def _is_gain(aim: Aim, forecaster: Forecaster, best: Parameters, current: Parameters) -> bool:
    """Whether the tuner would change from ``current`` to the best parameters by the objective."""
    target = forecaster.assess(best)
    is_fast = aim.is_for_latency and target.holds_ahead and aim.keeps_target(target)
    return is_gain(aim, Choice(target, target, is_fast=is_fast), forecaster.assess(current))


# ------------------------------------------------------------------------------------------------- reliability


def _observed(found: Running, forecast: float | None) -> Iterator[str]:
    """Report if observed answers took longer than ``forecast`` seconds, the p99 of the present parameters."""
    if found.p99 is not None and forecast is not None and found.p99 > UNLIKE * forecast:
        paused = f" ({found.stalls.count}, {duration(found.stalls.seconds)} in all)" if found.stalls.count else ""
        yield (
            f"since it started the p99 has been {duration(found.p99)}, where {duration(forecast)} is forecast for what "
            f"is in force: pauses of the host{paused}, another load or other parameters before are not in the forecast"
        )


def _trust(played: Load, situation: Situation, current: Parameters, percentile: str, quantile: float) -> Iterator[str]:
    """Describe the reliability of the recording."""
    recorded, span = played.recorded, duration(played.span)
    if played.how is How.FITTED:
        yield (
            f"arrivals are drawn at random; what the {number(recorded)} recorded ones also had (a trend, a pause, "
            "requests that always arrive together) is not in them"
        )
        if too_few_arrivals(len(played.times), quantile):
            needed = 10 / (1 - quantile)
            yield (
                f"{number(len(played.times))} drawn are too few for a {percentile}, which needs {needed:,.0f}: "
                f"--for {math.ceil(needed / played.process.rate)}s draws as many"
            )
        return
    others = [how for how in (How.REPEATED, How.FITTED) if how is not played.how]
    words = {
        How.REPEATED: "--arrivals repeated repeats them, so that queues reach a steady state",
        How.FITTED: "--arrivals fitted draws enough of them from a fitted process",
    }
    offered = "; ".join(words[how] for how in others)
    if too_few_arrivals(recorded, quantile):
        beyond = recorded * (1 - quantile)
        yield (
            f"{number(recorded)} arrivals are too few for a {percentile}: {beyond:.2g} lie beyond it, and 10 are "
            f"needed: {10 / (1 - quantile):,.0f} arrivals. Wait for more, or: {offered}"
        )
    elif played.span < SHORT:
        yield (
            f"the recording is {span} long: rarer bursts and pauses are not in its {percentile}. "
            f"Repeat it at other times, or: {offered}"
        )
    if played.how is How.REPEATED and len(played.times) > recorded:
        yield f"repeating adds no information to the {number(recorded)} recorded ones"
    size = recorded // QUARTERS
    if size < ENOUGH:
        return
    parts = []
    for part in range(QUARTERS):
        here = slice(part * size, (part + 1) * size)
        times, rows = played.times[here], played.rows and played.rows[here]
        quarter = played._replace(times=times, rows=rows).forecaster(situation)
        parts.append(getattr(quarter.assess(current).present, percentile))
    yield (
        f"by quarters of the recording the present {percentile} would be {duration(min(parts))} to "
        f"{duration(max(parts))}"
    )


def _reach(drawn: Plane) -> Iterator[str]:
    """Report which part of the map is extrapolated."""
    low, high = drawn.measured
    beyond = [size for size in drawn.sizes if drawn.extrapolated(size)]
    if beyond:
        yield (
            f"batch latency was measured from {low} to {high} rows: {', '.join(map(str, beyond))} are extrapolated; "
            f"the tuner goes to {2 * high} at most before it has measured more"
        )


# ------------------------------------------------------------------------------------------------- texts


def _marked(answer: WhatIf) -> dict[str, Parameters]:
    """Return the configurations marked on the maps."""
    marked = {each.name: each.parameters for each in answer.results if each.name in parameter_map.MARKS}
    return marked | {"now": answer.current, "recommended": answer.recommendation.parameters}


def _tell(found: Running, answer: WhatIf) -> None:
    from rich.console import Console  # noqa: PLC0415 - not for --help

    service, best = answer.service, answer.recommendation
    promise = f"{answer.percentile} {format_seconds(answer.slo_seconds)}"
    click.echo(f"{found.name} at {answer.sidecar}: {answer.current.describe()}; SLO {promise}")
    click.echo(f"load: {answer.load.described}")
    ends = ", ".join(
        f"{duration(service.seconds[index])} at {service.rows[index]}"
        for index in dict.fromkeys((0, len(service.rows) - 1))
    )
    click.echo(
        f"batch latency: {ends} rows, of {service.batches:,.0f} batches, extrapolated beyond {service.rows[-1]} rows; "
        f"{service.executors} computed at once, single batches vary by {service.noise:.0%}"
    )
    click.echo(f"answers since it started: p50 {duration(found.p50)}, p99 {duration(found.p99)}")
    if found.decision is not None:
        decision = found.decision.decision
        verb = "changed" if decision.change else "kept"
        ago = duration(max(round(time.time() - found.decision.at), 0))
        click.echo(printable(f"its tuner, {ago} ago: {verb}, {decision.reason}: {decision.message}"))
    click.echo()
    show(answer.results, answer.slo_seconds, 1 - found.policy.slo.percentiles[-1][0])
    click.echo(f"\nrecommended: {best.parameters.describe()}")
    for line in (*best.reasons, *(f"beware: {doubt}" for doubt in best.doubts)):
        click.echo(f"- {line}")
    if answer.stays:
        click.echo("- the present configuration is not clearly worse: the tuner would stay with it")
    click.echo(f"- {highest_load(best)}\n")
    console = Console(width=max(Console().width, 110), highlight=False)
    marked = _marked(answer)
    console.print(*parameter_map.drawn(answer.planes[-1], marked), sep="\n")
    click.echo(parameter_map.LEGEND)
    for name, parameters in marked.items():
        if answer.planes[-1].place(parameters) is None:
            click.echo(
                f"{name}, with {parameters.max_in_flight} in flight, is on another map: --plot and --json have it"
            )
    for note in answer.notes:
        click.echo(printable(f"beware: {note}"))


@contextmanager
def _progress() -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many points are done."""
    from rich.console import Console  # noqa: PLC0415 - not for --help
    from rich.progress import Progress  # noqa: PLC0415 - likewise

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (console.is_terminal and sys.stderr.isatty())) as bar:
        task = bar.add_task("searching", total=None)

        def step(left: int) -> None:
            total = bar.tasks[task].total or left + 1
            bar.update(task, description="forecasting", total=total, completed=total - left)

        yield step
