"""A workload's pod with a sidecar, as the API server would store it: with quotas, limits and other webhooks."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from carpool_cli.kubectl.cluster import Cluster, ForbiddenError
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Subject
from carpool_operator.api import annotations as names
from carpool_operator.injector.decide import Inject, InjectorSettings, decide, target_of
from carpool_operator.injector.patch import patch
from carpool_operator.injector.quotas import Surroundings, hard
from carpool_operator.injector.reasons import Skip

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTAINER = "Container"
"""Type of the LimitRange limits that have defaults."""

OF_ONE_POD = ("nodeName", "hostname", "subdomain")
"""Fields of a running pod's spec that belong to that pod alone."""


SETTINGS = InjectorSettings(image="carpool-sidecar", version=version("carpool-serving"), public_key="0" * 64)
"""For a sidecar without an injector: the chart's defaults, and a key that nobody uses."""


class Dry(NamedTuple):
    """The pod that the server would store, or why it rejects it. ``sent``: the pod in the request."""

    pod: Json | None
    refused: str = ""
    sent: Json | None = None


def surroundings(near: Around) -> Surroundings:
    """Return what an injector reads of a namespace."""
    return Surroundings(near.annotations, tuple(near.limit_ranges), tuple(near.quotas), near.labels)


def judged(pod: Json, around: Surroundings, namespace: str) -> Inject | Skip:
    """Return the injector's decision on a pod with its default settings, without a server."""
    return decide(pod, target_of(pod, namespace), SETTINGS, around=around)


def locally(pod: Json, near: Around) -> Json | None:
    """Return a pod with its sidecar by ``judged``, completed as the server would; ``None`` if it gets none.

    Quotas count as unused: here one more pod always fits.
    """
    quotas = tuple({**quota, "status": {"hard": hard(quota)}} for quota in near.quotas)
    around = surroundings(near)._replace(quotas=quotas)
    pod = completed(pod, near)
    decision = judged(pod, around, near.labels[NAME])
    return None if isinstance(decision, Skip) else completed(patch(pod, decision, SETTINGS, "", around=around), near)


def completed(pod: Json, near: Around) -> Json:
    """Return a pod with its LimitRanges' defaults in its containers, as the server completes it.

    A missing request becomes the container's own limit, if it has one.
    """
    items = [item for each in near.limit_ranges for item in each["spec"].get("limits") or []]
    given = [
        (item.get("default") or {}, item.get("defaultRequest") or {}) for item in items if item["type"] == CONTAINER
    ]
    spec = dict(pod["spec"])
    for members in ("initContainers", "containers"):
        if spec.get(members):
            spec[members] = [_completed(each, given) for each in spec[members]]
    return {**pod, "spec": spec}


def _completed(container: Json, given: list[tuple[Json, Json]]) -> Json:
    resources = container.get("resources") or {}
    own = resources.get("limits") or {}
    limits, requests = dict(own), {**own, **(resources.get("requests") or {})}
    for of_limits, of_requests in given:
        limits = {**of_limits, **limits}
        requests = {**of_requests, **requests}
    written = {"limits": limits, "requests": requests}
    return {**container, "resources": {**resources, **{kind: each for kind, each in written.items() if each}}}


def asking(pod: Json, annotations: Mapping[str, str]) -> Json:
    """Return a pod that asks for a sidecar with these annotations."""
    metadata = pod["metadata"]
    written = {**(metadata.get("annotations") or {}), names.INJECT: names.ASKED, **annotations}
    return {**pod, "metadata": {**metadata, "annotations": written}}


def sample(subject: Subject, of: Json, *, inject: bool) -> Json:
    """Return a pod as the workload's controller would create it, from its template or from a running pod.

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

    Raises ``click.ClickException`` if the user may not ask, or the server does not answer.
    """
    within = cluster._replace(namespace=pod["metadata"]["namespace"])
    text = msgspec.json.encode(pod).decode()
    try:
        stored = within.run("create", "--dry-run=server", "--filename=-", "--output=json", text=text)
        return Dry(msgspec.json.decode(stored), "", pod)
    except ForbiddenError as error:
        if "cannot create resource" in error.line:
            raise click.ClickException(
                f"{error.line}\nask for the right to create pods in namespace {within.namespace}: a dry run needs it, "
                "though it stores nothing"
            ) from None
        return Dry(None, _plain(error.line), pod)
    except click.ClickException as error:
        if "no API server answers" in error.message or "log in" in error.message or "no kubectl" in error.message:
            raise
        return Dry(None, _plain(error.message), pod)


def _plain(text: str) -> str:
    """Return the server's message, without kubectl's words around it."""
    said = text.removeprefix("kubectl: ").partition("\n")[0]
    return said.partition('error when creating "STDIN": ')[2] or said
