"""`curl`, unchanged, in front of a sidecar."""

from __future__ import annotations

import json
import shutil
import subprocess
import time

import pytest
import requests

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed (Debian: apt-get install curl)")

PREDICT, INFER = "v1/models/standin:predict", "v2/models/standin/infer"


@pytest.fixture
def curl(served):
    def run(path, *arguments, stdin=b""):
        """The status and the answer's body."""
        command = [CURL, "--silent", "--show-error", "--max-time", "30", "-w", "\\n%{http_code}", *arguments]
        url = f"http://{served.data}/{path}"
        answer = subprocess.run([*command, url], input=stdin, capture_output=True, check=True)  # noqa: S603 - curl
        body, _, status = answer.stdout.rpartition(b"\n")
        return int(status), body

    return run


def test_predict_as_the_guides_show_it(curl):
    assert curl(PREDICT, "-d", '{"instances": [[1.0, 2]]}') == (200, b'{"predictions":[[1.0, 2]]}')


def test_a_large_body_waits_for_100_continue(curl):
    rows = b",".join([b"[%b]" % b",".join([b"0.125"] * 20_000)] * 8)
    for header in ("Expect: 100-continue", "Content-Type: application/json"):
        status, body = curl(PREDICT, "-H", header, "--data-binary", "@-", stdin=b'{"instances":[%b]}' % rows)
        assert status == 200
        assert body == b'{"predictions":[%b]}' % rows


def test_a_binary_tensor(curl):
    raw = bytes(range(8))
    tensor = {"name": "x", "shape": [1, 8], "datatype": "UINT8", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    kind = "Content-Type: application/octet-stream"
    status, body = curl(INFER, "-H", length, "-H", kind, "--data-binary", "@-", stdin=head + raw)
    assert status == 200
    assert body.endswith(raw)


def test_http_1_0(curl):
    assert curl(PREDICT, "--http1.0", "-d", '{"instances": [[1]]}') == (200, b'{"predictions":[[1]]}')


def test_a_compressed_answer_is_asked_for(curl):
    assert curl(PREDICT, "--compressed", "-d", '{"instances": [[1]]}') == (200, b'{"predictions":[[1]]}')


def test_two_requests_on_one_connection(curl, served):
    again = f"http://{served.data}/{PREDICT}"
    _, body = curl(PREDICT, "-d", '{"instances": [[1]]}', again)
    assert body.count(b'{"predictions":[[1]]}') == 2


def test_an_error_is_the_model_servers_own(curl):
    status, body = curl(PREDICT, "-d", '{"instances": [NaN]}')
    assert status == 400
    assert json.loads(body)["error"].startswith("not a V1 request: JSON is malformed")


def test_head(curl):
    assert curl("v2/health/ready", "--head")[0] == 200


def test_a_stream_of_tokens_comes_event_by_event(gated):
    asked = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True})
    command = [CURL, "--silent", "--show-error", "--max-time", "30", "-N", "-d", asked]
    url = f"http://{gated.data}/v1/chat/completions"
    said = subprocess.run([*command, url], capture_output=True, check=True).stdout.split(b"\n\n")  # noqa: S603 - curl
    assert said[-2:] == [b"data: [DONE]", b""]
    texts = [json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in said[:-2]]
    assert texts == [" 0", " 1", " 2", " 3", ""]


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}},
        {"max_tokens": 20_000},
    ],
    ids=["tools", "logprobs", "an error"],
)
def test_bytes_of_tool_calls_logprobs_and_errors_pass_unchanged(chatting, asked):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True} | asked)
    command = [CURL, "--silent", "--show-error", "--max-time", "30", "-N", "-w", "\n%{http_code}", "-d", body]
    own, passed = (
        subprocess.run([*command, f"http://{server}/v1/chat/completions"], capture_output=True, check=True).stdout  # noqa: S603 - curl
        for server in (chatting.upstream, chatting.data)
    )
    assert passed == own


def test_a_stream_that_is_interrupted_ends_at_the_engine(chatting):
    asked = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9000})
    url = f"http://{chatting.data}/v1/chat/completions"
    with subprocess.Popen([CURL, "--silent", "-N", "-d", asked, url], stdout=subprocess.PIPE) as process:  # noqa: S603 - curl
        assert process.stdout.readline().startswith(b"data: ")
        process.terminate()
    deadline = time.monotonic() + 30
    while not requests.get(f"http://{chatting.upstream}/seen", timeout=30).json()["left"]:
        assert time.monotonic() < deadline, "the engine goes on"
        time.sleep(0.05)
