from __future__ import annotations

from carpool.batching.batch_limits import PROBE_AFTER, BatchLimits
from carpool.batching.model_state import ModelState
from carpool.policy.parameters import Parameters


def test_the_least_of_all_caps_holds() -> None:
    of = ModelState("m", Parameters(max_batch=64))
    assert of.cap == 64
    of.limits.max_rows = 32
    assert of.cap == 32
    of.limits.too_large(20, works=10)
    assert of.cap == 10


def test_a_ceiling_only_falls_until_a_larger_one_is_tried() -> None:
    of = BatchLimits()
    of.too_large(64, works=32)
    of.too_large(16, works=8)
    of.too_large(32, works=16)
    assert of.ceiling == 8


def test_a_larger_ceiling_is_tried_after_many_full_batches_an_eighth_at_a_time() -> None:
    of = BatchLimits()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        assert of.ceiling == 32
        of.served(31, 64)  # not full: says nothing
        of.served(32, 64)
    assert of.ceiling == 36


def test_a_failed_attempt_goes_back_to_what_worked_and_waits_twice_as_long() -> None:
    of = BatchLimits()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        of.served(32, 64)
    of.too_large(36, works=18)
    assert of.ceiling == 32
    for _ in range(2 * PROBE_AFTER):
        assert of.ceiling == 32
        of.served(32, 64)
    assert of.ceiling == 36


def test_a_size_that_no_longer_works_is_forgotten() -> None:
    of = BatchLimits()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        of.served(32, 64)
    of.too_large(36, works=18)
    of.too_large(32, works=16)
    assert of.ceiling == 16


def test_what_was_served_before_a_larger_batch_failed_still_works() -> None:
    of = BatchLimits()
    of.served(24, 64)
    of.served(8, 64)
    of.too_large(27, works=14)
    assert of.ceiling == 24
    of.too_large(24, works=12)  # less fits now: what was served once says nothing any more
    assert of.ceiling == 12
    of.forget()
    of.too_large(27, works=14)
    assert of.ceiling == 14


def test_the_ceiling_goes_once_it_reaches_the_largest_batch() -> None:
    of = BatchLimits()
    of.too_large(9, works=8)
    for _ in range(PROBE_AFTER):
        of.served(8, 9)
    assert of.ceiling is None
    of.too_large(9, works=5)
    assert of.ceiling == 8


def test_the_budget_for_finding_a_size_is_64_rows_then_a_fifth() -> None:
    of = BatchLimits()
    assert of.may_serve_again(64)
    assert not of.may_serve_again(1)
    of.served(5, 64)
    assert of.may_serve_again(1)
    assert not of.may_serve_again(1)
