"""The cost of replicas. Money is computed only here."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec
import yaml
from msgspec import Struct

from carpool_cli.answers import BadFile, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MONTH = 730.0
"""Hours: 365 days over 12."""


class Price(Struct, frozen=True):
    """The price of one replica."""

    hour: float
    """Per hour, of each replica's accelerator."""

    def month(self, replicas: float) -> float:
        """Return the cost of a (mean) number of replicas per month."""
        return self.hour * MONTH * replicas


class NodePrice(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Price of nodes that have all these labels; without labels: of every node."""

    gpu_hour: float
    labels: dict[str, str] = {}


def read_prices(path: Path) -> list[NodePrice]:
    """Read a YAML list of prices by labels of nodes.

    Raises ``BadFile`` naming it.
    """
    text = read_text(path)
    try:
        found = msgspec.convert(yaml.safe_load(text), list[NodePrice])
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise BadFile(
            f"{path}: {error}: write a list such as `- {{labels: {{nvidia.com/gpu.product: A100}}, gpuHour: 2.50}}`"
        ) from None
    if wrong := next((each for each in found if not 0 < each.gpu_hour < inf), None):
        raise BadFile(f"{path}: gpuHour {wrong.gpu_hour:g} is no price: write one above 0")
    return found


def price_of(prices: list[NodePrice], labels: Mapping[str, str]) -> Price | None:
    """Return the first price that matches a node's labels."""
    found = (each.gpu_hour for each in prices if each.labels.items() <= labels.items())
    return next((Price(each) for each in found), None)


def mean(prices: list[Price]) -> Price:
    """Return the mean price of several replicas."""
    return Price(sum(each.hour for each in prices) / len(prices))


def written(amount: float) -> str:
    """Format an amount for users: ``1,825.00``, ``-912.50``. The currency is that of the price."""
    return f"{amount:,.2f}"
