from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool_operator.cluster.cache import Cache


def everywhere(_):
    return True


def test_what_is_newer_wins_in_whatever_order_it_comes():
    cache = Cache()

    assert cache.put("a", 5, "five")
    assert not cache.put("a", 4, "four")
    assert not cache.put("a", 5, "five again")

    assert cache.get("a") == "five"
    assert cache.version("a") == 5
    assert cache.version("b") == 0


def test_what_was_deleted_does_not_come_back_with_an_older_list():
    cache = Cache()
    cache.put("a", 5, "five")
    cache.drop("a", 7)

    assert cache.replace({"a": (5, "five")}, 6, everywhere) == 0
    assert cache.get("a") is None
    assert cache.replace({"a": (8, "made again")}, 8, everywhere) == 1
    assert cache.get("a") == "made again"


def test_a_deletion_that_comes_late_takes_nothing_newer_away():
    cache = Cache()
    cache.put("a", 9, "made again")

    assert not cache.drop("a", 7)
    assert list(cache) == ["made again"]


def test_a_list_applies_the_changes_that_events_missed():
    cache = Cache()
    cache.put("changed", 1, "old")
    cache.put("deleted", 2, "there")
    cache.put("made after the list", 12, "there")

    news = cache.replace({"changed": (8, "new"), "made": (9, "new")}, 10, everywhere)

    assert news == 3
    assert sorted(cache) == ["new", "new", "there"]
    assert cache.get("deleted") is None
    assert cache.replace({"changed": (8, "new"), "made": (9, "new")}, 10, everywhere) == 0


def test_a_list_of_one_namespace_says_nothing_of_others():
    cache = Cache()
    cache.put(("a", "x"), 1, "there")
    cache.put(("b", "x"), 1, "there")

    cache.replace({}, 5, lambda key: key[0] == "a")

    assert cache.get(("a", "x")) is None
    assert cache.get(("b", "x")) == "there"


@given(st.data())
def test_dropped_repeated_and_shuffled_events_and_a_list_end_where_the_cluster_is(data):
    """A history of writes and deletions; any selection of its events in any order; then a list of its end."""
    history = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12))
    events = [(key, version, deleted) for version, (key, deleted) in enumerate(history, start=1)]
    end = {}
    for key, version, deleted in events:
        if deleted:
            end.pop(key, None)
        else:
            end[key] = (version, f"{key}{version}")
    told = data.draw(st.lists(st.sampled_from(events), max_size=30))
    cache = Cache()
    for key, version, deleted in told:
        if deleted:
            cache.drop(key, version)
        else:
            cache.put(key, version, f"{key}{version}")

    cache.replace(end, len(history), everywhere)

    assert {key: cache.get(key) for key in "abc" if cache.get(key)} == {key: value for key, (_, value) in end.items()}
