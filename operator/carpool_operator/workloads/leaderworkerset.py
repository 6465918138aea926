"""LeaderWorkerSet: a model over several pods. Requests go to the leaders, so only these have sidecars.

https://github.com/kubernetes-sigs/lws, ``api/leaderworkerset/v1``. The StatefulSets that it creates are not workloads
themselves.
"""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, reference
from carpool_operator.workloads.metadata import Meta, RollingUpdate, Template

NAME = "leaderworkerset.sigs.k8s.io/name"
WORKER = "leaderworkerset.sigs.k8s.io/worker-index"


class _Templates(Struct, frozen=True, rename="camel"):
    leader_template: Template | None = None
    worker_template: Template = Template()


class _RolloutStrategy(Struct, frozen=True):
    rolling_update: RollingUpdate = field(default=RollingUpdate(), name="rollingUpdateConfiguration")


class _Spec(Struct, frozen=True, rename="camel"):
    replicas: int = 1
    rollout_strategy: _RolloutStrategy = _RolloutStrategy()
    templates: _Templates = field(default=_Templates(), name="leaderWorkerTemplate")


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int | None = None
    replicas: int = 0
    updated_replicas: int = 0


class Raw(Struct, frozen=True):
    """A LeaderWorkerSet as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one: a replica is a group of pods with one leader."""
    spec, status = raw.spec, raw.status
    # Versions before 0.8 do not report the observed generation.
    behind = status.observed_generation is not None and status.observed_generation < raw.metadata.generation
    update, there = spec.rollout_strategy.rolling_update, max(spec.replicas, status.replicas)
    rolling = behind or status.updated_replicas < there - update.partition
    template = spec.templates.leader_template or spec.templates.worker_template
    held_back = update.held_back if status.updated_replicas < there else ""
    selector = f"{NAME}={raw.metadata.name},{WORKER}=0"
    return State(template.annotations, selector, spec.replicas, rolling, held_back=held_back)


def owner(labels: Json, _: Json) -> str | None:
    """Return the set that a leader names. A worker receives no requests."""
    name: str | None = labels.get(NAME)
    return "" if name and labels.get(WORKER) != "0" else name


KIND = Kind(
    name="LeaderWorkerSet",
    group="leaderworkerset.x-k8s.io",
    version="v1",
    plural="leaderworkersets",
    short=("lws",),
    raw=Raw,
    state=state,
    owner=owner,
    maker=("StatefulSet", "{name}"),
    made=lambda name: ({NAME: name, WORKER: "0"}, reference("apps/v1", "StatefulSet", name)),
    revision="leaderworkerset.sigs.k8s.io/template-revision-hash",
    templates=("spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"),
    annotating=True,
    restart="patch {resource} --type=merge -p "
    '\'{{"spec":{{"leaderWorkerTemplate":{{"workerTemplate":{{"metadata":{{"annotations":'
    '{{"kubectl.kubernetes.io/restartedAt":"\'$(date -u +%FT%TZ)\'"}}}}}}}}}}}}\'',
    remark="Leaders alone have sidecars; workers serve nobody.",
)
