"""YAML in which no key is given twice: PyYAML keeps the last one and says nothing."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads what ``SafeLoader`` reads, but for keys that are given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - its stubs name a wrong type
        """Read one mapping, with its keys as written: what `<<` merges in comes later, and may be given anew."""
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

    Raises ``yaml.YAMLError`` that names the line.
    """
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
