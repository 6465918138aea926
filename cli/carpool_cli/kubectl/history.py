"""`kubectl carpool history`: the last changes."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import cluster_options, here
from carpool_cli.kubectl.output import FORMATS, document
from carpool_cli.kubectl.screen import show, table


@click.command(
    epilog="""\b
Examples:
  kubectl carpool history resnet
  kubectl carpool history resnet -o json
"""
)
@click.argument("name")
@click.option("-o", "--output", type=FORMATS, help="The same as data.")
@cluster_options
def command(*, name: str, output: str | None) -> None:
    """List the last changes of a policy's parameters, the newest first: NAME, or what it tunes (deployment/NAME).

    The status remembers ten. Each is an Event of the policy as well, for as long as the cluster keeps those.
    """
    policy = policies.find(here(), name)
    if output is not None:
        click.echo(document(policy.raw.get("status", {}).get("history", []), output), nl=False)
        return
    if not policy.status.history:
        show("no change yet: these are the first parameters")
        return
    now = datetime.now(UTC)
    table(
        [
            ["AGO", "TARGET", "MODEL", "PARAMETERS", "REASON", "GENERATION"],
            *(
                [
                    policies.ago(each.at, now), each.target, each.model, each.parameters.describe(), each.reason,
                    str(each.generation),
                ]
                for each in policy.status.history
            ),
        ]
    )  # fmt: skip
