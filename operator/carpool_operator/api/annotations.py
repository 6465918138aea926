"""Labels and annotations: those that users set on workloads, their meaning, and those that the webhook sets on pods."""

from __future__ import annotations

import difflib
import re
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.policy.durations import DURATION_PATTERN
from carpool.policy.plain import PolicyError, from_plain
from carpool.policy.spec import Objective, TuningMode
from carpool_operator.api.spec import PolicySpec
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from enum import StrEnum

PREFIX = "carpool.dev/"

# Set by users on a Deployment or in a pod template
INJECT = PREFIX + "inject"
"""``"true"`` asks for a sidecar, ``"false"`` forbids it; ``"deployment"`` in a template is the webhook's."""
SLO_PREFIX = PREFIX + "slo-"
"""Followed by a percentile: ``carpool.dev/slo-p99: 50ms``. Any of these also asks for a sidecar. For token streams:
``slo-ttft-p99``, time to the first token, and ``slo-tpot-p99``, time per output token after it. A suffix ``.CLASS``,
e.g. ``slo-ttft-p99.gold``, limits the target to requests of that class."""
TTFT = SLO_PREFIX + "ttft-p99"
"""``slo.ttft`` of the policy; classes need it."""
MODE = PREFIX + "mode"
"""``tuning.mode`` of the policy that the operator keeps for the workload."""
OBJECTIVE = PREFIX + "objective"
"""Its ``objective``."""
TARGET_UTILIZATION = PREFIX + "target-utilization"
"""Its ``targetUtilizationPercent``."""
DEVICE_SHARE = PREFIX + "device-share"
"""Its ``deviceSharePercent``."""
AUTOSCALED = PREFIX + "autoscaled"
"""``"true"``: an autoscaler follows Carpool's load, so that ``Balanced`` is ``Efficiency`` here."""
MAX_BATCH = PREFIX + "max-batch"
"""Its ``bounds.maxBatch.max``, in rows."""
MAX_WAIT = PREFIX + "max-wait"
"""Its ``bounds.maxWait.max``."""
MAX_IN_FLIGHT = PREFIX + "max-in-flight"
"""Its ``bounds.maxInFlight.max``."""

# Set by users in a pod template
CONTAINER = PREFIX + "container"
"""The model's container; by default the one that asks for a GPU, or has a known port or name."""
PORT = PREFIX + "port"
"""The model's port in that container, name or number; by default the first that may speak HTTP/1.1."""
CPU = PREFIX + "sidecar-cpu"
"""The sidecar's CPU request."""
CPU_LIMIT = PREFIX + "sidecar-cpu-limit"
"""Its CPU limit; by default none."""
MEMORY = PREFIX + "sidecar-memory"
"""The sidecar's memory limit."""
MEMORY_REQUEST = PREFIX + "sidecar-memory-request"
"""Its memory request; by default a quarter of the limit."""
MAX_BODY = PREFIX + "max-body"
"""Largest body, in bytes, that is read whole so that it can be batched; by default an eighth of the memory limit."""
DATA_PORT = PREFIX + "data-port"
"""The sidecar's port for requests."""
ADMIN_PORT = PREFIX + "admin-port"
"""The sidecar's port for probes, metrics and the operator."""
CAPTURE = PREFIX + "capture"
"""``"true"``: the pod's kernel redirects the model's port to the sidecar, for callers that use the port's number."""

# Set by the webhook on a pod
INJECTED = PREFIX + "injected"
"""Label, ``"true"`` on a pod with a sidecar."""
TARGET = PREFIX + "target"
"""``Kind/name`` of the workload that the pod belongs to."""
STATUS = PREFIX + "status"
"""JSON: version, container, port, dataPort, adminPort, notes, and ``undo``: the changes that restore the original
pod."""
SKIPPED = PREFIX + "skipped"
"""``<reason>: <message>``, on a pod that asked for a sidecar and got none."""

ASKED = "true"
FORBIDDEN = "false"
PROPAGATED = "deployment"
"""Values of ``INJECT``."""


LONGEST_NAME = 253
"""Most characters in an object's name."""


def change_name(kind: str, name: str) -> str:
    """Return the name of the ConfigMap that holds a workload's signed change."""
    return _fitting(f"carpool-{kind.lower()}-{name}")


def policy_name(kind: str, name: str) -> str:
    """Return the name of the policy kept for a workload."""
    return _fitting(f"{kind.lower()}-{name}")


def _fitting(name: str) -> str:
    """Return a valid object name: one that is too long keeps its beginning, and a hash replaces the rest."""
    if len(name) <= LONGEST_NAME:
        return name
    digest = sha256(name.encode()).hexdigest()[:16]
    return f"{name[: LONGEST_NAME - 17].rstrip('.-')}-{digest}"


# ------------------------------------------------------------------------------------------------- what they ask for

FIELDS = {
    **{f"{SLO_PREFIX}{name}": ("slo", "latency", name) for name in ("p50", "p90", "p95", "p99", "p999")},
    **{f"{SLO_PREFIX}{name}-p99": ("slo", name, "p99") for name in ("ttft", "tpot")},
    MODE: ("tuning", "mode"),
    OBJECTIVE: ("objective",),
    TARGET_UTILIZATION: ("targetUtilizationPercent",),
    DEVICE_SHARE: ("deviceSharePercent",),
    MAX_BATCH: ("bounds", "maxBatch", "max"),
    MAX_WAIT: ("bounds", "maxWait", "max"),
    MAX_IN_FLIGHT: ("bounds", "maxInFlight", "max"),
}
"""The policy field that an annotation sets; for classes see ``_of_class``."""

OF_CLASSES = {f"{SLO_PREFIX}{name}-p99.CLASS": f"slo.classes[].{name}.p99" for name in ("ttft", "tpot")}
"""Annotations of classes, and the field that each one sets."""

_OF_CLASS = re.compile(rf"{re.escape(SLO_PREFIX)}(ttft|tpot)-p99\.([a-z0-9]([a-z0-9-]*[a-z0-9])?)")

BATCH = "batch"
"""The priority without targets, which is therefore not a class."""

_DURATIONS = {name for name in FIELDS if name.startswith(SLO_PREFIX)} | {MAX_WAIT}
_NUMBERS = {MAX_BATCH: 65536, MAX_IN_FLIGHT: 65536, TARGET_UTILIZATION: 100, DEVICE_SHARE: 100}
"""Annotations that are whole numbers from 1, with the largest value."""
_CHOICES: dict[str, type[StrEnum]] = {MODE: TuningMode, OBJECTIVE: Objective}
OF_SIDECAR = (CPU, CPU_LIMIT, MEMORY, MEMORY_REQUEST, MAX_BODY, DATA_PORT, ADMIN_PORT, CAPTURE)
"""Annotations that a Namespace may have, too: defaults for the sidecars in it."""
_OF_TEMPLATE = (CONTAINER, PORT, *OF_SIDECAR)
_OWN = (INJECT, *FIELDS, AUTOSCALED)

KNOWN = frozenset(_OWN)
"""Annotations allowed on a workload itself."""
KNOWN_IN_TEMPLATE = frozenset({INJECT, *_OF_TEMPLATE, STATUS, TARGET, SKIPPED})
"""Annotations allowed in a pod template: those that users set, and those of ``carpool inject``."""


class Wish(NamedTuple):
    """What a workload's own annotations ask for. With ``problems``, ``spec`` is None: an SLO is never guessed."""

    spec: PolicySpec | None
    """The policy to keep for it, if any."""
    problems: tuple[str, ...]
    """Each names an annotation and the fix."""
    by_default: bool = False
    """Whether its SLO is a default. A policy written by a user then takes precedence, even one that selects by
    label."""


def read(kind: str, name: str, annotations: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> Wish:
    """Read a workload's own annotations, not those of its pod template.

    ``defaults``: values, free of problems, for annotations that the workload lacks. They apply to workloads that ask
    for a sidecar. An SLO is taken as a whole: default percentiles are never added to a workload's own.
    """
    ours = {key: value for key, value in sorted(annotations.items()) if key.startswith(PREFIX)}
    where = ".".join(BY_NAME[kind].annotations_path()) if BY_NAME[kind].templates else "the templates of its pods"
    problems = [problem for key, value in ours.items() if (problem := _problem(key, value, where)) is not None]
    own = any(_is_slo(key) for key in ours)
    by_default = not own and ours.get(INJECT) == ASKED and any(_is_slo(key) for key in defaults or {})
    if not own and not by_default:
        problems += [
            f"{key} belongs to an SLO: add one, e.g. {SLO_PREFIX}p99: 50ms, here or on the namespace (with "
            f'{INJECT}: "{ASKED}" here), or drop it'
            for key in ours
            if _is_known(key)
        ]
    if problems or not (own or by_default) or ours.get(INJECT) == FORBIDDEN:
        return Wish(None, tuple(problems))
    ours = merged(defaults or {}, ours)
    classes = _classes(ours)
    if classes and TTFT not in ours:
        of = next(key for key in ours if _of_class(key) is not None)
        return Wish(None, (f"{of} is of a class: add {TTFT} for the requests without one, e.g. 2s, or drop it",))
    plain: dict[str, Any] = {"targetRefs": [{"group": BY_NAME[kind].group, "kind": kind, "name": name}]}
    for key, (*path, last) in ((key, FIELDS[key]) for key in ours if key in FIELDS):
        inner = plain
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = int(ours[key]) if key in _NUMBERS else ours[key]
    if classes:
        plain["slo"] |= {"classes": classes}
    try:
        return Wish(from_plain(plain, PolicySpec, what="spec").validate(), (), by_default)
    except PolicyError as error:
        drop = ", so drop some" if error.field == "slo.classes" else ""
        return Wish(None, (f"{_annotation(error.field, classes)}: {str(error).partition(': ')[2]}{drop}",))


def merged(outer: Mapping[str, str], inner: Mapping[str, str]) -> dict[str, str]:
    """Return annotations completed with defaults; percentiles come from only one of the two."""
    own = any(_is_slo(key) for key in inner)
    return {key: value for key, value in outer.items() if not (own and _is_slo(key))} | dict(inner)


def asks(annotations: Mapping[str, str]) -> bool:
    """Return whether a workload's own annotations ask for a sidecar; their values are checked elsewhere."""
    if annotations.get(INJECT) == FORBIDDEN:
        return False
    return annotations.get(INJECT) == ASKED or any(name.startswith(SLO_PREFIX) for name in annotations)


def asks_validly(annotations: Mapping[str, str]) -> bool:
    """Return whether one of the annotations that ask for a sidecar is valid."""
    if not asks(annotations) or annotations.get(INJECT) == ASKED:
        return asks(annotations)
    return any(_is_slo(key) and _problem(key, value) is None for key, value in annotations.items())


def _is_slo(key: str) -> bool:
    return _is_known(key) and key.startswith(SLO_PREFIX)


def _is_known(key: str) -> bool:
    return key in FIELDS or _of_class(key) is not None


def _of_class(key: str) -> tuple[str, str] | None:
    """Return an annotation's target and class: ("ttft", "gold") for ``slo-ttft-p99.gold``; None for any other."""
    found = _OF_CLASS.fullmatch(key)
    return None if found is None else (found[1], found[2])


def _classes(ours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the classes that annotations name, as in a policy, sorted by name."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in ours.items():
        if (of := _of_class(key)) is not None:
            found.setdefault(of[1], {"priority": of[1]})[of[0]] = {"p99": value}
    return [found[name] for name in sorted(found)]


def read_defaults(annotations: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read the defaults on a namespace; return the valid ones, and the problems of the others.

    The injector checks defaults for sidecars, and reports invalid ones in each pod.
    """
    good: dict[str, str] = {}
    problems = []
    for key, value in sorted(annotations.items()):
        if not key.startswith(PREFIX) or key in OF_SIDECAR:
            continue
        if _is_known(key) and (problem := _problem(key, value)) is None:
            good[key] = value
        elif _is_known(key):
            problems.append(str(problem))
        else:
            problems.append(f"{key} is no default: {_hint(key, (*FIELDS, *OF_SIDECAR))}")
    return good, tuple(problems)


def _problem(key: str, value: str, template: str = "") -> str | None:
    """Return the problem of one annotation by itself. ``template``: where its pods' annotations are."""
    if key in _OF_TEMPLATE:
        return f"{key} is read in the pod template only: move it to {template}"
    if key in {INJECT, AUTOSCALED}:
        return (
            None if value in {ASKED, FORBIDDEN} else f'{key} is {value!r}: write "{ASKED}" or "{FORBIDDEN}", in quotes'
        )
    if not _is_known(key):
        return f"{key} is not known: {_hint(key, _OWN)}"
    if (of := _of_class(key)) is not None and of[1] == BATCH:
        return f"{key}: requests of the class {BATCH} have no targets: name another class, or drop it"
    if (key in _DURATIONS or of is not None) and re.fullmatch(DURATION_PATTERN, value) is None:
        return f"{key} is {value!r}: write a duration, e.g. 50ms, 2s, 1m30s (units h, m, s, ms; whole numbers)"
    if key in _NUMBERS and not (re.fullmatch("[1-9][0-9]{0,8}", value) and int(value) <= _NUMBERS[key]):
        return f'{key} is {value!r}: write a whole number from 1 to {_NUMBERS[key]}, in quotes, e.g. "32"'
    if key in _CHOICES and value not in (known := list(map(str, _CHOICES[key]))):
        close = difflib.get_close_matches(value.capitalize(), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{key} is {value!r}: {hint}"
    return None


def misplaced(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Return the annotations of a pod template that are ignored there, and the fix for each.

    Values are not checked here: a pod with an invalid value reports it itself.
    """
    unread = sorted(key for key in annotations if key.startswith(PREFIX) and key not in KNOWN_IN_TEMPLATE)
    return tuple(
        f"{key} is read on the workload itself: move it from the pod template to metadata.annotations"
        if _is_known(key)
        else f"{key} in the pod template is not known: {_hint(key, (INJECT, *_OF_TEMPLATE))}"
        for key in unread
    )


def _hint(key: str, here: Iterable[str]) -> str:
    """Return the annotation that was probably meant, or those that are allowed ``here``."""
    if key.startswith(SLO_PREFIX) and "." in key.removeprefix(PREFIX):
        return (
            f"of a class there are {' and '.join(OF_CLASSES)}, where CLASS has lower-case letters, digits and -, e.g. "
            f"{SLO_PREFIX}ttft-p99.gold"
        )
    known = [each.removeprefix(PREFIX) for each in (*_OWN, *_OF_TEMPLATE)]
    close = difflib.get_close_matches(key.removeprefix(PREFIX), known, n=1)
    return f"did you mean {PREFIX}{close[0]}?" if close else f"there are {', '.join(here)}"


def _annotation(path: str, classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the annotation that sets a policy's field; for a whole SLO, or all classes, all of them."""
    if path == "slo.classes":
        return f"{SLO_PREFIX}*.CLASS"
    fields = {".".join(steps): key for key, steps in FIELDS.items()}
    for index, each in enumerate(classes):
        for name in ("ttft", "tpot"):
            fields[f"slo.classes[{index}].{name}.p99"] = f"{SLO_PREFIX}{name}-p99.{each['priority']}"
    inside = [key for field, key in fields.items() if field == path or field.startswith(f"{path}.")]
    return inside[0] if len(inside) == 1 else f"{SLO_PREFIX}*"
