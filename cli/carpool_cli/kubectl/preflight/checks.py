"""The checks: pure functions of a workload, its pod with and without a sidecar, and what is around it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.kubectl.preflight.findings import Code, Effect, Finding
from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.injector.bypass import bypasses
from carpool_operator.injector.decide import SIDECAR, annotations_of
from carpool_operator.injector.reasons import NOTES, REASONS, Note, Reason
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_cli.kubectl.preflight.dry_run import Dry
    from carpool_cli.kubectl.preflight.scene import Around, Json, Subject

KNATIVE = "serving.knative.dev"


class Ports(NamedTuple):
    """Of an injected pod."""

    model: int
    data: int
    admin: int


def _compact(plain: object) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _kubectl(subject: Subject) -> str:
    return f"kubectl -n {subject.namespace}"


def ports(pod: Json) -> Ports | None:
    """Return the ports of a pod with a sidecar; ``None`` of one without."""
    everyone = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
    written = injection_of(annotations_of(pod))
    if SIDECAR not in {each["name"] for each in everyone}:
        return None
    if written.port is None or written.data_port is None or written.admin_port is None:
        return None
    return Ports(written.port, written.data_port, written.admin_port)


# ------------------------------------------------------------------------------------------------- before the dry run


def knative(subject: Subject) -> Iterator[Finding]:
    """Find models that Knative runs: its queue proxy stands where a sidecar would."""
    metadata, status = subject.manifest["metadata"], subject.manifest.get("status") or {}
    modes = {(metadata.get("annotations") or {}).get("serving.kserve.io/deploymentMode"), status.get("deploymentMode")}
    owners = [str(each.get("apiVersion")) for each in metadata.get("ownerReferences") or []]
    if subject.kind.name == "InferenceService" and modes & {"Serverless", "Knative"}:
        fix = (
            f"{_kubectl(subject)} annotate {subject.kind.resource(subject.name)} "
            "serving.kserve.io/deploymentMode=RawDeployment --overwrite"
        )
        yield Finding(Code.KNATIVE, Effect.NO_BATCHING, "Knative runs its pods, which get no sidecar", fix)
    elif any(owner.startswith((f"{KNATIVE}/", "autoscaling.internal.knative.dev/")) for owner in owners):
        fix = "run the model as a Deployment of its own"
        yield Finding(Code.KNATIVE, Effect.NO_BATCHING, "Knative runs its pods, which get no sidecar", fix)


# ------------------------------------------------------------------------------------------------- the dry run


def outcome(subject: Subject, plain: Dry, injected: Dry) -> Iterator[Finding]:
    """Find what the server or the injector has against the pod."""
    if plain.pod is None:
        message = f"the server refuses its pods without a sidecar, too: {plain.refused}"
        yield Finding(Code.REFUSED_ALREADY, Effect.NOTE, message, "correct what the message names first")
    elif injected.pod is None:
        message = f"the server refuses its pods with a sidecar: {injected.refused}"
        yield Finding(Code.REFUSED, Effect.BREAKS, message, _room(subject, injected.refused))
    elif ports(injected.pod) is None:
        said = (injected.pod["metadata"].get("annotations") or {}).get(names.SKIPPED, "")
        reason, _, message = said.partition(": ")
        if not reason:
            message = (
                "its pods would get no sidecar: no injector answered. Either it is not ready, or this namespace is not "
                "watched or has the label carpool.dev/injection=disabled"
            )
            fix = "kubectl get pods --all-namespaces --selector=app.kubernetes.io/component=injector"
            yield Finding(Code.NOT_ASKED, Effect.NO_BATCHING, message, fix)
        else:
            yield Finding(
                reason, Effect.NO_BATCHING, f"its pods would get no sidecar: {message}", _way(subject, reason)
            )


def _room(subject: Subject, refused: str) -> str:
    """Return what makes room for a sidecar."""
    if re.search(r"quota|LimitRange|maximum|minimum|ratio", refused):
        return _smaller(subject)
    return "change what the message names; the sidecar itself meets the Pod Security Standard `restricted`"


def _smaller(subject: Subject) -> str:
    """Return the command that has the sidecar ask for less."""
    least = {names.CPU: "100m", names.MEMORY: "128Mi"}
    smaller = subject.kind.annotate_pods(subject.namespace, subject.name, least)
    return f"{smaller} asks for the least; or raise the limit that is named"


def _way(subject: Subject, reason: str) -> str:
    """Return what has to be done for the pods to get sidecars."""
    if reason == Reason.HOST_NETWORK and subject.kind.templates == ("spec.template",):
        patch = _compact({"spec": {"template": {"spec": {"hostNetwork": False}}}})
        return f"{_kubectl(subject)} patch {subject.kind.resource(subject.name)}{subject.kind.merge} -p '{patch}'"
    if reason == Reason.NO_ROOM:
        return _smaller(subject)
    if reason in set(Reason):
        return REASONS[Reason(reason)].fix
    return "see docs/reference/injection.md"


# ------------------------------------------------------------------------------------------------- around it


def services(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find Services whose callers get past the sidecar."""
    labels = pod["metadata"].get("labels") or {}
    for service in near.services:
        spec, name = service["spec"], service["metadata"]["name"]
        selector = spec.get("selector") or {}
        if not selector or not selector.items() <= labels.items():
            continue
        owners = {each["kind"] for each in service["metadata"].get("ownerReferences") or []}
        by_number = bypasses(service, pod)
        if spec.get("clusterIP") == "None":
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
                message = f"Service {name} port {way.port} leads to the model's port {found.model} by number"
                yield Finding(Code.SERVICE_BY_NUMBER, Effect.NO_BATCHING, message, way.command)


def _expose(subject: Subject, pod: Json, service: str) -> str:
    """Return the command that makes a Service by whose name callers get the sidecar."""
    status = json.loads(pod["metadata"]["annotations"][names.STATUS])
    model = next(each for each in pod["spec"]["containers"] if each["name"] == status["container"])
    found = ports(pod)
    data = "http" if found is None else found.data
    handed: Json = next((each for each in model.get("ports") or [] if each["containerPort"] == data), {})
    target = handed.get("name") or data
    return f"{_kubectl(subject)} expose service {service} --name={service}-batched --port=80 --target-port={target}"


def network_policies(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find rules that admit the model's port by its number, and not the sidecar's."""
    labels = pod["metadata"].get("labels") or {}
    named = {
        each["name"]: each["containerPort"]
        for container in pod["spec"]["containers"]
        for each in container.get("ports") or []
        if each.get("name")
    }
    for policy in near.policies:
        spec = policy["spec"]
        if "Ingress" not in spec.get("policyTypes", ["Ingress"]):
            continue
        if not msgspec.convert(spec.get("podSelector") or {}, Selector).matches(labels):
            continue
        for index, rule in enumerate(spec.get("ingress") or []):
            if _admits(rule, found.model, named) and not _admits(rule, found.data, named):
                name = policy["metadata"]["name"]
                change = [
                    {
                        "op": "add",
                        "path": f"/spec/ingress/{index}/ports/-",
                        "value": {"port": found.data, "protocol": "TCP"},
                    }
                ]
                yield Finding(
                    Code.NETWORK_POLICY_BY_NUMBER,
                    Effect.BREAKS,
                    f"NetworkPolicy {name} admits port {found.model} and not {found.data}, at which the sidecar is",
                    f"{_kubectl(subject)} patch networkpolicy {name} --type=json -p '{_compact(change)}'",
                )


def _admits(rule: Json, port: int, named: dict[str, int]) -> bool:
    listed = rule.get("ports") or []
    return not listed or any(_covers(each, port, named) for each in listed)


def _covers(entry: Json, port: int, named: dict[str, int]) -> bool:
    if entry.get("protocol", "TCP") != "TCP":
        return False
    first: int | str | None = entry.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return named.get(first) == port
    return first <= port <= int(entry.get("endPort", first))


def autoscalers(subject: Subject, pod: Json, near: Around) -> Iterator[Finding]:
    """Find HPAs on a percentage of what all containers request: the sidecar's request is one more."""
    mine = {(subject.kind.name, subject.name)}
    if subject.kind.name == "InferenceService":
        mine.add(("Deployment", f"{subject.name}-predictor"))
    container = json.loads(pod["metadata"]["annotations"][names.STATUS])["container"]
    for scaler in near.autoscalers:
        target, name = scaler["spec"]["scaleTargetRef"], scaler["metadata"]["name"]
        if (target["kind"], target["name"]) not in mine:
            continue
        for index, metric in enumerate(scaler["spec"].get("metrics") or []):
            resource = metric.get("resource") or {}
            if metric["type"] != "Resource" or resource["target"]["type"] != "Utilization":
                continue
            value = {"type": "ContainerResource", "containerResource": {**resource, "container": container}}
            change = [{"op": "replace", "path": f"/spec/metrics/{index}", "value": value}]
            yield Finding(
                Code.HPA_ON_PERCENTAGE,
                Effect.BREAKS,
                f"HorizontalPodAutoscaler {name} scales by a percentage of the {resource['name']} that all containers "
                "request: the sidecar's request changes that",
                f"{_kubectl(subject)} patch hpa {name} --type=json -p '{_compact(change)}'",
            )


# ------------------------------------------------------------------------------------------------- inside the pod


def mesh(pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find a mesh that stands before the whole pod; of others the injector excludes the admin port."""
    labels = {**(near.namespace["metadata"].get("labels") or {}), **(pod["metadata"].get("labels") or {})}
    if labels.get("istio.io/dataplane-mode") == "ambient":
        yield Finding(
            Code.MESH,
            Effect.NOTE,
            "Istio's ambient mode stands before the pod: where mTLS is STRICT, the operator can't reach port "
            f"{found.admin}",
            "have the operator's namespace in the mesh: kubectl label namespace carpool-system "
            "istio.io/dataplane-mode=ambient",
        )


def probes(subject: Subject, plain: Json, pod: Json) -> Iterator[Finding]:
    """Find a model that nobody asks whether it can serve, and one with a stop hook of its own."""
    status = json.loads(pod["metadata"]["annotations"][names.STATUS])
    model = next(each for each in plain["spec"]["containers"] if each["name"] == status["container"])
    if not model.get("readinessProbe"):
        probe = {"name": model["name"], "readinessProbe": {"tcpSocket": {"port": status["port"]}}}
        patch = _compact({"spec": {"template": {"spec": {"containers": [probe]}}}})
        resource = subject.kind.resource(subject.name)
        fix = f"{_kubectl(subject)} patch {resource} -p '{patch}'"
        if not subject.kind.built_in:
            fix = f"add a readinessProbe to container {model['name']}: {_kubectl(subject)} edit {resource}"
        message = f"container {model['name']} has no readiness probe: requests come before the model can serve"
        yield Finding(Code.NO_READINESS_PROBE, Effect.NOTE, message, fix)
    if Note.PRE_STOP_KEPT in status["notes"]:
        page = NOTES[Note.PRE_STOP_KEPT]
        yield Finding(Code.PRE_STOP_KEPT, Effect.NOTE, page.cause, page.fix)


def capture(pod: Json) -> Iterator[Finding]:
    """Find why the port is not captured of a pod that asks for it."""
    notes = json.loads(pod["metadata"]["annotations"][names.STATUS])["notes"]
    for note in (Note.CAPTURE_FORBIDDEN, Note.CAPTURE_IN_MESH, Note.CAPTURE_TCP_PROBE):
        if note in notes:
            yield Finding(note, Effect.NO_BATCHING, NOTES[note].cause, NOTES[note].fix)


def all_of(subject: Subject, plain: Dry, injected: Dry, near: Around) -> list[Finding]:
    """Return all findings about a workload, by its pod as the server would store it."""
    found = list(outcome(subject, plain, injected))
    if plain.pod is None or injected.pod is None or (at := ports(injected.pod)) is None:
        return found
    pod = injected.pod
    # Where the port is captured, calls by its number reach the sidecar.
    callers = [*network_policies(subject, pod, at, near), *services(subject, pod, at, near)]
    return [
        *found,
        *([] if injection_of(annotations_of(pod)).capture else callers),
        *autoscalers(subject, pod, near),
        *capture(pod),
        *mesh(pod, at, near),
        *probes(subject, plain.pod, pod),
    ]
