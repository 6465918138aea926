"""A sidecar in front of a real Triton: `make triton`. Not in the default suite: Triton is 400 MB.

`CARPOOL_TRITON` names a virtual environment with nvidia-pytriton, if it is not `~/.cache/carpool/pytriton`.
"""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

PYTHON = Path(os.environ.get("CARPOOL_TRITON", Path.home() / ".cache" / "carpool" / "pytriton")) / "bin" / "python"
PATIENCE = 60.0
MODELS = ("affine", "fixed", "half", "upper")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    assert PYTHON.exists(), "nvidia-pytriton is not installed: run `make triton`"
    ports = free_ports(3)
    log = tmp_path_factory.mktemp("triton") / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(  # noqa: S603 - our own command
            [PYTHON, Path(__file__).with_name("triton_server.py"), *map(str, ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert any(line == "ready\n" for line in server.stdout), log.read_text()
        yield f"127.0.0.1:{ports[0]}"
        server.stdin.close()
        server.stdout.close()
        server.wait(PATIENCE)


@pytest.fixture(scope="module")
def sidecar(upstream, in_front_of):
    """Every model's batch axis has been asked for."""
    sidecar = in_front_of(upstream)
    with triton.InferenceServerClient(sidecar.data, concurrency=4) as client:
        for model in MODELS:
            call(client, model, *sample(model, 0))
    sidecar.await_axes(set(MODELS))
    return sidecar


@pytest.fixture
def through(sidecar):
    with triton.InferenceServerClient(sidecar.data, concurrency=48, network_timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def direct(upstream):
    with triton.InferenceServerClient(upstream, concurrency=48, network_timeout=PATIENCE) as client:
        yield client


def sample(model, number):
    """An input of a model: array, datatype, input, output."""
    if model == "half":
        return np.array([[number / 8, -0.5, 2048.0]], np.float16), "FP16", "x", "y"
    if model == "upper":
        return np.array([[f"grüße {number}".encode()]], np.object_), "BYTES", "text", "loud"
    row = np.array([number, 0.1, -1e30, 3.0], np.float32)
    return (row if model == "fixed" else row[None]), "FP32", "x", "y"


def given(array, datatype, name, *, binary=True):
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array, binary_data=binary)


def call(client, model, array, datatype, name, output, *, binary=True, **more):
    wanted = [triton.InferRequestedOutput(output, binary_data=binary)]
    return client.infer(model, [given(array, datatype, name, binary=binary)], outputs=wanted, **more)


def call_apart(address, *what, **more):
    """The same in a thread: the client belongs to the one that made it."""
    with triton.InferenceServerClient(address, network_timeout=PATIENCE) as client:
        return call(client, *what, **more)


def executions(upstream, model):
    """How often Triton itself says that it ran a model."""
    stats = requests.get(f"http://{upstream}/v2/models/{model}/stats", timeout=PATIENCE).json()
    return stats["model_stats"][0]["execution_count"]


def test_axes_come_from_tritons_configuration(sidecar):
    models = sidecar.models()
    for name in ("affine", "half", "upper"):
        assert models[name]["merges"]
        assert models[name]["maxBatch"] == 16
        assert "max_batch_size" in models[name]["axis"]
    assert not models["fixed"]["merges"]


# FP16 has no form in JSON.
@pytest.mark.parametrize(
    ("model", "binary"), [*product(MODELS, [True]), ("affine", False), ("fixed", False), ("upper", False)]
)
def test_answers_are_those_of_direct_calls(sidecar, upstream, model, binary):
    def ask(address, number):
        array, datatype, name, output = sample(model, number)
        answer = call_apart(address, model, array, datatype, name, output, binary=binary, request_id=f"r{number}")
        got = answer.as_numpy(output)
        response = answer.get_response()
        return response["id"], response["outputs"][0]["shape"], got.tolist() if datatype == "BYTES" else got.tobytes()

    before = executions(upstream, model)
    with ThreadPoolExecutor(24) as threads:
        merged = list(threads.map(lambda number: ask(sidecar.data, number), range(48)))
    seen = executions(upstream, model) - before
    assert merged == [ask(upstream, number) for number in range(48)]
    if model == "fixed":
        assert seen == 48
    elif model == "affine":
        assert seen < 24, "hardly any requests were merged"


def test_a_large_request_is_split_under_tritons_cap(through, direct):
    array = np.arange(160, dtype=np.float32).reshape(40, 4)
    answer = call(through, "affine", array, "FP32", "x", "y").as_numpy("y")
    assert answer.tobytes() == (2 * array + 1).tobytes()
    with pytest.raises(InferenceServerException):  # Triton itself refuses 40 rows
        call(direct, "affine", array, "FP32", "x", "y")


def test_health_metadata_and_all_else_are_tritons_own(through, direct):
    assert through.is_server_live()
    assert through.is_server_ready()
    assert through.is_model_ready("affine")
    assert through.get_server_metadata() == direct.get_server_metadata()
    assert through.get_model_metadata("affine") == direct.get_model_metadata("affine")
    assert through.get_model_config("affine") == direct.get_model_config("affine")
    assert through.get_inference_statistics("affine") == direct.get_inference_statistics("affine")


def test_timeout_and_priority_are_honoured(sidecar, through):
    sent = sample("affine", 1)
    for priority in (0, 1, 2):
        answer = call(through, "affine", *sent, timeout=5_000_000, priority=priority)
        assert answer.as_numpy("y").tobytes() == (2 * sent[0] + 1).tobytes()
    with ThreadPoolExecutor(8) as threads:
        others = [threads.submit(call_apart, sidecar.data, "affine", *sent) for _ in range(8)]
        with pytest.raises(InferenceServerException) as error:  # the batch latency is 10 ms, known by now
            call(through, "affine", *sent, timeout=1000)
        for other in others:
            other.result()
    assert error.value.status() in {"503", "504"}


def test_a_compressed_request_is_served(through):
    array, datatype, name, output = sample("affine", 2)
    answer = through.infer(
        "affine", [given(array, datatype, name)], request_compression_algorithm="gzip",
        response_compression_algorithm="gzip", outputs=[triton.InferRequestedOutput(output)],
    )  # fmt: skip
    assert answer.as_numpy(output).tobytes() == (2 * array + 1).tobytes()


def test_tritons_own_errors_arrive(through, direct):
    array = np.zeros((1, 5), np.float32)
    said = []
    for client in (through, direct):
        with pytest.raises(InferenceServerException) as error:
            call(client, "affine", array, "FP32", "x", "y")
        said.append((error.value.status(), error.value.message()))
    assert said[0] == said[1]
    assert said[0][0] == "400"
