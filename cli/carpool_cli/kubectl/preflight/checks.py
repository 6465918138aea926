"""The checks: pure functions of a workload, its pod with and without a sidecar, and the objects around it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from carpool_cli.kubectl.preflight import ways
from carpool_cli.kubectl.preflight.dry_run import Dry, asking, completed, locally
from carpool_cli.kubectl.preflight.meshes import ambient, authorizations, servers
from carpool_cli.kubectl.preflight.quotas import room_for_all
from carpool_cli.manifest_checks.autoscalers import autoscalers
from carpool_cli.manifest_checks.findings import Code, Effect, Finding, compact
from carpool_cli.manifest_checks.network.judging import admin_port, network_policies, understood
from carpool_cli.manifest_checks.objects import Around, Json, Ports, Subject, addresses, ports
from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.injector.bypass import bypasses, named_ports
from carpool_operator.injector.decide import annotations_of, is_self_tuned, undo
from carpool_operator.injector.reasons import NOTES, Note, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KNATIVE = "serving.knative.dev"
FULL = "exceeded quota"
"""The server's words if a quota has no room left."""


# ------------------------------------------------------------------------------------------------- before the dry run


def knative(subject: Subject) -> Iterator[Finding]:
    """Find models that Knative runs: its queue proxy has the sidecar's place."""
    metadata, status = subject.manifest["metadata"], subject.manifest.get("status") or {}
    modes = {(metadata.get("annotations") or {}).get("serving.kserve.io/deploymentMode"), status.get("deploymentMode")}
    owners = [str(each.get("apiVersion")) for each in metadata.get("ownerReferences") or []]
    if subject.kind.name == "InferenceService" and modes & {"Serverless", "Knative"}:
        fix = (
            f"{subject.kubectl} annotate {subject.resource} serving.kserve.io/deploymentMode=RawDeployment --overwrite"
        )
        yield Finding(Code.KNATIVE, Effect.NO_BATCHING, "Knative runs its pods, which get no sidecar", fix)
    elif any(owner.startswith((f"{KNATIVE}/", "autoscaling.internal.knative.dev/")) for owner in owners):
        fix = "run the model as a Deployment of its own"
        yield Finding(Code.KNATIVE, Effect.NO_BATCHING, "Knative runs its pods, which get no sidecar", fix)


def self_tuned(subject: Subject, of: Json) -> Iterator[Finding]:
    """Find sidecars that tune themselves: the injector adds no second one. ``of``: the pod template, or a pod."""
    if is_self_tuned(of):
        message = "its pods have a sidecar that no operator tunes, and get no other"
        fix = f"{undo(subject.namespace, subject.resource)} takes it out; delete one written by hand"
        yield Finding(Reason.SELF_TUNED, Effect.NO_BATCHING, message, fix)


# ------------------------------------------------------------------------------------------------- the dry run


def outcome(subject: Subject, plain: Dry, injected: Dry, near: Around) -> Iterator[Finding]:
    """Find why the server or the injector rejects the pod."""
    if plain.pod is None and FULL in plain.refused:
        message = (
            "the namespace's quota has no room for one more pod, which a dry run makes. The other checks are for a "
            f"sidecar with the chart's defaults. The server says: {plain.refused}"
        )
        fix = f"{subject.kubectl} describe resourcequota shows what is used; with room for one pod the server answers"
        yield Finding(Code.NO_ROOM_FOR_DRY_RUN, Effect.NOTE, message, fix)
    elif plain.pod is None:
        message = f"the server refuses its pods without a sidecar, too: {plain.refused}"
        yield Finding(Code.REFUSED_ALREADY, Effect.NOTE, message, "correct what the message names first")
    elif injected.pod is None:
        message = f"the server refuses its pods with a sidecar: {injected.refused}"
        yield Finding(Code.REFUSED, Effect.BREAKS, message, ways.of_refusal(subject, injected.refused))
    elif ports(injected.pod) is None:
        yield _left_out(subject, injected.pod, near)


def _left_out(subject: Subject, pod: Json, near: Around) -> Finding:
    """Return why the injector gives a pod no sidecar."""
    said = (pod["metadata"].get("annotations") or {}).get(names.SKIPPED, "")
    reason, _, message = said.partition(": ")
    if reason:
        fix = ways.of_reason(subject, reason, message, pod, near)
        return Finding(reason, Effect.NO_BATCHING, f"its pods would get no sidecar: {message}", fix)
    message = (
        "its pods would get no sidecar: no injector answered. Either it is not ready, or this namespace is not "
        "watched or has the label carpool.dev/injection=disabled"
    )
    fix = "kubectl get pods --all-namespaces --selector=app.kubernetes.io/component=injector"
    return Finding(Code.NOT_ASKED, Effect.NO_BATCHING, message, fix)


# ------------------------------------------------------------------------------------------------- objects around it


def services(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find Services whose callers bypass the sidecar."""
    labels, named = pod["metadata"].get("labels") or {}, named_ports(pod)
    for service in near.services:
        spec, name = service["spec"], service["metadata"]["name"]
        selector = spec.get("selector") or {}
        if not selector or not selector.items() <= labels.items():
            continue
        owners = {each["kind"] for each in service["metadata"].get("ownerReferences") or []}
        by_number = bypasses(service, pod, subject.manifest)
        if spec.get("clusterIP") == "None":
            offered = spec.get("ports") or []
            if offered and all(_is_sidecar_s(port, found, named) for port in offered):
                continue
            yield Finding(
                Code.HEADLESS_SERVICE,
                Effect.NO_BATCHING,
                f"callers of the headless Service {name} choose the port themselves: at {found.model} they get past "
                f"the sidecar, which is at {found.data}",
                _expose(subject, pod, name),
            )
        elif by_number and "InferenceService" in owners:
            yield Finding(
                Code.KSERVE_RAW,
                Effect.NO_BATCHING,
                f"KServe points its Service {name} at port {found.model} by number, and puts that back if you change "
                "it",
                f"{_expose(subject, pod, name)}, and have callers use that Service",
            )
        else:
            for way in by_number:
                message = f"Service {name} port {way.port} leads to the model's port {found.model} by {way.by}"
                yield Finding(Code.SERVICE_BY_NUMBER, Effect.NO_BATCHING, message, way.command)


def pools(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find InferencePools whose gateways bypass the sidecar: they use no port names."""
    labels = pod["metadata"].get("labels") or {}
    for pool in near.pools:
        spec, name = pool["spec"], pool["metadata"]["name"]
        written = spec.get("selector") or {}
        selector = written.get("matchLabels") or {key: each for key, each in written.items() if isinstance(each, str)}
        ports = [each["number"] for each in spec.get("targetPorts") or []] or [spec.get("targetPortNumber")]
        if not selector or not selector.items() <= labels.items() or found.model not in ports:
            continue
        yield Finding(
            Code.INFERENCE_POOL,
            Effect.NO_BATCHING,
            f"InferencePool {name} leads to the model's port {found.model} by number, past the sidecar",
            f"{subject.annotate_pods({names.CAPTURE: 'true'})} has the port captured; or, when all its pods have a "
            f"sidecar, name {found.data} there: {subject.kubectl} edit {_kind_of(pool)} {name}",
        )


def _kind_of(pool: Json) -> str:
    return f"inferencepools.{str(pool.get('apiVersion', '')).partition('/')[0]}"


def _is_sidecar_s(port: Json, found: Ports, named: dict[str, int]) -> bool:
    """Whether a headless Service's port is the sidecar's: callers by address use ``port``, by SRV the target."""
    target = port.get("targetPort", port["port"])
    number = named.get(str(target), target)
    return bool(number == found.admin or port["port"] == number == found.data)


def _expose(subject: Subject, pod: Json, service: str) -> str:
    """Return the command that creates a Service whose callers reach the sidecar by its name."""
    status = json.loads(pod["metadata"]["annotations"][names.STATUS])
    model = next(each for each in pod["spec"]["containers"] if each["name"] == status["container"])
    found = ports(pod)
    data = "http" if found is None else found.data
    handed: Json = next((each for each in model.get("ports") or [] if each["containerPort"] == data), {})
    target = handed.get("name") or data
    return f"{subject.kubectl} expose service {service} --name={service}-batched --port=80 --target-port={target}"


# ------------------------------------------------------------------------------------------------- inside the pod


def probes(subject: Subject, plain: Json, pod: Json) -> Iterator[Finding]:
    """Find a model without a readiness probe, and one with a stop hook of its own."""
    status = json.loads(pod["metadata"]["annotations"][names.STATUS])
    model = next(each for each in plain["spec"]["containers"] if each["name"] == status["container"])
    if not model.get("readinessProbe"):
        probe = {"name": model["name"], "readinessProbe": {"tcpSocket": {"port": status["port"]}}}
        patch = compact({"spec": {"template": {"spec": {"containers": [probe]}}}})
        resource = subject.resource
        fix = f"{subject.kubectl} patch {resource} -p '{patch}'"
        if not subject.kind.built_in:
            fix = f"add a readinessProbe to container {model['name']}: {subject.kubectl} edit {resource}"
        message = f"container {model['name']} has no readiness probe: requests come before the model can serve"
        yield Finding(Code.NO_READINESS_PROBE, Effect.NOTE, message, fix)
    if Note.PRE_STOP_KEPT in status["notes"]:
        page = NOTES[Note.PRE_STOP_KEPT]
        yield Finding(Code.PRE_STOP_KEPT, Effect.NOTE, page.cause, page.fix)


def capture(subject: Subject, pod: Json) -> Iterator[Finding]:
    """Find why a pod that asks for port capture does not get it."""
    notes = json.loads(pod["metadata"]["annotations"][names.STATUS])["notes"]
    for note in (Note.CAPTURE_FORBIDDEN, Note.CAPTURE_IN_MESH, Note.CAPTURE_TCP_PROBE):
        if note in notes:
            yield Finding(note, Effect.NO_BATCHING, NOTES[note].cause, ways.of_capture(subject, note))


# ------------------------------------------------------------------------------------------------- all


def unread(subject: Subject, near: Around) -> Iterator[Finding]:
    """Report what could not be read."""
    if near.not_understood:
        message = f"not looked at, since it is not understood: {'; '.join(near.not_understood)}"
        yield Finding(Code.NOT_LOOKED_AT, Effect.NOTE, message, "compare the ports that it names by hand")
    if near.unread:
        message = f"not looked at, since it could not be read: {'; '.join(near.unread)}"
        fix = f"ask for the right to list these, and look again: kubectl carpool preflight {subject.resource} -n "
        yield Finding(Code.NOT_LOOKED_AT, Effect.NOTE, message, f"{fix}{subject.namespace}")


def all_of(
    subject: Subject, plain: Dry, injected: Dry, near: Around, running: Sequence[Json] | None = ()
) -> list[Finding]:
    """Return all findings about a workload, by its pod as the server would store it; otherwise by a pod built here.

    ``running``: its pods; ``None`` if the user may not read them.
    """
    near = understood(near)
    found = list(outcome(subject, plain, injected, near))
    before = plain.pod or plain.sent
    if before is None:
        return found
    before = completed(before, near)
    pod = injected.pod
    if pod is None or ports(pod) is None:
        pod = locally(asking(before, {}), near)
    if pod is None or (at := ports(pod)) is None:
        return found
    least = locally(asking(before, ways.LEAST), near)
    # If the port is captured, calls by its number reach the sidecar.
    callers = [
        *network_policies(subject, pod, at, near, [address for each in running or () for address in addresses(each)]),
        *authorizations(subject, pod, at, near),
        *servers(subject, pod, at, near),
        *services(subject, pod, at, near),
        *pools(subject, pod, at, near),
    ]
    return [
        *found,
        *([] if running is None else room_for_all(subject, before, pod, least, pods=running, quotas=near.quotas)),
        *([] if injection_of(annotations_of(pod)).capture else callers),
        *admin_port(subject, pod, at, near),
        *autoscalers(subject, pod, near),
        *capture(subject, pod),
        *ambient(pod, at, near),
        *probes(subject, before, pod),
        *unread(subject, near),
    ]
