"""Reads request heads from the data of a connection."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httptools

from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.http1.parsing import LONGEST_KEPT, TOKEN, HeadCheck, HttpError, RequestHead, parse_request_head

if TYPE_CHECKING:
    from carpool_sidecar.http1.limits import ServerLimits

UNREAD = RequestHead(b"", b"", FieldLines(), 1, False, 0, False)
"""A request that could not be read; its error is sent after the earlier answers."""

PREFACE = b"PRI * HTTP/2.0\r\n"
"""The first bytes of HTTP/2 with prior knowledge (RFC 9113, 3.4)."""

FOREIGN = RequestHead(b"", b"(not HTTP/1.1)", FieldLines(), 0, False, 0, False)
"""A connection that does not carry HTTP/1.1 requests."""

_LONGEST_METHOD = 32
_EMPTY_LINES = 4  # before a request; RFC 9112, 2.2 asks to skip one at least
_METHOD = re.compile(TOKEN + rb"( |$)")


def speaks_http1(beginning: bytes) -> bool | None:
    """Return whether a connection with this first data speaks HTTP/1.1; ``None``: more data is needed.

    A request begins with a method and a space, maybe behind empty lines. What begins so and is malformed is answered,
    not passed through.
    """
    text = beginning
    for _ in range(_EMPTY_LINES):
        text = text.removeprefix(b"\r\n")
    if text.startswith(PREFACE):
        return False
    if not text or text == b"\r" or PREFACE.startswith(text):
        return None
    method = _METHOD.match(text)
    if method is None:
        return False
    if not method[1]:
        return None if len(text) <= _LONGEST_METHOD else False
    return True


def _behind_empty_lines(data: bytes, position: int) -> int:
    """Return where a head begins: some clients end a body with a line break too many (RFC 9112, 2.2).

    Raises HttpError (400) for more than a few: reading megabytes of them would block the thread.
    """
    most = position + 2 * _EMPTY_LINES
    while data.startswith(b"\r\n", position):
        if position == most:
            raise HttpError(400, "malformed-head", f"more than {_EMPTY_LINES} empty lines before a request")
        position += 2
    return position


class HeadReader:
    """Reads the heads of one connection, within the limits.

    Clients send the same head again and again, so the last one is kept, as it came and as it was read. Equal bytes are
    read equally, whatever follows them: what was accepted once need not be read again.
    """

    __slots__ = ("_check", "_last", "_last_head", "_limits")

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._last = b""
        self._last_head = UNREAD
        self._check: HeadCheck | None = None  # of a head that has begun

    def read(self, data: bytes, position: int) -> tuple[RequestHead | None, int]:
        """Read the head at data[position:]; return it and its end.

        Where it is not complete, return None, and where it begins. Raises HttpError for what is not accepted.
        """
        if (last := self._last) and data.startswith(last, position):
            self._check = None
            return self._last_head, position + len(last)
        limits = self._limits
        if data.startswith(b"\r\n", position):
            position = _behind_empty_lines(data, position)
        stop = data.find(b"\r\n\r\n", position) + 4
        complete = stop > 3
        size = (stop if complete else len(data)) - position
        if size > limits.max_target_bytes and data.find(b"\r\n", position, position + limits.max_target_bytes) < 0:
            text = f"the request's target is over {limits.max_target_bytes} bytes, a fixed limit: send a shorter one"
            raise HttpError(414, "target-too-long", text)
        if size > limits.max_head_bytes:
            text = f"the request's head is over {limits.max_head_bytes} bytes, a fixed limit: send fewer headers"
            raise HttpError(431, "head-too-large", text)
        if not complete:
            return None, position

        self._check = None
        raw = data if size == len(data) else data[position:stop]
        head = parse_request_head(raw)
        if len(head.headers) > limits.max_headers:
            text = f"the request has over {limits.max_headers} header fields, a fixed limit: send fewer"
            raise HttpError(431, "too-many-headers", text)
        if size <= LONGEST_KEPT:
            self._last, self._last_head = raw, head
        return head, stop

    def check(self, beginning: bytes) -> bool:
        """Check an incomplete head; return whether this is the first check.

        Raises HttpError (400) where no head begins so.
        """
        if not beginning or beginning == b"\r":  # nothing, or half a line break before the head
            return False
        first = self._check is None
        if self._check is None:
            self._check = HeadCheck(httptools.HttpRequestParser)
        self._check.feed(beginning)
        return first
