"""The stand-in for an engine, alone and behind a sidecar, as processes of their own."""

from __future__ import annotations

import json

import pytest
import requests

FAST = {
    "name": "fast", "source": "synthetic", "kvTokens": 10_000, "maxRunning": 8,
    "step": {"form": "linear", "base": 0.001, "sequence": 1e-5, "kvToken": 1e-9, "promptToken": 1e-6},
}  # fmt: skip


@pytest.fixture
def engine(standing_in, tmp_path):
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(FAST))
    with standing_in(path) as url:
        yield url


def events(answer):
    return [line.removeprefix(b"data: ") for line in answer.content.split(b"\n\n") if line]


def test_a_chat_streams_its_tokens_and_says_how_many(engine):
    asked = {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 5, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    answer = requests.post(f"{engine}/v1/chat/completions", json=asked, timeout=30)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *tokens, last, usage, done = events(answer)
    assert done == b"[DONE]"
    assert json.loads(tokens[0])["choices"][0]["delta"] == {"role": "assistant", "content": " 0"}
    assert [json.loads(each)["choices"][0]["delta"]["content"] for each in tokens] == [" 0", " 1", " 2", " 3", " 4"]
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def test_a_completion_comes_whole(engine):
    answer = requests.post(f"{engine}/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=30).json()
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", " 0 1 2")
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("body", ["nothing", '{"prompt": 5}', '{"max_tokens": 10001}'])
def test_what_it_can_not_answer_is_refused(engine, body):
    assert requests.post(f"{engine}/v1/completions", data=body, timeout=30).status_code == 400
    assert requests.get(f"{engine}/v1/nothing", timeout=30).status_code == 404


def test_a_client_that_leaves_frees_its_place(engine):
    asked = {"prompt": "x", "max_tokens": 9000, "stream": True}
    with requests.post(f"{engine}/v1/completions", json=asked, stream=True, timeout=30) as answer:
        next(answer.iter_lines())
        assert b"vllm:num_requests_running" in requests.get(f"{engine}/metrics", timeout=30).content
    after = requests.post(f"{engine}/v1/completions", json={"prompt": "x", "max_tokens": 9000}, timeout=60)
    assert after.status_code == 200  # both at once don't fit into the cache


def test_options_of_other_stand_ins_are_refused(carpool, tmp_path):
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(FAST))
    result = carpool("standin", "--profile", path, "--wrong-rows")
    assert (result.exit_code, "drop the other options" in result.output) == (2, True)


def test_behind_a_sidecar_streams_pass_and_explain_shows_them(engine, launched, carpool):
    with launched("--upstream", engine, "--slo-ttft-p99", "20s", "--slo-tpot-p99", "1s") as started:
        asked = {"prompt": "x" * 400, "max_tokens": 20, "stream": True, "model": "fast"}
        direct = requests.post(f"{engine}/v1/completions", json=asked, timeout=30)
        passed = requests.post(f"{started.data}/v1/completions", json=asked, timeout=30)
        same = [[json.loads(each)["choices"] for each in events(one)[:-1]] for one in (direct, passed)]
        assert same[0] == same[1]
        shown = carpool("explain", started.admin, "--over", "0s").output
    assert "token streams: 0 running, 0 waiting, 0 KV tokens; forecast TPOT" in shown
    assert "fast: " in shown
    assert "100.0% within both targets" in shown
