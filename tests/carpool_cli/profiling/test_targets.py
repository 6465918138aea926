from __future__ import annotations

import numpy as np
import pytest

from carpool_cli.load.servers import InputSpec
from carpool_cli.options import ADDRESS
from carpool_cli.profiling.targets import OnnxTarget, ServerTarget, TargetError


def server(url, protocol, model="standin"):
    return ServerTarget(ADDRESS.convert(url, None, None), model, protocol, [InputSpec("x", "FP32", (2,))], 30.0)


@pytest.mark.parametrize("protocol", ["v1", "v2", "v2-binary"])
def test_a_server_answers_arrays(echo, protocol):
    target = server(echo, protocol)
    sent = np.array([[1, 2], [3, 4]], np.float32)
    (answer,) = target.prepare({"x": sent})().values()
    target.close()
    assert answer.tolist() == sent.tolist()


def test_several_inputs_of_v1_are_objects(echo):
    target = server(echo, "v1")
    answer = target.prepare({"x": np.array([1, 2]), "y": np.array([3, 4])})()["predictions"]
    target.close()
    assert answer.tolist() == [{"x": 1, "y": 3}, {"x": 2, "y": 4}]


def test_errors_show_whether_the_input_or_the_server_caused_them(echo, nasty):
    target = server(echo, "v1", model="other")
    with pytest.raises(TargetError, match=r"status 404 of other at .*: check --model: ") as raised:
        target.prepare({"x": np.zeros((1, 2))})()
    target.close()
    assert not raised.value.input_fault
    with nasty("--poison", "666") as url:
        target = server(url, "v1")
        with pytest.raises(TargetError, match="status 500") as raised:
            target.prepare({"x": np.full((1, 2), 666.0)})()
        assert raised.value.input_fault
        target.close()
    with pytest.raises(TargetError, match="no answer") as raised:
        server(url, "v1").prepare({"x": np.zeros((1, 2))})()
    assert not raised.value.input_fault


def test_an_onnx_file_knows_its_inputs(double):
    target = OnnxTarget(double, 1, {"n": 3})
    assert target.inputs == [InputSpec("x", "FP32", (3,))]
    assert target.prepare({"x": np.ones((2, 3), np.float32)})()["y"].tolist() == [[2.0] * 3] * 2
    with pytest.raises(TargetError) as raised:
        target.prepare({"x": np.ones(2, np.int64)})()
    assert raised.value.input_fault
