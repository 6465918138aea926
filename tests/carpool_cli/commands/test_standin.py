from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
import requests
import tritonclient.http as triton


def predict(url, body, **options):
    return requests.post(f"{url}/v1/models/standin:predict", data=body, timeout=30, **options)


def infer(url, body, headers=None):
    return requests.post(f"{url}/v2/models/standin/infer", data=body, headers=headers, timeout=30)


def test_v1_echoes_every_digit(echo):
    answer = predict(echo, b'{"instances": [[1.10, 1e5], [-0, 12345678901234567890123]]}')
    assert answer.content == b'{"predictions":[[1.10, 1e5],[-0, 12345678901234567890123]]}'


def test_v2_echoes_json_verbatim_and_restores_the_id(echo):
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1.5, 2], [3, 4]]}
    answer = infer(echo, json.dumps({"id": "7", "inputs": [tensor]})).json()
    assert answer == {"model_name": "standin", "model_version": "1", "id": "7", "outputs": [tensor]}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float32", "float64", "object"])
def test_a_real_client_gets_back_what_it_sent(echo, dtype, binary_in, binary_out):
    client = triton.InferenceServerClient(echo.removeprefix("http://"))
    sent = np.array([[b"a", b""], [b"bc", b"d"]], dtype=object) if dtype == "object" else np.eye(2, 3).astype(dtype)
    tensor = triton.InferInput("input", list(sent.shape), triton.np_to_triton_dtype(sent.dtype))
    tensor.set_data_from_numpy(sent, binary_data=binary_in)
    wanted = triton.InferRequestedOutput("input", binary_data=binary_out)
    got = client.infer("standin", [tensor], outputs=[wanted]).as_numpy("input")
    expected = sent if binary_out or dtype != "object" else sent.astype(str)
    assert got.tolist() == expected.tolist()
    client.close()


def test_half_floats_travel_in_binary(echo):
    half = struct.pack("<4e", 1, 2, 3, 4)
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP16", "shape": [2, 2], "parameters": {"binary_data_size": len(half)}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    answer = infer(echo, header + half, {"Inference-Header-Content-Length": str(len(header))})
    assert answer.content[int(answer.headers["Inference-Header-Content-Length"]) :] == half


def test_metadata_and_health(echo):
    client = triton.InferenceServerClient(echo.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("standin")
    metadata = client.get_model_metadata("standin")
    assert all(tensor["shape"][0] == -1 for tensor in metadata["inputs"] + metadata["outputs"])
    client.close()
    assert requests.get(f"{echo}/v1/models/standin", timeout=30).json() == {"name": "standin", "ready": True}
    assert requests.get(f"{echo}/v1/models/other", timeout=30).status_code == 404


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3]},
            "3 values for shape [2, 2], expected 4",
        ),
        ({"name": "x", "datatype": "FP33", "shape": [1], "data": [1]}, "unknown datatype FP33"),
        ({"name": "x", "datatype": "FP32", "shape": [-1], "data": [1]}, "shape [-1]"),
        ({"name": "x", "datatype": "FP32", "shape": [1]}, "neither data nor binary_data_size"),
    ],
)
def test_a_malformed_tensor_is_a_400_that_names_it(echo, tensor, says):
    answer = infer(echo, json.dumps({"inputs": [tensor]}))
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_broken_json_is_a_400(echo):
    assert predict(echo, b'{"instances": [1').status_code == 400
    assert predict(echo, b'{"instances": []}').status_code == 400
    assert infer(echo, b"{").status_code == 400


def test_poison_fails_the_whole_request_and_no_other(nasty):
    with nasty("--poison", "666") as url:
        assert predict(url, b'{"instances": [[1], [666]]}').status_code == 500
        assert predict(url, b'{"instances": [[1], [667]]}').status_code == 200
        tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [666]}
        assert infer(url, json.dumps({"inputs": [tensor]})).status_code == 500


def test_wrong_rows_lose_the_last_one(nasty):
    with nasty("--wrong-rows") as url:
        assert predict(url, b'{"instances": [1, 2, 3]}').json() == {"predictions": [1, 2]}
        assert predict(url, b'{"instances": [1]}').json() == {"predictions": [1]}
        tensor = {"name": "x", "datatype": "INT32", "shape": [2, 1], "data": [1, 2]}
        assert infer(url, json.dumps({"inputs": [tensor]})).json()["outputs"][0]["shape"] == [1, 1]


def test_while_it_is_down_all_but_liveness_is_503(nasty):
    with nasty("--outage", "0s-1h") as url:
        assert predict(url, b'{"instances": [1]}').status_code == 503
        assert requests.get(f"{url}/v2/health/ready", timeout=30).status_code == 503
        assert requests.get(f"{url}/v2/health/live", timeout=30).status_code == 200


def test_stats_count_batches_by_rows(nasty):
    with nasty() as url:
        predict(url, b'{"instances": [1, 2]}')
        predict(url, b'{"instances": [1]}')
        predict(url, b'{"instances": [1]}')
        stats = requests.get(f"{url}/stats", timeout=30).json()
    assert stats["batches"] == {"1": 2, "2": 1}
    assert (stats["requests"], stats["rows"], stats["mostInFlight"]) == (3, 4, 1)
    assert stats["busySeconds"] > 0


def test_a_request_larger_than_the_model_takes_is_refused(nasty):
    with nasty("--max-batch", "2") as url:
        assert predict(url, b'{"instances": [1, 2, 3]}').status_code == 400


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "no-such.json"], "no-such.json: No such file"),
        ([], "Missing option '--profile'"),
        (["--outage", "15s-10s"], "must end after it begins"),
        (["--outage", "tomorrow"], "FROM-TO"),
        (["--cold", "5"], "write e.g. 50ms"),
    ],
)
def test_wrong_options_are_named(carpool, options, says):
    result = carpool("standin", *options)
    assert result.exit_code in {1, 2}
    assert says in result.output


def test_a_taken_port_says_so(echo, tiny, carpool):
    result = carpool("standin", "--profile", tiny, "--port", echo.rsplit(":", 1)[1])
    assert result.exit_code == 1
    assert "name another --port" in result.output


def test_interrupt_ends_it_cleanly(tiny):
    command = [sys.executable, "-m", "carpool_cli", "standin", "--profile", str(tiny), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("host", ["300.0.0.1", "a..b"])
def test_an_address_that_is_not_this_machine_s_names_the_host(carpool, tiny, host):
    result = carpool("standin", "--profile", tiny, "--host", host, "--port", 0)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: can't listen on {host}:0: ")
    assert result.output.endswith("; name an address of this machine with --host\n")
