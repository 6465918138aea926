"""The price of a replica of each workload, from the labels of its pods' nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from carpool_cli.kubectl.cluster import Cluster, alive
from carpool_cli.planning.money import Price, mean, price_of, read_prices
from carpool_operator.api.annotations import INJECTED, TARGET

if TYPE_CHECKING:
    from pathlib import Path


def by_target(cluster: Cluster, path: Path, other: Price | None, *, everywhere: bool) -> dict[tuple[str, str], Price]:
    """Return the price of one replica by namespace and target, the mean over its pods.

    ``other``: price of nodes that are not in the file. Raises ``click.ClickException`` if a node has no price.
    """
    prices = read_prices(path)
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in cluster.items("nodes")}
    found: dict[tuple[str, str], list[Price]] = {}
    for pod in alive(cluster.items("pods", f"--selector={INJECTED}", everywhere=everywhere)):
        target, node = _target(pod), pod.get("spec", {}).get("nodeName")
        if target is None or node is None:
            continue
        price = price_of(prices, labels.get(node, {})) or other
        if price is None:
            raise click.ClickException(
                f"{path} has no price for node {node}: add its labels, an entry without labels, or --gpu-hour"
            )
        found.setdefault(target, []).append(price)
    return {target: mean(each) for target, each in found.items()}


def _target(pod: dict[str, Any]) -> tuple[str, str] | None:
    metadata = pod["metadata"]
    name = metadata.get("annotations", {}).get(TARGET)
    return None if name is None else (metadata["namespace"], name)
