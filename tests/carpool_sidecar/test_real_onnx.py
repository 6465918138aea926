"""Real files on the real runtime: small graphs built here, served in-process, batched and alone."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from carpool.policy import PolicyError
from carpool_sidecar.backends.onnx import OnnxBackend
from carpool_sidecar.config import Onnx

pytestmark = pytest.mark.real

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
LENGTH = b"Inference-Header-Content-Length"


def save(path, nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return str(path)


@pytest.fixture
def matmul(tmp_path):
    return save(
        tmp_path / "matmul.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", 4])],
        [("y", TensorProto.FLOAT, ["n", 3])],
        [("w", WEIGHTS)],
    )


@pytest.fixture
def two_inputs(tmp_path):
    return save(
        tmp_path / "two.onnx",
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [("a", TensorProto.INT64, ["n"]), ("b", TensorProto.INT64, ["n"])],
        [("sum", TensorProto.INT64, ["n"]), ("difference", TensorProto.INT64, ["n"])],
    )


def identity(tmp_path, kind):
    return save(
        tmp_path / "identity.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", kind, ["n", 2])],
        [("y", kind, ["n", 2])],
    )


async def start(world, path, **fields):
    policy = {"models": [], **fields.pop("policy", {})}
    sidecar = await world.sidecar(upstream=None, onnx={"path": path, "threads": 1}, policy=policy, **fields)
    name = sidecar.backend.model
    client = world.client(sidecar.address)
    await client.get(b"/v2/health/ready")
    return sidecar, client, name


async def test_batched_and_alone_agree(world, matmul):
    sidecar, client, name = await start(world, matmul)
    rows = np.random.default_rng(7).standard_normal((32, 4)).astype(np.float32)
    expected = rows @ WEIGHTS
    asked = [client.predict(json.dumps(row.tolist()).encode(), model=name) for row in rows]
    answers = [(await one).json["predictions"][0] for one in asked]
    np.testing.assert_allclose(answers, expected, rtol=1e-5, atol=1e-6)
    assert (np.argmax(answers, axis=1) == np.argmax(expected, axis=1)).all()
    sizes = [size for _, size in sidecar.driver.batch_sizes]
    assert max(sizes) > 1  # some rode together


async def test_a_request_larger_than_a_batch_is_put_together_again(world, two_inputs):
    _, client, name = await start(world, two_inputs, parameters={"*": {"maxBatch": 3}})
    rows = b",".join(b'{"a":%d,"b":%d}' % (n, 2 * n) for n in range(10))
    answer = await client.predict(rows, model=name)
    assert answer.json["predictions"] == [{"sum": 3 * n, "difference": -n} for n in range(10)]
    body = json.dumps({"inputs": {"a": [1, 2], "b": [5, 5]}}).encode()
    answer = await client.send(b"POST", f"/v1/models/{name}:predict".encode(), body)
    assert answer.json == {"outputs": {"sum": [6, 7], "difference": [-4, -3]}}


@pytest.mark.parametrize(
    ("kind", "datatype", "data"),
    [
        (TensorProto.BOOL, "BOOL", b"\x01\x00"),
        (TensorProto.UINT8, "UINT8", b"\x00\xff"),
        (TensorProto.INT64, "INT64", bytes(range(16))),
        (TensorProto.FLOAT16, "FP16", b"\x01\x00\x00\x3c"),
        (TensorProto.FLOAT, "FP32", b"\x00\x00\x80\x3f\x01\x00\x00\x00"),
        (TensorProto.DOUBLE, "FP64", b"\x00" * 8 + b"\x01" + b"\x00" * 7),
        (TensorProto.STRING, "BYTES", b"\x02\x00\x00\x00hi\x00\x00\x00\x00"),
    ],
)
async def test_every_datatype_goes_through_the_runtime_byte_for_byte(world, tmp_path, kind, datatype, data):
    _, client, name = await start(world, identity(tmp_path, kind))
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": datatype, "shape": [1, 2], "parameters": {"binary_data_size": len(data)}}
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
            "id": "me",
        }
    ).encode()
    asked = [client.infer(head + data, [(LENGTH, b"%d" % len(head))], model=name) for _ in range(8)]
    for one in asked:
        answer = await one
        at = int(answer.header(b"inference-header-content-length"))
        assert answer.body[at:] == data
        described = json.loads(answer.body[:at])
        assert (described["id"], described["outputs"][0]["shape"]) == ("me", [1, 2])


async def test_documents_and_health(world, matmul):
    sidecar, client, _ = await start(world, matmul)
    assert sidecar.ready
    metadata = (await client.get(b"/v2/models/matmul")).json
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    for path in (
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/matmul/ready",
        "/v2/models/matmul/versions/1",
        "/v1/models",
        "/v1/models/matmul",
    ):
        assert (await client.get(path.encode())).status == 200
    assert (await client.get(b"/v2/models/other")).status == 404
    assert (await client.send(b"POST", b"/v2", b"{}")).status == 405
    assert (await client.predict(b"[1,2,3,4]", model="other")).status == 404


async def test_a_row_that_does_not_fit_costs_nobody_else_an_answer(world, matmul):
    _, client, name = await start(world, matmul)
    asked = [client.predict(text, model=name) for text in (b"[1,2,3,4]", b"[1,2]", b'["a"]', b"[1.5,2,3,4]")]
    answers = [await one for one in asked]
    assert [answer.status for answer in answers] == [200, 400, 400, 200]
    assert "takes shape [-1, 4]" in answers[1].json["error"]


async def test_a_computation_that_fails_is_500_with_the_runtimes_words(world, tmp_path):
    path = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["w", "i"], ["y"])],
        [("i", TensorProto.INT64, ["n"])],
        [("y", TensorProto.FLOAT, ["n", 3])],
        [("w", WEIGHTS)],
    )
    _, client, name = await start(world, path)
    good, bad = client.predict(b"1", model=name), client.predict(b"99", model=name)
    assert (await good).status == 200
    answer = await bad
    assert (answer.status, "indices" in answer.json["error"]) == (500, True)


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [(TensorProto.FLOAT, [1, 4], "dynamic first dimension"), (TensorProto.BFLOAT16, ["n", 4], "not served")],
)
def test_a_file_that_cannot_be_batched_is_refused_with_the_fix(tmp_path, kind, shape, words):
    path = save(
        tmp_path / "fixed.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", kind, shape)],
        [("y", kind, shape)],
    )
    with pytest.raises(PolicyError, match=words) as caught:
        OnnxBackend(Onnx(path=path))
    assert caught.value.field == "onnx.path"


def test_files_and_devices_that_are_not_there_are_named(tmp_path, matmul):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for config, words in (
        (Onnx(path=str(tmp_path / "missing.onnx")), "there is no file"),
        (Onnx(path=str(tmp_path / "broken.onnx")), "can't be loaded"),
        (Onnx(path=matmul, device="CUDA"), "onnxruntime-gpu"),
    ):
        with pytest.raises(PolicyError, match=words):
            OnnxBackend(config)
