from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from carpool_operator.injector.jsonpatch import diff

LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "true"])
KEYS = st.sampled_from(["a", "b", "", "carpool.dev/inject", "~", "~1", "0"])
DOCUMENTS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))


def apply(document, operations):
    """RFC 6902, of the three operations that are used."""
    root = {"": copy.deepcopy(document)}
    for each in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")]
        parent = root
        for part in path:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        if isinstance(parent, list):
            if each["op"] == "add":
                parent.insert(len(parent) if last == "-" else int(last), each["value"])
            elif each["op"] == "remove":
                del parent[int(last)]
            else:
                parent[int(last)] = each["value"]
        elif each["op"] == "remove":
            del parent[last]
        else:
            assert (last in parent) == (each["op"] == "replace")
            parent[last] = each["value"]
    return root[""]


def same(one, other):
    # In Python, but not in JSON, true is one.
    return repr(one) == repr(other) if not isinstance(one, dict | list) else _same_tree(one, other)


def _same_tree(one, other):
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))


@given(DOCUMENTS, DOCUMENTS)
def test_applied_it_makes_one_of_the_other(old, new):
    assert same(apply(old, list(diff(old, new))), new)


@given(DOCUMENTS)
def test_equal_documents_need_nothing(document):
    assert list(diff(document, copy.deepcopy(document))) == []


def test_only_what_differs_is_touched():
    old = {"a": [{"b": 1}, 2], "c": 3}
    assert list(diff(old, {"a": [{"b": 1, "x/y": 0}, 2, 4], "c": 3})) == [
        {"op": "add", "path": "/a/0/x~1y", "value": 0},
        {"op": "add", "path": "/a/-", "value": 4},
    ]
