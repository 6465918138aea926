"""Decides which pods get a sidecar, and for which container and port: pure functions of the pod."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from carpool.policy.durations import Quantity
from carpool.policy.spec import BatchingPolicy
from carpool_operator.api import annotations as names
from carpool_operator.api.model import Target
from carpool_operator.injector import capture
from carpool_operator.injector.containers import (
    DEFAULT_CONTAINER,
    QUEUE_PROXY,
    handlers,
    model_container,
    model_port,
    other_protocol,
)
from carpool_operator.injector.ports import port_number
from carpool_operator.injector.quotas import UNKNOWN, fitted
from carpool_operator.injector.reasons import Note, Reason, Skip, Skipped
from carpool_operator.injector.resources import Resources, Written, everyone, is_guaranteed, of_sidecar, parse_memory
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_operator.injector.quotas import Surroundings

Json: TypeAlias = dict[str, Any]
"""An object of the Kubernetes API, as JSON has it."""

SIDECAR = "carpool"
"""The sidecar's container."""
VOLUME = "carpool-change"
"""Volume of the operator's signed change."""
DATA_PORT, ADMIN_PORT = 14080, 14090
"""The sidecar's ports. Requests use the first; the operator, probes and the drain use the second. Istio has 15000 to
15090, Linkerd 4140 to 4192."""

OS_LABELS = ("kubernetes.io/os", "beta.kubernetes.io/os")
"""Labels of nodes with their operating system."""

MIN_BODY = Quantity(2**20)
"""Least limit for bodies: with less, nothing worthwhile is batched."""
DEFAULT_RESOURCES = Resources(500, None, Quantity(128 * 2**20), Quantity(512 * 2**20))


_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


def is_secret_name(text: str) -> bool:
    """Whether a Secret can have that name: a DNS subdomain, as for most Kubernetes objects."""
    return _NAME.fullmatch(text) is not None


class InjectorSettings(Struct, frozen=True, kw_only=True):
    """Settings for every sidecar of a cluster.

    ``public_key``: the operator's, 64 hex digits; ``None`` where it is not known. ``policy``: the policy with which
    sidecars tune themselves, without an operator. ``user``: numeric, or ``None`` where the platform assigns one.
    ``pull_secrets``: names of Secrets in the pods' namespaces that the image is pulled with, in addition to the pods'
    own.
    """

    image: str
    version: str
    pull_policy: str | None = None
    pull_secrets: tuple[str, ...] = ()
    public_key: str | None = None
    policy: BatchingPolicy | None = None
    user: int | None = 65532
    resources: Resources = DEFAULT_RESOURCES
    data_port: int = DATA_PORT
    admin_port: int = ADMIN_PORT


class Inject(NamedTuple):
    """A sidecar, and the container and port that it serves.

    ``container``: the model's. ``port``: the model's port, and ``declared`` its index in the container's ``ports`` or
    ``None``. The other fields are the sidecar's: ``max_body`` is the limit of a body that is batched.
    """

    target: Target | None
    container: str
    port: int
    declared: int | None
    resources: Resources
    data_port: int
    admin_port: int
    max_body: Quantity
    notes: tuple[Note, ...] = ()
    capture: bool = False
    """Whether the pod's kernel redirects the model's port to the sidecar."""


def decide(
    pod: Json, target: Target | None, settings: InjectorSettings, *, asked: bool = False, around: Surroundings = UNKNOWN
) -> Inject | Skip:
    """Decide on a pod, or a pod template, at admission.

    ``target``: the workload that it belongs to. ``asked``: a user asked for it by command; only a template that forbids
    it is left unchanged. ``around``: the namespace's annotations and limits.
    """
    try:
        _check_wanted(pod, asked=asked)
        written = Written.of(annotations_of(pod), around.annotations)
        data, admin = _ports(written, settings)
        _check_possible(pod["spec"], data, admin)
        _check_tuned(target, settings)
        return _in_front(pod, target, settings, written, data, admin, around)
    except Skipped as skipped:
        return skipped.skip


def _check_wanted(pod: Json, *, asked: bool) -> None:
    """Check that a sidecar is wanted, and not there already."""
    written = annotations_of(pod)
    wanted = written.get(names.INJECT)
    if wanted == names.FORBIDDEN:
        raise Skipped(Reason.DISABLED, f'{names.INJECT} is "false"')
    if wanted is None and not asked:
        raise Skipped(Reason.NOT_OPTED_IN, f"no annotation {names.INJECT}")
    if wanted not in {None, names.ASKED, names.PROPAGATED}:
        raise Skipped(Reason.BAD_ANNOTATION, f'{names.INJECT} is {wanted!r}: write "true" or "false"')
    if has_sidecar(pod):
        raise Skipped(Reason.ALREADY_INJECTED, f"a container named {SIDECAR} is in the pod")


def _check_possible(spec: Json, data: int, admin: int) -> None:
    """Check that the pod can have one at all."""
    if spec.get("hostNetwork"):
        raise Skipped(Reason.HOST_NETWORK, "the pod uses the node's network: set hostNetwork: false")
    if not _may_be_on_linux(spec):
        raise Skipped(Reason.WINDOWS, "the pod is for Windows; the sidecar is for Linux")
    if any(volume["name"] == VOLUME for volume in spec.get("volumes") or []):
        raise Skipped(Reason.NAME_TAKEN, f"the pod has a volume named {VOLUME}: rename it")
    if any(each["name"] == QUEUE_PROXY for each in spec["containers"]):
        raise Skipped(
            Reason.KNATIVE,
            "Knative's queue-proxy calls the model by itself: deploy it without Knative, for KServe with "
            "serving.kserve.io/deploymentMode: Standard",
        )
    for each in everyone(spec):
        for port in (*(port["containerPort"] for port in each.get("ports") or []), *_called(each)):
            if port in {data, admin}:
                _taken(port, f"container {each['name']} uses", data)


def _called(container: Json) -> Iterator[object]:
    """Yield the ports, numbers and names, that the kubelet calls: a container need not declare what it uses."""
    for _, handler in handlers(container):
        if handler.get("host") is None:  # of another machine
            yield handler.get("port")


def _check_tuned(target: Target | None, settings: InjectorSettings) -> None:
    """Check that something would tune it."""
    if settings.policy is not None:
        return
    if target is None:
        raise Skipped(
            Reason.UNKNOWN_OWNER,
            "the pod belongs to no workload that a policy can name: run the model as a Deployment, "
            "or give its template a sidecar that tunes itself, with carpool inject --slo-p99",
        )
    if settings.public_key is None:
        raise Skipped(
            Reason.NO_PUBLIC_KEY,
            "the operator's public key is not known yet: see that the operator runs, then restart the workload",
        )


def _in_front(
    pod: Json,
    target: Target | None,
    settings: InjectorSettings,
    written: Written,
    data: int,
    admin: int,
    around: Surroundings,
) -> Inject:
    """Choose the container and port, and the sidecar's size."""
    spec, values = pod["spec"], written.values
    # 1. The container and port
    model = model_container(spec, values.get(names.CONTAINER), values.get(DEFAULT_CONTAINER))
    port, declared = model_port(model, values.get(names.PORT))
    if port in {data, admin}:
        _taken(port, "the model serves on", data)
    if (why := other_protocol(model, port, declared)) is not None:
        raise Skipped(Reason.NOT_HTTP, f"port {port} of {model['name']} {why}: name one for HTTP/1.1 with {names.PORT}")
    # 2. The size: a Guaranteed pod stays Guaranteed
    notes: list[Note] = []
    wanted = of_sidecar(written, settings.resources)
    if is_guaranteed(spec):
        notes.append(Note.GUARANTEED_KEPT)
        wanted = wanted.guaranteed()
    resources = fitted(spec, wanted, around)
    # Storage has no annotation that would override this amount.
    if resources._replace(storage=None) != wanted:
        notes.append(Note.RESOURCES_FITTED)
    # 3. The largest body it batches
    held = Quantity(resources.memory // 2)
    max_body = Quantity(resources.memory // 8)
    if names.MAX_BODY in values:
        max_body = parse_memory(written.place(names.MAX_BODY), values[names.MAX_BODY], MIN_BODY)
        if names.MAX_BODY in written.defaults:
            max_body = min(max_body, held)
        if max_body > held:
            text = f"{names.MAX_BODY} is {max_body}, more than half of the sidecar's memory, {held}: lower it"
            raise Skipped(Reason.BAD_ANNOTATION, f"{text}, or raise {written.place(names.MEMORY)}")
    # 4. How callers reach it
    captured = capture.is_wanted(written)
    if captured and (why_not := capture.hindrance(pod, port, settings.user, around)) is not None:
        notes.append(why_not)
        captured = False
    return Inject(target, model["name"], port, declared, resources, data, admin, max_body, tuple(notes), captured)


def _may_be_on_linux(spec: Json) -> bool:
    """Whether a pod's operating system, its node selector and its required node affinity let it run on Linux."""
    selector = spec.get("nodeSelector") or {}
    if "windows" in {(spec.get("os") or {}).get("name"), *(selector.get(label) for label in OS_LABELS)}:
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    # A node has to match one of the terms, and all expressions of that term.
    terms = [
        [
            Requirement(each["key"], each["operator"], each.get("values") or [])
            for each in term.get("matchExpressions") or []
            if each["key"] in OS_LABELS
        ]
        for term in required.get("nodeSelectorTerms") or []
    ]
    linux = dict.fromkeys(OS_LABELS, "linux")
    return not terms or any(all(each.matches(linux) for each in term) for term in terms)


def _taken(port: int, who: str, data: int) -> None:
    annotation = names.DATA_PORT if port == data else names.ADMIN_PORT
    raise Skipped(Reason.PORT_TAKEN, f"{who} port {port}, the sidecar's: give that another with {annotation}")


def _ports(written: Written, settings: InjectorSettings) -> tuple[int, int]:
    """Return the sidecar's ports. Raises ``Skipped``."""
    found, given = [], []
    for name, default, value in (
        (names.DATA_PORT, settings.data_port, "data"),
        (names.ADMIN_PORT, settings.admin_port, "admin"),
    ):
        text = written.values.get(name, str(default))
        given.append(written.place(name) if name in written.values else f"the chart's sidecar.ports.{value}")
        number = port_number(text)
        # Lower ports need a privilege that the sidecar does not have.
        if number is None or not 1024 <= number <= 65535:
            raise Skipped(
                Reason.BAD_ANNOTATION, f"{written.place(name)} is {text!r}: write a number from 1024 to 65535"
            )
        found.append(number)
    if found[0] == found[1]:
        raise Skipped(Reason.BAD_ANNOTATION, f"{' and '.join(given)} are both {found[0]}: they have to differ")
    return found[0], found[1]


def has_sidecar(pod: Json) -> bool:
    """Whether a pod, or pod template, has a sidecar, of the webhook or of anyone else."""
    return any(each["name"] == SIDECAR for each in everyone(pod["spec"]))


def is_self_tuned(pod: Json) -> bool:
    """Whether a pod, or pod template, has a sidecar that no operator tunes: others come with a label."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return names.INJECTED not in labels and has_sidecar(pod)


def self_tuned(namespace: str, resource: str) -> Skip:
    """Return why an operator can't tune such a pod. ``resource``: its workload's name for kubectl."""
    message = f"it has a sidecar that no operator tunes: take it out, {undo(namespace, resource)}"
    return Skip(Reason.SELF_TUNED, message)


def undo(namespace: str, resource: str) -> str:
    """Return the command that takes a sidecar by ``carpool inject`` out of a workload.

    Not with ``apply``, which leaves list members that no earlier ``apply`` added.
    """
    return f"kubectl -n {namespace} get {resource} -o yaml | carpool inject --undo -f - | kubectl replace -f -"


def annotations_of(thing: Json) -> dict[str, str]:
    """Return an object's or a template's annotations."""
    found: dict[str, str] = (thing.get("metadata") or {}).get("annotations") or {}
    return found


def target_of(pod: Json, namespace: str) -> Target | None:
    """Return the workload that a pod belongs to, if a policy can name it."""
    of = registry.owner(pod)
    return None if of is None else Target(namespace, *of)
