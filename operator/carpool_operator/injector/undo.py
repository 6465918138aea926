"""What was changed in a pod, written so that it can be taken back: values by their place, list members by name.

A place holds for as long as its members have their names. What others add beside them later stays.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Change = dict[str, Any]
"""``at``: the steps to a place. ``was``: what was there; without it nothing was. ``empty``: taken out only if empty."""

_DEPTH = 1
"""Levels of an added mapping in which others may have added something since, e.g. ``lifecycle``."""


def changes(old: Any, new: Any, *steps: str) -> Iterator[Change]:  # noqa: ANN401 - any JSON
    """Yield what restores ``old``, where ``new`` is there."""
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
    elif old != new:
        yield {"at": list(steps), "was": old}


def undone(thing: Any, written: list[Change]) -> Any:  # noqa: ANN401 - any JSON
    """Return a thing as it was. Raises ``ValueError`` where a place is not there any more."""
    restored = copy.deepcopy(thing)
    for change in written:
        *steps, last = change["at"]
        place = restored
        for step in steps:
            place = place[_index(place, step)]
        if "was" in change:
            place[last if isinstance(place, dict) else _index(place, last)] = change["was"]
        elif not change.get("empty") or not place[_index(place, last)]:
            del place[_index(place, last)]
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
    if isinstance(place, dict) and step in place:
        return step
    if isinstance(place, list):
        for index, each in enumerate(place):
            if isinstance(each, dict) and each.get("name") == step:
                return index
    raise ValueError(f"there is no {step} any more")


def _named(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether a value is a list whose members have names, each another one."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return False
    return len({each["name"] for each in value}) == len(value)


def _by_name(value: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["name"]: each for each in value}
