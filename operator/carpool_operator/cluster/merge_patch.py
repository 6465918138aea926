"""JSON merge patches (RFC 7396): the difference between two statuses."""

from __future__ import annotations

from typing import Any


def without_nulls(plain: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON without null members of objects: for the server, null means absent."""
    if isinstance(plain, dict):
        return {key: without_nulls(value) for key, value in plain.items() if value is not None}
    if isinstance(plain, list | tuple):
        return [without_nulls(each) for each in plain]
    return plain


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the merge patch that turns ``old`` into ``new``, both without nulls; ``{}`` where they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = difference(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
