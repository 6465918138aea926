"""What a field takes and what it means: for error messages, and for pages and schemas of the types."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
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
    if isinstance(node, types.LiteralType):
        return [str(each) for each in node.values]
    return []


def _inside(node: types.Type, name: str | None) -> types.Type:
    if isinstance(node, types.StructType):
        return next(field.type for field in node.fields if field.encode_name == name)
    if isinstance(node, types.DictType):
        return node.value_type
    if isinstance(node, types.ListType | types.VarTupleType):
        return node.item_type
    return types.AnyType()


def _bare(node: types.Type) -> types.Type:
    """Take off what stands around: metadata, and that it may be None."""
    while isinstance(node, types.Metadata):
        node = node.type
    if isinstance(node, types.UnionType):
        return next(_bare(each) for each in node.types if not isinstance(each, types.NoneType))
    return node


@cache
def attribute_texts(cls: type) -> dict[str, str]:
    """Return the strings that stand under the attributes of a class and its bases, by name, each on one line.

    They are read from the source, so for generators only.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ in {"builtins", "enum", "msgspec", "msgspec._core"}:
            continue
        tree = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(tree, ast.ClassDef)  # noqa: S101 - it is a class's source
        for one, two in zip(tree.body, tree.body[1:], strict=False):
            match one, two:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    texts[name] = one_line(text)
    return texts


def one_line(text: object) -> str:
    """Put a docstring on one line, its code in single backticks."""
    return " ".join(str(text).split()).replace("``", "`")
