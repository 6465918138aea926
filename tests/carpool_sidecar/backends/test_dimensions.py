from __future__ import annotations

import pytest

from carpool_sidecar.backends.dimensions import Dimension, axis_of


def axis(inputs, outputs):
    """What is said of dimensions, each a size, a name, None for neither, or "scalar"."""

    def dimensions(side, firsts):
        return [
            Dimension(f"{side}{index}", None, None, scalar=True)
            if first == "scalar"
            else Dimension(f"{side}{index}", first, None)
            if isinstance(first, int)
            else Dimension(f"{side}{index}", None, first)
            for index, first in enumerate(firsts)
        ]

    return axis_of("m", dimensions("x", inputs), dimensions("y", outputs))


GENERATED = ["", "?", "None", "unk__615", "p2o.DynamicDimension.0", "DynamicDimension.0", "x_dynamic_axes_1", "s0"]


@pytest.mark.parametrize(
    "name", ["n", "N", "batch", "batch_size", "BatchSize", "bs", "num_samples", "users", None, *GENERATED]
)
def test_the_same_name_everywhere_is_no_contradiction(name):
    assert axis([name, name], [name]).kind == "First"
    # An exporter that lost the name in between says nothing.
    assert axis([name], ["Gemmy_dim_0"]).kind == axis([None], [name]).kind == "First"


def test_several_words_for_a_batch_say_the_same():
    assert axis(["batch", "N"], ["batch_size", "unk__1"]).kind == "First"


@pytest.mark.parametrize(
    "name",
    ["time", "seq", "seq_len", "T", "length", "num_dets", "num_selected_indices", "tokens", "frames", "batch*seq"],
)
def test_names_that_say_something_else_are_believed(name):
    for found in (axis([name], [name]), axis(["batch"], [name]), axis([name, "batch"], ["batch"])):
        assert found.kind == "None"
        assert f"is named {name!r}, which is no batch" in found.reason
        assert "models: [{name: m, axis: First}]" in found.reason


@pytest.mark.parametrize(("one", "other"), [("batch", "users"), ("users", "items"), ("users", "N")])
def test_names_that_contradict_each_other_are_believed(one, other):
    found = axis([one], [other])
    assert found.kind == "None"
    assert f"output 'y0' is named {other!r}, and that of input 'x0' {one!r}" in found.reason


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ([1], [1], "dim 0 of input 'x0' is fixed to 1: export the model with a dynamic first dimension"),
        (["n", 2], ["n"], "dim 0 of input 'x1' is fixed to 2"),
        (["n"], [2], "dim 0 of output 'y0' is fixed to 2"),
        (["n", "scalar"], ["n"], "input 'x1' is a scalar"),
        (["n"], ["scalar"], "output 'y0' is a scalar"),
    ],
)
def test_what_is_fixed_or_a_scalar_is_no_batch(inputs, outputs, words):
    found = axis(inputs, outputs)
    assert found.kind == "None"
    assert words in found.reason


def test_the_export_call_is_named():
    assert 'torch.onnx.export(..., dynamic_axes={"x0": {0: "batch"}})' in axis([4], ["n"]).reason


@pytest.mark.parametrize(
    ("inputs", "outputs", "helps"), [([1], [1], False), (["n", 2], ["n"], False), (["n"], [2], True)]
)
def test_an_axis_is_only_offered_where_the_runtime_would_take_larger_batches(inputs, outputs, helps):
    assert ("axis: First" in axis(inputs, outputs).reason) == helps
