"""`kubectl carpool preflight`: the command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from carpool_cli import options
from carpool_cli.kubectl.cluster import Cluster, cluster_options, here
from carpool_cli.kubectl.output import document
from carpool_cli.kubectl.preflight import checks, scene
from carpool_cli.kubectl.preflight.dry_run import dry_run, sample
from carpool_cli.kubectl.screen import BAD, GOOD, UNSURE, show, text
from carpool_cli.manifest_checks.findings import Code, Effect, Finding
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from carpool_cli.manifest_checks.objects import Around, Subject

BREAKS = 3
"""Exit code: something would break."""

STYLES = {Effect.BREAKS: BAD, Effect.NO_BATCHING: UNSURE, Effect.NOTE: ""}


class Result(NamedTuple):
    """A workload, and its findings."""

    subject: Subject
    findings: list[Finding]

    @property
    def breaks(self) -> bool:
        """Whether anything would break."""
        return any(finding.effect is Effect.BREAKS for finding in self.findings)


@click.command(
    epilog="""\b
Examples:
  kubectl carpool preflight deployment/resnet -n shop
  kubectl carpool preflight -n shop
  kubectl carpool preflight --all --json
"""
)
@click.argument("workload", required=False)
@click.option("--all", "everywhere", is_flag=True, help="Workloads of all namespaces but the system's.")
@options.as_json(help="Print JSON.")
@cluster_options
def command(*, workload: str | None, everywhere: bool, as_json: bool) -> None:
    """Find what a sidecar would break or miss, before anything changes: of WORKLOAD (deployment/NAME), or of all.

    The API server is asked what it would store for a pod with a sidecar, in a dry run: the injector, quotas, limit
    ranges, Pod Security and other webhooks answer. Services, NetworkPolicies, those of administrators, of Cilium and of
    Calico, the rules of meshes, autoscalers and quotas are compared with that pod. Each finding is one line, with the
    command that corrects it. Nothing is changed.

    Exits 0 when nothing would break, 3 when something would.
    """
    cluster = here()
    if workload is not None and everywhere:
        raise click.UsageError("name a workload or --all, not both")
    subjects = [_named(cluster, workload)] if workload else scene.subjects(cluster, everywhere=everywhere)
    of_all = scene.whole(cluster)
    near: dict[str, Around] = {}
    results = []
    for subject in subjects:
        if subject.namespace not in near:
            near[subject.namespace] = scene.around(cluster, subject.namespace, of_all)
        results.append(Result(subject, look(cluster, subject, near[subject.namespace])))
    if as_json:
        click.echo(document(_plain(results), "json"), nl=False)
    else:
        _show(results)
    if any(result.breaks for result in results):
        sys.exit(BREAKS)


def look(cluster: Cluster, subject: Subject, near: Around) -> list[Finding]:
    """Return the findings about one workload.

    Raises ``click.ClickException``.
    """
    early = list(checks.knative(subject))
    if early:
        return early
    template = subject.kind.pod(subject.manifest)
    pods = scene.pods(cluster, subject)
    of = template or next(iter(pods or ()), None)
    if of is None:
        why = "you may not read its pods" if pods is None else "it has no pod"
        fix = f"kubectl -n {subject.namespace} get {subject.kind.resource(subject.name)}; try again when it has a pod"
        return [Finding(Code.NO_POD, Effect.NOTE, f"{why}, and it has no pod template to look at", fix)]
    if pods is None:
        near = near._replace(unread=(*near.unread, "its pods, which quotas count, and whose addresses rules name"))
    plain = dry_run(cluster, sample(subject, of, inject=False))
    injected = dry_run(cluster, sample(subject, of, inject=True))
    return [*checks.self_tuned(subject, of), *checks.all_of(subject, plain, injected, near, pods)]


def _named(cluster: Cluster, workload: str) -> Subject:
    prefix, slash, name = workload.partition("/")
    kind = registry.NAMES.get(prefix.lower())
    if kind is None or not slash:
        raise click.UsageError(f"{workload!r}: write e.g. deployment/NAME")
    return scene.one(cluster, kind, name)


def _show(results: list[Result]) -> None:
    if not results:
        show("there are no workloads here: name a namespace with -n, or --all")
    for result in results:
        subject = result.subject
        name = f"{subject.namespace} {subject.kind.resource(subject.name)}"
        if not result.findings:
            show(f"{name}: ", text("nothing found", GOOD))
        for finding in result.findings:
            show(
                f"{name}: ",
                text(f"{finding.code} ({finding.effect})", STYLES[finding.effect]),
                f": {finding.message.removesuffix('.')}. Fix: {finding.fix}",
            )


def _plain(results: list[Result]) -> dict[str, object]:
    return {
        "breaks": any(result.breaks for result in results),
        "workloads": [
            {
                "namespace": result.subject.namespace,
                "kind": result.subject.kind.name,
                "name": result.subject.name,
                "findings": [finding._asdict() for finding in result.findings],
            }
            for result in results
        ],
    }
