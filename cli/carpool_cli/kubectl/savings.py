"""`kubectl carpool savings`: how many replicas each workload needs, by each way to batch, and their cost."""

from __future__ import annotations

from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct, to_builtins

from carpool_cli import options
from carpool_cli.kubectl import node_prices, policies
from carpool_cli.kubectl.cluster import cluster_options, here
from carpool_cli.kubectl.output import FORMATS, document
from carpool_cli.kubectl.screen import show, table
from carpool_cli.planning.money import Price, written
from carpool_cli.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from carpool_cli.kubectl.policies import Policy
    from carpool_operator.api.status import CapacityStatus


class Money(Struct, frozen=True, rename="camel", kw_only=True):
    """Per month, for a number of replicas."""

    unbatched: float
    zero_wait: float
    by_hand: float | None = None
    best: float
    serving: float
    surplus: float
    beyond_zero_wait: float


class Need(Struct, frozen=True, rename="camel", kw_only=True):
    """The replicas of one workload by each way to batch, over the same five minutes."""

    namespace: str
    target: str
    serving: int
    unbatched: int
    zero_wait: int
    by_hand: int | None = None
    """With the policy's baseline; ``None``: it has none."""
    best: int
    best_upper: int
    """With batch latency at its upper confidence."""
    beyond_zero_wait: int
    """Replicas that Carpool at best saves in addition to zero wait."""
    surplus: int
    """Serving replicas that are not needed."""
    lowest_utilization: float | None = None
    utilization: float | None = None
    device_seconds: float | None = None
    """Per hour, over the serving replicas: measured."""
    device_seconds_best: float | None = None
    """Lowest possible at this load within the SLO, on the same replicas."""
    gpu_hour: float | None = None
    """Price of one replica."""
    money: Money | None = None


def needs(found: Sequence[Policy], prices: Mapping[tuple[str, str], Price], other: Price | None) -> list[Need]:
    """Read them from statuses; workloads without measurements are left out.

    ``prices`` by namespace and target; ``other``: for all other replicas.
    """
    return [
        _need(policy.metadata.namespace, each, prices.get((policy.metadata.namespace, each.target), other))
        for policy in found
        for each in policy.status.capacity
    ]


def _need(namespace: str, status: CapacityStatus, price: Price | None) -> Need:
    surplus = max(status.serving - max(status.replicas, 1), 0)
    beyond = max(status.replicas_zero_wait - status.replicas, 0)
    busy, lowest = status.utilization, status.lowest_utilization
    return Need(
        namespace=namespace,
        target=status.target,
        serving=status.serving,
        unbatched=status.replicas_unbatched,
        zero_wait=status.replicas_zero_wait,
        by_hand=status.replicas_by_hand,
        best=status.replicas,
        best_upper=status.replicas_upper,
        beyond_zero_wait=beyond,
        surplus=surplus,
        utilization=busy,
        lowest_utilization=lowest,
        device_seconds=None if busy is None else 3600 * status.serving * busy,
        device_seconds_best=None if lowest is None else 3600 * status.serving * lowest,
        gpu_hour=None if price is None else price.hour,
        money=None
        if price is None
        else Money(
            unbatched=price.month(status.replicas_unbatched),
            zero_wait=price.month(status.replicas_zero_wait),
            by_hand=None if status.replicas_by_hand is None else price.month(status.replicas_by_hand),
            best=price.month(status.replicas),
            serving=price.month(status.serving),
            surplus=price.month(surplus),
            beyond_zero_wait=price.month(beyond),
        ),
    )


@click.command(
    epilog="""\b
Examples:
  kubectl carpool savings
  kubectl carpool savings -A --gpu-hour 2.50
  kubectl carpool savings -A --prices prices.yaml
  kubectl carpool savings -n shop -o json
"""
)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of all namespaces.")
@options.gpu_hour()
@click.option(
    "--prices",
    "prices_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML list of prices by labels of nodes; --gpu-hour is for the others.",
)
@click.option("-o", "--output", type=FORMATS, help="The same as data.")
@cluster_options
def command(*, everywhere: bool, gpu_hour: float | None, prices_file: Path | None, output: str | None) -> None:
    """Show how many replicas each workload needs, by each way to batch, at the highest load of the last five minutes.

    By what the sidecars measured. ZERO WAIT batches what waits anyway and needs no tuning: what it saves, Carpool does
    not. BY HAND is the policy's baseline, where one is written. SURPLUS serves now and is not needed: an autoscaler
    that follows Carpool's load takes it away. DEVICE S/H is measured, and what it could be within the SLO.
    """
    other = None if gpu_hour is None else Price(gpu_hour)
    found = [policies.read(raw) for raw in here().list(everywhere=everywhere)]
    prices = {} if prices_file is None else node_prices.by_target(here(), prices_file, other, everywhere=everywhere)
    rows = needs(found, prices, other)
    never = [
        f"{policy.metadata.namespace} {each.target}: no number of replicas meets the SLO"
        f"{f' of model {each.model}' if each.model else ''}: {each.reason}"
        for policy in found
        for each in policy.status.no_capacity
    ]
    if output is not None:
        for line in never:
            click.echo(printable(line), err=True)
        click.echo(document(to_builtins(rows), output), nl=False)
        return
    if not rows and never:
        show("\n".join(never))
        return
    if not rows:
        show(
            "no workload has a capacity yet: it needs a policy that is Ready, and requests"
            if found
            else "no BatchingPolicy here: -A shows all namespaces"
        )
        return
    lines = [[each.namespace, each.target, *_cells([each])] for each in rows]
    if len(rows) > 1:
        lines.append(["", "in all", *_cells(rows)])
    shown = [title != BY_HAND or any(each.by_hand is not None for each in rows) for title in HEAD]
    table([list(compress(line, shown)) for line in (HEAD, *lines)])
    hours = sorted({each.gpu_hour for each in rows if each.gpu_hour is not None})
    if hours:
        named = " to ".join(written(each) for each in dict.fromkeys((hours[0], hours[-1])))
        show(f"money per month, at {named} an hour and replica")
    for line in never:
        show(line)


BY_HAND = "BY HAND"
HEAD = [
    "NAMESPACE", "TARGET", "NO BATCHING", "ZERO WAIT", BY_HAND, "CARPOOL", "SERVING", "SURPLUS", "BEYOND ZERO WAIT",
    "DEVICE S/H",
]  # fmt: skip


def _cells(rows: Sequence[Need]) -> list[str]:
    """Format the sums over some workloads; money for those that have a price."""
    moneys = [each.money for each in rows if each.money is not None]

    def cell(name: str, text: str = "") -> str:
        if any(getattr(each, name) is None for each in rows):
            return ""  # a sum over some of them would look like a sum over all
        count = text or str(sum(getattr(each, name) for each in rows))
        return f"{count} ({written(sum(getattr(each, name) for each in moneys))})" if moneys else count

    best, upper = sum(each.best for each in rows), sum(each.best_upper for each in rows)
    named = [cell(each) for each in ("unbatched", "zero_wait", "by_hand")]
    named.append(cell("best", str(best) if best == upper else f"{best} to {upper}"))
    return [*named, *(cell(each) for each in ("serving", "surplus", "beyond_zero_wait")), _device(rows)]


def _device(rows: Sequence[Need]) -> str:
    known = [each for each in rows if each.device_seconds is not None]
    if not known:
        return ""
    now = sum(each.device_seconds or 0.0 for each in known)
    if any(each.device_seconds_best is None for each in known):
        return f"{now:,.0f}"
    return f"{now:,.0f}, at best {sum(each.device_seconds_best or 0.0 for each in known):,.0f}"
