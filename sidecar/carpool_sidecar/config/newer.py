"""Configurations written by a newer injector, which may have fields that this version does not know."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as types


def without_unknown(plain: Any, kind: type) -> tuple[Any, list[str]]:  # noqa: ANN401 - whatever was parsed
    """Return plain data without the fields that ``kind`` does not have, and their paths: ``upstream.later``."""
    unknown: list[str] = []
    return _known(plain, types.type_info(kind), "", unknown), unknown


def _known(plain: Any, node: types.Type, path: str, unknown: list[str]) -> Any:  # noqa: ANN401 - likewise
    while isinstance(node, types.Metadata | types.UnionType):
        if isinstance(node, types.Metadata):
            node = node.type
        else:  # it may be absent
            node = next(each for each in node.types if not isinstance(each, types.NoneType))
    if isinstance(node, types.StructType) and isinstance(plain, dict):
        fields = {each.encode_name: each.type for each in node.fields}
        unknown += [f"{path}{name}" for name in plain if name not in fields]
        items = [(name, value) for name, value in plain.items() if name in fields]
        return {name: _known(value, fields[name], f"{path}{name}.", unknown) for name, value in items}
    if isinstance(node, types.DictType) and isinstance(plain, dict):
        return {name: _known(value, node.value_type, f"{path}{name}.", unknown) for name, value in plain.items()}
    if isinstance(node, types.ListType | types.VarTupleType) and isinstance(plain, list):
        places = enumerate(plain)
        return [_known(value, node.item_type, f"{path.rstrip('.')}[{place}].", unknown) for place, value in places]
    return plain
