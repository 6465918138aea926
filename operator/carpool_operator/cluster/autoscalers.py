"""Autoscalers that follow Carpool's load: HorizontalPodAutoscalers, and KEDA's ScaledObjects where there are any.

One is of interest if it names a metric of ours. Its workload is then batched as far as the SLO allows before another
replica is paid for (``tuning.capacity.for_autoscaler``).
"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from carpool_operator.api.model import Target
from carpool_operator.workloads.metadata import Meta
from carpool_operator.workloads.registry import BY_NAME, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_operator.api.model import Workload

HPAS, SCALED_OBJECTS = "horizontalpodautoscalers", "scaledobjects"

METRICS = frozenset(
    {"carpool_load", "carpool_load_ratio", "carpool_target_load_replicas", "carpool_target_needed_replicas"}
)
"""Those that say how many replicas a load fills, and the name under which the examples' adapter offers one."""

NEEDED = "carpool_target_needed_replicas"
"""Of these the one that has a share of the capacity in it already: its target is 1."""

ENDPOINT, FIELD = "/capacity", "load"
"""Where a sidecar says how full it is, and in which field."""


class Autoscaler(Struct, frozen=True):
    """One that follows the load of a workload."""

    kind: str
    name: str
    target: Target
    full: float | None = None
    """Load at which it takes a replica for full, as 0.9; ``None``: it does not say."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class RawHpa(Struct, frozen=True):
    """A HorizontalPodAutoscaler (``autoscaling/v2``) as the server writes it."""

    metadata: Meta
    spec: Any = None

    def autoscaler(self) -> Autoscaler | None:
        """Return what is kept of it; nothing of one that follows something else."""
        target = _target(self.metadata, _dict(self.spec).get("scaleTargetRef"))
        # Kept by KEDA for a ScaledObject, it has the names of KEDA's metrics.
        sources = [
            (name, _dict(source.get("target")).get("averageValue"))
            for metric in _dicts(self.spec, "metrics")
            for source in metric.values()
            if isinstance(source, dict) and (name := _dict(source.get("metric")).get("name")) in METRICS
        ]
        return _follower("HorizontalPodAutoscaler", self.metadata, target, sources)


class RawScaledObject(Struct, frozen=True):
    """A ScaledObject (``keda.sh/v1alpha1``) as the server writes it."""

    metadata: Meta
    spec: Any = None

    def autoscaler(self) -> Autoscaler | None:
        """Return what is kept of it; nothing of one that follows something else."""
        target = _target(self.metadata, _dict(self.spec).get("scaleTargetRef"))
        sources = [found for each in _dicts(self.spec, "triggers") if (found := _source(each)) is not None]
        return _follower("ScaledObject", self.metadata, target, sources)


def followed(workload: Workload, by: Autoscaler | None) -> Workload:
    """Return a workload with what follows its load."""
    return workload if by is None else replace(workload, autoscaler=str(by), full=by.full)


def _follower(kind: str, meta: Meta, target: Target | None, sources: list[tuple[str, Any]]) -> Autoscaler | None:
    """Return the autoscaler of a workload that goes by some of our metrics, each with its target; none by none."""
    if target is None or not sources:
        return None
    name, asked = sources[0]
    return Autoscaler(kind, meta.name, target, None if name == NEEDED else _full(asked))


def _source(trigger: dict[str, Any]) -> tuple[str, Any] | None:
    """Return which load a trigger reads, and its target: from Prometheus by its name, or from sidecars."""
    said = {key: str(value) for key, value in _dict(trigger.get("metadata")).items()}
    if trigger.get("type") == "prometheus":
        query = said.get("query", "")
        return next(((each, said.get("threshold")) for each in METRICS if _names(query, each)), None)
    if trigger.get("type") == "metrics-api":
        reads = _path(said.get("url", "")).rstrip("/") == ENDPOINT and said.get("valueLocation") == FIELD
        return (FIELD, said.get("targetValue")) if reads else None
    return None


def _full(asked: object) -> float | None:
    """Read a target; of what is none, nothing."""
    try:
        found = quantity(str(asked))
    except ValueError:
        return None
    return found if isfinite(found) and found > 0 else None


def quantity(text: str) -> float:
    """Read a Kubernetes quantity: ``850m``, ``2k``, ``1.5``.

    Raises ``ValueError``.
    """
    powers = {"m": -3, "k": 3, "M": 6}
    return float(f"{text[:-1]}e{powers[text[-1]]}") if text[-1:] in powers else float(text)


def _path(url: str) -> str:
    """Return a URL's path; of what is no URL, nothing: anybody may write anything there."""
    try:
        return urlsplit(url).path
    except ValueError:
        return ""


def _names(query: str, metric: str) -> bool:
    """Whether a PromQL expression has a metric's name in it, and not only as a part of a longer one."""
    pieces = query.split(metric)
    return any(
        not (before[-1:].isalnum() or before[-1:] in {"_", ":"})
        and not (after[:1].isalnum() or after[:1] in {"_", ":"})
        for before, after in pairwise(pieces)
    )


def _target(meta: Meta, reference: object) -> Target | None:
    """Return the workload that a ``scaleTargetRef`` names; of a kind that we don't know, nothing."""
    named = _dict(reference)
    kind = BY_NAME.get(str(named.get("kind") or DEFAULT.name))
    if kind is None or not named.get("name"):
        return None
    api = str(named.get("apiVersion") or kind.api)
    return Target(meta.namespace, kind.name, str(named["name"])) if api.partition("/")[0] == kind.group else None


def _dict(plain: object) -> dict[str, Any]:
    return plain if isinstance(plain, dict) else {}


def _dicts(spec: object, name: str) -> Iterator[dict[str, Any]]:
    listed = _dict(spec).get(name)
    return (each for each in listed if isinstance(each, dict)) if isinstance(listed, list) else iter(())
