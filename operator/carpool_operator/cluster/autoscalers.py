"""Autoscalers that follow Carpool's load: HorizontalPodAutoscalers, and KEDA's ScaledObjects where there are any.

One matters here if it names a Carpool metric. Its workload is then batched as far as the SLO allows before the
autoscaler adds another replica (``tuning.target_load.for_autoscaler``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from carpool_operator.api.model import Target
from carpool_operator.workloads.metadata import Meta
from carpool_operator.workloads.registry import BY_NAME, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from carpool_operator.api.model import Workload

HPAS, SCALED_OBJECTS = "horizontalpodautoscalers", "scaledobjects"

LOADS = frozenset({"carpool_load", "carpool_load_ratio", "carpool_target_load_replicas"})
"""Metrics of how many replicas a load fills. ``carpool_load`` is the name that the examples' adapter uses for one."""

NEEDED = frozenset({"carpool_target_needed_replicas", "carpool_target_needed_replicas_upper"})
"""Metrics that already include a share of the capacity: their target is 1."""

METRICS = LOADS | NEEDED

ENDPOINT, FIELD = "/capacity", "load"
"""The sidecar's endpoint that reports how full it is, and the field."""


class Autoscaler(Struct, frozen=True):
    """An autoscaler that follows the load of a workload."""

    kind: str
    name: str
    target: Target
    full: float | None = None
    """Load at which it considers a replica full, e.g. 0.9; ``None``: not given, or in another unit."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class RawHpa(Struct, frozen=True):
    """A HorizontalPodAutoscaler (``autoscaling/v2``) as the server writes it."""

    metadata: Meta
    spec: Any = None

    def autoscaler(self) -> Autoscaler | None:
        """Return the autoscaler; ``None`` if it follows something else."""
        target = _target(self.metadata, _dict(self.spec).get("scaleTargetRef"))
        # If KEDA keeps it for a ScaledObject, it has the names of KEDA's metrics.
        sources = [
            _full({name}, _dict(source.get("target")).get("averageValue"))
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
        """Return the autoscaler; ``None`` if it follows something else."""
        target = _target(self.metadata, _dict(self.spec).get("scaleTargetRef"))
        sources = [full for each in _dicts(self.spec, "triggers") for full in _sources(each)]
        return _follower("ScaledObject", self.metadata, target, sources)


def followed(workload: Workload, by: Autoscaler | None) -> Workload:
    """Return a workload with the autoscaler of its load."""
    return workload if by is None else replace(workload, autoscaler=str(by), full=by.full)


class Query(NamedTuple):
    """The names and operations in a PromQL expression."""

    names: frozenset[str]
    """Names of metrics, and PromQL's own words."""
    computes: bool
    """Whether it has arithmetic: its value may have another unit than the metric, such as percent."""


_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)"""

_LABELS = re.compile(
    rf"""
      __name__\s*=~?\s*(?={_STRING})     # before a metric's name
    | \b\w+\s*(?:=~|!~|!=|=)\s*{_STRING}  # a label
    | \[[^\[\]]*\]                      # a time
    | \#[^\n]*
    | (?P<name>{_STRING})                # a metric's name, or a function's text
    """,
    re.VERBOSE,
)
"""Parts of an expression that are ignored."""


def query(text: str) -> Query:
    """Read the names and operations of a PromQL expression; labels and times are ignored."""
    rest = _LABELS.sub(lambda found: f" {(found['name'] or '')[1:-1]} ", text)
    computes = re.search(r"[-+*/%^]", _LABELS.sub(" ", text)) is not None
    return Query(frozenset(re.findall(r"[^\W\d][\w:]*|:[\w:]+", rest)), computes)


def _follower(kind: str, meta: Meta, target: Target | None, sources: list[float | None]) -> Autoscaler | None:
    """Return a workload's autoscaler that uses some of our metrics, each with its target; ``None`` if it uses none."""
    return Autoscaler(kind, meta.name, target, sources[0]) if target is not None and sources else None


def _sources(trigger: dict[str, Any]) -> Iterator[float | None]:
    """Yield the load of a full replica for each trigger that reads our metrics, from Prometheus or from sidecars."""
    said = {key: str(value) for key, value in _dict(trigger.get("metadata")).items()}
    if trigger.get("type") == "prometheus":
        asked = query(said.get("query", ""))
        if asked.names & METRICS:
            yield None if asked.computes else _full(asked.names, said.get("threshold"))
    reads = _path(said.get("url", "")).rstrip("/"), said.get("valueLocation")
    if trigger.get("type") == "metrics-api" and reads == (ENDPOINT, FIELD):
        yield _full((), said.get("targetValue"))


def _full(names: Collection[str], asked: object) -> float | None:
    """Convert a target to the load of a full replica, at most 1: 90 means percent."""
    try:
        found = quantity(str(asked))
    except ValueError:
        return None
    return found if 0 < found <= 1 and NEEDED.isdisjoint(names) else None


def quantity(text: str) -> float:
    """Read a Kubernetes quantity: ``850m``, ``2k``, ``1.5``.

    Raises ``ValueError``.
    """
    powers = {"m": -3, "k": 3, "M": 6}
    return float(f"{text[:-1]}e{powers[text[-1]]}") if text[-1:] in powers else float(text)


def _path(url: str) -> str:
    """Return a URL's path; ``""`` for an invalid URL, because anyone may write anything there."""
    try:
        return urlsplit(url).path
    except ValueError:
        return ""


def _target(meta: Meta, reference: object) -> Target | None:
    """Return the workload that a ``scaleTargetRef`` names; ``None`` for an unknown kind."""
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
