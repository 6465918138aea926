"""`tritonclient[http]`, unchanged, in front of a sidecar."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

MODEL = "standin"
ARRAYS = {
    "FP32": np.array([[0.1, -2.5e30, np.inf]], np.float32),
    "FP64": np.array([[0.1, 1e-300]], np.float64),
    "FP16": np.array([[0.1, 65504.0, -0.0]], np.float16),
    "INT64": np.array([[2**63 - 1, -(2**63)]], np.int64),
    "UINT8": np.array([[0, 255]], np.uint8),
    "BOOL": np.array([[True, False]], np.bool_),
    "BYTES": np.array([["grüße", "", 'a"b\\', "\x00\n"]], np.object_),
}


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(served.data, concurrency=32) as client:
        yield client


def given(array, datatype, *, binary=True, module=triton):
    tensor = module.InferInput("input", list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def asked(*, binary=True):
    return [triton.InferRequestedOutput("input", binary_data=binary)]


def same(answer, array):
    if array.dtype == np.object_:
        texts = [[one if isinstance(one, str) else one.decode() for one in row] for row in answer]
        return texts == array.tolist()
    return answer.dtype == array.dtype and answer.tobytes() == array.tobytes()


def test_health_and_metadata_come_from_the_model_server(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("nobody")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata(MODEL)["inputs"][0]["datatype"] == "FP32"
    assert client.get_model_config(MODEL)["max_batch_size"] > 0


@pytest.mark.parametrize("datatype", ARRAYS)
def test_binary_tensors_come_back_byte_for_byte(client, datatype):
    array = ARRAYS[datatype]
    answer = client.infer(MODEL, [given(array, datatype)], outputs=asked())
    assert same(answer.as_numpy("input"), array)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "BOOL", "BYTES"])
@pytest.mark.parametrize("binary_output", [True, False])
def test_json_tensors_come_back(client, datatype, binary_output):
    array = np.array([[0.1, -2.5]], np.float32) if datatype == "FP32" else ARRAYS[datatype]
    answer = client.infer(MODEL, [given(array, datatype, binary=False)], outputs=asked(binary=binary_output))
    assert same(answer.as_numpy("input"), array)


def test_the_callers_id_comes_back(client):
    answer = client.infer(MODEL, [given(ARRAYS["FP32"], "FP32")], request_id="ride 17")
    assert answer.get_response()["id"] == "ride 17"


def test_a_version_may_be_named(client):
    answer = client.infer(MODEL, [given(ARRAYS["FP32"], "FP32")], model_version="1")
    assert same(answer.as_numpy("input"), ARRAYS["FP32"])


def test_a_generous_timeout_and_any_priority_are_served(client):
    for priority in (0, 1, 2):
        answer = client.infer(MODEL, [given(ARRAYS["FP32"], "FP32")], timeout=10_000_000, priority=priority)
        assert same(answer.as_numpy("input"), ARRAYS["FP32"])


def test_a_timeout_that_can_not_be_kept_is_no_answer(client):
    tensor = given(np.zeros((1, 3), np.float32), "FP32")
    # Before it are seven others, each of another shape and so in its own batch: at 20 ms a batch its 1 ms is over.
    shapes = [np.zeros((1, width), np.float32) for width in range(10, 17)]
    others = [client.async_infer(MODEL, [given(array, "FP32")]) for array in shapes]
    with pytest.raises(InferenceServerException) as error:
        client.infer(MODEL, [tensor], timeout=1000)
    for other, array in zip(others, shapes, strict=True):
        assert same(other.get_result().as_numpy("input"), array)
    # Predicted to be late if the batch latency is known by then, else expired in the queue.
    assert error.value.status() in {"503", "504"}


def test_an_unknown_model_is_the_servers_own_error(client):
    with pytest.raises(InferenceServerException, match="one model") as error:
        client.infer("nobody", [given(ARRAYS["FP32"], "FP32")])
    assert error.value.status() == "404"


def test_a_wrong_shape_is_named(client):
    tensor = triton.InferInput("input", [1, 3], "FP32").set_data_from_numpy(np.zeros((1, 3), np.float32))
    tensor._shape = [1, 4]
    with pytest.raises(InferenceServerException, match="input") as error:
        client.infer(MODEL, [tensor])
    assert error.value.status() == "400"


def test_asynchronous_requests_are_batched_together_and_get_their_own_rows(served, client):
    arrays = [np.full((1 + number % 3, 5), number, np.float32) for number in range(32)]
    pending = [client.async_infer(MODEL, [given(array, "FP32")], request_id=str(n)) for n, array in enumerate(arrays)]
    for number, array in enumerate(arrays):
        answer = pending[number].get_result()
        assert answer.get_response()["id"] == str(number)
        assert same(answer.as_numpy("input"), array)
    assert served.most_rows() > 3


async def test_the_asyncio_client(served):
    async with aio.InferenceServerClient(served.data) as client:
        assert await client.is_model_ready(MODEL)
        answer = await client.infer(MODEL, [given(ARRAYS["FP16"], "FP16")], outputs=asked())
        assert same(answer.as_numpy("input"), ARRAYS["FP16"])
