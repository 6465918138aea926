"""`kubectl carpool inject`: adds sidecars to manifests, for the operator of the connected cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from carpool_cli import options
from carpool_cli.commands import inject
from carpool_cli.kubectl.cluster import Cluster, ForbiddenError, NotFoundError, cluster_options, here, read_list

IMAGE = "--sidecar-image="
"""The injector's argument that names the sidecar's image."""
PULL_SECRET = "--sidecar-pull-secret="  # noqa: S105 - its name
"""The injector's argument that names a Secret to pull it with."""


class _Installed(NamedTuple):
    """Settings of the sidecars: ``image`` is ``None`` if the injector names none."""

    key: str
    image: str | None
    pull_secrets: tuple[str, ...]


@click.command(
    epilog="""\b
Examples:
  kubectl carpool inject -f model.yaml | kubectl apply -f -
  kubectl get deployment resnet -o yaml | kubectl carpool inject -f - | kubectl apply -f -
"""
)
@options.manifests()
@click.option("--carpool-namespace", default="carpool-system", show_default=True, help="Where Carpool is installed.")
@cluster_options
def command(*, source: str, carpool_namespace: str) -> None:
    """Put a sidecar into workloads and Pods as the webhook would, and print the manifests.

    The sidecars trust the operator of this cluster: the public key, the sidecar's image and the secrets to pull it
    with are read from it. Without a cluster, `carpool inject` does the same. Objects without a namespace get that of
    -n, or of the context.

    Exits 0 when all have their sidecars, 3 when some can't or have one with other settings, 2 for wrong input. The
    standard error has the reasons.
    """
    cluster = here()
    key, image, pull_secrets = _installed(cluster, carpool_namespace)
    namespace = cluster.namespace
    if namespace is None:
        namespace = cluster.run("config", "view", "--minify", "--output=jsonpath={..namespace}").strip() or "default"
    context = click.get_current_context()
    context.invoke(
        inject.command,
        source=source,
        slo_p99=None,
        public_key=key,
        namespace=namespace,
        image=image,
        pull_secrets=pull_secrets,
    )


def _installed(cluster: Cluster, namespace: str) -> _Installed:
    """Read the operator's public key and the injector's arguments.

    Raises ``click.ClickException``.
    """
    release = cluster._replace(namespace=namespace)
    try:
        text = release.run("get", "configmap/carpool-public-key", "deployment/carpool-injector", "--output=json")
    except NotFoundError as error:
        raise click.ClickException(
            f"{error.message}: Carpool is not in namespace {namespace}, or its operator never ran; name another with "
            "--carpool-namespace"
        ) from None
    except ForbiddenError as error:
        raise click.ClickException(
            f"{error.line}\nask for the key in ConfigMap carpool-public-key, and give it to carpool inject --public-key"
        ) from None
    key, injector = read_list(text)
    containers: list[dict[str, Any]] = injector["spec"]["template"]["spec"]["containers"]
    arguments = [argument for container in containers for argument in container.get("args", [])]
    images, secrets = (
        [argument.removeprefix(flag) for argument in arguments if argument.startswith(flag)]
        for flag in (IMAGE, PULL_SECRET)
    )
    return _Installed(key["data"]["publicKey"], next(iter(images), None), tuple(secrets))
