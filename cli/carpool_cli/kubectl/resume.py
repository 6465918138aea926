"""`kubectl carpool resume`: removes the annotation again."""

from __future__ import annotations

import click

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import PAUSED, RESOURCE, cluster_options, here
from carpool_cli.kubectl.screen import show


@click.command(
    epilog="""\b
Examples:
  kubectl carpool resume resnet
"""
)
@click.argument("name")
@cluster_options
def command(*, name: str) -> None:
    """Let a paused policy be tuned again: NAME, or what it tunes (deployment/NAME)."""
    cluster = here()
    policy = policies.find(cluster, name)
    if not policy.paused:
        show(f"{policy.metadata.name} is not paused")
        return
    cluster.run("annotate", RESOURCE, policy.metadata.name, f"{PAUSED}-")
    show(f"{policy.metadata.name} is tuned again")
