"""Throw damaged HTTP/1.1 at the server and at the parsers: ``python fuzz.py [iterations] [seed]``.

Streams of valid requests are damaged at random and fed to a connection, once whole and once in random pieces. It may
refuse what comes, with a 4xx or 5xx, and nothing else. What it accepts has to be sound: the same requests however the
bytes were cut; those that a reader by the letter of RFC 9112 finds, and so no smuggled one; and each, written as it is
forwarded, reads back as the same. A failure prints what replays it.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys

from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.messages import content_length, encode_request_head, forwardable
from carpool_sidecar.http1.parsing import HttpError, parse_request_head, parse_response_head
from carpool_sidecar.http1.server.server import Server

TOKENS = [
    *(
        b"\r \n \r\n \r\n\r\n \x00 \x0b \x7f \x85 \xff : ; , 0 -1 +5 0x5 5,5 1e3 99999999999999999999 ffffffffffffffff "
        b"chunked gzip identity close keep-alive upgrade 100-continue HTTP/1.0 HTTP/1.1 HTTP/2.0 HTTP/0.9 GET PRI"
    ).split(b" "),
    b" ",
    b"\t",
    b"\r\n ",
    b"Content-Length: 5\r\n",
    b"Content-Length : 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Host: h\r\n",
    b"Connection: content-length\r\n",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
]
REQUESTS = [
    b"GET /a?b=c HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"POST /p HTTP/1.1\r\nHost: h:80\r\nX-A: 1\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n",
    b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"HEAD / HTTP/1.1\r\nHost: [::1]:8080\r\nConnection: close\r\n\r\n",
    b"GET http://a:1/x?y HTTP/1.1\r\nHost: b\r\n\r\n",
    b"GET /w HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 503 \r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
    b"HTTP/1.0 204 No Content\r\nX: y\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
]
# The grammar of RFC 9112, by the letter: what is accepted has to match it.
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
_HEAD = re.compile(
    rb"(?:\r\n)*(%b) ([\x21-\x7e\x80-\xff]+) HTTP/1\.[01]\r\n((?:%b:%b\r\n)*)\r\n" % (_TOKEN, _TOKEN, _TEXT)
)
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#@]*)([/?].*)?", re.DOTALL)
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)(?:[ \t]*;%b)?\r\n" % _TEXT)
_TRAILERS = re.compile(rb"(?:%b:%b\r\n)*\r\n" % (_TOKEN, _TEXT))
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_UNPRINTABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def damage(dice: random.Random, text: bytes) -> bytes:
    """A copy with a few bytes lost, doubled, changed or replaced by a token of the grammar."""
    out = bytearray(text)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 4))):
        a = dice.randint(0, len(out))
        b = min(len(out), a + dice.choice((0, 1, 2, 8, 30)))
        match dice.randrange(5):
            case 0:
                del out[a:b]
            case 1:
                out[a:a] = out[a:b]
            case 2:
                out[a:b] = dice.choice(TOKENS)
            case 3:
                out[a:a] = dice.choice(TOKENS)
            case _:
                out[a:b] = bytes(dice.randrange(256) for _ in range(b - a))
    return bytes(out)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self.closing = False
        protocol.connection_made(self)

    def write(self, data) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high=None, low=None) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class App:
    """Answers each request with its body, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]] = []
        self.refusals = 0

    def head(self, exchange) -> None: ...

    def request(self, exchange) -> None:
        self.requests.append((exchange.method, exchange.target, tuple(exchange.headers), exchange.body))
        exchange.respond(200, [], exchange.body)

    def sent(self, exchange) -> None: ...

    def disconnected(self, exchange) -> None: ...

    def refused(self, error: HttpError) -> None:
        assert 400 <= error.status < 600
        self.refusals += 1


def serve(pieces: list[bytes]) -> App:
    """Feed a fresh connection, then end the client's side."""
    app = App()
    server = Server(app, ServerLimits(tick=1e6), lambda: 100.0)
    wire = Wire(server.protocol())
    for piece in pieces:
        if not wire.closing:
            wire.protocol.data_received(piece)
    if not wire.closing:
        wire.protocol.eof_received()
    wire.protocol.connection_lost(None)
    assert {int(status) for status in _STATUS.findall(wire.written)} <= {100, 200, *range(400, 600)}
    assert server.connections == 0
    return app


def by_the_letter(stream: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Method, target and body of each request up to the first that is incomplete, malformed or has two lengths."""
    found = []
    position = 0
    while (head := _HEAD.match(stream, position)) is not None:
        fields = [line.partition(b":") for line in head[3].split(b"\r\n")[:-1]]
        lengths = [value.strip() for name, _, value in fields if name.lower() == b"content-length"]
        codings = [value.strip().lower() for name, _, value in fields if name.lower() == b"transfer-encoding"]
        position = head.end()
        if codings:
            if codings != [b"chunked"] or lengths:
                break
            body = b""
            while (chunk := _CHUNK.match(stream, position)) is not None and (size := int(chunk[1], 16)):
                body += stream[chunk.end() : chunk.end() + size]
                position = chunk.end() + size + 2
                if stream[position - 2 : position] != b"\r\n":
                    return found
            trailers = _TRAILERS.match(stream, chunk.end()) if chunk is not None else None
            if trailers is None:
                break
            position = trailers.end()
        else:
            if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):
                break
            end = position + int(lengths[0] if lengths else 0)
            if end > len(stream):
                break
            body, position = stream[position:end], end
        target = head[2]
        if (absolute := _ABSOLUTE.fullmatch(target)) is not None:  # RFC 9112, 3.2.2
            path = absolute[2] or (b"*" if head[1] == b"OPTIONS" else b"/")
            target = path if path[:1] != b"?" else b"/" + path
        found.append((head[1], target, body))
    return found


def one_round(dice: random.Random) -> str:
    """Serve one damaged stream twice, and read one damaged answer; what became of the stream."""
    stream = damage(dice, b"".join(dice.choices(REQUESTS, k=dice.randint(1, 3))))
    cuts = sorted(dice.randint(0, len(stream)) for _ in range(dice.randint(0, 12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    # 1. However it is cut, it is the same.
    whole, cut = serve([stream]), serve(pieces)
    assert whole.requests == cut.requests
    assert whole.refusals == cut.refusals
    # 2. Nobody who reads strictly finds other requests in it.
    taken = [(method, target, body) for method, target, _, body in whole.requests]
    assert taken == by_the_letter(stream)[: len(taken)]
    # 3. What is forwarded reads back as what was taken.
    for method, target, headers, body in whole.requests:
        kept = forwardable(list(headers))
        head = encode_request_head(method, target, [*kept, content_length(len(body))])
        assert not any(_UNPRINTABLE.search(name + value) for name, value in headers)
        again = parse_request_head(head if b"host" in {name.lower() for name, _ in kept} else _with_host(head))
        assert (again.method, again.target, again.length) == (method, target, len(body))
    # 4. Answers
    answer = damage(dice, dice.choice(RESPONSES))
    try:
        parsed = parse_response_head(answer, dice.choice((b"GET", b"HEAD", b"POST")))
    except HttpError:
        pass
    else:
        assert 100 <= parsed.status < 1000
    return "refused" if whole.refusals else "served" if whole.requests else "unfinished"


def _with_host(head: bytes) -> bytes:
    line, _, rest = head.partition(b"\r\n")
    return line + b"\r\nhost: h\r\n" + rest


async def rounds(iterations: int, seed: int) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    for index in range(iterations):
        try:
            outcome = one_round(random.Random(f"{seed}:{index}"))
        except Exception:
            print(f"replay: one_round(random.Random('{seed}:{index}'))", file=sys.stderr)  # noqa: T201 - a script prints
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def main(iterations: int = 100_000, seed: int = 0) -> dict[str, int]:
    """Run that many rounds, each with its own seed; how often what happened."""
    return asyncio.run(rounds(iterations, seed))


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))  # noqa: T201 - a script prints
