from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool_operator.cluster.merge_patch import difference, without_nulls

plain = st.recursive(
    st.booleans() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), plain, max_size=3)


def merged(old, patch):
    """RFC 7396, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(objects, objects)
def test_the_patch_makes_the_new_of_the_old(old, new):
    assert merged(old, difference(old, new)) == new


@given(objects)
def test_nothing_is_sent_where_nothing_differs(value):
    assert difference(value, value) == {}


def test_a_null_is_as_good_as_nothing():
    assert without_nulls({"a": None, "b": [{"c": None, "d": 1}], "e": {"f": None}}) == {"b": [{"d": 1}], "e": {}}
