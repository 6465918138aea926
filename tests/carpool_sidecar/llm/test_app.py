"""The engine's API on real sockets; what computes is the test."""

from __future__ import annotations

import json
import random
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool_sidecar.generation.engine_metrics import parse
from carpool_sidecar.http1.server.server import Server
from carpool_sidecar.llm.app import EngineApp
from carpool_sidecar.llm.messages import Accepted, Add, Cancel, Piece, Ready, Refused, Stepped, Token

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


class Api:
    """An app, what it sends to the process that computes, and clients."""

    def __init__(self, world):
        self.sent = []
        self.app = EngineApp("m", self.sent.append, rng=random.Random(1))
        self.until = world.until
        self._world = world

    async def start(self):
        self.server = Server(self.app)
        await self.server.listen("127.0.0.1", 0)
        self.client = self._world.client(f"127.0.0.1:{self.server.addresses[0][1]}")
        return self

    def post(self, path=CHAT, **fields):
        fields = {"messages": HELLO, **fields} if path == CHAT else fields
        return self.client.send(b"POST", path.encode(), json.dumps(fields).encode())

    async def added(self, number=1):
        """Wait for so many sequences; return their keys, each accepted with 5 tokens."""
        await self.until(lambda: len(self.adds) >= number)
        for add in self.adds:
            self.app.heard(Accepted(add.key, 5))
        return [add.key for add in self.adds]

    @property
    def adds(self):
        return [message for message in self.sent if isinstance(message, Add)]

    def step(self, *pieces, running=1, waiting=0, kv=0.25):
        self.app.heard(Stepped(list(pieces), running, waiting, kv))


@pytest.fixture
async def api(world):
    api = await Api(world).start()
    api.app.heard(Ready(4096, 9000))
    yield api
    api.server.stop_accepting()
    api.server.abort()


def events(body):
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_chat_in_events(api):
    asked = api.post(stream=True, stream_options={"include_usage": True})
    (key,) = await api.added()
    api.step(Piece(key, "a", 1))
    api.step(Piece(key, "", 1))  # a part of a character
    api.step(Piece(key, "ä", 1, "length"))
    answer = await asked
    found = events(answer.body)
    assert answer.header(b"content-type") == b"text/event-stream; charset=utf-8"
    deltas = [(one["choices"][0]["delta"], one["choices"][0]["finish_reason"]) for one in found[:-1]]
    assert deltas == [
        ({"role": "assistant", "content": ""}, None), ({"content": "a"}, None), ({"content": "ä"}, None),
        ({}, "length"),
    ]  # fmt: skip
    assert (found[-1]["choices"], found[-1]["usage"]) == (
        [], {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    )  # fmt: skip
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    assert len({(one["id"], one["model"], one["created"]) for one in found}) == 1


async def test_a_completion_as_a_whole(api):
    asked = api.post(TEXT, prompt="x", max_tokens=2, logprobs=1)
    (key,) = await api.added()
    api.step(Piece(key, "a", 1, logprobs=[Token("a", -1.0)]))
    api.step(Piece(key, "b", 1, "stop", [Token("b", -2.0)]))
    answer = (await asked).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -2.0]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


async def test_choices_keep_apart_and_a_prompt_counts_once(api):
    asked = api.post(TEXT, prompt=["x", "y"], n=2, stream=True, stream_options={"include_usage": True})
    keys = await api.added(4)
    api.step(*(Piece(key, str(at), 1, "length") for at, key in enumerate(keys)))
    found = events((await asked).body)
    texts = {
        one["choices"][0]["index"]: one["choices"][0]["text"]
        for one in found
        if one["choices"] and one["choices"][0]["text"]
    }
    assert texts == {0: "0", 1: "1", 2: "2", 3: "3"}
    assert found[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}


async def test_a_client_that_leaves_ends_its_sequences(api):
    asked = api.post(n=2)
    keys = await api.added(2)
    api.step(Piece(keys[0], "a", 1, "length"))
    asked.leave()
    await api.until(lambda: len(api.sent) > 2)
    assert api.sent[2:] == [Cancel(keys[1])]
    assert api.app.cancelled == 1
    api.step(Piece(keys[1], "b", 1))  # it was computed meanwhile


async def test_a_client_that_leaves_within_a_stream(api):
    asked = api.post(stream=True)
    (key,) = await api.added()
    api.step(Piece(key, "a", 1))
    asked.leave()

    def noticed():
        api.step(Piece(key, "b", 1))  # a stream whose client has left is noticed by writing
        return Cancel(key) in api.sent

    await api.until(noticed)


async def test_what_the_engine_refuses(api):
    asked = api.post()
    (key,) = await api.added()
    api.app.heard(Refused(key, "there is no room", "max_tokens"))
    answer = await asked
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": "there is no room", "type": "invalid_request_error", "param": "max_tokens", "code": None,
    }  # fmt: skip


async def test_what_it_can_not_do_is_refused_in_openais_form(api):
    answer = await api.post(stream=True, tools=[{"type": "function", "function": {"name": "look"}}])
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": "tools: this is not supported by this engine: leave it out",
        "type": "invalid_request_error", "param": "tools", "code": None,
    }  # fmt: skip


async def test_one_prompt_that_is_refused_ends_the_others(api):
    asked = api.post(TEXT, prompt=["a", "b"])
    keys = await api.added(2)
    api.app.heard(Refused(keys[1], "no", "prompt"))
    assert (await asked).status == 400
    assert api.sent[2:] == [Cancel(keys[0]), Cancel(keys[1])]


async def test_an_engine_that_dies_fails_what_it_had(api):
    whole, stream = api.post(), api.post(stream=True)
    keys = await api.added(2)
    streamed = next(key for key, add in zip(keys, api.adds, strict=True) if api.app._requests[key][0].stream)
    api.step(Piece(streamed, "a", 1))
    api.app.lost()
    assert (await whole).status == 500
    body = (await stream).body
    last = json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert (await api.post()).status == 503  # until it is back
    api.app.heard(Ready(4096, 9000))
    again = api.post(max_tokens=1)
    await api.until(lambda: len(api.adds) == 3)
    api.step(Piece(api.adds[-1].key, "a", 1, "length"))
    assert (await again).status == 200


async def test_before_the_model_is_loaded(world):
    api = await Api(world).start()
    answer = await api.post()
    assert (answer.status, answer.header(b"retry-after")) == (503, b"2")
    assert (await api.client.get(b"/health")).status == 503
    api.app.heard(Ready(4096, 9000))
    assert (await api.client.get(b"/health")).status == 200
    api.server.stop_accepting()
    api.server.abort()


async def test_models_and_what_is_not_there(api):
    models = (await api.client.get(b"/v1/models")).json
    assert [(one["id"], one["max_model_len"]) for one in models["data"]] == [("m", 4096)]
    assert (await api.client.get(b"/v1/models/m")).json["id"] == "m"
    assert (await api.client.get(b"/v1/models/x")).status == 404
    wrong = await api.client.get(CHAT.encode())
    assert (wrong.status, wrong.header(b"allow")) == (405, b"POST")
    assert "/v1/completions" in (await api.client.get(b"/v1/embeddings")).json["error"]["message"]
    assert (
        (await api.client.send(b"POST", CHAT.encode(), b"{")).json["error"]["message"].startswith("the body is no JSON")
    )
    wrong = await api.post(model="gpt")
    assert (wrong.status, wrong.json["error"]["code"]) == (404, "model_not_found")


async def test_metrics_are_those_that_the_gate_reads(api):
    api.post()
    api.post()
    keys = await api.added(2)
    api.step(Piece(keys[0], "a", 1), running=1, waiting=1, kv=0.25)
    answer = await api.client.get(b"/metrics")
    said = parse(answer.body)
    assert (said.running, said.waiting, said.kv_share, said.kv_tokens) == (1, 1, 0.25, 9000)
    assert re.search(rb'generation_tokens_total\{engine="0",model_name="m"\} 1\n', answer.body)


def test_any_name_of_a_model_is_a_label():
    name = 'a "b" \\ c\nd'
    app = EngineApp(name, print, rng=random.Random(1))
    app.heard(Ready(4096, 9000))
    families = list(text_string_to_metric_families(app.metrics().decode()))
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {name}
    assert parse(app.metrics()).kv_tokens == 9000
