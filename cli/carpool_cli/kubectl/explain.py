"""`kubectl carpool explain`: the last decision, the metrics behind it, and what limits the tuner."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import cluster_options, here
from carpool_cli.kubectl.output import FORMATS, document
from carpool_cli.kubectl.screen import STRONG, show, table, text
from carpool_cli.live.figures import duration, number
from carpool_operator.api.status import Figures

if TYPE_CHECKING:
    from carpool_cli.kubectl.policies import Policy


@click.command(
    epilog="""\b
Examples:
  kubectl carpool explain resnet
  kubectl carpool explain deployment/resnet -n shop -o json
"""
)
@click.argument("name")
@click.option("-o", "--output", type=FORMATS, help="The same as data.")
@cluster_options
def command(*, name: str, output: str | None) -> None:
    """Show the last decision for a policy: NAME, or what it tunes (deployment/NAME).

    It shows observation beside forecast, where the tuner would go if it could go at once, and what limits it. The
    tuning guide explains the reasons.
    """
    policy = policies.find(here(), name)
    if output is not None:
        status = policy.raw.get("status", {})
        parts = ("lastDecision", "applied", "recommendation")
        click.echo(document({part: status[part] for part in parts if part in status}, output), nl=False)
        return
    _tell(policy, datetime.now(UTC))


def _tell(policy: Policy, now: datetime) -> None:
    status = policy.status
    decision = status.last_decision
    if decision is None:
        show("nothing was decided yet")
    else:
        model = "every model" if decision.model == "*" else f"model {decision.model}"
        show(
            text(f"{decision.action}, {decision.reason}", STRONG),
            f": {decision.message} ({decision.target}, {model}, {policies.ago(decision.at, now)} ago)",
        )
        observed, predicted = decision.observed or Figures(), decision.predicted or Figures()
        rows = [
            [label, left, right]
            for label, left, right in zip(LABELS, _lines(observed), _lines(predicted), strict=True)
            if (left, right) != ("-", "-")
        ]
        if rows:
            show()
            table([["", "OBSERVED", "FORECAST"], *rows], indent=2)
            show()
    if decision is not None and decision.alternative:
        show(decision.alternative)
    if status.applied is not None:
        show("applied: ", status.applied.parameters.describe())
    if (recommended := status.recommendation) is not None:
        show(f"next: {recommended.parameters.describe()}")
        if recommended.uncapped is not None:
            kept = f"; limited by: {recommended.capped_by}" if recommended.capped_by else ""
            show(f"would be: {recommended.uncapped.describe()}{kept}")
    for line in policies.problems(policy):
        show(text("! ", "red"), line)


LABELS = (
    "requests/s per replica",
    "p50",
    "p99",
    "misses",
    "goodput/s per replica",
    "rows per batch",
    "device time per request",
    "device in use",
)


def _lines(figures: Figures) -> list[str]:
    return [
        _number(figures.rate),
        duration(figures.p50),
        duration(figures.p99),
        _share(figures.miss_fraction),
        _number(figures.goodput),
        _number(figures.mean_batch),
        duration(figures.device_time),
        _share(figures.utilization),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
