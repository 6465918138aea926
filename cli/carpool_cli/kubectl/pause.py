"""`kubectl carpool pause`: sets an annotation on the policy."""

from __future__ import annotations

import click

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import PAUSED, RESOURCE, cluster_options, here
from carpool_cli.kubectl.screen import show


@click.command(
    epilog="""\b
Examples:
  kubectl carpool pause resnet
  kubectl carpool pause deployment/resnet -n shop
"""
)
@click.argument("name")
@cluster_options
def command(*, name: str) -> None:
    """Keep a policy's parameters as they are until it is resumed: NAME, or what it tunes (deployment/NAME).

    Sidecars still batch and shed, and the tuner's recommendation is still shown. It sets the annotation
    carpool.dev/paused on the policy, also on one that a Deployment's annotations made.
    """
    cluster = here()
    policy = policies.find(cluster, name)
    if policy.paused:
        show(f"{policy.metadata.name} is paused already")
        return
    cluster.run("annotate", RESOURCE, policy.metadata.name, f"{PAUSED}=true")
    show(
        f"{policy.metadata.name} is paused: its parameters stay until kubectl carpool resume "
        f"{policy.metadata.name}{cluster.flags()}"
    )
