from __future__ import annotations

from random import Random

import pytest

from carpool.batching.isolation import (
    EXTRA_ROWS,
    MAX_SUSPECTS,
    MOST_NEEDED,
    NEEDED,
    Isolation,
    RetryBudget,
    Suspects,
)
from carpool.batching.requests import Request


def test_the_credit_is_a_fifth_of_the_rows_that_succeed() -> None:
    budget = RetryBudget(EXTRA_ROWS)
    assert budget.failed(64)
    budget.succeeded(9)  # 0.2 x 9 is not 2 rows
    assert not budget.failed(2)
    assert budget.limit == 32, "half of the largest batch that failed"
    budget.succeeded(11)
    assert budget.failed(2)


def test_batches_grow_again_once_nothing_fails() -> None:
    budget = RetryBudget(EXTRA_ROWS)
    for _ in range(7):
        budget.failed(64)
    assert budget.limit == 1
    sizes = []
    while not budget.over(64):
        sizes.append(budget.limit)
        budget.succeeded(budget.limit or 64)
    assert sizes == sorted(sizes)
    assert {1, 2, 4, 8, 16, 32} == set(sizes)
    # From a debt of 384 rows back to a credit of 64: five times as many have to succeed.
    assert 2240 <= sum(sizes) <= 2300


def test_a_suspect_is_trusted_again_after_four_good_answers_for_each_failure() -> None:
    suspects = Suspects()
    assert not suspects.left
    suspects.failed("caller", "key")
    for _ in range(NEEDED - 1):
        suspects.succeeded("caller", "key")
    suspects.failed("caller", "key")
    for _ in range(NEEDED):
        suspects.succeeded("caller", "key")
        suspects.succeeded("another", "key")
        suspects.succeeded("caller", "another")
    assert ("caller", "key") in suspects.left
    suspects.succeeded("caller", "key")
    assert not suspects.left


def of(caller: str, key: str, *, mergeable: bool = True) -> Request:
    return Request(key=key, arrived=0.0, due=1.0, deadline=1.0, caller=caller, mergeable=mergeable)


def test_after_a_failure_a_caller_shares_batches_with_itself_where_it_could_share_that_one() -> None:
    isolation = Isolation()
    isolation.suspects.failed("gateway", "three numbers")
    apart = isolation.key_of(of("gateway", "three numbers"))
    assert apart == isolation.key_of(of("gateway", "three numbers"))
    assert apart not in {None, "three numbers"}
    assert isolation.key_of(of("gateway", "four numbers")) == "four numbers"
    assert isolation.key_of(of("another", "three numbers")) == "three numbers"
    assert isolation.key_of(of("gateway", "three numbers", mergeable=False)) is None
    isolation.quarantined = True
    assert isolation.key_of(of("gateway", "three numbers")) is None


def test_where_a_failing_caller_is_known_new_keys_have_to_earn_searches_by_halves() -> None:
    isolation = Isolation()
    assert isolation.failed("one", 8)
    isolation.suspects.failed("caller", "one")
    assert not isolation.failed("two", 8), "each is sent alone"
    assert isolation.cap("two", 8) == 4
    assert isolation.failed("one", 8), "the credit that it has stays"


@pytest.mark.parametrize(("failing", "least", "most"), [(0.05, 0.15, 0.30), (0.5, 0.99, 1.0)])
def test_a_gateway_is_mostly_trusted_if_few_of_its_requests_fail(failing: float, least: float, most: float) -> None:
    rng, suspects = Random(1), Suspects()
    apart = 0
    for _ in range(10_000):
        apart += bool(suspects.left)
        if rng.random() < failing:
            suspects.failed("gateway", "key")
        else:
            suspects.succeeded("gateway", "key")
    assert least <= apart / 10_000 <= most


def test_nobody_is_suspected_for_ever() -> None:
    suspects = Suspects()
    for _ in range(100):
        suspects.failed("caller", "key")
        suspects.succeeded("another", "key")
    for _ in range(MOST_NEEDED):
        assert suspects.left
        suspects.succeeded("caller", "key")
    assert not suspects.left


def test_while_the_model_fails_all_requests_no_caller_gets_more_suspect() -> None:
    """All came from one gateway: after 6 s of errors it took 1,024 good answers until they were batched again."""
    suspects = Suspects()
    for _ in range(1000):
        suspects.failed("gateway", "key")
    for _ in range(NEEDED):
        assert suspects.left
        suspects.succeeded("gateway", "key")
    assert not suspects.left


def test_suspects_are_bounded_and_the_latest_stay() -> None:
    suspects = Suspects()
    for caller in range(2 * MAX_SUSPECTS):
        suspects.failed(caller, "key")
    callers = (0, MAX_SUSPECTS - 1, MAX_SUSPECTS)
    assert [(caller, "key") in suspects.left for caller in callers] == [False, False, True]
