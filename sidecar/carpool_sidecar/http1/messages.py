"""Elements of HTTP/1.1: header lists, heads as bytes, bodies as parts.

Everything is bytes: a proxy that decodes and encodes again spends its time on that and changes what it forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, TypeAlias

from carpool_sidecar.http1.fields import FieldLines

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Field lines as received: order, case and repetitions kept, optional whitespace around values taken off."""

Added: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Field lines that this hop adds to those it passes on: none of a peer's, since they are kept as they are encoded."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A piece of a body; a memoryview must be one-dimensional, contiguous and of single bytes."""

Body: TypeAlias = Buffer | Sequence[Buffer]
"""A body in one piece, or in parts that are sent one after the other."""


class Flow(Protocol):
    """Receives the backpressure of a streamed answer."""

    def pause_writing(self) -> None:
        """Stop: written data accumulates, since the other side reads too slowly or earlier answers go first."""

    def resume_writing(self) -> None:
        """Go on: the data was sent."""


HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Names (lower case) that concern one connection only (RFC 9110, 7.6.1); Trailer, because trailers are dropped."""

CHUNKED = (b"transfer-encoding", b"chunked")
"""The field line of a body whose length is not known beforehand."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

# Fields that each hop decides for itself: they are not forwarded but, where needed, written anew. A client that expects
# 100 Continue got it from this hop.
_PER_HOP = HOP_BY_HOP | {b"content-length", b"expect"}
# Below this, copying into one buffer is cheaper than another entry in the kernel's list: 16 KiB are about 1 us.
_WORTH_KEEPING_APART: Final = 16 * 1024

_STATUS_LINES: Final = {status.value: b"HTTP/1.1 %d %b" % (status, status.phrase.encode()) for status in HTTPStatus}


def find(headers: Headers, lowercase_name: bytes) -> bytes | None:
    """Return the first value of a field, or None if there is none."""
    size = len(lowercase_name)
    for name, value in headers:
        if len(name) == size and name.lower() == lowercase_name:  # the length first: that avoids most of the copies
            return value
    return None


def tokens(value: bytes) -> list[bytes]:
    """Return the members of a comma-separated field value, in lower case and without empty ones."""
    return [token for member in value.lower().split(b",") if (token := member.strip(b" \t"))]


@lru_cache(1024)  # where sizes repeat, half the time of formatting it
def content_length(size: int) -> tuple[bytes, bytes]:
    """Return the field line that announces a body of `size` bytes."""
    return (b"content-length", b"%d" % size)


def forwardable(headers: Headers) -> Headers:
    """Return the field lines that an intermediary passes on.

    It leaves out hop-by-hop fields, fields that Connection names, the body's framing, which every hop writes anew, and
    Expect, which is answered here.
    """
    if not isinstance(headers, FieldLines):
        return _forwardable(headers)
    if headers.kept is None:
        headers.kept = FieldLines(_forwardable(headers))
    return headers.kept


def _forwardable(headers: Headers) -> Headers:
    kept = [field for field in headers if field[0].lower() not in _PER_HOP]
    if find(headers, b"connection") is not None:
        named = set[bytes]().union(*(named_by(value) for name, value in headers if name.lower() == b"connection"))
        if named:
            kept = [field for field in kept if field[0].lower() not in named]
    return kept


def named_by(connection: bytes) -> set[bytes]:
    """Return the fields that a value of Connection names, in lower case, except those that are hop-by-hop anyway.

    Host is left out, too: a request without it could not be routed.
    """
    return {*tokens(connection)} - _PER_HOP - {b"close", b"host"}


def encode_request_head(method: bytes, target: bytes, headers: Headers, added: Added = ()) -> bytes:
    """Return the head of an HTTP/1.1 request, blank line included; `added` fields follow the headers.

    The framing (`content_length`, `CHUNKED`) is the caller's, among them. Raises ValueError where a part
    carries CR, LF or NUL, or where the method or target carries a space: it would be read as something else.
    """
    inputs = (method, target)
    if isinstance(headers, FieldLines) and headers.encoded_for == inputs:
        return headers.encoded + _ending(added)
    line = b"%b %b HTTP/1.1" % (method, target)
    if line.count(b" ") != 2:
        raise ValueError("a space in the method or target of a request")
    return _begun(line, headers, inputs) + _ending(added)


def encode_response_head(status: int, headers: Headers, added: Added = ()) -> bytes:
    """Return the head of an HTTP/1.1 response, blank line included; `added` fields follow the headers.

    The framing is the caller's, among them. Raises ValueError where a header carries CR, LF or NUL.
    """
    if isinstance(headers, FieldLines) and headers.encoded_for == status:
        return headers.encoded + _ending(added)
    line = _STATUS_LINES.get(status)
    if line is None:
        line = b"HTTP/1.1 %d " % status
    return _begun(line, headers, status) + _ending(added)


def _begun(first_line: bytes, headers: Headers, inputs: object) -> bytes:
    """Return the lines of a head without those that are added, and keep them with the headers."""
    head = _lines([first_line, *map(b": ".join, headers)])
    if isinstance(headers, FieldLines):
        headers.encoded, headers.encoded_for = head, inputs
    return head


@lru_cache(1024)  # a fifth of the time of encoding it
def _ending(added: Added) -> bytes:
    """Return the lines of the added fields, and the blank line."""
    return _lines([b": ".join(field) for field in added]) + b"\r\n"


def _lines(lines: list[bytes]) -> bytes:
    text = b"\r\n".join([*lines, b""])
    # Passes over all lines take less time than checking each: they may contain only the line breaks written here.
    if text.count(b"\r") != len(lines) or text.count(b"\n") != len(lines) or b"\0" in text:
        raise ValueError("a line break or NUL in the head of a message")
    return text


def has_body(method: bytes, status: int) -> bool:
    """Whether a response to `method` may carry content (RFC 9110, 6.4.1)."""
    return method != b"HEAD" and status >= 200 and status not in {204, 304}


def parts_of(body: Body) -> Sequence[Buffer]:
    """Return a body as its parts."""
    return (body,) if isinstance(body, bytes | bytearray | memoryview) else body


def size_of(body: Body) -> int:
    """Return a body's length in bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, parts_of(body)))


def chunk_of(piece: Buffer) -> tuple[Buffer, ...]:
    """Return the parts of one chunk of the chunked coding; none for an empty piece, which would end the body."""
    return (b"%x\r\n" % len(piece), piece, b"\r\n") if len(piece) else ()


def message(head: bytes, body: Body) -> list[Buffer]:
    """Return what to write for a head and its body (see `gather`)."""
    if isinstance(body, bytes) and len(body) < _WORTH_KEEPING_APART:
        return [head + body]
    return gather((head, *parts_of(body)))


def gather(parts: Sequence[Buffer]) -> list[Buffer]:
    """Return what to write for these parts: small neighbours joined into one, large parts as they are, not copied."""
    if sum(map(len, parts)) <= _WORTH_KEEPING_APART:
        return [b"".join(parts)]
    writes: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < _WORTH_KEEPING_APART:
            small.append(part)
        else:
            if small:
                writes.append(b"".join(small))
                small = []
            writes.append(part)
    if small:
        writes.append(b"".join(small))
    return writes
