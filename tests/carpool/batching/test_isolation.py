from __future__ import annotations

from carpool.batching.isolation import FIRST_SPAN, LONGEST_SPAN, MAX_SUSPECTS, RetryBudget, Suspects


def test_the_credit_is_a_fifth_of_the_rows_that_succeed() -> None:
    budget = RetryBudget()
    assert budget.failed(64)
    budget.succeeded(9)  # 0.2 x 9 is not 2 rows
    assert not budget.failed(2)
    assert budget.limit == 32, "half of the largest batch that failed"
    budget.succeeded(11)
    assert budget.failed(2)


def test_batches_grow_again_once_nothing_fails() -> None:
    budget = RetryBudget()
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


def test_a_suspect_is_trusted_again_after_eight_good_answers_and_after_twice_as_many_the_next_time() -> None:
    suspects = Suspects()
    assert not suspects.left
    suspects.failed("caller")
    for _ in range(FIRST_SPAN - 1):
        suspects.succeeded("caller")
    assert "caller" in suspects.left
    suspects.failed("caller")
    for _ in range(2 * FIRST_SPAN - 1):
        suspects.succeeded("caller")
        suspects.succeeded("another")
    assert "caller" in suspects.left
    suspects.succeeded("caller")
    assert "caller" not in suspects.left
    suspects.failed("caller")
    for _ in range(FIRST_SPAN):
        suspects.succeeded("caller")
    assert not suspects.left, "once trusted it begins anew"


def test_nobody_is_suspected_for_ever() -> None:
    suspects = Suspects()
    for _ in range(100):
        suspects.failed("caller")
        suspects.succeeded("another")
    for _ in range(LONGEST_SPAN):
        assert suspects.left
        suspects.succeeded("caller")
    assert not suspects.left


def test_while_the_model_fails_all_requests_no_caller_gets_more_suspect() -> None:
    """All came from one gateway: after 6 s of errors it took 1,024 good answers until they were batched again."""
    suspects = Suspects()
    for _ in range(1000):
        suspects.failed("gateway")
    for _ in range(FIRST_SPAN):
        assert suspects.left
        suspects.succeeded("gateway")
    assert not suspects.left


def test_suspects_are_bounded_and_the_latest_stay() -> None:
    suspects = Suspects()
    for caller in range(2 * MAX_SUSPECTS):
        suspects.failed(caller)
    assert [caller in suspects.left for caller in (0, MAX_SUSPECTS - 1, MAX_SUSPECTS)] == [False, False, True]
