"""Real files on the real runtime: small graphs built here, served in-process, batched and alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import signal
import struct
import sys
import threading
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from carpool.policy.plain import PolicyError
from carpool_sidecar.backends import onnx as onnx_backend
from carpool_sidecar.backends.onnx import OnnxBackend
from carpool_sidecar.config.settings import Onnx
from carpool_sidecar.main import CUT_SHORT, OK

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


def text(*elements):
    """BYTES: each element behind its length."""
    return b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in elements)


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
    client = world.client(sidecar.data.address)
    await client.get(b"/v2/health/ready")
    return sidecar, client, name


class Gate:
    """A session whose runs wait until they are let through, so that what comes meanwhile is in one batch for sure."""

    def __init__(self, session):
        self.session = session
        self.open = threading.Event()
        self.rows = []
        self.ended = False

    def run(self, names, arrays, *, pad):
        self.rows.append(len(next(iter(arrays.values()))))
        assert self.open.wait(30)
        self.ended = True
        return self.session.run(names, arrays, pad=pad)


@pytest.fixture
def gated():
    gates = []

    def gated(sidecar):
        gate = sidecar.backend._session = Gate(sidecar.backend._session)
        gates.append(gate)
        return gate

    yield gated
    for gate in gates:
        gate.open.set()


async def together(world, sidecar, gate, *starts):
    """Send the first request alone and the others in one batch behind it; their answers, in order."""
    first = starts[0]()
    await world.until(lambda: gate.rows)
    rest = await world.queue(sidecar, *starts[1:])
    gate.open.set()
    answers = [await one for one in (first, *rest)]
    assert len(gate.rows) == 2
    return answers


@pytest.mark.parametrize("protocol", ["v1", "v2", "v2 binary"])
async def test_batched_and_alone_agree(world, matmul, gated, protocol):
    sidecar, client, name = await start(world, matmul, parameters={"*": {"maxBatch": 64, "maxInFlight": 1}})
    rows = np.random.default_rng(7).standard_normal((32, 4)).astype(np.float32)

    def ask(row):
        if protocol == "v1":
            return client.predict(json.dumps(row.tolist()).encode(), model=name)
        if protocol == "v2":
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": row.tolist()}
            return client.infer(json.dumps({"inputs": [tensor]}).encode(), model=name)
        body, headers = world.binary([("x", "FP32", [1, 4], row.tobytes())], parameters={"binary_data_output": True})
        return client.infer(body, headers, model=name)

    def values(answer):
        assert answer.status == 200
        if protocol == "v1":
            return answer.json["predictions"][0]
        if protocol == "v2":
            return answer.json["outputs"][0]["data"]
        return np.frombuffer(answer.body[int(answer.header(LENGTH.lower())) :], np.float32)

    gate = gated(sidecar)
    batched = [values(answer) for answer in await together(world, sidecar, gate, *[partial(ask, row) for row in rows])]
    assert gate.rows == [1, 31]
    alone = [values(await ask(row)) for row in rows]
    assert gate.rows[2:] == [1] * 32
    for answers in (batched, alone):
        # float32, sums of four products: a few units in the last place
        np.testing.assert_allclose(answers, rows @ WEIGHTS, rtol=1e-5, atol=1e-6)
        assert (np.argmax(answers, axis=1) == np.argmax(rows @ WEIGHTS, axis=1)).all()


@pytest.fixture
def encoder(tmp_path):
    """Tokens in, attention with a mask: an embedding of the text, and a state for each token."""
    node = helper.make_node
    return save(
        tmp_path / "encoder.onnx",
        [
            node("Gather", ["table", "input_ids"], ["tokens"]),
            node("ReduceSum", ["tokens", "last"], ["scores"], keepdims=0),
            node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            node("Sub", ["mask", "one"], ["hidden"]),
            node("Mul", ["hidden", "large"], ["penalty"]),
            node("Add", ["scores", "penalty"], ["masked"]),
            node("Softmax", ["masked"], ["weights"], axis=1),
            node("Unsqueeze", ["weights", "last"], ["columns"]),
            node("Mul", ["columns", "tokens"], ["weighted"]),
            node("ReduceSum", ["weighted", "middle"], ["context"], keepdims=1),
            node("Add", ["tokens", "context"], ["last_hidden_state"]),
            node("ReduceSum", ["context", "middle"], ["embedding"], keepdims=0),
        ],
        [(name, TensorProto.INT64, ["n", "length"]) for name in ("input_ids", "attention_mask")],
        [
            ("last_hidden_state", TensorProto.FLOAT, ["n", "length", 8]),
            ("embedding", TensorProto.FLOAT, ["n", 8]),
        ],
        [
            ("table", np.random.default_rng(5).standard_normal((100, 8)).astype(np.float32)),
            ("last", np.array([-1])),
            ("middle", np.array([1])),
            ("one", np.float32(1)),
            ("large", np.float32(1e9)),
        ],
    )


async def test_texts_of_different_lengths_share_batches_and_get_their_own_answers(world, encoder):
    sidecar = await world.sidecar(
        upstream=None,
        onnx={"path": encoder, "threads": 1},
        parameters={"*": {"maxBatch": 16, "maxInFlight": 1}},
        policy={
            "models": [
                {
                    "name": "encoder",
                    "sequence": {"pad": {"input_ids": 0, "attention_mask": 0}, "outputs": ["last_hidden_state"]},
                }
            ],
            "verification": {},
        },
    )
    client = world.client(sidecar.data.address)
    rng = np.random.default_rng(11)

    async def ask(ids):
        tensors = [(name, "INT64", list(ids.shape), each.tobytes()) for name, each in
                   (("input_ids", ids), ("attention_mask", np.ones_like(ids)))]  # fmt: skip
        body, headers = world.binary(tensors, parameters={"binary_data_output": True})
        answer = await client.infer(body, headers, model="encoder")
        assert answer.status == 200
        at = int(answer.header(LENGTH.lower()))
        state, embedding = json.loads(answer.body[:at])["outputs"]
        assert (state["shape"], embedding["shape"]) == ([*ids.shape, 8], [len(ids), 8])
        return np.frombuffer(answer.body[at:], np.float32)

    texts = [rng.integers(1, 100, (1, int(length))) for length in rng.integers(1, 65, 120)]
    alone = [await ask(ids) for ids in texts]
    (entry,) = sidecar.models
    await world.until(lambda: sidecar.driver.verifier.padding(entry).startswith("verified"))
    for got, expected in zip(await asyncio.gather(*map(ask, texts)), alone, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    own, added = sidecar.driver.counts.tokens["encoder"]
    assert 0 < added < own


async def test_batches_run_at_once(world, matmul, gated):
    sidecar, client, name = await start(world, matmul, parameters={"*": {"maxBatch": 1, "maxInFlight": 3}})
    gate = gated(sidecar)
    asked = [client.predict(b"[%d,2,3,4]" % number, model=name) for number in range(5)]
    await world.until(lambda: len(gate.rows) == 3)  # and none has ended
    await world.queued(sidecar, 2)
    gate.open.set()
    answers = [(await one).json["predictions"][0] for one in asked]
    np.testing.assert_allclose(answers, np.array([[n, 2, 3, 4] for n in range(5)], "f4") @ WEIGHTS, rtol=1e-5)


async def test_who_leaves_a_run_under_way_costs_the_others_nothing(world, matmul, gated):
    sidecar, client, name = await start(world, matmul, parameters={"*": {"maxBatch": 8, "maxInFlight": 1}})
    gate = gated(sidecar)
    first = client.predict(b"[1,2,3,4]", model=name)
    await world.until(lambda: gate.rows)
    rest = await world.queue(sidecar, lambda: client.predict(b"[4,3,2,1]", model=name))
    first.leave()
    await world.until(lambda: sidecar.batcher.model(name).counters.misses.get("cancelled"))
    gate.open.set()
    np.testing.assert_allclose((await rest[0]).json["predictions"], np.array([[4, 3, 2, 1]], "f4") @ WEIGHTS, rtol=1e-5)


async def test_a_request_larger_than_a_batch_is_put_together_again(world, two_inputs):
    _, client, name = await start(world, two_inputs, parameters={"*": {"maxBatch": 3}})
    rows = b",".join(b'{"a":%d,"b":%d}' % (n, 2 * n) for n in range(10))
    answer = await client.predict(rows, model=name)
    assert answer.json["predictions"] == [{"sum": 3 * n, "difference": -n} for n in range(10)]
    body = json.dumps({"inputs": {"a": [1, 2], "b": [5, 5]}}).encode()
    answer = await client.send(b"POST", f"/v1/models/{name}:predict".encode(), body)
    assert answer.json == {"outputs": {"sum": [6, 7], "difference": [-4, -3]}}


@pytest.mark.parametrize(
    ("kind", "datatype", "rows"),
    [
        (TensorProto.BOOL, "BOOL", [b"\x01\x00", b"\x00\x00", b"\x01\x01"]),
        (TensorProto.UINT8, "UINT8", [b"\x00\xff", b"\x01\x02", b"\x80\x7f"]),
        (TensorProto.UINT16, "UINT16", [b"\x00\xff\xff\x00", b"\x01\x00\x02\x00", bytes(4)]),
        (TensorProto.UINT32, "UINT32", [bytes(range(8)), b"\xff" * 8, bytes(8)]),
        (TensorProto.UINT64, "UINT64", [bytes(range(16)), b"\xff" * 16, bytes(16)]),
        (TensorProto.INT8, "INT8", [b"\x80\x7f", b"\xff\x00", b"\x01\x02"]),
        (TensorProto.INT16, "INT16", [b"\x00\x80\xff\x7f", b"\xff\xff\x00\x00", bytes(4)]),
        (TensorProto.INT32, "INT32", [b"\x00\x00\x00\x80\xff\xff\xff\x7f", b"\xff" * 8, bytes(8)]),
        (TensorProto.INT64, "INT64", [bytes(range(16)), b"\xff" * 16, bytes(16)]),
        (TensorProto.FLOAT16, "FP16", [b"\x01\x00\x00\x3c", b"\x01\x7e\x00\xfc", b"\x00\x80\xff\x7b"]),
        (TensorProto.FLOAT, "FP32", [b"\x00\x00\x80\x3f\x01\x00\x00\x00", b"\x01\x00\xc0\x7f" * 2, bytes(8)]),
        (
            TensorProto.DOUBLE,
            "FP64",
            [bytes(8) + b"\x01" + bytes(7), b"\x01" + bytes(5) + b"\xf8\x7f" + bytes(8), bytes(16)],
        ),
        (TensorProto.STRING, "BYTES", [text("hi", ""), text("ends in\0", "é漢🙂"), text("x" * 1000, "\0")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_datatype_goes_through_the_runtime_byte_for_byte(world, tmp_path, gated, *, kind, datatype, rows):
    parameters = {"*": {"maxBatch": 8, "maxInFlight": 1}}
    sidecar, client, name = await start(world, identity(tmp_path, kind), parameters=parameters)

    def ask(number, data):
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        tensor = ("x", datatype, [1, 2], data)
        return client.infer(*world.binary([tensor], outputs=outputs, id=f"caller {number}"), model=name)

    gate = gated(sidecar)
    answers = await together(world, sidecar, gate, *[partial(ask, *each) for each in enumerate(rows)])
    assert gate.rows == [1, 2]
    for number, (answer, data) in enumerate(zip(answers, rows, strict=True)):
        at = int(answer.header(LENGTH.lower()))
        assert answer.body[at:] == data
        described = json.loads(answer.body[:at])
        assert (described["id"], described["outputs"][0]["shape"]) == (f"caller {number}", [1, 2])


@pytest.mark.parametrize(
    ("kind", "datatype", "rows"),
    [
        (TensorProto.UINT64, "UINT64", [[2**63 - 1, 1], [0, 2**62], [3, 4]]),
        (TensorProto.INT64, "INT64", [[2**53 + 1, -(2**63)], [1, 2], [-1, 0]]),
        (TensorProto.FLOAT16, "FP16", [[1.5, 2], [0.25, -3], [65504.0, 0]]),
        (TensorProto.DOUBLE, "FP64", [[0.1, 1e300], [5e-324, 2], [-1.5, 3]]),
        (TensorProto.BOOL, "BOOL", [[True, False], [False, False], [True, True]]),
        (TensorProto.STRING, "BYTES", [["a", ""], ["ends in\0", "é漢🙂"], ["x" * 100, "z"]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_json_rows_go_through_the_runtime_unchanged(world, tmp_path, gated, *, kind, datatype, rows):
    parameters = {"*": {"maxBatch": 8, "maxInFlight": 1}}
    sidecar, client, name = await start(world, identity(tmp_path, kind), parameters=parameters)
    gate = gated(sidecar)
    texts = [json.dumps(row).encode() for row in rows]
    v1 = await together(world, sidecar, gate, *[partial(client.predict, row, model=name) for row in texts])
    assert [answer.json for answer in v1] == [{"predictions": [row]} for row in rows]
    for row in rows:
        tensor = {"name": "x", "datatype": datatype, "shape": [1, 2], "data": row}
        answer = await client.infer(json.dumps({"inputs": [tensor]}).encode(), model=name)
        if datatype == "FP16":  # JSON has no form for it
            at = int(answer.header(LENGTH.lower()))
            assert np.frombuffer(answer.body[at:], "<f2").tolist() == row
        else:
            assert answer.json["outputs"][0]["data"] == row


async def test_what_is_not_served_is_a_4xx_that_names_it(world, matmul):
    _, client, name = await start(world, matmul)
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]%b}'
    for text, headers, status, words in (
        (gzip.compress(body % b""), [(b"content-encoding", b"gzip")], 415, "content-encoding"),
        (b"0" * 16, [(LENGTH, b"0")], 400, "without JSON"),
        (body % b',"outputs":[{"name":"z"}]', [], 400, "no output z"),
        (body % b',"outputs":[{"name":"y","parameters":{"classification":1}}]', [], 400, "classification"),
        (body.replace(b"[1,4]", b"[4]") % b"", [], 400, "takes shape [-1, 4], got [4]"),
        (body.replace(b"1,2,3", b"1e39,2,3") % b"", [], 400, "out of bounds for float32"),
        (body.replace(b'"x"', b'"q"') % b"", [], 400, "no input 'q'"),
    ):
        answer = await client.infer(text, headers, model=name)
        assert (answer.status, words in answer.json["error"]) == (status, True), answer


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
    for method, path, status, allow in (
        (b"POST", b"/v2", 405, b"GET, HEAD"),
        (b"DELETE", b"/v2/models/matmul", 405, b"GET, HEAD"),
        (b"GET", b"/v2/models/matmul/infer", 405, b"POST"),
        (b"PUT", b"/v1/models/matmul:predict", 405, b"POST"),
        (b"POST", b"/v2/models/other", 404, None),
        (b"POST", b"/nope", 404, None),
    ):
        answer = await client.send(method, path)
        assert (answer.status, answer.header(b"allow")) == (status, allow), path
    assert (await client.predict(b"[1,2,3,4]", model="other")).status == 404


@pytest.mark.parametrize(
    ("name", "spelt"),
    [("a+b", ["a+b", "a%2Bb", "a%2bb"]), ("my model", ["my%20model"]), ("größe", ["gr%C3%B6%C3%9Fe"])],
)
async def test_a_name_that_paths_encode_is_described_and_batched(world, matmul, tmp_path, name, spelt):
    shutil.copy(matmul, tmp_path / f"{name}.onnx")
    sidecar, client, model = await start(world, str(tmp_path / f"{name}.onnx"))
    assert model == name
    for path in spelt:
        assert (await client.get(f"/v2/models/{path}".encode())).json["name"] == name
        assert (await client.get(f"/v2/models/{path}/versions/1/ready".encode())).status == 200
        assert (await client.get(f"/v1/models/{path}".encode())).status == 200
    assert (await client.get(f"/v2%2Fmodels/{spelt[0]}".encode())).status == 404
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
    assert (await client.send(b"POST", f"/v2/models/{spelt[-1]}/infer".encode(), body)).status == 200
    (entry,) = sidecar.models
    await world.until(lambda: entry.known.axis is not None)
    assert (entry.model, entry.known.axis.kind) == (name, "First")


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


def test_a_type_that_v2_has_no_name_for_is_refused(tmp_path):
    path = save(
        tmp_path / "bfloat.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.BFLOAT16, ["n", 4])],
        [("y", TensorProto.BFLOAT16, ["n", 4])],
    )
    with pytest.raises(PolicyError, match="not served") as caught:
        OnnxBackend(Onnx(path=path))
    assert caught.value.field == "onnx.path"


async def test_a_file_without_shapes_is_served_without_batching(world, tmp_path):
    node = helper.make_node("Add", ["x", "x"], ["y"])
    path = save(tmp_path / "shapeless.onnx", [node], [("x", TensorProto.FLOAT, None)], [("y", TensorProto.FLOAT, None)])
    sidecar, client, name = await start(world, path)
    assert (await client.predict(b"[1,2]", model=name)).json == {"predictions": [[2.0, 4.0]]}
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}
    answer = await client.infer(json.dumps({"inputs": [tensor]}).encode(), model=name)
    assert (answer.json["outputs"][0]["shape"], answer.json["outputs"][0]["data"]) == ([2, 1], [2.0, 4.0])
    assert "a scalar, or the file gives no shape" in sidecar.backend.axis(name).reason


@pytest.fixture
def recurrent(tmp_path):
    """A state beside the rows, and a scalar: neither has a batch in dim 0."""
    return save(
        tmp_path / "recurrent.onnx",
        [
            helper.make_node("Mul", ["x", "scale"], ["y"]),
            helper.make_node("Add", ["state", "scale"], ["next"]),
        ],
        [
            ("x", TensorProto.FLOAT, ["batch", 3]),
            ("state", TensorProto.FLOAT, [2, 4]),
            ("scale", TensorProto.FLOAT, []),
        ],
        [("y", TensorProto.FLOAT, ["batch", 3]), ("next", TensorProto.FLOAT, [2, 4])],
    )


async def test_a_model_with_a_fixed_batch_is_served_without_batching_and_the_fix_is_named(
    world, tmp_path, gated, caplog
):
    path = save(
        tmp_path / "fixed.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, [1, 4])],
        [("y", TensorProto.FLOAT, [1, 3])],
        [("w", WEIGHTS)],
    )
    sidecar, client, name = await start(world, path)
    (line,) = (record for record in caplog.records if record.message == "the model is served without batching")
    assert 'torch.onnx.export(..., dynamic_axes={"x": {0: "batch"}})' in line.detail
    assert sidecar.backend.axis(sidecar.backend.model).kind == "None"
    gate = gated(sidecar)
    rows = [np.full((1, 4), row, dtype=np.float32) for row in range(3)]
    bodies = [world.binary([("x", "FP32", [1, 4], row.tobytes())]) for row in rows]
    asked = [client.infer(*body, model=name) for body in bodies]
    await world.until(lambda: gate.rows)
    gate.open.set()
    for row, one in zip(rows, asked, strict=True):
        answer = await one
        assert answer.status == 200
        assert answer.json["outputs"][0]["data"] == pytest.approx((row @ WEIGHTS)[0].tolist(), abs=1e-6)
    assert gate.rows == [1, 1, 1]


async def test_a_model_with_a_state_and_a_scalar_is_served_without_batching(world, recurrent):
    sidecar, client, name = await start(world, recurrent)
    assert "dim 0 of input 'state' is fixed to 2" in sidecar.backend.axis(sidecar.backend.model).reason
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]},
        {"name": "state", "datatype": "FP32", "shape": [2, 4], "data": [0] * 8},
        {"name": "scale", "datatype": "FP32", "shape": [], "data": [2]},
    ]
    answer = await client.infer(json.dumps({"inputs": inputs}).encode(), model=name)
    assert answer.status == 200
    assert [output["shape"] for output in answer.json["outputs"]] == [[1, 3], [2, 4]]
    columns = json.dumps({"inputs": {"x": [[1, 2, 3]], "state": [[0] * 4] * 2, "scale": 2}}).encode()
    answer = await client.send(b"POST", f"/v1/models/{name}:predict".encode(), columns)
    assert answer.json == {"outputs": {"y": [[2, 4, 6]], "next": [[2] * 4] * 2}}


@pytest.mark.parametrize(
    ("inputs", "outputs", "kind"),
    [
        (["batch"], ["batch"], "First"),
        ([None], ["unk__1"], "First"),
        (["batch"], ["num_dets"], "None"),
        (["n"], [3], "None"),
    ],
)
def test_the_names_in_a_file_reach_the_axis(tmp_path, inputs, outputs, kind):
    path = save(
        tmp_path / "named.onnx",
        [helper.make_node("Identity", ["x0"], ["y0"])],
        [(f"x{index}", TensorProto.FLOAT, [name, 2]) for index, name in enumerate(inputs)],
        [(f"y{index}", TensorProto.FLOAT, [name, 2]) for index, name in enumerate(outputs)],
    )
    backend = OnnxBackend(Onnx(path=path))
    assert backend.axis(backend.model).kind == kind


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b'{"inputs":[', [], "truncated"),
        (b'{"inputs":["\xff"]}', [], "body: "),
        (b'{"inputs":' + b"[" * 2000, [], "body: "),
        (b"{}", [(LENGTH, b"9")], "Inference-Header-Content-Length: '9' for a body of 2 bytes"),
        (b"{}", [(LENGTH, b"-1")], "Inference-Header-Content-Length: '-1'"),
        (b"{}trailing", [(LENGTH, b"2")], "body: "),
    ],
)
async def test_what_cannot_be_read_is_refused_by_the_model_server_itself(world, matmul, *, body, headers, words):
    _, client, name = await start(world, matmul)
    answer = await client.infer(body, headers, model=name)
    assert answer.status == 400
    assert words in answer.json["error"]


@pytest.mark.parametrize("size", [-1, "8", 15, 12, 17, None])
async def test_binary_sizes_that_do_not_fit_are_refused_by_the_model_server_itself(world, matmul, size):
    _, client, name = await start(world, matmul)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    answer = await client.infer(head + bytes(16), [(LENGTH, b"%d" % len(head))], model=name)
    assert answer.status == 400
    assert "inputs[0]" in answer.json["error"]


async def test_longer_json_than_is_read_is_413_and_halves_a_batch(world, matmul, gated):
    sidecar = await world.sidecar(
        upstream=None,
        onnx={"path": matmul, "threads": 1, "maxText": "100"},
        policy={"models": []},
        parameters={"*": {"maxBatch": 8, "maxInFlight": 1}},
    )
    client, name = world.client(sidecar.data.address), sidecar.backend.model
    await client.get(b"/v2/health/ready")
    gate = gated(sidecar)
    first = client.predict(b"[1,2,3,4]", model=name)
    await world.until(lambda: gate.rows)
    text = b"[1.5,2,3,4.25" + b" " * 40 + b"]"
    rest = await world.queue(sidecar, *[lambda: client.predict(text, model=name)] * 2)
    gate.open.set()
    assert [(await one).status for one in (first, *rest)] == [200] * 3
    assert gate.rows == [1, 1, 1]
    assert sidecar.batcher.model(name).cap == 1
    long = await client.predict(b"[1.5,2,3,4.25" + b" " * 100 + b"]", model=name)
    assert (long.status, "onnx.maxText is 100" in long.json["error"]) == (413, True)


async def test_an_answer_over_the_limit_is_413_and_halves_a_batch(world, matmul, gated):
    bodies = {"maxRequest": 1000, "maxBuffered": 100_000, "maxAnswer": 1000}  # 83 rows of three floats
    sidecar, client, name = await start(
        world, matmul, bodies=bodies, parameters={"*": {"maxBatch": 84, "maxInFlight": 1}}
    )

    def ask(rows):
        body, headers = world.binary([("x", "FP32", [rows, 4], bytes(16 * rows))])
        return client.infer(body, headers, model=name)

    gate = gated(sidecar)
    first = ask(1)
    await world.until(lambda: gate.rows)
    rest = await world.queue(sidecar, *[partial(ask, 42)] * 2)
    gate.open.set()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]
    assert gate.rows == [1, 84, 42, 42]
    whole = json.dumps({"instances": [[0, 0, 0, 0]] * 84}).encode()
    status, _, body = sidecar.backend.serve(b"/v1/models/%b:predict" % name.encode(), [], whole)
    assert status == 413
    assert b"outputs have 1008 bytes; bodies.maxAnswer is 1000: raise it" in body


def test_files_and_devices_that_are_not_there_are_named(tmp_path, matmul):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for config, words in (
        (Onnx(path=str(tmp_path / "missing.onnx")), "there is no file"),
        (Onnx(path=str(tmp_path / "broken.onnx")), "can't be loaded"),
        (Onnx(path=matmul, device="CUDA"), "onnxruntime-gpu"),
    ):
        with pytest.raises(PolicyError, match=words):
            OnnxBackend(config)


# -------------------------------------------------------------------------------------------------------------- the end


def endless(tmp_path):
    """A model that computes for years."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["more"], ["more_out"]), helper.make_node("Neg", ["in"], ["out"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("in", TensorProto.FLOAT, ["n", 2]),
        ],
        [
            helper.make_tensor_value_info("more_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 2]),
        ],
    )
    return save(
        tmp_path / "endless.onnx",
        [helper.make_node("Loop", ["turns", "more", "x"], ["y"], body=body)],
        [("x", TensorProto.FLOAT, ["n", 2])],
        [("y", TensorProto.FLOAT, ["n", 2])],
        [("turns", np.array(2**62)), ("more", np.array(True))],
    )


@pytest.mark.parametrize(("limit", "signals", "code"), [("50ms", 1, OK), ("1h", 2, CUT_SHORT)])
async def test_a_computation_that_hangs_does_not_keep_the_process(world, tmp_path, *, limit, signals, code):
    path = tmp_path / "sidecar.json"
    onnx_file = {"path": endless(tmp_path), "threads": 1}
    path.write_text(world.config(upstream=None, onnx=onnx_file, shutdown={"lame": "0s", "limit": limit}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carpool_sidecar.main", "--config", str(path), stderr=asyncio.subprocess.PIPE
    )

    async def logged(event):
        while (line := json.loads(await process.stderr.readline()))["event"] != event:
            pass
        return line

    try:
        async with asyncio.timeout(60):
            listening = await logged("listening")
            client, admin = world.client(listening["data"]), world.client(listening["admin"])
            hung = client.predict(b"[1,2]", model="endless")
            while b"carpool_in_flight_batches 1.0" not in (await admin.get(b"/metrics")).body:
                assert not hung.future.done()
            process.send_signal(signal.SIGTERM)
            if signals > 1:
                await logged("draining")
                process.send_signal(signal.SIGTERM)
            assert await process.wait() == code
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_closing_does_not_wait_for_what_is_computed(world, matmul, gated):
    sidecar, client, name = await start(world, matmul)
    gate = gated(sidecar)
    client.predict(b"[1,2,3,4]", model=name)
    await world.until(lambda: gate.rows)
    await sidecar.backend.close()
    assert not gate.ended
    gate.open.set()
    await world.until(lambda: gate.ended)


async def test_a_body_too_large_for_memory_gives_its_slot_back(world, matmul, monkeypatch):
    sidecar, client, name = await start(world, matmul, parameters={"*": {"maxBatch": 8, "maxInFlight": 1}})

    def parts_of(_):
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(onnx_backend, "parts_of", parts_of)
        answer = await client.predict(b"[1,2,3,4]", model=name)
    assert (answer.status, b"MemoryError" in answer.body) == (500, True)
    assert (await client.predict(b"[1,2,3,4]", model=name)).status == 200
    assert sidecar.batcher.in_flight == 0
