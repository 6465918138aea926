"""Changes a YAML document and keeps everything else as written: comments, order, quotes."""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator


_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "int": (r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
              "-+0123456789."),
    "bool": (r"y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
}  # fmt: skip
"""Unquoted scalars that kubectl does not read as text (go-yaml v2, resolve.go), with their first characters. PyYAML's
differ: it reads 12:30 as 750, 2024-01-02 as a date, and 1e3 as text that needs no quotes."""


class _Loader(yaml.SafeLoader):
    """Reads scalars as kubectl does."""

    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012 - PyYAML's own


class _Dumper(yaml.SafeDumper):
    """Quotes texts that kubectl would read as something else."""


for _each in (_Loader, _Dumper):
    _each.yaml_implicit_resolvers = {
        first: [
            (tag, form) for tag, form in forms if tag not in {f"{_TAG}timestamp", *(_TAG + name for name in _SCALARS)}
        ]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _name, (_form, _first) in _SCALARS.items():
        _each.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_form})$"), list(_first))


def load(text: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    """Read one document, as kubectl does."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


class _OddError(Exception):
    """YAML that can't be edited in place: the whole document is written anew."""


def edited(text: str, new: Any) -> str:  # noqa: ANN401 - whatever YAML holds
    """Return the text of one document with ``new`` in it, which is compared with the present content.

    If it can't be edited in place (anchors, merge keys, ...) the document is written anew, without its comments.
    """
    changed = in_place(text, new)
    return _dump(new) + "\n" if changed is None else changed


def in_place(text: str, new: Any) -> str | None:  # noqa: ANN401 - whatever YAML holds
    """Return the text with ``new`` in it and everything else unchanged; ``None`` if that can't be done."""
    old, node = load(text), yaml.compose(text, Loader=_Loader)
    assert node is not None  # noqa: S101 - an empty document has nothing to change
    # Content in braces is edited inside them, or replaced as a whole if that fails.
    for whole in (False, True):
        try:
            pieces, position = [], 0
            # Stable: of two insertions in one place the inner one comes first.
            for edit in sorted(_edits(text, node, old, new, whole=whole), key=lambda each: each.start):
                pieces += [text[position : edit.start], edit.text]
                position = edit.end
            changed = "".join([*pieces, text[position:]])
            if load(changed) == new:
                return changed
        except (_OddError, yaml.YAMLError):
            pass
    return None


def _edits(text: str, node: yaml.Node, old: Any, new: Any, *, whole: bool) -> Iterator[_Edit]:  # noqa: ANN401 - whatever YAML holds
    if old == new:
        return
    column = node.start_mark.column
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and not node.flow_style:
        if any(key.tag != "tag:yaml.org,2002:str" for key, _ in node.value):
            raise _OddError
        for key, value in node.value:
            if key.value in new:
                yield from _edits(text, value, old[key.value], new[key.value], whole=whole)
            else:
                start = text.rfind("\n", 0, key.start_mark.index) + 1
                yield _Edit(start, min(_line_end(text, value) + 1, len(text)), "")
        if added := {key: value for key, value in new.items() if key not in old}:
            yield _inserted(text, node, _dump(added), column)
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and not node.flow_style and new:
        for item, before, after in zip(node.value, old, new, strict=False):
            yield from _edits(text, item, before, after, whole=whole)
        for item in node.value[len(new) :]:
            start = text.rfind("\n", 0, item.start_mark.index) + 1
            yield _Edit(start, min(_line_end(text, item) + 1, len(text)), "")
        if added_items := new[len(old) :]:
            yield _inserted(text, node, _dump(added_items), column)
    elif isinstance(node, yaml.CollectionNode) and node.flow_style:
        yield from _in_braces(node, old, new, whole=whole)
    elif isinstance(node, yaml.ScalarNode) and old is None and isinstance(new, dict | list):
        # null, or nothing behind a colon
        start = node.start_mark.index
        blank = "" if text[start - 1 : start].isspace() else " "
        yield _Edit(start, node.end_mark.index, blank + _dump(new, flow=True))
    elif isinstance(node, yaml.ScalarNode) and not isinstance(new, dict | list):
        yield _Edit(node.start_mark.index, node.end_mark.index, _quoted(node, new) or _dump(new))
    else:
        raise _OddError


def _in_braces(node: yaml.Node, old: Any, new: Any, *, whole: bool) -> Iterator[_Edit]:  # noqa: ANN401 - whatever YAML holds
    """Yield the edits of content in braces or brackets."""
    if old == new:
        return
    members: list[tuple[Any, yaml.Node, yaml.Node]] = []  # each with the nodes at its beginning and end
    staying: dict[Any, Any] = {}
    added: Any = None
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict):
        members = [(key.value, key, value) for key, value in node.value]
        staying = {key: value for key, value in new.items() if key in old}
        added = {key: value for key, value in new.items() if key not in old}
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list):
        members = [(index, item, item) for index, item in enumerate(node.value)]
        staying, added = dict(enumerate(new[: len(old)])), new[len(old) :]
    stay = [index for index, (key, _, _) in enumerate(members) if key in staying]
    if whole or not stay:
        text = _quoted(node, new) or _dump([new], flow=True)[1:-1]
        yield _Edit(node.start_mark.index, node.end_mark.index, text)
        return
    if added:
        end = members[stay[-1]][2].end_mark.index
        yield _Edit(end, end, f", {_dump(added, flow=True)[1:-1]}")
    for index, (key, first, last) in enumerate(members):
        if key in staying:
            yield from _in_braces(last, old[key], staying[key], whole=whole)
        elif index < stay[0]:
            yield _Edit(first.start_mark.index, members[index + 1][1].start_mark.index, "")
        else:
            yield _Edit(members[index - 1][2].end_mark.index, last.end_mark.index, "")


def _quoted(node: yaml.Node, new: Any) -> str | None:  # noqa: ANN401 - whatever YAML holds
    """Return a text in the quotes of the one that it replaces; ``None`` if that had none."""
    if isinstance(node, yaml.ScalarNode) and node.style in {"'", '"'} and isinstance(new, str):
        return _dump(new, quote=node.style)
    return None


def _inserted(text: str, node: yaml.CollectionNode, block: str, column: int) -> _Edit:
    """Insert a block after a block's last line."""
    end = _line_end(text, node)
    return _Edit(end, end, "\n" + textwrap.indent(block, " " * column))


def _line_end(text: str, node: yaml.Node) -> int:
    """Return the end of a node's last line, including a comment on that line.

    A block's own end is where the next token begins, after comments that may belong to that token.
    """
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        return len(text[:end].rstrip())
    found = text.find("\n", end)
    return len(text.rstrip()) if found < 0 else found


def _dump(value: Any, *, flow: bool = False, quote: str | None = None) -> str:  # noqa: ANN401 - whatever YAML holds
    dumped: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow,
        default_style=quote,
    )  # fmt: skip
    return dumped.removesuffix("...\n").rstrip("\n")
