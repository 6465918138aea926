"""Reversible changes of a pod: values by their path, list members by name.

A path is valid while its members keep their names. Members that others add later stay, and members that others removed
need not be there.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Change = dict[str, Any]
"""``at``: the path. ``was``: the previous value; missing if there was none. ``empty``: undone only if empty."""

_DEPTH = 1
"""Levels of an added mapping in which others may have added something since, e.g. ``lifecycle``."""


def changes(old: Any, new: Any, *steps: str) -> Iterator[Change]:  # noqa: ANN401 - any JSON
    """Yield the changes that restore ``old`` from ``new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in new.items():
            if key in old:
                yield from changes(old[key], value, *steps, key)
            else:
                yield from _added(value, _DEPTH, *steps, key)
        for key in old:
            if key not in new:
                yield {"at": [*steps, key], "was": old[key]}
    elif _named(old) and _named(new) and (before := _by_name(old)).keys() <= (after := _by_name(new)).keys():
        for name, value in after.items():
            if name in before:
                yield from changes(before[name], value, *steps, name)
            else:
                yield {"at": [*steps, name]}
    elif (added := _appended(old, new)) is not None:
        yield from ({"at": [*steps, each["name"]]} for each in added)
    elif old is None and new is not None:
        # The same as a missing value: null has no members either.
        *members, whole = _added(new, _DEPTH, *steps)
        yield from members
        yield {**whole, "was": None}
    elif old != new:
        yield {"at": list(steps), "was": old}


def undone(thing: Any, written: list[Change]) -> Any:  # noqa: ANN401 - any JSON
    """Return the original value. Raises ``ValueError`` if a path is gone, e.g. because a member was renamed."""
    restored = copy.deepcopy(thing)
    for change in written:
        *steps, last = change["at"]
        place = restored
        for step in steps:
            index = _index(place, step)
            if index is None and isinstance(place, list):
                raise ValueError(f"there is no {step} any more")
            place = None if index is None else place[index]
        index = _index(place, last)
        if "was" in change and not change.get("empty"):
            if place is None or (index is None and isinstance(place, list)):
                raise ValueError(f"there is no {last} any more")
            place[last if index is None else index] = change["was"]
        elif index is None or (change.get("empty") and place[index]):
            continue
        elif "was" in change:
            place[index] = change["was"]
        else:
            del place[index]
    return restored


def _added(value: Any, depth: int, *steps: str) -> Iterator[Change]:  # noqa: ANN401 - any JSON
    if depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from _added(inner, depth - 1, *steps, key)
        yield {"at": list(steps), "empty": True}
    elif _named(value):
        yield from ({"at": [*steps, each["name"]]} for each in value)
        yield {"at": list(steps), "empty": True}
    else:
        yield {"at": list(steps)}


def _index(place: Any, step: str) -> Any:  # noqa: ANN401 - a key or a position
    """Return a member's index; ``None`` if it is missing."""
    if isinstance(place, dict):
        return step if step in place else None
    named = (index for index, each in enumerate(place or ()) if isinstance(each, dict) and each.get("name") == step)
    return next(named, None)


def _named(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether a value is a list whose members have distinct names."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return False
    return len({each["name"] for each in value}) == len(value)


def _appended(old: Any, new: Any) -> list[dict[str, Any]] | None:  # noqa: ANN401 - any JSON
    """Return the members that one list of named members has after those of another; ``None`` if they differ otherwise.

    Members of the old list may share names, as pull secrets that two webhooks added.
    """
    if not isinstance(old, list) or not isinstance(new, list) or new[: len(old)] != old:
        return None
    added = new[len(old) :]
    taken = {each.get("name") if isinstance(each, dict) else None for each in old}
    return added if None not in taken and _named(added) and not taken & _by_name(added).keys() else None


def _by_name(value: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["name"]: each for each in value}
