"""`kubectl carpool savings`: how many replicas each workload needs, by each way to batch, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import Struct, to_builtins

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import cluster_options, here
from carpool_cli.kubectl.output import FORMATS, document
from carpool_cli.kubectl.screen import show, table
from carpool_cli.options import FiniteRange
from carpool_cli.planning.money import Price, written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.kubectl.policies import Policy


class Need(Struct, frozen=True, rename="camel", kw_only=True):
    """Of one workload: replicas by each way to batch. Money per month."""

    namespace: str
    target: str
    serving: int
    unbatched: int
    zero_wait: int
    best: int
    best_upper: int
    """With batch latency at its upper confidence."""
    beyond_zero_wait: int
    """Replicas that Carpool at best saves and zero wait does not."""
    surplus: int
    """Replicas that serve now and are not needed."""
    lowest_utilization: float | None = None
    utilization: float | None = None
    money_surplus: float | None = None
    money_beyond_zero_wait: float | None = None


def needs(found: Sequence[Policy], price: Price | None) -> list[Need]:
    """Read them from statuses; workloads without measurements are left out."""
    return [
        Need(
            namespace=policy.metadata.namespace,
            target=each.target,
            serving=each.serving,
            unbatched=each.replicas_unbatched,
            zero_wait=each.replicas_zero_wait,
            best=each.replicas,
            best_upper=each.replicas_upper,
            beyond_zero_wait=max(each.replicas_zero_wait - each.replicas, 0),
            surplus=max(each.serving - max(each.replicas, 1), 0),
            utilization=each.utilization,
            lowest_utilization=each.lowest_utilization,
            money_surplus=None if price is None else price.month(max(each.serving - max(each.replicas, 1), 0)),
            money_beyond_zero_wait=None
            if price is None
            else price.month(max(each.replicas_zero_wait - each.replicas, 0)),
        )
        for policy in found
        for each in policy.status.capacity
    ]


@click.command(
    epilog="""\b
Examples:
  kubectl carpool savings
  kubectl carpool savings -A --gpu-hour 2.50
  kubectl carpool savings -n shop -o json
"""
)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of all namespaces.")
@click.option("--gpu-hour", type=FiniteRange(0, min_open=True), help="Price of one replica's accelerator by the hour.")
@click.option("-o", "--output", type=FORMATS, help="The same as data.")
@cluster_options
def command(*, everywhere: bool, gpu_hour: float | None, output: str | None) -> None:
    """Show how many replicas each workload needs at its present load, by each way to batch.

    By what the sidecars measured. ZERO WAIT batches what waits anyway and needs no tuning: what it saves, Carpool does
    not. SURPLUS serves now and is not needed: an autoscaler that follows Carpool's load takes it away.
    """
    price = None if gpu_hour is None else Price(gpu_hour)
    found = [policies.read(raw) for raw in here().list(everywhere=everywhere)]
    rows = needs(found, price)
    if output is not None:
        click.echo(document(to_builtins(rows), output), nl=False)
        return
    if not rows:
        show(
            "no workload has a capacity yet: it needs a policy that is Ready, and requests"
            if found
            else "no BatchingPolicy here: -A shows all namespaces"
        )
        return
    head = ["NAMESPACE", "TARGET", "NO BATCHING", "ZERO WAIT", "CARPOOL", "SERVING", "SURPLUS", "BEYOND ZERO WAIT"]
    lines = [
        [
            each.namespace, each.target, str(each.unbatched), str(each.zero_wait), _range(each), str(each.serving),
            _with(each.surplus, each.money_surplus), _with(each.beyond_zero_wait, each.money_beyond_zero_wait),
        ]
        for each in rows
    ]  # fmt: skip
    if len(rows) > 1:
        sums = [
            sum(column) for column in zip(*((e.unbatched, e.zero_wait, e.best, e.serving) for e in rows), strict=True)
        ]
        surplus, beyond = sum(each.surplus for each in rows), sum(each.beyond_zero_wait for each in rows)
        lines.append(
            [
                "", "in all", *map(str, sums),
                _with(surplus, None if price is None else price.month(surplus)),
                _with(beyond, None if price is None else price.month(beyond)),
            ]
        )  # fmt: skip
    table([head, *lines])
    if price is not None:
        show(f"money per month, at {written(price.hour)} an hour and replica")


def _range(need: Need) -> str:
    return str(need.best) if need.best == need.best_upper else f"{need.best} to {need.best_upper}"


def _with(count: int, money: float | None) -> str:
    return str(count) if money is None else f"{count} ({written(money)})"
