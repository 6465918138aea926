from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.padding import Buckets, StaticSizes, Waste, riders_within, suggest_buckets


def test_geometric_buckets_cover_the_range():
    assert Buckets.geometric(16, 128).ends == (16, 32, 64, 128)
    assert Buckets.geometric(16, 100).ends == (16, 32, 64, 100)
    assert Buckets.geometric(5, 5).ends == (5,)
    # A factor near 1 still moves on.
    assert Buckets.geometric(1, 5, 1.1).ends == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("shortest", "longest", "factor"), [(0, 5, 2.0), (6, 5, 2.0), (1, 5, 1.0)])
def test_buckets_that_go_nowhere_are_refused(shortest, longest, factor):
    with pytest.raises(ValueError, match="no buckets from"):
        Buckets.geometric(shortest, longest, factor)


def test_explicit_buckets_are_put_in_order():
    assert Buckets.explicit([64, 16, 64]).ends == (16, 64)
    with pytest.raises(ValueError, match="can't end at 0"):
        Buckets.explicit([0, 5])


def test_a_length_belongs_to_the_bucket_that_ends_at_or_after_it():
    buckets = Buckets.explicit([16, 64])
    assert [buckets.bucket(length) for length in (1, 16, 17, 64, 65, 1000)] == [0, 0, 1, 1, 2, 2]
    assert [buckets.padded(length) for length in (1, 16, 17, 64, 65, 1000)] == [16, 16, 64, 64, 65, 1000]
    assert Buckets().bucket(7) == 0
    assert Buckets().padded(7) == 7


@given(st.integers(1, 500), st.integers(0, 5000), st.floats(1.05, 4), st.integers(1, 6000))
def test_geometric_padding_is_bounded_by_the_factor(shortest, more, factor, length):
    buckets = Buckets.geometric(shortest, shortest + more, factor)
    padded = buckets.padded(length)
    assert padded >= length
    if shortest <= length <= shortest + more:
        assert padded <= max(length * factor, length + 1)


def test_static_sizes():
    sizes = StaticSizes.powers_of_two(16)
    assert sizes.sizes == (1, 2, 4, 8, 16)
    assert [sizes.static_size(rows) for rows in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]
    assert StaticSizes.powers_of_two(12).sizes == (1, 2, 4, 8, 12)
    assert StaticSizes.powers_of_two(1).sizes == (1,)
    with pytest.raises(ValueError, match="17 rows exceed the largest static size 16"):
        sizes.static_size(17)


def test_waste_adds_up():
    sizes = StaticSizes.powers_of_two(16)
    total = Waste.of_rows(5, sizes) + Waste.of_rows(8, sizes)
    assert total == Waste(real=13, padded=3)
    assert total.ratio == pytest.approx(3 / 13)
    assert Waste().ratio == 0


def test_waste_of_tokens_counts_width_and_height():
    assert Waste.of_tokens([10, 20, 30]) == Waste(60, 30)
    assert Waste.of_tokens([10, 20, 30], Buckets.explicit([32])) == Waste(60, 36)
    assert Waste.of_tokens([10, 20, 30], Buckets.explicit([32]), StaticSizes.powers_of_two(8)) == Waste(60, 68)


def test_a_token_budget_counts_rows_times_the_longest():
    assert riders_within(100, [10, 20, 30, 40]) == 3
    assert riders_within(160, [10, 20, 30, 40]) == 4
    # A long one makes all the others long.
    assert riders_within(100, [10, 10, 60, 10]) == 2
    assert riders_within(100, [10, 20, 30], rows=[2, 2, 1]) == 2
    assert riders_within(100, []) == 0


def test_a_rider_beyond_the_budget_rides_alone():
    assert riders_within(100, [500, 1]) == 1


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 500))
def test_the_budget_holds_and_the_next_would_break_it(lengths, budget):
    riders = riders_within(budget, lengths)
    taken = lengths[:riders]
    assert riders <= 1 or max(taken) * riders <= budget
    if riders < len(lengths):
        assert riders >= 1
        assert max(lengths[: riders + 1]) * (riders + 1) > budget


def padding_of(histogram, ends):
    buckets = Buckets.explicit(ends)
    return sum(count * (buckets.padded(length) - length) for length, count in histogram.items())


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 60), st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 5))
def test_suggested_buckets_pad_least(histogram, count):
    suggestion = suggest_buckets(histogram, count)
    ends = suggestion.buckets.ends
    assert len(ends) <= count
    assert ends[-1] == max(histogram)
    assert suggestion.waste.padded == padding_of(histogram, ends)
    assert suggestion.waste.real == sum(length * seen for length, seen in histogram.items())
    longest = max(histogram)
    others = [length for length in histogram if length != longest]
    best = min(
        padding_of(histogram, (*chosen, longest))
        for size in range(min(count, len(histogram)))
        for chosen in combinations(others, size)
    )
    assert suggestion.waste.padded == best


def test_a_bucket_for_every_length_pads_nothing():
    suggestion = suggest_buckets({5: 10, 9: 1, 700: 3}, 8)
    assert suggestion.buckets.ends == (5, 9, 700)
    assert suggestion.waste == Waste(10 * 5 + 9 + 2100, 0)


def test_more_buckets_than_help_are_not_used():
    assert suggest_buckets({128: 1000}, 5).buckets.ends == (128,)


def test_suggestions_beat_powers_of_two_on_real_looking_lengths():
    rng = Random(1)
    histogram: dict[int, int] = {}
    for _ in range(20_000):
        length = min(max(round(rng.lognormvariate(5.0, 0.8)), 1), 2048)
        histogram[length] = histogram.get(length, 0) + 1
    suggestion = suggest_buckets(histogram, 8)
    doubling = padding_of(histogram, Buckets.geometric(16, 2048).ends)
    assert suggestion.waste.padded < 0.6 * doubling
