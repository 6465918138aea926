"""The CRD of BatchingPolicy, generated from its types, and the chart's part that depends on the kinds of workloads.

``python -m carpool_operator.api.crd [--check]``
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import NODEFAULT, Struct

from carpool.policy.durations import DURATION_PATTERN, QUANTITY_PATTERN, Duration, Quantity
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Model
from carpool_operator.api.cel import RULES
from carpool_operator.api.docstrings import attribute_texts, one_line
from carpool_operator.api.spec import GROUP, KIND, MAX_MODELS, PLURAL, VERSION, PolicySpec, TargetRef
from carpool_operator.api.status import MAX_HISTORY, Condition, HistoryEntry, Status, TargetModel, TargetStatus
from carpool_operator.workloads import chart

ROOT = Path(__file__).parents[3]
FILE = ROOT / "crds" / f"{GROUP}_{PLURAL}.yaml"
TEMPLATE = ROOT / "charts" / "carpool" / "templates" / "crds.yaml"
WORKLOADS = TEMPLATE.with_name("_workloads.tpl")

_APPLIED_PATTERN = r"^([0-9]{1,5}(h|m|s|ms|us)){1,5}$"
"""For measured and applied durations, in whole microseconds; a spec's durations have milliseconds at most."""


KEYS: dict[type[Struct], list[str]] = {
    Condition: ["type"],
    Model: ["name"],
    TargetModel: ["name"],
    TargetRef: ["group", "kind", "name"],
    TargetStatus: ["kind", "name"],
}
"""Lists whose entries have key fields; the server rejects two entries with the same key."""

SIZES: dict[type[Struct], int] = {Model: MAX_MODELS, HistoryEntry: MAX_HISTORY}
"""Maximum length of a list; it bounds the cost of a rule over the list. Other lists declare it in their type."""

# ------------------------------------------------------------------------------------------------- schema


def _object(kind: type[Struct], *, spec: bool) -> dict[str, Any]:
    """Return the schema of a struct; defaults and the stricter duration appear only in the spec."""
    described = types.type_info(kind)
    assert isinstance(described, types.StructType)  # noqa: S101 - what it is of a struct
    texts = attribute_texts(kind)
    properties = {}
    for field in described.fields:
        schema = _schema(field.type, spec=spec)
        values = _meaning(field.type)
        schema = {"description": f"{texts[field.name]} {values}".strip(), **schema}
        if spec and (default := _default(field, schema)) is not None:
            schema["default"] = default
        properties[field.encode_name] = schema
    whole: dict[str, Any] = {"type": "object", "properties": properties}
    required = [field.encode_name for field in described.fields if field.required]
    if required:
        whole["required"] = required
    if spec and kind in RULES:
        whole["x-kubernetes-validations"] = [rule.schema() for rule in RULES[kind]]
    return whole


def _schema(kind: types.Type, *, spec: bool) -> dict[str, Any]:
    match kind:
        case types.Metadata(type=inner, extra_json_schema=extra):
            return _schema(inner, spec=spec) | (extra or {})
        case types.UnionType(types=members):
            return _schema(next(each for each in members if not isinstance(each, types.NoneType)), spec=spec)
        case types.StructType(cls=cls):
            return _object(cls, spec=spec)
        case types.CustomType(cls=cls) if cls is Duration:
            # Four numbers of five digits with units of two letters.
            return {
                "type": "string",
                **({"pattern": DURATION_PATTERN, "maxLength": 28} if spec else {"pattern": _APPLIED_PATTERN}),
            }
        case types.CustomType(cls=cls) if cls is Quantity:
            return {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "minimum": 0,
                "pattern": QUANTITY_PATTERN,
            }
        case types.BoolType():
            return {"type": "boolean"}
        case types.IntType(ge=low, le=high):
            return {"type": "integer", **_given(minimum=low, maximum=high)}
        case types.FloatType(gt=low, le=high):
            exclusive = {} if low is None else {"exclusiveMinimum": True}
            return {"type": "number", **_given(minimum=low, maximum=high), **exclusive}
        case types.StrType(min_length=least, max_length=most, pattern=pattern):
            return {"type": "string", **_given(minLength=least, maxLength=most, pattern=pattern)}
        case types.EnumType(cls=cls):
            return {"type": "string", "enum": [str(each.value) for each in cls]}
        case types.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case types.DictType(value_type=value, min_length=least, max_length=most):
            return {
                "type": "object",
                "additionalProperties": _schema(value, spec=spec),
                **_given(minProperties=least, maxProperties=most),
                "x-kubernetes-map-type": "atomic",
            }
        case types.VarTupleType(item_type=item, min_length=least, max_length=most):
            of = item.cls if isinstance(item, types.StructType) else Struct
            schema = {
                "type": "array",
                "items": _schema(item, spec=spec),
                **_given(minItems=least, maxItems=SIZES.get(of) or most),
            }
            if of in KEYS:
                return schema | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": KEYS[of]}
            return schema | {"x-kubernetes-list-type": "atomic"}
        case _:
            raise NotImplementedError(kind)


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _meaning(kind: types.Type) -> str:
    """Return the meanings of an enumeration's values."""
    return one_line(kind.cls.__doc__) if isinstance(kind, types.EnumType) else ""


def _default(field: types.Field, schema: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the value that the server fills in where a field is left out; ``None`` for nothing."""
    if field.required:
        return None
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if isinstance(value, Parameters):
        return None  # no default for the baseline: left out, it follows the bounds, and must not look like a set value
    if isinstance(value, Struct):
        # The server checks its rules on a default exactly as written here, before it fills in nested defaults.
        return {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner} or None
    if isinstance(value, Duration | Quantity | str):
        return str(value)
    if isinstance(value, tuple):
        return list(value) or None
    return value or None if isinstance(value, dict) else value


COLUMNS = (
    ("Mode", "string", ".spec.tuning.mode", "Whether parameters are tuned."),
    ("Batch", "string", ".status.applied.batch", "Rows that a batch of the busiest model may have."),
    ("Wait", "string", ".status.applied.wait", "How long a request may wait for others."),
    ("P99", "string", ".spec.slo.latency.p99", "The p99 of the SLO."),
    ("SLO", "string", '.status.conditions[?(@.type=="SLOMet")].status', "Whether the SLO is met."),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether all works."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why not, or a note: Paused."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since its creation."),
)


def resource() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    names = {
        "plural": PLURAL,
        "singular": KIND.lower(),
        "kind": KIND,
        "listKind": f"{KIND}List",
        "shortNames": ["bp"],
        "categories": ["carpool"],
    }
    schema = {
        "description": "An SLO of some workloads' models. Carpool tunes their batching to meet it.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": one_line(PolicySpec.__doc__), **_object(PolicySpec, spec=True)},
            "status": {"description": one_line(Status.__doc__), **_object(Status, spec=False)},
        },
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in COLUMNS
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


_HEADER = "# Generated by `make crds` from operator/carpool_operator/api/spec.py; do not edit.\n"


def text() -> str:
    """Return the CRD as YAML."""
    return _HEADER + _yaml(resource())


def template() -> str:
    """Return the CRD as a template of the chart, kept after an uninstall: without it every policy would be deleted."""
    crd = resource()
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    return f"{_HEADER}{{{{- if .Values.crds.install }}}}\n{_yaml(crd)}{{{{- end }}}}\n"


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """No anchors: equal parts are written out again."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the signature is the library's
        return True


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` report how they differ from the types; returns the exit code."""
    stale = False
    for path, written in ((FILE, text()), (TEMPLATE, template()), (WORKLOADS, chart.template())):
        if arguments != ["--check"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written, "utf-8")
            continue
        there = path.read_text("utf-8") if path.exists() else ""
        if there != written:
            stale = True
            lines = (there.splitlines(keepends=True), written.splitlines(keepends=True))
            sys.stdout.writelines(difflib.unified_diff(*lines, str(path), "the types"))
    if stale:
        sys.stderr.write("the CRD is behind its types: run `make crds` and commit what it writes\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
