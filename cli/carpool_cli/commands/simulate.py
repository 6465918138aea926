"""`carpool simulate`: the digital twin of a load and a device, given as numbers or by a running sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from carpool.forecasting.forecaster import Forecaster
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.parameters import Parameters
from carpool.policy.spec import BatchingPolicy, ShedAt
from carpool_cli import options
from carpool_cli.options import ADDRESS, DURATION, Address, FiniteRange, WithStreams, is_typed
from carpool_cli.planning import assumptions, replica
from carpool_cli.planning.recommending import best_for
from carpool_cli.planning.replaying import How
from carpool_cli.planning.simulating import Twin, alternatives, distinct, show
from carpool_cli.planning.traces import lasts
from carpool_cli.printable import json_of
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from carpool_cli.profiling.device_profile import DeviceProfile

BROUGHT = ("path", "config", "rate", "cv", "trace", "rows", "executors", "shed_at", "timeout")
"""Options that a running sidecar replaces."""

NO_PART_OF_A_DAY = (
    "config", "rows", "max_batch", "max_wait", "max_in_flight", "pass_through", "tune", "compare", "shed_at", "timeout",
    "seconds",
)  # fmt: skip
"""Options that `--autoscaler` can't follow."""

ITS_OWN = ("model", "factor", "how", "key_file", "workload")
"""Options that need a running sidecar."""

PARAMETERS = ("max_batch", "max_wait", "max_in_flight", "pass_through")
"""Options that are parameters."""

WRITTEN = (*PARAMETERS, "shed_at", "timeout", "objective", "target_utilization")
"""Options that a sidecar's file replaces."""

LARGEST = 32
"""Default maximum rows of a batch, without a sidecar or an option."""


class Asked(NamedTuple):
    """The options."""

    path: Path | None
    admin: Address | None
    model: str | None
    slo: float | None
    config: Path | None
    rate: float | None
    cv: float
    trace: Path | None
    rows: int
    executors: int | None
    max_batch: int | None
    max_wait: float | None
    max_in_flight: int | None
    pass_through: bool
    factor: float
    how: str | None
    tune: bool
    compare: bool
    objective: str | None
    target_utilization: int | None
    shed_at: str
    autoscaler: Path | None
    replicas: str | None
    cold_start: float
    timeout: float | None
    seconds: float
    seed: int
    plot: Path | None
    key_file: Path | None
    workload: str | None
    as_json: bool


@click.command(
    cls=WithStreams,
    streams="carpool_cli.commands.simulate_streams",
    epilog="""\b
Examples:
  carpool simulate --profile benchmarks/profiles/bert-large-128-a100.json --slo-p99 50ms --rate 800 --tune
  carpool simulate --profile p.json --slo-p99 50ms --rate 800 --cv 2 --max-batch 8 --max-wait 5ms
  carpool simulate --profile p.json --slo-p99 50ms --trace azure --rate 300 --for 2m --compare
  carpool simulate --profile p.json --slo-p99 50ms --rate 6000 --replicas 1..8 --autoscaler hpa.yaml --plot day.png
  carpool simulate --from-running http://127.0.0.1:9090 --plot what-if.png
  carpool simulate --from-running :9090 --model bert --load 1.25 --max-batch 16 --max-wait 5ms
  carpool simulate --generative --help

Traces: seconds, one a line, or the Azure LLM inference trace of 2023; `--trace azure` looks for it in the folder that
CARPOOL_TRACES names. It is at https://github.com/Azure/AzurePublicDataset.
""",
)
@options.profile()
@click.option(
    "--from-running",
    "admin",
    type=ADDRESS,
    help="Take load, device, policy and present parameters from the sidecar with this admin port instead.",
)
@click.option("--model", help="Name of the model, if the running sidecar serves several.")
@options.slo()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A sidecar's configuration instead: its policy, and what it starts with.",
)
@options.rate()
@options.cv(help="Coefficient of variation of the gaps. 1: Poisson, above: bursts (gamma).")
@options.trace(help="Recorded arrivals, or `azure`.")
@options.rows(help="Rows of each request.")
@options.executors()
@options.max_batch(help="Largest batch, rows.  [default: 32; of a running sidecar its own, as the next two]")
@options.max_wait(help="How long the oldest request waits for others.  [default: 0s]")
@options.max_in_flight(help="Batches sent at once.  [default: 1]")
@click.option("--pass-through", is_flag=True, help="Merge nothing, and let no request wait.")
@click.option(
    "--load",
    "factor",
    type=FiniteRange(0.01, 100),
    default=1.0,
    show_default=True,
    help="Speed of a running sidecar's arrivals, as a factor, e.g. 1.25.",
)
@click.option(
    "--arrivals",
    "how",
    type=click.Choice([each.value for each in How]),
    help="How to play them: as they came, over and over, or a process like them, the latter two for --for.  "
    "[default: once; with --tune, --compare or --for repeated]",
)
@click.option("--tune", is_flag=True, help="Put the tuner in the loop; it starts from the three above.")
@click.option(
    "--compare", is_flag=True, help="Compare no batching, zero wait, a manual setting, the best one and the tuner."
)
@options.objective
@click.option(
    "--shed-at",
    type=click.Choice([each.value for each in ShedAt], case_sensitive=False),
    default=ShedAt.AUTOMATIC.value,
    show_default=True,
    help="Refuse requests that would miss this. Automatic: the SLO where device time is scarce, else the deadline.",
)
@click.option(
    "--autoscaler",
    type=click.Path(path_type=Path),
    help="An HPA or a ScaledObject (YAML): play a day at --rate in the mean, or a --trace at its own pace, with it.",
)
@click.option(
    "--replicas",
    metavar="LEAST..MOST",
    help="Replicas that it may have; from 0, the first requests are held.  [default: as the manifest says]",
)
@click.option("--cold-start", type=DURATION, default=60.0, help="Until a new replica serves.  [default: 1m]")
@options.timeout(help="Deadline of requests.  [default: 10s, or 2x the SLO]")
@click.option("--for", "seconds", type=DURATION, default=60.0, help="How long requests come.  [default: 60s]")
@options.seed(help="Seed of arrivals and service times.")
@options.plot(
    help="Draw a running sidecar's map over max_batch and max_wait, or the day of an --autoscaler (PNG, SVG, PDF)."
)
@options.admin_access
@options.as_json()
@click.pass_context
def command(context: click.Context, /, **typed: Any) -> None:  # noqa: ANN401 - `Asked` has the types
    """Forecast the effect of a configuration, or of the tuner, on a load, by simulation.

    Batcher and tuner are the sidecar's own; only the device and the clock are not real. A minute takes a few seconds.
    The same arguments give the same figures.

    With --from-running, the load is a running sidecar's last requests (up to 4,096), and the device is its latency
    model. It compares the present configuration, the given one and the recommended one. The map of all sizes and waits
    shows which settings would meet the SLO, and the device time per request.

    With --autoscaler, a day is played with replicas that start and end: replica-hours and misses, beside those of
    Carpool's own signal and of the fewest replicas possible.
    """
    asked = Asked(**typed)
    _check(context, asked)
    if asked.admin is not None:
        _from_running(asked, asked.admin)
        return
    assert asked.path is not None  # noqa: S101 - for the type checker: it was checked
    profile = device_profile.load(asked.path, asked.executors)
    if asked.autoscaler is not None:
        _day(asked, profile, asked.autoscaler)
    else:
        _simulate(asked, profile)


def _from_running(asked: Asked, admin: Address) -> None:
    """Play the last requests of a running sidecar with other parameters."""
    from carpool_cli.live.admin_client import client_of  # noqa: PLC0415 - not for profiles
    from carpool_cli.planning import what_if  # noqa: PLC0415 - likewise, and rich is not for every run

    wanted = what_if.Asked(
        max_batch=asked.max_batch,
        max_wait=asked.max_wait,
        max_in_flight=asked.max_in_flight,
        pass_through=asked.pass_through,
        slo=asked.slo,
        objective=asked.objective,
        target_utilization=asked.target_utilization,
        tune=asked.tune,
        compare=asked.compare,
        factor=asked.factor,
        how=_how(asked.how, lasts=asked.tune or asked.compare or is_typed("seconds")),
        seconds=asked.seconds,
        seed=asked.seed,
    )
    client = client_of(admin, asked.key_file, asked.workload)
    what_if.run(client, asked.model, wanted, asked.plot, as_json=asked.as_json)


def _day(asked: Asked, profile: DeviceProfile, autoscaler: Path) -> None:
    """Play a day of replicas that an autoscaler starts and ends."""
    from carpool_cli.autoscaling import fleet_day  # noqa: PLC0415 - yaml is not for every run

    if asked.slo is None:
        raise click.UsageError("name the p99 to meet: --slo-p99 50ms")
    policy = assumptions.slo_policy(
        asked.slo,
        largest_batch=profile.largest_safe or 64,
        objective=asked.objective,
        target_utilization=asked.target_utilization,
    )
    wanted = fleet_day.Asked(
        autoscaler, asked.replicas, asked.cold_start, asked.rate, asked.cv, asked.trace, asked.seed
    )
    fleet_day.run(profile, policy, wanted, asked.plot, as_json=asked.as_json)


def _simulate(asked: Asked, profile: DeviceProfile) -> None:
    """Play a load on a profile's device with the given parameters, the tuner, or all that is compared."""
    # 1. The load, the policy and the parameters
    if (asked.objective or asked.target_utilization is not None) and not (asked.tune or asked.compare):
        raise click.UsageError("an objective chooses settings, and here one is given: add --tune or --compare")
    assumptions.refuse_cv_of(asked.trace)
    load = assumptions.arrivals(asked.rate, asked.cv, asked.trace, asked.seconds, asked.seed)
    seconds = asked.seconds if asked.trace is None else min(asked.seconds, lasts(load.times))
    policy, parameters, given = _configured(asked, profile)
    if parameters.max_batch > 2 * profile.rows[-1] and not asked.as_json:
        end = f"{asked.path} ends at {profile.rows[-1]} rows"
        click.echo(f"{end}: larger batches are extrapolated by its last slope", err=True)
    arrivals = load.times if asked.rows == 1 else [(time, asked.rows) for time in load.times]
    twin = Twin(assumptions.device(profile, asked.rows), policy, arrivals, seconds=seconds, seed=asked.seed)
    # 2. The requested results
    found = []
    if asked.compare:
        named = _compared(asked, profile, policy, load.times, parameters if given else None)
        found = [twin.fixed(name, each) for name, each in named]
    elif not asked.tune:
        found = [twin.fixed("fixed", parameters)]
    if asked.compare or asked.tune:
        found.append(twin.tuned("tuned", parameters))
    # 3. Report
    due = policy.slo.due
    if asked.as_json:
        document = {
            "profile": profile.name,
            "sloSeconds": due,
            "load": load.described,
            "requests": len(load.times),
            "seconds": seconds,
            "seed": asked.seed,
            "results": found,
        }
        click.echo(json_of(document))
        return
    click.echo(f"{profile.name}; {load.described}, {len(load.times)} requests; due in {format_seconds(due)}")
    show(found, due, 1 - policy.slo.percentiles[-1][0])


def _configured(asked: Asked, profile: DeviceProfile) -> tuple[BatchingPolicy, Parameters, bool]:
    """Return the policy, the parameters, and whether those were given rather than defaults.

    Raises ``click.ClickException`` naming the option or the field of the file.
    """
    if (asked.slo is None) == (asked.config is None):
        raise click.UsageError("name --slo-p99 or --config, one of the two")
    if asked.config is not None:
        policy, parameters = assumptions.configured(asked.config)
        return policy, parameters, parameters != policy.limits().clamp(Parameters())
    parameters = Parameters(
        max_batch=asked.max_batch or LARGEST,
        max_wait=Duration(asked.max_wait or 0.0),
        max_in_flight=asked.max_in_flight or 1,
        pass_through=asked.pass_through,
    )
    policy = assumptions.slo_policy(
        asked.slo or 0.0,
        largest_batch=profile.largest_safe or max(64, parameters.max_batch),
        timeout=asked.timeout,
        shed_at=ShedAt(asked.shed_at),
        objective=asked.objective,
        target_utilization=asked.target_utilization,
    )
    return policy, parameters, any(is_typed(name) for name in PARAMETERS)


def _compared(
    asked: Asked, profile: DeviceProfile, policy: BatchingPolicy, times: list[float], given: Parameters | None
) -> list[tuple[str, Parameters]]:
    """Return the fixed configurations to compare at arrivals at ``times``, each with its name."""
    if asked.trace is not None:
        process = assumptions.burstiness(times)
    else:
        process = assumptions.process_of(len(times) / times[-1], asked.cv)
    best = best_for(policy, Forecaster(replica.situation(profile, policy, process, asked.rows)))
    return distinct(
        [
            *alternatives(asked.rows, policy.limits().max_batch, profile.executors),
            *([] if given is None else [("as given", given)]),
            ("best fixed", best.parameters),
        ]
    )


def _how(how: str | None, *, lasts: bool) -> How:
    """Return how arrivals are played: for a given duration they are repeated."""
    if how is None:
        return How.REPEATED if lasts else How.ONCE
    return How(how)


def _check(context: click.Context, asked: Asked) -> None:
    """Reject options that contradict each other.

    Raises ``click.UsageError`` naming the option, and the fix.
    """
    typed = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and is_typed(parameter.name)
    }
    if (asked.path is None) == (asked.admin is None):
        raise click.UsageError("name --profile or --from-running, one of the two")
    if "autoscaler" not in typed:
        for name in ("replicas", "cold_start", *(("plot",) if asked.admin is None else ())):
            if name in typed:
                raise click.UsageError(
                    f"{typed[name]} goes with {'--from-running, or ' if name == 'plot' else ''}--autoscaler"
                )
    elif asked.admin is not None:
        raise click.UsageError("--autoscaler goes with --profile: the requests of a sidecar are no day")
    else:
        for name in NO_PART_OF_A_DAY:
            if name in typed:
                raise click.UsageError(
                    f"{typed[name]} does not go with --autoscaler: a day is played with zero wait and with Carpool, "
                    "and requests of one row"
                )
    if asked.admin is None:
        for name in ITS_OWN:
            if name in typed:
                raise click.UsageError(f"{typed[name]} goes with --from-running")
    elif "seconds" in typed and context.params["how"] == How.ONCE:
        raise click.UsageError("--for goes with --arrivals repeated or fitted")
    for source, replaced in (("admin", BROUGHT), ("config", WRITTEN)):
        for name in replaced:
            if source in typed and name in typed:
                faster = ": --load 1.25 plays it faster" if name == "rate" else ""
                raise click.UsageError(f"{typed[name]} does not go with {typed[source]}, which brings its own{faster}")
