"""Argo Rollout: pods name its ReplicaSet, which is named after it and the template's hash.

https://github.com/argoproj/argo-rollouts, ``pkg/apis/rollouts/v1alpha1``.
"""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Condition, Meta, Selector, Template, refused

HASH = "rollouts-pod-template-hash"


class _Spec(Struct, frozen=True):
    selector: Selector | None = None
    template: Template = Template()
    replicas: int = 1


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: str = ""
    replicas: int = 0
    updated_replicas: int = 0
    current_pod_hash: str = ""
    stable_hash: str = field(default="", name="stableRS")
    selector: str = ""
    conditions: list[Condition] = field(default_factory=list)


class Raw(Struct, frozen=True):
    """A Rollout as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It rolls from a new template until that is the stable one, including pauses between its steps."""
    spec, status = raw.spec, raw.status
    seen = status.observed_generation
    # 64 bits have 19 digits; int() refuses more than 4,300.
    behind = seen.isdecimal() and len(seen) < 20 and int(seen) < raw.metadata.generation
    rolling = behind or status.current_pod_hash != status.stable_hash or status.updated_replicas < spec.replicas
    # If it refers to a Deployment, only its status has a selector.
    selector = status.selector if spec.selector is None else str(spec.selector)
    return State(spec.template.annotations, selector, spec.replicas, rolling, refused(status.conditions))


def owner(labels: Json, by: Json) -> str | None:
    """Return the ReplicaSet's name without the hash."""
    suffix = f"-{labels.get(HASH)}"
    name = str(by.get("name", ""))
    return name.removesuffix(suffix) if controlled_by(by, "apps", "ReplicaSet") and name.endswith(suffix) else None


KIND = Kind(
    name="Rollout",
    group="argoproj.io",
    version="v1alpha1",
    plural="rollouts",
    short=("ro",),
    raw=Raw,
    state=state,
    owner=owner,
    made=lambda name: ({HASH: "0"}, reference("apps/v1", "ReplicaSet", f"{name}-0")),
    revision=HASH,
    templates=("spec.template",),
    annotating=True,
    restart='patch {resource} --type=merge -p \'{{"spec":{{"restartAt":"\'$(date -u +%FT%TZ)\'"}}}}\'',
    remark="With `workloadRef` write the annotations in the template of the Deployment that it refers to.",
)
