"""`carpool savings`: device time, replicas and money that batching saves, and the part that zero wait saves alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli import options
from carpool_cli.options import ADDRESS, AGO, Address, is_typed
from carpool_cli.planning import assumptions, replica
from carpool_cli.planning.money import Price
from carpool_cli.planning.savings import (
    FOLLOWS,
    PLANNED,
    Stretch,
    Workload,
    savings,
    situation_of,
    stretches,
    table,
    total,
)
from carpool_cli.printable import json_of, printable
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool_cli.live.running import Running

HOUR = 3600.0


class Asked(NamedTuple):
    """The options."""

    sidecars: tuple[Address, ...]
    prometheus: str | None
    since: float
    selector: str
    path: Path | None
    slo: float | None
    rate: float | None
    cv: float
    trace: Path | None
    pods: int | None
    max_batch: int | None
    max_wait: float | None
    max_in_flight: int | None
    gpu_hour: float | None
    objective: str | None
    target_utilization: int | None
    key_file: Path | None
    workload: str | None
    plot: Path | None
    as_json: bool

    @property
    def by_hand(self) -> Parameters | None:
        """The setting to compare with, if there is one."""
        if self.max_batch is None and self.max_wait is None and self.max_in_flight is None:
            return None
        return Parameters(
            max_batch=self.max_batch or 32,
            max_wait=Duration(self.max_wait or 0.0),
            max_in_flight=self.max_in_flight or 1,
        )

    @property
    def price(self) -> Price | None:
        """The price of a replica, if it is known."""
        return None if self.gpu_hour is None else Price(self.gpu_hour)


@click.command(
    epilog="""\b
Examples:
  carpool savings http://127.0.0.1:9090 --pods 6 --gpu-hour 2.50
  carpool savings :9090 :9190
  carpool savings --prometheus http://prometheus:9090 --since 7d --select 'namespace="shop"' --gpu-hour 2.50
  carpool savings --profile benchmarks/profiles/bert-large-128-a100.json --slo-p99 50ms --rate 6000 --gpu-hour 2.50
  carpool savings --profile p.json --slo-p99 50ms --trace azure --rate 6000 --max-batch 8 --max-wait 5ms --plot p.png
"""
)
@click.argument("sidecars", type=ADDRESS, nargs=-1, metavar="[SIDECAR]...")
@click.option(
    "--prometheus", metavar="URL", help="Server that scrapes the sidecars: what they counted of the past, by model."
)
@click.option(
    "--since",
    type=AGO,
    default=86400.0,
    help="With --prometheus: how long ago it begins, e.g. 12h or 7d.  [default: 1d]",
)
@click.option(
    "--select", "selector", default="", metavar="MATCHERS", help="With --prometheus: PromQL matchers of pods."
)
@options.profile(help="Profile of the device, instead of a sidecar.")
@options.slo()
@options.rate(help="Requests per second over all replicas; the mean of a --trace.")
@options.cv(help="Of the gaps: 1 Poisson, above: bursts.")
@options.trace(help="Recorded arrivals, or `azure`; played at their own pace.")
@click.option(
    "--pods",
    type=click.IntRange(1),
    help="Of a running sidecar: pods that have its load each. What they take gets a row.  [default: 1]",
)
@options.max_batch(help="Set by hand so far, for comparison.")
@options.max_wait(help="Likewise.  [default: 0s]")
@options.max_in_flight(help="Likewise.  [default: 1]")
@options.gpu_hour()
@options.objective
@options.admin_access
@options.plot(help="Draw every way to this file (PNG, SVG, PDF).")
@options.as_json()
def command(**typed: Any) -> None:  # noqa: ANN401 - `Asked` has the types
    """Compare what a load needs without batching, with zero wait, as set by hand, with Carpool now and at best.

    Of running sidecars (their admin ports), by their last requests and batch latencies; of the past, from Prometheus;
    or of a profile and a load. The last column is what counts: zero wait batches what waits anyway and needs no tuning,
    so what it saves, Carpool does not. Sidecars in Recommend mode count, too: nothing is held there until you say so.
    """
    asked = Asked(**typed)
    if bool(asked.sidecars) + (asked.path is not None) + (asked.prometheus is not None) != 1:
        raise click.UsageError("name sidecars (http://127.0.0.1:9090), --prometheus, or --profile: one of the three")
    found: list[Workload] = []
    failed: list[str] = []
    if asked.prometheus is not None:
        _check("--prometheus")
        found, failed = _past(asked, asked.prometheus)
    elif asked.path is not None:
        _check("--profile")
        found = [_planned(asked, asked.path)]
    else:
        _check(SIDECARS)
        for address in asked.sidecars:
            compared, left_out = _running(asked, address)
            found += compared
            failed += left_out
    if not found:
        raise click.ClickException("\n".join(failed))
    _show(found, failed, as_json=asked.as_json)
    if asked.plot is not None:
        from carpool_cli.planning import savings_plot  # noqa: PLC0415 - matplotlib takes half a second

        drawn = [(each.name, each.ways) for each in found]
        savings_plot.draw(asked.plot, [*drawn, ("in all", total(found))] if len(drawn) > 1 else drawn)
        click.echo(f"drew {asked.plot}", err=asked.as_json)


SIDECARS = "running sidecars"
GOES_WITH = {
    "since": ("--prometheus",),
    "selector": ("--prometheus",),
    "rate": ("--profile",),
    "cv": ("--profile",),
    "trace": ("--profile",),
    "pods": (SIDECARS,),
    "slo": ("--profile", "--prometheus"),
    "objective": ("--profile", "--prometheus"),
    "target_utilization": ("--profile", "--prometheus"),
    "key_file": (SIDECARS,),
    "workload": (SIDECARS,),
}
"""The sources of a load with which an option means something; other options go with all."""
BRINGS = {SIDECARS: ": a sidecar brings its own", "--prometheus": ": Prometheus has the load", "--profile": ""}


def _check(source: str) -> None:
    """Reject options that would change nothing.

    Raises ``click.UsageError`` naming the option, and what it goes with.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        wanted = GOES_WITH.get(parameter.name or "", (source,))
        if source not in wanted and is_typed(parameter.name or ""):
            named = f"{parameter.opts[0]} goes with {' and '.join(wanted)}"
            raise click.UsageError(named + (BRINGS[source] if wanted[0] == "--profile" else ""))


def _planned(asked: Asked, path: Path) -> Workload:
    """Compare for a profile and a load.

    Raises ``click.UsageError`` naming what is missing.
    """
    if asked.slo is None:
        raise click.UsageError("name the p99 to meet: --slo-p99 50ms")
    profile = device_profile.load(path)
    policy = assumptions.slo_policy(
        asked.slo,
        largest_batch=profile.largest_safe or 64,
        objective=asked.objective,
        target_utilization=asked.target_utilization,
    )
    assumptions.refuse_cv_of(asked.trace)
    if asked.trace is not None:
        times, _ = assumptions.read_trace(asked.trace, None)
        load, process = stretches(times, asked.rate), assumptions.burstiness(times)
    elif asked.rate is not None:
        load, process = [Stretch(HOUR, asked.rate)], assumptions.process_of(asked.rate, asked.cv)
    else:
        raise assumptions.no_load()
    situation = replica.situation(profile, policy, process)
    return savings(profile.name, situation, policy, load, by_hand=asked.by_hand, price=asked.price)


def _running(asked: Asked, address: Address) -> tuple[list[Workload], list[str]]:
    """Compare for every model with requests; for those that can't be compared return why."""
    from carpool_cli.live import running  # noqa: PLC0415 - not for profiles
    from carpool_cli.live.admin_client import AdminError, client_of  # noqa: PLC0415 - likewise

    found, failed = [], []
    try:
        client = client_of(address, asked.key_file, asked.workload)
        names: list[str | None] = list(running.asked_for(client.report())) or [None]
    except AdminError as error:
        raise click.ClickException(str(error)) from None
    for name in names:
        try:
            found.append(of_running(running.read(client, name), asked.by_hand, asked.price, asked.pods))
        except AdminError as error:
            failed.append(str(error))
        except click.ClickException as error:
            failed.append(f"{name or 'model'} at {address}: {error.message}")
    return found, failed


def of_running(found: Running, by_hand: Parameters | None, price: Price | None, pods: int | None) -> Workload:
    """Compare the ways to batch the last load of a sidecar; the present parameters count while that load lasts.

    ``pods``: how many have its load each, and what they take is a way of its own; ``None``: this one.
    """
    situation = situation_of(found)
    rate = situation.process.rate
    load = [Stretch(HOUR, rate * (pods or 1))]
    beware = list(found.notes)
    if found.stopped:
        beware.append("what is in force now is for no load, and is left out")
    return savings(
        f"{found.name} at {found.address}", situation, found.policy, load,
        by_hand=by_hand, now=None if found.stopped else found.parameters, retunes=found.retunes, pods=pods,
        price=price, beware=beware,
    )  # fmt: skip


def _past(asked: Asked, url: str) -> tuple[list[Workload], list[str]]:
    """Compare for every model with requests in that time; for those that can't be compared return why."""
    from carpool_cli.planning import history, prometheus  # noqa: PLC0415 - not for profiles

    now = time.time()
    try:
        held = prometheus.held(url, asked.since, asked.selector, now)
        questions = history.questions(held.since, asked.selector, held.interval)
        ranges, ends = prometheus.ask(url, questions, held.since, now)
        known = history.pasts(
            questions, ranges, ends,
            slo=asked.slo, objective=asked.objective, target_utilization=asked.target_utilization,
        )  # fmt: skip
    except history.HistoryError as error:
        raise click.ClickException(str(error)) from None
    found, failed = [], []
    for each in known:
        if isinstance(each, history.Unknown):
            failed.append(f"{each.name}: {each.error}")
            continue
        try:
            compared = savings(
                each.name, each.situation, each.policy, each.load,
                by_hand=asked.by_hand, counted=each.counted, price=asked.price, beware=each.beware,
            )  # fmt: skip
            found.append(compared)
        except click.ClickException as error:
            failed.append(f"{each.name}: {error.message}")
    return found, failed


def _show(found: Sequence[Workload], failed: Sequence[str], *, as_json: bool) -> None:
    """Print the comparisons, and a row for each model without one."""
    if as_json:
        document = {"workloads": found, "leftOut": failed, "total": total(found)}
        click.echo(json_of(document))
        return
    for workload in found:
        click.echo(printable(f"{workload.name}; {workload.rate:,.1f} requests/s"))
        click.echo(assumptions.lines(table(workload)))
        click.echo(workload.note)
        for note in workload.beware:
            click.echo(printable(f"beware: {note}"))
    for each in failed:
        click.echo(printable(f"left out: {each}"))
    if len(found) > 1:
        click.echo("in all, but for what is left out" if failed else "in all")
        click.echo(assumptions.lines(table(total(found))))
    click.echo(PLANNED)
    click.echo(FOLLOWS)
