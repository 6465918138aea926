"""`make record-engines`: ask real engines, and keep their answers byte for byte as fixtures of the tests.

Each exchange is two files: ``NAME.request`` (path, then the body) and ``NAME.response``, the bytes of the HTTP answer
as they came, chunked framing included. Addresses and dates are not in them.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_server
import vllm_server

from carpool_cli.demo.random_model import SIZES, write

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = Path(__file__).parents[1] / "carpool_sidecar" / "generation" / "recorded"
TIMEOUT = 300
"""Seconds without a byte: vLLM compiles what its first requests of a kind need."""
CONTEXT = 512
"""Tokens that a sequence may have."""
SLOTS = 2
DATES = re.compile(rb"^date: [^\r\n]*\r\n", re.IGNORECASE | re.MULTILINE)
"""A header that is another one each second."""
HELLO = {"model": "random", "messages": [{"role": "user", "content": 'Say "é" and {"usage": {}}.'}], "seed": 1}
PLAIN = {"model": "random", "prompt": "ba bo", "seed": 1}
INPUT = {"model": "random", "input": "ba bo", "max_output_tokens": 6}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": ["here", "there"]}},
            "required": ["at"],
        },
    },
}
CALL = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
LONG = " ba" * 700
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

EXCHANGES: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "chat-stream": (CHAT, {**HELLO, "stream": True, "max_tokens": 6}),
    "chat-stream-usage": (CHAT, {**HELLO, **USAGE, "max_tokens": 6}),
    "chat-stream-logprobs": (CHAT, {**HELLO, **USAGE, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    "chat-stream-two": (CHAT, {**HELLO, "stream": True, "max_tokens": 6, "n": 2}),
    "chat-stream-stop": (CHAT, {**HELLO, **USAGE, "max_tokens": 60, "stop": ["a", "e", "i", "o"]}),
    "chat-stream-tool": (CHAT, {**HELLO, **USAGE, **CALL}),
    "chat-whole": (CHAT, {**HELLO, "max_tokens": 6}),
    "chat-whole-logprobs": (CHAT, {**HELLO, "max_tokens": 24, "logprobs": True, "top_logprobs": 4}),
    "chat-whole-tool": (CHAT, {**HELLO, **CALL}),
    "completions-stream": (TEXT, {**PLAIN, "stream": True, "max_tokens": 6}),
    "completions-stream-usage": (TEXT, {**PLAIN, **USAGE, "max_tokens": 6}),
    "completions-stream-logprobs": (TEXT, {**PLAIN, **USAGE, "max_tokens": 4, "logprobs": 2}),
    "completions-whole": (TEXT, {**PLAIN, "max_tokens": 6}),
    "completions-whole-ids": (TEXT, {**PLAIN, "prompt": [260, 261, 262], "max_tokens": 6}),
    "responses-stream": ("/v1/responses", {**INPUT, "stream": True}),
    "responses-whole": ("/v1/responses", INPUT),
    "messages-stream": ("/v1/messages", {**HELLO, "max_tokens": 6, "stream": True}),
    "messages-whole": ("/v1/messages", {**HELLO, "max_tokens": 6}),
    "error-field": (CHAT, {**HELLO, "max_tokens": "many"}),
    "error-json": (CHAT, b'{"messages": ['),
    "error-too-long": (CHAT, {"model": "random", "messages": [{"role": "user", "content": LONG}], "max_tokens": 6}),
    "error-too-long-stream": (TEXT, {**PLAIN, "prompt": LONG, "max_tokens": 6, "stream": True}),
    "error-model": (CHAT, {**HELLO, "model": "no-such-model", "max_tokens": 2}),
    "models": ("/v1/models", b""),
    "health": ("/health", b""),
    "metrics-idle": ("/metrics", b""),
}  # fmt: skip

OWN: dict[str, dict[str, tuple[str, dict[str, Any] | bytes]]] = {
    "llama-server": {
        "native-stream": ("/completion", {"prompt": "ba bo", "n_predict": 6, "stream": True, "seed": 1}),
        "native-whole": ("/completion", {"prompt": "ba bo " * 80, "n_predict": 6, "seed": 1}),
    },
    "vllm": {},
}
"""What only one engine has."""

BUSY = {**PLAIN, "stream": True, "max_tokens": 480, "ignore_eos": True}


class Asked:
    """A request on a connection of its own."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        method = "POST" if body else "GET"
        head = f"{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._socket.sendall(head.encode() + b"\r\n" + body)
        self.answer = b""

    def read(self, most: int | None = None) -> bytes:
        """Read to the end, or ``most`` bytes or a few more."""
        while most is None or len(self.answer) < most:
            piece = self._socket.recv(65536)
            if not piece:
                break
            self.answer += piece
        return DATES.sub(b"", self.answer)

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()


def encoded(body: dict[str, Any] | bytes) -> bytes:
    """Return a body as it is sent."""
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()


def exchanges(port: int, engine: str) -> Iterator[tuple[str, str, bytes, bytes]]:
    """Ask for everything; gives name, path, body and answer."""
    for name, (path, body) in (EXCHANGES | OWN[engine]).items():
        sent = encoded(body)
        yield name, path, sent, Asked(port, path, sent).read()
    # More requests than slots; one of them is left in the middle of its answer.
    sent = encoded(BUSY)
    busy = [Asked(port, TEXT, sent) for _ in range(SLOTS + 2)]
    busy[0].read(1500)
    yield "metrics-busy", "/metrics", b"", Asked(port, "/metrics", b"").read()
    yield "cancelled", TEXT, sent, busy[0].read()[:1400]
    for each in busy:
        each.leave()
    deadline = time.monotonic() + 60
    while True:  # the engine must hear of it
        after = Asked(port, "/metrics", b"").read()
        if not re.search(rb"^(?:llamacpp:requests_processing|vllm:num_requests_running\S*) [1-9]", after, re.MULTILINE):
            break
        if time.monotonic() > deadline:
            sys.exit("the engine goes on after its clients have left")
        time.sleep(0.1)
    yield "metrics-after", "/metrics", b"", after


def record(engine: str, port: int, about: str) -> None:
    """Write an engine's folder anew."""
    folder = RECORDED / engine
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, path, body, answer in exchanges(port, engine):
        (folder / f"{name}.request").write_bytes(path.encode() + b"\n" + body)
        (folder / f"{name}.response").write_bytes(answer)
        print(f"{engine}: {name}: {answer.partition(bytes((13, 10)))[0].decode()}", flush=True)
    date = dt.datetime.now(tz=dt.UTC).date()
    (folder / "README.md").write_text(
        f"# Answers of {engine}\n\n{about}\n\nRecorded on {date} by `make record-engines`.\n"
    )


def main() -> None:
    """Record one engine, or each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", nargs="?", default="llama-server", choices=["llama-server", "vllm"])
    engine = parser.parse_args().engine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if engine == "llama-server":
            write(folder / "model.gguf", SIZES["medium"], ends=True)
            options = {"slots": SLOTS, "context": SLOTS * CONTEXT}
            with llama_server.running(folder / "model.gguf", folder, **options) as port:
                about = (
                    f"{llama_server.version()}\n\n"
                    f"`llama-server -m model.gguf --alias random -np {SLOTS} -c {SLOTS * CONTEXT} -t 1 --metrics "
                    "--jinja --no-warmup`, a model of random weights (`python -m "
                    "carpool_cli.demo.random_model model.gguf medium`)."
                )
                record(engine, port, about)
        else:
            with vllm_server.running(folder, sequences=SLOTS, context=CONTEXT) as port:
                record(engine, port, vllm_server.ABOUT)


if __name__ == "__main__":
    main()
