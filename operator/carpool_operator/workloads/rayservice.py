"""RayService: Ray Serve on clusters that each upgrade recreates. Its pods name the cluster, and the service by labels.

https://github.com/ray-project/kuberay, ``ray-operator/apis/ray/v1``. KubeRay copies labels of a group's template to its
pods. By itself it labels them only with the RayCluster, whose name is random. So users name the service in the
template.
"""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Meta, Template

FROM_KIND, FROM_NAME = "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"


class _Group(Struct, frozen=True):
    template: Template = Template()
    replicas: int = 1


class _Cluster(Struct, frozen=True, rename="camel"):
    head_group_spec: _Group = _Group()
    worker_group_specs: list[_Group] = field(default_factory=list)


class _Spec(Struct, frozen=True):
    cluster: _Cluster = field(default=_Cluster(), name="rayClusterConfig")


class _Of(Struct, frozen=True):
    name: str = field(default="", name="rayClusterName")


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    pending_service_status: _Of = _Of()


class Raw(Struct, frozen=True):
    """A RayService as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It counts groups whose templates have Carpool's annotations; it rolls while a cluster is pending."""
    cluster, status = raw.spec.cluster, raw.status
    groups = [cluster.head_group_spec, *cluster.worker_group_specs]
    asking = [each for each in groups if any(name.startswith("carpool.dev/") for name in each.template.annotations)]
    annotations = {name: value for each in asking for name, value in each.template.annotations.items()}
    rolling = status.observed_generation < raw.metadata.generation or bool(status.pending_service_status.name)
    selector = f"{FROM_KIND}=RayService,{FROM_NAME}={raw.metadata.name}"
    return State(annotations, selector, sum(each.replicas for each in asking), rolling)


def owner(labels: Json, by: Json) -> str | None:
    """Return the RayService that the labels name."""
    named = controlled_by(by, "ray.io", "RayCluster") and labels.get(FROM_KIND) == "RayService"
    return labels.get(FROM_NAME) if named else None


KIND = Kind(
    name="RayService",
    group="ray.io",
    version="v1",
    plural="rayservices",
    raw=Raw,
    state=state,
    owner=owner,
    maker=("RayCluster", "{name}-*"),
    made=lambda name: ({FROM_KIND: "RayService", FROM_NAME: name}, reference("ray.io/v1", "RayCluster", f"{name}-0")),
    revision="ray.io/cluster",
    # One per group, in a list.
    templates=(),
    annotating=False,
    restart="delete pods --selector='{selector}'",
    remark="Write the annotations in the templates of the groups that serve, with the labels "
    "`ray.io/originated-from-crd: RayService` and `ray.io/originated-from-cr-name: NAME`, and let "
    "`serveService` lead to the port by its name.",
)
