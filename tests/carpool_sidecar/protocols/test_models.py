from __future__ import annotations

import json

import pytest

from carpool_sidecar.protocols import models


def metadata(inputs, outputs):
    def describe(shapes):
        return [{"name": f"t{index}", "datatype": "FP32", "shape": shape} for index, shape in enumerate(shapes)]

    return json.dumps({"name": "m", "platform": "p", "inputs": describe(inputs), "outputs": describe(outputs)}).encode()


def test_metadata_with_free_first_dimensions_is_first():
    axis = models.axis_from_metadata(metadata([[-1, 3], [-1]], [[-1, 1000]]))
    assert (axis.kind, axis.max_batch) == ("First", None)


@pytest.mark.parametrize(
    ("inputs", "outputs", "culprit"),
    [
        ([[1, 3]], [[-1, 2]], "input 't0' has shape [1, 3]"),
        ([[-1, 3], [3, -1]], [[-1]], "input 't1' has shape [3, -1]"),
        ([[-1, 3]], [[-1], [1]], "output 't1' has shape [1]"),
        ([[-1, 3]], [[]], "output 't0' has shape []"),
        ([], [[-1]], "names no inputs"),
        ([[-1]], [], "names no outputs"),
    ],
)
def test_any_other_metadata_is_none_with_the_culprit_and_the_fix(inputs, outputs, culprit):
    axis = models.axis_from_metadata(metadata(inputs, outputs))
    assert axis.kind == "None"
    assert culprit in axis.reason
    assert "axis: First" in axis.reason


@pytest.mark.parametrize("text", [b"", b"[]", b"not found", b'{"inputs": 3}', b'{"name":"\xff"}', b"[" * 100_000])
def test_unreadable_metadata_is_none(text):
    assert models.axis_from_metadata(text).kind == "None"
    assert models.axis_from_config(text) is None


def test_triton_configuration_gives_the_cap():
    axis = models.axis_from_config(b'{"name":"m","platform":"x","max_batch_size":16,"input":[{"dims":["3"]}]}')
    assert axis is not None
    assert (axis.kind, axis.max_batch) == ("First", 16)


def test_triton_without_batching_is_none_with_the_fix():
    for text in (b'{"name":"m","max_batch_size":0}', b'{"name":"m"}'):
        axis = models.axis_from_config(text)
        assert axis is not None
        assert axis.kind == "None"
        assert "max_batch_size" in axis.reason
        assert "name: m, axis: First" in axis.reason


def test_triton_sequences_are_never_batched():
    axis = models.axis_from_config(b'{"name":"m","max_batch_size":8,"sequence_batching":{"direct":{}}}')
    assert axis is not None
    assert axis.kind == "None"


def test_an_error_body_is_no_configuration():
    assert models.axis_from_config(b'{"error":"no such model"}') is None
