"""Changes of a YAML document that leave what they don't touch as it was written: comments, order, quotes."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


class _OddError(Exception):
    """Written in a way that is not edited here: the whole document is written anew."""


def edited(text: str, new: Any) -> str:  # noqa: ANN401 - whatever YAML holds
    """Return the text of one document with ``new`` in it, which is compared with what is there.

    Where that can't be done in place (anchors, merge keys, ...) the document is written anew, without its comments.
    """
    old, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None  # noqa: S101 - an empty document has nothing to change
    try:
        pieces, position = [], 0
        # Stable: of two insertions in one place the inner one comes first.
        for edit in sorted(_edits(text, node, old, new), key=lambda each: each.start):
            pieces += [text[position : edit.start], edit.text]
            position = edit.end
        changed = "".join([*pieces, text[position:]])
        if yaml.safe_load(changed) == new:
            return changed
    except (_OddError, yaml.YAMLError):
        pass
    return _dump(new) + "\n"


def _edits(text: str, node: yaml.Node, old: Any, new: Any) -> Iterator[_Edit]:  # noqa: ANN401 - whatever YAML holds
    if old == new:
        return
    column = node.start_mark.column
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and not node.flow_style:
        if any(key.tag != "tag:yaml.org,2002:str" for key, _ in node.value):
            raise _OddError
        for key, value in node.value:
            if key.value in new:
                yield from _edits(text, value, old[key.value], new[key.value])
            else:
                start = text.rfind("\n", 0, key.start_mark.index) + 1
                yield _Edit(start, min(_line_end(text, value) + 1, len(text)), "")
        if added := {key: value for key, value in new.items() if key not in old}:
            yield _inserted(text, node, _dump(added), column)
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and not node.flow_style and new:
        for item, before, after in zip(node.value, old, new, strict=False):
            yield from _edits(text, item, before, after)
        for item in node.value[len(new) :]:
            start = text.rfind("\n", 0, item.start_mark.index) + 1
            yield _Edit(start, min(_line_end(text, item) + 1, len(text)), "")
        if added_items := new[len(old) :]:
            yield _inserted(text, node, _dump(added_items), column)
    elif isinstance(node, yaml.CollectionNode) and node.flow_style:
        yield _Edit(node.start_mark.index, node.end_mark.index, _dump(new, flow=True))
    elif isinstance(node, yaml.ScalarNode) and not isinstance(new, dict | list):
        yield _Edit(node.start_mark.index, node.end_mark.index, _dump(new))
    else:
        raise _OddError


def _inserted(text: str, node: yaml.CollectionNode, block: str, column: int) -> _Edit:
    """Put a block behind a block's last line."""
    end = _line_end(text, node)
    return _Edit(end, end, "\n" + textwrap.indent(block, " " * column))


def _line_end(text: str, node: yaml.Node) -> int:
    """Return the end of a node's last line, a comment on that line included.

    A block's own end is where the next token begins, behind comments that may belong to that.
    """
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        return len(text[:end].rstrip())
    found = text.find("\n", end)
    return len(text.rstrip()) if found < 0 else found


def _dump(value: Any, *, flow: bool = False) -> str:  # noqa: ANN401 - whatever YAML holds
    dumped = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow)
    return dumped.removesuffix("...\n").rstrip("\n")
