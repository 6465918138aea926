"""What a field takes: for error messages."""

from __future__ import annotations

import re
from typing import Any

import msgspec.inspect as types

_STEP = re.compile(r"\.?([^.\[\]]+)|\[[^\]]*\]")


def alternatives(kind: Any, path: str) -> list[str]:  # noqa: ANN401 - any type that msgspec knows
    """Return the fields of the object, or the values of the enumeration, at ``path`` inside ``kind``; else nothing.

    ``path`` as msgspec writes it in its errors, without the root: ``models[0].axis``, ``parameters[...]``.
    """
    node = _bare(types.type_info(kind))
    for step in _STEP.finditer(path):
        node = _bare(_inside(node, step[1]))
    if isinstance(node, types.StructType):
        return [field.encode_name for field in node.fields]
    if isinstance(node, types.EnumType):
        return [str(each.value) for each in node.cls]
    return [str(each) for each in node.values] if isinstance(node, types.LiteralType) else []


def _inside(node: types.Type, name: str | None) -> types.Type:
    if isinstance(node, types.StructType):
        return next(field.type for field in node.fields if field.encode_name == name)
    if isinstance(node, types.DictType):
        return node.value_type
    return node.item_type if isinstance(node, types.ListType | types.VarTupleType) else types.AnyType()


def _bare(node: types.Type) -> types.Type:
    """Take off what stands around: metadata, and that it may be None."""
    while isinstance(node, types.Metadata):
        node = node.type
    if isinstance(node, types.UnionType):
        return next(_bare(each) for each in node.types if not isinstance(each, types.NoneType))
    return node
