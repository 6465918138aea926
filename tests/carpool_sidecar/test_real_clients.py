"""Clients that people have, unchanged, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys

import pytest

from carpool_sidecar.http1.messages import find

pytestmark = pytest.mark.real

TRITON = """
import sys
import numpy as np
import tritonclient.http as http

client = http.InferenceServerClient(sys.argv[1], concurrency=8)
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("m")
assert client.get_model_metadata("m")["name"] == "m"
for binary in (True, False):
    asked = []
    for number in range(16):
        tensor = http.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[number, 0.5]], np.float32), binary_data=binary)
        wanted = [http.InferRequestedOutput("x", binary_data=binary)]
        asked.append(client.async_infer("m", [tensor], outputs=wanted, request_id=str(number)))
    for number, one in enumerate(asked):
        answer = one.get_result()
        assert answer.get_response()["id"] == str(number)
        np.testing.assert_array_equal(answer.as_numpy("x"), np.array([[number, 0.5]], np.float32))
"""

REQUESTS = """
import sys
import requests

with requests.Session() as session:
    url = f"http://{sys.argv[1]}/v1/models/m:predict"
    for number in range(5):
        answer = session.post(url, json={"instances": [[number, 1.5]]}, timeout=30)
        assert answer.status_code == 200 and answer.json() == {"predictions": [[number, 1.5]]}, answer.text
    refused = session.post(url, data="{", timeout=30)
    assert refused.status_code == 400 and refused.json()["error"]
"""


def answer_as_asked(exchange):
    """Echo V2 outputs in the form that the request wants them, as Triton does."""
    length = find(exchange.headers, b"inference-header-content-length")
    at = len(exchange.body) if length is None else int(length)
    request = json.loads(exchange.body[:at])
    request.pop("outputs", None)
    answer = json.dumps({"model_name": "m", "outputs": request.pop("inputs"), **request}).encode()
    headers = [] if length is None else [(b"Inference-Header-Content-Length", b"%d" % len(answer))]
    exchange.respond(200, headers, answer + exchange.body[at:])


async def run(*command):
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output


async def test_tritonclient(world):
    world.model.behave = answer_as_asked
    for path in (b"/v2/health/live", b"/v2/models/m/ready"):
        world.model.documents[path] = (200, {})
    sidecar = await world.sidecar()
    await run(sys.executable, "-c", TRITON, sidecar.address)
    assert sidecar.batcher.stats(sidecar.clock()).models["m"].arrivals == 32


async def test_requests(world):
    sidecar = await world.sidecar()
    await run(sys.executable, "-c", REQUESTS, sidecar.address)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(world):
    sidecar = await world.sidecar()
    url = f"http://{sidecar.address}/v1/models/m:predict"
    assert await run("curl", "-sS", "-d", '{"instances":[[1.10]]}', url) == b'{"predictions":[[1.10]]}'
    large = ("curl", "-sS", "-H", "Expect: 100-continue", "-d", json.dumps({"instances": [[0.5] * 20_000]}), url)
    assert json.loads(await run(*large)) == {"predictions": [[0.5] * 20_000]}
