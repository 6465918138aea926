"""What a client sends to the server, and what comes back, for the tests of its connections."""

from __future__ import annotations

import json

GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
CHUNKED_POST = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
OK5 = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
OK0 = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def refusal(written: bytes) -> tuple[int, str, str]:
    """Take a refusal apart: status, reason, text."""
    head, _, body = written.rpartition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    told = json.loads(body)
    assert set(told) == {"error", "reason"}
    return int(head[9:12]), told["reason"], told["error"]
