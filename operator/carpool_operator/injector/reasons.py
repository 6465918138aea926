"""Codes, causes and fixes: why a pod got no sidecar, and notes on pods that got one."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why a pod starts without a sidecar."""

    NOT_OPTED_IN = "NotOptedIn"
    DISABLED = "Disabled"
    ALREADY_INJECTED = "AlreadyInjected"
    SELF_TUNED = "SelfTuned"
    BAD_ANNOTATION = "BadAnnotation"
    NO_PUBLIC_KEY = "NoPublicKey"
    UNKNOWN_OWNER = "UnknownOwner"
    UNKNOWN_CONTAINER = "UnknownContainer"
    AMBIGUOUS_CONTAINER = "AmbiguousContainer"
    NO_PORT = "NoPort"
    UNKNOWN_PORT = "UnknownPort"
    NOT_TCP = "NotTCP"
    NOT_HTTP = "NotHTTP"
    PORT_TAKEN = "PortTaken"
    NAME_TAKEN = "NameTaken"
    HOST_NETWORK = "HostNetwork"
    WINDOWS = "WindowsNode"
    KNATIVE = "KnativeQueueProxy"
    NO_ROOM = "NoRoom"
    FAULT = "Fault"


class Note(StrEnum):
    """A note on a pod that got a sidecar."""

    PRE_STOP_KEPT = "PreStopKept"
    GRACE_RAISED = "GraceRaised"
    GUARANTEED_KEPT = "GuaranteedKept"
    PORT_UNNAMED = "PortUnnamed"
    RESOURCES_FITTED = "ResourcesFitted"
    CAPTURE_FORBIDDEN = "CaptureForbidden"
    CAPTURE_IN_MESH = "CaptureInMesh"
    CAPTURE_TCP_PROBE = "CaptureTCPProbe"


class Page(NamedTuple):
    """A code's text in the documentation."""

    cause: str
    fix: str


REASONS = {
    Reason.NOT_OPTED_IN: Page(
        "Nothing asks for a sidecar.",
        "Annotate the Deployment with `carpool.dev/slo-p99: 50ms`, or a pod template with "
        '`carpool.dev/inject: "true"`.',
    ),
    Reason.DISABLED: Page(
        'The pod template says `carpool.dev/inject: "false"`.', "Take the annotation out of the template."
    ),
    Reason.ALREADY_INJECTED: Page(
        "A container named `carpool` is in the pod: injected before, or written by hand.",
        "Nothing, or take the one written by hand out.",
    ),
    Reason.SELF_TUNED: Page(
        "The workload is annotated, or a policy names it, but its pods already have a sidecar that no operator tunes: "
        "`carpool inject --slo-p99` added it, or somebody wrote it by hand. The operator reports this; pods don't.",
        "Take it out: `carpool inject -f FILE --undo | kubectl apply -f -`. The injector then adds one that the "
        "operator tunes. Or drop the annotations and the policy: the sidecar goes on tuning itself.",
    ),
    Reason.BAD_ANNOTATION: Page(
        "An annotation of the pod template has an invalid value, or one of the Namespace, as the message then says.",
        "Write what the message says. The template's, not the Deployment's: changing it rolls the pods. After a "
        "change on the Namespace restart the workload.",
    ),
    Reason.NO_PUBLIC_KEY: Page(
        "The injector has not read the ConfigMap `carpool-public-key` yet: a sidecar could not verify the "
        "operator's changes.",
        "See that the operator runs: it makes the key. Then restart the workload.",
    ),
    Reason.UNKNOWN_OWNER: Page(
        "The pod belongs to no [workload that a policy can name](policy.md#workloads).",
        "Run the model as a Deployment, or give its template a sidecar that tunes itself: "
        "`carpool inject --slo-p99 50ms -f FILE`.",
    ),
    Reason.UNKNOWN_CONTAINER: Page(
        "`carpool.dev/container` names no container of the pod.", "Name one of those that the message lists."
    ),
    Reason.AMBIGUOUS_CONTAINER: Page(
        "Several containers may be the model's: of them none, or more than one, asks for a GPU, is kubectl's default "
        "(`kubectl.kubernetes.io/default-container`), or has a known name or port.",
        "Name the model's with `carpool.dev/container` in the pod template.",
    ),
    Reason.NO_PORT: Page(
        "The model's container names no port.",
        "Name the port that it serves on in the container's `ports`, or annotate the template with "
        '`carpool.dev/port: "8000"`.',
    ),
    Reason.UNKNOWN_PORT: Page(
        "`carpool.dev/port` names no port of the model's container.",
        "Name one of those that the message lists, or write the number.",
    ),
    Reason.NOT_TCP: Page("The port's protocol is not TCP.", "Name a TCP port: `carpool.dev/port`."),
    Reason.NOT_HTTP: Page(
        "The port speaks TLS or gRPC, by its name or by its probe; a sidecar speaks HTTP/1.1 without TLS.",
        "Name the port that does: `carpool.dev/port`. What a mesh encrypts outside the model's container is fine.",
    ),
    Reason.PORT_TAKEN: Page(
        "A container of the pod uses port 14080 or 14090, the sidecar's, or one that is set in their place.",
        "Give the sidecar others, with `carpool.dev/data-port` and `carpool.dev/admin-port` in the pod template.",
    ),
    Reason.NAME_TAKEN: Page("The pod has a volume named `carpool-change` of its own.", "Rename the volume."),
    Reason.HOST_NETWORK: Page(
        "The pod uses the node's network: the sidecar's ports would be the node's.", "Set `hostNetwork: false`."
    ),
    Reason.WINDOWS: Page("The pod is for Windows; the sidecar is for Linux.", "Run the model on Linux."),
    Reason.KNATIVE: Page(
        "Knative's `queue-proxy` is in the pod and calls the model by itself: a sidecar would get no request.",
        "With KServe: annotate the InferenceService with `serving.kserve.io/deploymentMode: Standard` (`RawDeployment` "
        "before KServe 0.16).",
    ),
    Reason.NO_ROOM: Page(
        "A LimitRange or a ResourceQuota of the namespace leaves no room for a sidecar, or the pod's annotations would "
        "exceed 256 KiB: the API server would refuse the pod. Or a LimitRange gives devices to every container.",
        "Make room, or ask for less: `carpool.dev/sidecar-cpu`, `-cpu-limit`, `-memory`, `-memory-request`, in the pod "
        "template or on the Namespace. Then restart the workload.",
    ),
    Reason.FAULT: Page(
        "The injector failed on this pod. Its log has the traceback; "
        '`carpool_injector_reviews_total{result="Fault"}` counts.',
        "Report it, with the pod. `carpool inject` may work meanwhile.",
    ),
}  # fmt: skip

NOTES = {
    Note.PRE_STOP_KEPT: Page(
        "The model's container has a `preStop` hook of its own, so it does not wait for the sidecar's drain.",
        "Let the hook last until nobody sends requests any more, e.g. `sleep: {seconds: 15}`; or take it out: then the "
        "sidecar's drain takes its place.",
    ),
    Note.GRACE_RAISED: Page(
        "`terminationGracePeriodSeconds` left no time to drain: 5 s while load balancers catch up, some to finish in, "
        "5 s for the model's own end. It is 20 now.",
        "Set 20 or more.",
    ),
    Note.GUARANTEED_KEPT: Page(
        "The pod's quality of service is Guaranteed. To keep it so, the sidecar's limits equal its requests.",
        "If the sidecar is throttled, raise `carpool.dev/sidecar-cpu`.",
    ),
    Note.RESOURCES_FITTED: Page(
        "The sidecar's requests or limits are not those that are set: a LimitRange or a ResourceQuota of the namespace "
        "demands others.",
        "Nothing, or change the LimitRange. A CPU limit delays requests when it is reached.",
    ),
    Note.PORT_UNNAMED: Page(
        "The model's port has no name, so Services reach it by number and bypass the sidecar.",
        "Name the port in the workload, and let the Service's `targetPort` be that name.",
    ),
    Note.CAPTURE_FORBIDDEN: Page(
        "The model's port is not captured. Its init container needs the capability NET_ADMIN and user 0. The namespace "
        "enforces the Pod Security Standard `baseline` or `restricted`, or could not be read, or the platform assigns "
        "users.",
        "Label the namespace: `kubectl label namespace NAMESPACE pod-security.kubernetes.io/enforce=privileged "
        "--overwrite`. Or do without capture, and let Services name the port.",
    ),
    Note.CAPTURE_IN_MESH: Page(
        "The model's port is not captured: a service mesh captures the pod's connections already, and its proxy would "
        "get past the sidecar.",
        "Let Services name the port, as without capture. Or take the pod out of the mesh.",
    ),
    Note.CAPTURE_TCP_PROBE: Page(
        "The model's port is not captured: a `tcpSocket` probe of that port would reach the sidecar, which accepts "
        "connections before the model does.",
        "Make it an `httpGet`, such as of `/v2/health/ready`.",
    ),
}


LONGEST_MESSAGE = 1000
"""Most characters. A message quotes annotations, which may have 256 KiB, and is stored in one."""


class Skipped(Exception):  # noqa: N818 - control flow of a decision, no error
    """The pod can't have a sidecar."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        cut = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."
        self.skip = Skip(reason, cut)


class Skip(NamedTuple):
    """No sidecar, and why: the message has the finding and the fix."""

    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def is_annotated(self) -> bool:
        """Whether the pod is annotated: one that asked for a sidecar and gets none."""
        return self.reason not in {Reason.NOT_OPTED_IN, Reason.DISABLED, Reason.ALREADY_INJECTED}
