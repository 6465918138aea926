"""What the pool sends to a server, and what comes back, for the tests of the pool."""

from __future__ import annotations

from carpool_sidecar.http1.messages import content_length, encode_request_head

GET = encode_request_head(b"GET", b"/", [(b"Host", b"h")])
HEAD = encode_request_head(b"HEAD", b"/", [(b"Host", b"h")])
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED_OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nX: y\r\n\r\n"
UNTIL_CLOSE_OK = b"HTTP/1.1 200 OK\r\n\r\nhello"


def post(size: int) -> bytes:
    return encode_request_head(b"POST", b"/", [(b"Host", b"h"), content_length(size)])


def answering(answer: bytes, *, close: bool = False):
    def script(peer, received):
        if b"\r\n\r\n" in received:
            peer.answer(answer)
            if close:
                peer.transport.close()

    return script
