"""KServe InferenceService in its raw mode (`Standard`): a Deployment `NAME-predictor`, which is not a workload itself.

https://github.com/kserve/kserve, ``pkg/apis/serving/v1beta1``. KServe copies annotations of ``spec.predictor`` to the
Deployment's template. In its serverless mode pods belong to Knative, and are left unchanged.
"""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, reference
from carpool_operator.workloads.metadata import Meta

NAME = "serving.kserve.io/inferenceservice"
KNATIVE = "serving.knative.dev/revision"
COMPONENT = "component"


class _Predictor(Struct, frozen=True, rename="camel"):
    annotations: dict[str, str] = field(default_factory=dict)
    min_replicas: int = 1


class _Spec(Struct, frozen=True):
    predictor: _Predictor = _Predictor()


class _Condition(Struct, frozen=True):
    type: str
    status: str = ""


class _Status(Struct, frozen=True, rename="camel"):
    conditions: list[_Condition] = field(default_factory=list)


class Raw(Struct, frozen=True):
    """An InferenceService as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. Its status has no number of pods, so its minimum counts as the desired number.

    Nor does it report a rollout: its ``observedGeneration`` is the Deployment's, which counts by itself.
    """
    predictor = raw.spec.predictor
    rolling = not any(each.type == "PredictorReady" and each.status == "True" for each in raw.status.conditions)
    annotations = {**raw.metadata.annotations, **predictor.annotations}
    return State(annotations, f"{NAME}={raw.metadata.name},{COMPONENT}=predictor", predictor.min_replicas, rolling)


def owner(labels: Json, _: Json) -> str | None:
    """Return the InferenceService that a predictor's pod names; transformers and explainers serve no model."""
    name: str | None = labels.get(NAME)
    return "" if name and (labels.get(COMPONENT) != "predictor" or KNATIVE in labels) else name


KIND = Kind(
    name="InferenceService",
    group="serving.kserve.io",
    version="v1beta1",
    plural="inferenceservices",
    short=("isvc",),
    raw=Raw,
    state=state,
    owner=owner,
    maker=("ReplicaSet", "{name}-predictor-*"),
    made=lambda name: (
        {NAME: name, COMPONENT: "predictor", "pod-template-hash": "0"},
        reference("apps/v1", "ReplicaSet", f"{name}-predictor-0"),
    ),
    deployment="{name}-predictor",
    revision="pod-template-hash",
    templates=("spec.predictor.annotations",),
    containers=("spec.predictor.containers", "spec.predictor.model"),
    annotating=True,
    restart="rollout restart deployment/{name}-predictor",
    remark="Raw mode only. KServe points its Services at the model's port by number, and puts that back if you change "
    "it: [KServe](../injection.md#kserve).",
)
