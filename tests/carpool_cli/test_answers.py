"""Servers that answer with what nobody asked for: each command says so in a line."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from carpool_cli.answers import get
from carpool_cli.live.first_call import curl_line
from carpool_cli.options import ADDRESS, Address

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"


def whole(body):
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


LOAD = ("--rate", "9", "--prompt-tokens", "9", "--output-tokens", "9")
TARGETS = ("--slo-ttft-p99", "2s", "--slo-tpot-p99", "50ms")

ANSWERS = {
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "cut off": HEAD + b"Content-Length: 99\r\n\r\n{",
    "long head": HEAD + b"X: " + b"a" * 99_999 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "no UTF-8": whole(b'{"inputs": ["\xff"], "models": ["\xff"], "data": ["\xff"], "predictions": ["\xff"]}'),
    "deep": whole(b"[" * 100_000),
    "null": whole(b"null"),
    "of another form": whole(b'{"models": null, "inputs": [{"shape": null}], "data": 3, "predictions": 4}'),
}


@contextmanager
def answering(answer):
    """A server that gives everybody one answer; its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection = listening.accept()[0]
                except OSError:
                    return
                with connection, suppress(OSError):  # some only look whether anybody is there
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "{}"),
        ("top", "--once", "{}"),
        ("savings", "{}"),
        ("simulate", "--from-running", "{}"),
        ("savings", "--prometheus", "{}"),
        ("profile", "--upstream", "{}", "--protocol", "v2"),
        ("profile", "--upstream", "{}", "--protocol", "v1", "--shape", "1"),
        ("bench", "{}", "--protocol", "v2"),
        ("bench", "--generative", "{}", *LOAD, *TARGETS),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_answer_is_one_line(carpool, command, answer):
    with answering(answer) as url:
        result = carpool(*(word.format(url) for word in command))
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_an_answer_that_comes_too_late_leaves_no_connection_open():
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as server:

        def begin():
            connection = listening.accept()[0]
            connection.settimeout(10)
            request = connection.recv(65536)
            connection.sendall(ANSWERS["cut off"])
            return connection, request

        answered = server.submit(begin)
        with pytest.raises(TimeoutError) as error:  # whose traceback holds the answer
            get(Address("127.0.0.1", listening.getsockname()[1], ""), "/", timeout=0.5)
        connection, request = answered.result()
        with connection:
            assert request.startswith(b"GET / HTTP/1.1")
            assert connection.recv(1) == b"", error


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_model_that_does_not_describe_itself_gives_no_line_to_try(answer):
    with answering(answer) as url:
        assert curl_line(ADDRESS.convert(url, None, None), ["m"]) is None
