from __future__ import annotations

import numpy as np

from carpool_cli.profiling.verifying import compare

ROWS = {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}


def test_equal_answers_are_safe():
    verdict = compare(lambda batch: {"y": batch["x"] * 2}, ROWS, 0.0)
    assert (verdict.why, verdict.worst, verdict.same_argmax) == ("", 0.0, True)


def test_last_bits_are_safe_within_the_tolerance():
    def run(batch):
        return {"y": batch["x"] * (1 + 1e-6 * len(batch["x"]))}

    assert compare(run, ROWS, 1e-3).why == ""
    assert "differ by" in compare(run, ROWS, 1e-9).why


def test_another_argmax_is_not_safe():
    def run(batch):
        return {"y": np.array([[1.0, 1.00001] if len(batch["x"]) > 1 else [1.00001, 1.0]] * len(batch["x"]))}

    verdict = compare(run, ROWS, 1e-3)
    assert (verdict.same_argmax, verdict.why) == (False, "merged answers have another argmax")


def test_rows_mixed_up_are_found():
    assert compare(lambda batch: {"y": batch["x"][::-1]}, ROWS, 1e-3).why != ""


def test_labels_must_be_equal():
    assert compare(lambda batch: {"y": np.array([len(batch["x"])] * len(batch["x"]))}, ROWS, 1.0).worst == float("inf")


def test_nan_on_one_side_is_a_difference_and_on_both_is_none():
    one = compare(lambda batch: {"y": np.full((len(batch["x"]), 1), np.nan if len(batch["x"]) > 1 else 1.0)}, ROWS, 1.0)
    assert one.worst == float("inf")
    assert compare(lambda batch: {"y": np.full((len(batch["x"]), 1), np.nan)}, ROWS, 0.0).why == ""


def test_answers_without_a_row_axis_are_not_safe():
    assert "first axis" in compare(lambda batch: {"y": np.zeros(1)}, ROWS, 1.0).why
    padded = compare(lambda batch: {"y": np.zeros((len(batch["x"]), len(batch["x"])))}, ROWS, 1.0)
    assert "alone and" in padded.why
