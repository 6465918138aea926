"""`kubectl carpool status`: policies, the state of their pods, and problems."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from carpool_cli.kubectl import policies
from carpool_cli.kubectl.cluster import RESOURCE, cluster_options, here
from carpool_cli.kubectl.screen import BAD, FAINT, GOOD, OF_STATUS, STRONG, UNSURE, show, table, text
from carpool_operator.api.status import ConditionType, TokenStreamsStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from carpool_cli.kubectl.policies import Policy


@click.command(
    epilog="""\b
Examples:
  kubectl carpool status
  kubectl carpool status -A -o wide
  kubectl carpool status deployment/resnet -n shop
  kubectl carpool status resnet --check && echo all is well
"""
)
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Policies of all namespaces.")
@click.option("-o", "--output", type=click.Choice(["wide", "json", "yaml"]), help="More columns, or the objects.")
@click.option("--check", is_flag=True, help="Exit with 3 unless every policy shown is ready.")
@cluster_options
def command(*, name: str | None, everywhere: bool, output: str | None, check: bool) -> None:
    """Show the policies of a namespace, or one of them in full: NAME, or what it tunes (deployment/NAME).

    PODS are the pods with the newest configuration, the pods with a sidecar, and the pods wanted. Problems are listed
    below, with what to do.
    """
    cluster = here()
    if name is not None and everywhere:
        raise click.UsageError("a policy by its name is of one namespace: leave out -A")
    found = [policies.find(cluster, name)] if name is not None else None
    if output in {"json", "yaml"}:
        named = [] if found is None else [found[0].metadata.name]
        where = ["--all-namespaces"] if everywhere else []
        click.echo(cluster.run("get", RESOURCE, *named, *where, f"--output={output}"), nl=False)
        if not check:
            return
    if found is None:
        found = [policies.read(raw) for raw in cluster.list(everywhere=everywhere)]
    if output not in {"json", "yaml"}:
        now = datetime.now(UTC)
        if not found:
            show(
                "no policies here",
                "" if everywhere else ": -A shows those of all namespaces, and",
                ": " if everywhere else " ",
                "kubectl annotate deployment/NAME carpool.dev/slo-p99=50ms makes one. Of a Deployment that is "
                "annotated, kubectl carpool status deployment/NAME says what is missing",
            )
        elif name is not None:
            _in_full(found[0], now)
        else:
            _list(found, now, wide=output == "wide", everywhere=everywhere)
    if check and not all(policies.is_ready(policy) for policy in found):
        click.get_current_context().exit(3)


def _list(found: list[Policy], now: datetime, *, wide: bool, everywhere: bool) -> None:
    heads = ["NAME", "SLO", "MODE", "APPLIED", "PODS", "SLO MET", "READY", "AGE"]
    if everywhere:
        heads.insert(0, "NAMESPACE")
    if wide:
        heads += ["TARGETS", "RECOMMENDED"]
    rows: list[list[Text | str]] = [list(heads)]
    for policy in found:
        meta, status = policy.metadata, policy.status
        row: list[Text | str] = [
            text(meta.name),
            policy.slo,
            text(policy.mode, UNSURE if policy.paused else ""),
            "-" if status.applied is None else status.applied.parameters.describe(),
            _pods(policy),
            _said(policy, ConditionType.SLO_MET),
            _said(policy, ConditionType.READY),
            policies.ago(meta.creation_timestamp, now),
        ]
        if everywhere:
            row.insert(0, meta.namespace)
        if wide:
            row += [
                ",".join(f"{kind}/{name}" for kind, name in policy.targets),
                "-" if status.recommendation is None else status.recommendation.parameters.describe(),
            ]
        rows.append(row)
    table(rows)
    wrong = [(policy, line) for policy in found for line in policies.problems(policy)]
    if wrong:
        show()
    for policy, line in wrong:
        meta = policy.metadata
        show(text(f"{meta.namespace}/{meta.name}" if everywhere else meta.name, STRONG), ": ", line)


def _pods(policy: Policy) -> Text:
    targets = policy.status.targets
    if not targets:
        return text("-")
    acknowledged, injected, wanted = (
        sum(getattr(target, field) for target in targets) for field in ("acknowledged", "injected", "replicas")
    )
    return text(f"{acknowledged}/{injected}/{wanted}", "" if acknowledged == injected == wanted else UNSURE)


def _said(policy: Policy, kind: ConditionType) -> Text:
    condition = policy.condition(kind)
    return text("-") if condition is None else text(condition.status.value, OF_STATUS[condition.status])


def _in_full(policy: Policy, now: datetime) -> None:
    meta, status = policy.metadata, policy.status
    show(text(meta.name, STRONG), f" in {meta.namespace}: {policy.slo}, {policy.mode}")
    if (applied := status.applied) is not None:
        show(
            "applied: ", text(applied.parameters.describe(), STRONG),
            f" for {applied.target}, {_model(applied.model)}, since {policies.ago(applied.at, now)}", indent=2,
        )  # fmt: skip
    for target in status.targets:
        show(
            text(f"{target.kind}/{target.name}", STRONG),
            f": {target.replicas} pods wanted, {target.injected} with a sidecar, {target.acknowledged} run the newest",
            indent=2,
        )
        for model in target.models:
            show(f"{_model(model.name)}: {model.parameters.describe()}", indent=4)
            if (trial := model.trial) is not None:
                pods = ", ".join(trial.pods)
                show(f"on trial for {policies.ago(trial.since, now)}: {trial.parameters.describe()} ({pods})", indent=6)
    for streams in status.token_streams:
        for line in _streams(streams):
            show(line, indent=2)
    if (recommended := status.recommendation) is not None:
        show(f"recommended: {recommended.parameters.describe()}", indent=2)
    if status.conditions:
        show()
        rows: list[list[Text | str]] = [["", "", "SINCE", "REASON"]]
        rows += [
            [
                each.type,
                text(each.status.value, OF_STATUS[each.status]),
                policies.ago(each.last_transition_time, now),
                each.reason,
            ]
            for each in status.conditions
        ]
        table(rows, indent=2)
    show()
    wrong = list(policies.problems(policy))
    for line in wrong:
        show(text("! ", BAD), line, indent=2)
    if policy.paused:
        show(
            text(f"paused: kubectl carpool resume {meta.name} -n {meta.namespace} lets it be tuned again", UNSURE),
            indent=2,
        )
    if not wrong:
        show(text("nothing is wrong", GOOD), indent=2)
    show(text(f"why: kubectl carpool explain {meta.name} -n {meta.namespace}", FAINT), indent=2)


def _streams(said: TokenStreamsStatus) -> Iterator[str]:
    """Format token streams' status: rates and latencies, running requests, limits for engines without a sidecar."""
    parts = [f"{said.requests_per_second:g}/s, {said.tokens_per_second:g} tokens/s"]
    if said.goodput is not None:
        parts.append(f"{said.goodput:g}/s met both targets")
    times = ((name, getattr(said, name.lower().replace(" ", "_"))) for name in ("TTFT p99", "TPOT p99"))
    parts += [f"{name} {value}" for name, value in times if value is not None]
    limit = "" if said.limit is None else f", {said.limit} fit into one engine"
    yield f"token streams of {said.target}: {'; '.join(parts)}; {said.running} running, {said.queued} waiting{limit}"
    if (found := said.recommended) is not None:
        yield (
            f"recommended for its engines: --max-num-seqs {found.max_num_seqs} --max-num-batched-tokens "
            f"{found.max_num_batched_tokens} --max-num-queued-tokens {found.max_num_queued_tokens}, or maxConcurrency "
            f"{found.max_concurrency} in a gateway: {found.reason}"
        )


def _model(name: str) -> str:
    return "every model" if name == "*" else f"model {name}"
