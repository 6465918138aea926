"""OpenAI's API over one engine: requests become messages to the computing process, its replies become answers."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.llm.answers import Answer, error_body
from carpool_sidecar.llm.messages import Accepted, Cancel, Ready, Refused, Stepped
from carpool_sidecar.llm.requests import CHAT, TEXT, BadRequest, read

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.llm.messages import Message, Piece, Reply
    from carpool_sidecar.llm.requests import Asked

_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_PLAIN = (b"content-type", b"text/plain; version=0.0.4")

WRONG, BROKEN, UNREADY = "invalid_request_error", "server_error", "unavailable"
"""Types of errors."""


class _Request:
    """One request under way: its exchange, its answer so far, and the keys of its choices."""

    __slots__ = ("answer", "exchange", "keys", "stream")

    def __init__(self, exchange: Exchange, asked: Asked, answer: Answer, keys: list[int]) -> None:
        self.exchange = exchange
        self.answer = answer
        self.stream = asked.stream
        self.keys = keys


class EngineApp:
    """The application of the engine's server. ``send`` sends messages to the computing process."""

    def __init__(self, model: str, send: Callable[[Message], None], *, rng: random.Random) -> None:
        self._model = model
        self._send = send
        self._rng = rng
        self._keys = count(1)
        self._requests: dict[int, tuple[_Request, int]] = {}
        """By key of a choice: its request, and which of its choices it is."""
        self._ready: Ready | None = None
        self._last = Stepped([], 0, 0, 0.0)
        self._generated = 0
        self._prompted = 0
        self.cancelled = 0
        """Requests whose clients left."""

    # The process that computes

    def heard(self, reply: Reply) -> None:
        """Take a reply."""
        if isinstance(reply, Stepped):
            self._last = reply
            for piece in reply.pieces:
                self._add(piece)
        elif isinstance(reply, Accepted):
            self._prompted += reply.prompt_tokens
            if (found := self._requests.get(reply.key)) is not None:
                found[0].answer.accepted(found[1], reply.prompt_tokens)
        elif isinstance(reply, Refused):
            if (found := self._requests.get(reply.key)) is not None:
                status, kind = (400, WRONG) if reply.field else (500, BROKEN)
                self._fail(found[0], status, reply.why, kind, reply.field or None)
        elif isinstance(reply, Ready):
            self._ready = reply

    def lost(self) -> None:
        """Fail everything: the process has ended."""
        self._ready = None
        self._last = Stepped([], 0, 0, 0.0)
        for request in {id(each): each for each, _ in self._requests.values()}.values():
            self._fail(request, 500, "the engine ended; it is started again: send the request once more", BROKEN, None)

    def _add(self, piece: Piece) -> None:
        found = self._requests.get(piece.key)
        if found is None:
            return  # its client left while the step was computed
        request, index = found
        self._generated += piece.tokens
        if piece.end:
            del self._requests[piece.key]
        exchange = request.exchange
        if request.stream and not exchange.started:
            exchange.start(200, _EVENTS, None)
        events = request.answer.add(index, piece)
        if events:
            exchange.write(events)
        if request.answer.complete:
            if request.stream:
                exchange.end()
            else:
                exchange.respond(200, [_JSON], request.answer.whole())

    def _fail(self, request: _Request, status: int, why: str, kind: str, param: str | None) -> None:
        """Answer with an error, within a stream as its last event, and compute no choice any more."""
        self._drop(request)
        exchange = request.exchange
        body = msgspec.json.encode(error_body(why, param, kind))
        if exchange.started:
            exchange.write(b"data: %b\n\n" % body)
            exchange.end()
        else:
            exchange.respond(status, [_JSON], body)

    def _drop(self, request: _Request) -> bool:
        """Stop computing its choices; return whether there was one."""
        live = [key for key in request.keys if self._requests.pop(key, None) is not None]
        for key in live:
            self._send(Cancel(key))
        return bool(live)

    # The server

    def head(self, exchange: Exchange) -> None:
        """Every body is buffered."""

    def sent(self, exchange: Exchange) -> None:
        """Nothing is kept of an exchange."""

    def refused(self, refusal: HttpError) -> None:
        """Nothing to add: the server has answered."""

    def disconnected(self, exchange: Exchange) -> None:
        """Stop computing for a client that has left."""
        request = exchange.context
        if isinstance(request, _Request) and self._drop(request):
            self.cancelled += 1

    def request(self, exchange: Exchange) -> None:
        """Answer a request: generation as it is computed, everything else at once."""
        path = exchange.path
        if path in {CHAT, TEXT}:
            if exchange.method == b"POST":
                self._generate(exchange)
            else:
                _refuse(exchange, 405, "method not allowed: POST a JSON body", WRONG)
        elif path in {b"/v1/models", b"/v1/models/" + self._model.encode()}:
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "carpool"}
            model |= {} if self._ready is None else {"max_model_len": self._ready.context}
            known = model if path != b"/v1/models" else {"object": "list", "data": [model]}
            exchange.respond(200, [_JSON], msgspec.json.encode(known))
        elif path == b"/health":
            status, said = (503, b'{"status":"loading"}') if self._ready is None else (200, b'{"status":"ok"}')
            exchange.respond(status, [_JSON], said)
        elif path == b"/metrics":
            exchange.respond(200, [_PLAIN], self.metrics())
        else:
            there = "/v1/chat/completions, /v1/completions, /v1/models, /health and /metrics"
            _refuse(exchange, 404, f"nothing at {path.decode('latin-1')}; there are {there}", WRONG)

    def _generate(self, exchange: Exchange) -> None:
        if self._ready is None:
            _refuse(exchange, 503, "the model is not loaded yet: try again in some seconds", UNREADY)
            return
        try:
            asked = read(exchange.path, bytes(exchange.body), self._model, self._rng)
        except BadRequest as error:
            _refuse(exchange, error.status, str(error), WRONG, error.param)
            return
        exchange.body = b""
        answer = Answer(asked, self._model, f"{self._rng.getrandbits(96):024x}", int(time.time()))
        request = _Request(exchange, asked, answer, [next(self._keys) for _ in asked.choices])
        exchange.context = request
        for index, (key, add) in enumerate(zip(request.keys, asked.choices, strict=True)):
            self._requests[key] = request, index
            self._send(msgspec.structs.replace(add, key=key))

    def metrics(self) -> bytes:
        """Return the engine's metrics under vLLM's names, which the gate, dashboards and gateways know."""
        name = self._model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'{{engine="0",model_name="{name}"}}'
        # Requests sent since the last step wait, too.
        running = min(self._last.running, len(self._requests))
        facts = (
            ("num_requests_running", "gauge", running),
            ("num_requests_waiting", "gauge", len(self._requests) - running),
            ("kv_cache_usage_perc", "gauge", round(self._last.kv_share if self._requests else 0.0, 6)),
            ("prompt_tokens_total", "counter", self._prompted),
            ("generation_tokens_total", "counter", self._generated),
        )
        lines = [f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {value}\n" for name, kind, value in facts]
        if self._ready is not None:
            size = f'{labels[:-1]},kv_cache_size_tokens="{self._ready.kv_tokens}"}}'
            lines.append(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{size} 1\n")
        return "".join(lines).encode()


def _refuse(exchange: Exchange, status: int, message: str, kind: str, param: str | None = None) -> None:
    code = "model_not_found" if param == "model" else None
    headers = {503: [(b"retry-after", b"2")], 405: [(b"allow", b"POST")]}.get(status, [])
    exchange.respond(status, [_JSON, *headers], msgspec.json.encode(error_body(message, param, kind, code)))
