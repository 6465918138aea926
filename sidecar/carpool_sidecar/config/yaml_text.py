"""YAML without repeated keys: PyYAML would keep the last one silently."""

from __future__ import annotations

from typing import Any

import yaml

from carpool_sidecar.config.hints import not_utf8


class _Loader(yaml.SafeLoader):
    """``SafeLoader`` that refuses repeated keys."""

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
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{alias}"
