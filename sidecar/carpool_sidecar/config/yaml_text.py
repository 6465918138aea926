"""YAML with each key once, and few copies. PyYAML would keep the last of repeated keys silently."""

from __future__ import annotations

from typing import Any

import yaml

from carpool_sidecar.config.hints import not_utf8

MOST_COPIED = 100_000
"""Characters that all aliases stand for. Nine aliases on each of nine lines stand for 9^9 copies of the first one."""


class _Loader(yaml.SafeLoader):
    """``SafeLoader`` that refuses repeated keys, and too many copies by aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._size = 0
        """Of what was read so far, each alias replaced by what it stands for."""
        self._copied = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one value and count its characters, plus one for itself; the copies are made later."""
        before = self._size
        event: Any = self.peek_event()  # type: ignore[no-untyped-call] # its stubs say nothing
        node = super().compose_node(parent, index)
        if node is None:
            return node
        line, aliased = event.start_mark.line + 1, isinstance(event, yaml.AliasEvent)
        if not aliased:
            self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            self._sizes[node] = self._size - before
            return node
        size = self._sizes.get(node, 0)  # 0: it contains itself, which is refused elsewhere
        self._size += size
        self._copied += size
        if self._copied > MOST_COPIED:
            raise yaml.YAMLError(
                f"the aliases (*) up to line {line} stand for over {MOST_COPIED} characters: use fewer, or shorter ones"
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - its stubs name a wrong type
        """Read one mapping with its keys as written: keys merged in by `<<` come later, and may be repeated."""
        mapping = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in mapping.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(
                        f"`{key.value}` in line {line} is given in line {lines[key.value]} already: leave one of them"
                    )
                lines[key.value] = line
        return mapping


def load(text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return the plain data of a text.

    Raises ``yaml.YAMLError``, whose ``problem`` names the line.
    """
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def problem(error: Exception) -> str:
    """Return what is wrong with a text, in one line; the caller adds the file's name."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1} is U+{error.character:04X}, which a YAML file can't have: delete it"
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error)
    if str(error).startswith("Out of range float"):
        return "it has .nan or .inf: write a finite number"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, begun = error.problem_mark, error.context_mark
    where = "" if begun is None or begun.line == mark.line else f" that begins in line {begun.line + 1}"
    context = "" if error.context is None else f", {error.context}{where}"
    alias = '; if * itself is meant, write "*" in quotes' if "alias" in context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{alias}{tabs(error.problem)}"


def tabs(found: str | None) -> str:
    """Return what to do where the parser ``found`` a tab: YAML is indented with spaces."""
    return "; use spaces, not tabs" if "\\t" in (found or "") else ""
