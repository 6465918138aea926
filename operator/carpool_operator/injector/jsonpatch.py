"""The difference of two JSON documents, as an RFC 6902 patch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def diff(old: Any, new: Any, path: str = "") -> Iterator[dict[str, Any]]:  # noqa: ANN401 - any JSON
    """Yield the operations that turn one document into the other, to be applied in order.

    Lists are compared by position: an insertion before other items replaces them all.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() - new.keys():
            yield {"op": "remove", "path": _join(path, key)}
        for key, value in new.items():
            if key in old:
                yield from diff(old[key], value, _join(path, key))
            else:
                yield {"op": "add", "path": _join(path, key), "value": value}
    elif isinstance(old, list) and isinstance(new, list):
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from diff(one, other, f"{path}/{index}")
        # From the end, so that earlier indices stay valid.
        for index in range(len(old) - 1, len(new) - 1, -1):
            yield {"op": "remove", "path": f"{path}/{index}"}
        for value in new[len(old) :]:
            yield {"op": "add", "path": f"{path}/-", "value": value}
    elif type(old) is not type(new) or old != new:
        yield {"op": "replace", "path": path, "value": new}


def _join(path: str, key: str) -> str:
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
