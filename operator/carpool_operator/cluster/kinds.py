"""The kinds of objects that are kept, and how each is read."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from carpool_operator.api import annotations as names
from carpool_operator.api.spec import API_VERSION, PLURAL
from carpool_operator.cluster.autoscalers import HPAS, SCALED_OBJECTS, RawHpa, RawScaledObject
from carpool_operator.cluster.objects import RawNamespace, RawPod, RawPolicy, workload
from carpool_operator.cluster.watching import Kept
from carpool_operator.workloads import registry

POLICIES, NAMESPACES, PODS = "policies", "namespaces", "pods"


class Kind(NamedTuple):
    """One kind of object that is watched."""

    api: str
    plural: str
    query: dict[str, str]
    kept: Kept[Any]
    optional: bool = False
    """Whether a cluster may be without it."""


KINDS = {
    POLICIES: Kind(API_VERSION, PLURAL, {}, Kept(RawPolicy, RawPolicy.policy)),
    **{
        kind.plural: Kind(kind.api, kind.plural, {}, Kept(kind.raw, partial(workload, kind)), not kind.built_in)
        for kind in registry.KINDS
    },
    NAMESPACES: Kind("v1", NAMESPACES, {}, Kept(RawNamespace, RawNamespace.namespace), optional=True),
    PODS: Kind("v1", PODS, {"labelSelector": f"{names.INJECTED}=true"}, Kept(RawPod, RawPod.pod)),
    # An operator of an older chart has no rights to them.
    HPAS: Kind("autoscaling/v2", HPAS, {}, Kept(RawHpa, RawHpa.autoscaler), optional=True),
    SCALED_OBJECTS: Kind(
        "keda.sh/v1alpha1", SCALED_OBJECTS, {}, Kept(RawScaledObject, RawScaledObject.autoscaler), optional=True
    ),
}

WATCHED = (PODS, "replicasets", HPAS, SCALED_OBJECTS)
"""Kinds with our own watch: they change by themselves all the time, or most of them don't matter, as the ReplicaSets of
Deployments. kopf watches the others, and holds all of an object."""

REQUIRED = [name for name, kind in KINDS.items() if not kind.optional]
"""Kinds that every cluster has."""
