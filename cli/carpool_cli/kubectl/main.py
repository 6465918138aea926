"""The ``kubectl-carpool`` command; kubectl finds it on the path and runs it as ``kubectl carpool``."""

from __future__ import annotations

from carpool_cli.main import Entry, LazyGroup  # isort: skip - first: reports what to install without click

import click

from carpool_cli.kubectl.cluster import cluster_options

COMMANDS = {
    "status": Entry("carpool_cli.kubectl.status", "Show policies: what is applied, how far, and what is wrong."),
    "explain": Entry("carpool_cli.kubectl.explain", "Show the last decision for a policy, and why."),
    "history": Entry("carpool_cli.kubectl.history", "List the last changes of a policy's parameters."),
    "savings": Entry("carpool_cli.kubectl.savings", "Show how many replicas each workload needs, and what that costs."),
    "pause": Entry("carpool_cli.kubectl.pause", "Keep a policy's parameters as they are until it is resumed."),
    "resume": Entry("carpool_cli.kubectl.resume", "Let a paused policy be tuned again."),
    "preflight": Entry(
        "carpool_cli.kubectl.preflight.command", "Find what a sidecar would break or miss, before anything changes."
    ),
    "inject": Entry("carpool_cli.kubectl.inject", "Put sidecars into manifests, for this cluster's operator."),
}


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@cluster_options
@click.version_option(package_name="carpool-serving", prog_name="kubectl-carpool")
def main() -> None:
    """Show and control the BatchingPolicies of a cluster.

    It reaches the cluster through kubectl: contexts, credentials and their plugins work as they do there. Exit codes: 0
    done, 1 the cluster has no such policy or refuses, 2 wrong arguments, 3 --check found a policy that is not ready,
    preflight something that would break, or inject a workload that can't have the sidecar.
    """


def run() -> None:
    """Run it under its usual name."""
    main(prog_name="kubectl carpool")
