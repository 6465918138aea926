"""A workload's pod with a sidecar, as the API server would store it: quotas, limits and other webhooks answer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from carpool_cli.kubectl.cluster import ForbiddenError
from carpool_operator.api import annotations as names

if TYPE_CHECKING:
    from carpool_cli.kubectl.cluster import Cluster
    from carpool_cli.kubectl.preflight.scene import Json, Subject

OF_ONE_POD = ("nodeName", "hostname", "subdomain")
"""What a running pod's spec has that no other may have."""


class Dry(NamedTuple):
    """What the server would store, or why it refuses."""

    pod: Json | None
    refused: str = ""


def sample(subject: Subject, of: Json, *, inject: bool) -> Json:
    """Return a pod as the workload's controller would make it, by its template or by a pod that runs.

    ``inject``: whether it asks for a sidecar.
    """
    of = copy.deepcopy(of)
    metadata, spec = of.get("metadata") or {}, of["spec"]
    labels, owner = subject.kind.made(subject.name)
    for name in OF_ONE_POD:
        spec.pop(name, None)
    written = {**(metadata.get("annotations") or {}), names.INJECT: names.ASKED if inject else names.FORBIDDEN}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{subject.name[:200]}-preflight",
            "namespace": subject.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": written,
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def dry_run(cluster: Cluster, pod: Json) -> Dry:
    """Ask the server what it would store. Nothing is stored.

    Raises ``click.ClickException`` where one may not ask, or nobody answers.
    """
    within = cluster._replace(namespace=pod["metadata"]["namespace"])
    text = msgspec.json.encode(pod).decode()
    try:
        return Dry(
            msgspec.json.decode(within.run("create", "--dry-run=server", "--filename=-", "--output=json", text=text))
        )
    except ForbiddenError as error:
        if "cannot create resource" in error.line:
            raise click.ClickException(
                f"{error.line}\nask for the right to create pods in namespace {within.namespace}: a dry run needs it, "
                "though it stores nothing"
            ) from None
        return Dry(None, _plain(error.line))
    except click.ClickException as error:
        if "no API server answers" in error.message or "log in" in error.message or "no kubectl" in error.message:
            raise
        return Dry(None, _plain(error.message))


def _plain(text: str) -> str:
    """Return what the server says, without kubectl's words around it."""
    said = text.removeprefix("kubectl: ").partition("\n")[0]
    return said.partition('error when creating "STDIN": ')[2] or said
