from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_operator.cluster.sharding import Shard


@given(st.text(min_size=1), st.integers(1, 64))
def test_each_namespace_is_of_one_shard(namespace, count):
    assert [Shard(index, count).has(namespace) for index in range(count)].count(True) == 1


def test_namespaces_stay_where_they_are():
    # A hash that became another with a version of Python, or of ours, would move them while both are at work.
    names = ("default", "team-a", "team-b", "team-c", "team-d")

    assert [name for name in names if Shard(0, 2).has(name)] == ["team-a", "team-b"]


def test_many_namespaces_are_shared_evenly():
    names = [f"team-{number}" for number in range(1000)]

    sizes = [sum(Shard(index, 4).has(name) for name in names) for index in range(4)]

    assert min(sizes) > 200


def test_it_is_written_as_it_is_read():
    assert Shard.parse("1/3") == Shard(1, 3)
    assert str(Shard(1, 3)) == "1/3"
    assert Shard.parse("0/1") == Shard()


@pytest.mark.parametrize("text", ["", "1", "3/3", "0/0", "-1/2", "1/2/3", "a/b", "0 / 2"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ValueError, match="shard"):
        Shard.parse(text)


def test_leases_of_one_division_do_not_overlap_and_others_do():
    whole, first, second = Shard(), Shard(0, 2), Shard(1, 2)

    assert [each.lease("op") for each in (whole, first, second)] == ["op", "op-0-of-2", "op-1-of-2"]
    assert not first.overlaps("op", "op-1-of-2")
    assert not whole.overlaps("op", "op")
    assert first.overlaps("op", "op")
    assert whole.overlaps("op", "op-1-of-2")
    assert first.overlaps("op", "op-2-of-3")
    assert not first.overlaps("op", "another")
    assert not first.overlaps("op", "op-injector")
    assert not first.overlaps("o.", "op-2-of-3")
