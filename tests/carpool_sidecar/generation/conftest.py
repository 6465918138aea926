"""An engine that answers token by token, when the test says so, behind a sidecar on loopback sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from carpool_sidecar.http1.messages import content_length, encode_request_head

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class Call:
    """A request that the engine has, and what it answers: OpenAI's chat completions in events."""

    def __init__(self, exchange) -> None:
        self.exchange = exchange
        self.asked = json.loads(bytes(exchange.body))
        self.sent = b""
        self.tokens = 0

    def begin(self):
        self.exchange.start(200, [EVENTS], None)
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        return self

    def event(self, content):
        self.raw(b"data: " + json.dumps({"id": "x", "model": "m", **content}).encode() + b"\n\n")

    def raw(self, text):
        self.sent += text
        self.exchange.write(text)

    def token(self, text=" a"):
        if not self.exchange.started:
            self.begin()
        self.tokens += 1
        self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        return self

    def finish(self, reason="stop", *, prompt_tokens=None):
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if prompt_tokens is not None:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.tokens}
            self.event({"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}})
        self.raw(b"data: [DONE]\n\n")
        self.exchange.end()

    def whole(self, tokens, *, prompt_tokens=7, status=200):
        choice = {"index": 0, "message": {"role": "assistant", "content": " a" * tokens}, "finish_reason": "length"}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        self.sent = json.dumps({"id": "x", "model": "m", "choices": [choice], "usage": usage}).encode()
        self.exchange.respond(status, [(b"content-type", b"application/json")], self.sent)


class Engine:
    """The engine: its calls, and how many clients left."""

    def __init__(self, world) -> None:
        self.calls: list[Call] = []
        self._world = world
        world.model.behave = lambda exchange: self.calls.append(Call(exchange))

    @property
    def left(self):
        return self._world.model.left


class Reader:
    """A client that reads a stream."""

    def __init__(self) -> None:
        self.status = None
        self.headers = []
        self.body = b""
        self.over = asyncio.get_running_loop().create_future()
        self.call = None

    def interim(self, status, headers):
        pass

    def head(self, status, headers):
        self.status, self.headers = status, headers

    def data(self, chunk):
        self.body += chunk

    def end(self):
        self.over.set_result(self)

    def answered(self, status, headers, body):
        self.head(status, headers)
        self.data(bytes(body))
        self.end()

    def failed(self, error):
        self.over.set_exception(error)
        self.over.exception()

    def leave(self):
        self.call.cancel()

    @property
    def json(self):
        return json.loads(self.body)

    def header(self, name):
        return dict(self.headers).get(name)

    def __await__(self):
        return asyncio.wait_for(self.over, 30).__await__()


class Chat:
    """A world with an engine, a sidecar and clients."""

    def __init__(self, world) -> None:
        self.world = world
        self.until = world.until
        self.engine = Engine(world)

    async def start(self, **fields):
        policy = {"slo": {"latency": {"p99": "5s"}}, **fields.pop("policy", {})}
        self.sidecar, self.client = await self.world.start(policy=policy, **fields)
        return self.sidecar.streams

    def ask(self, target=b"/v1/chat/completions", headers=(), body=None, framing=None, **fields):
        if body is None:
            body = json.dumps({"model": "m", "messages": [], "stream": True, **fields}).encode()
        reader = Reader()
        head = encode_request_head(b"POST", target, [(b"host", b"t"), *headers, framing or content_length(len(body))])
        reader.call = self.client.pool.stream(head, body, reader)
        return reader

    async def called(self, number):
        """Wait until the engine has so many requests; return the last."""
        await self.until(lambda: len(self.engine.calls) >= number)
        return self.engine.calls[number - 1]


@pytest.fixture
async def chat(world):
    return Chat(world)
