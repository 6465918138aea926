"""How the end of an answer's body is marked: its length, the chunked coding, or the close (RFC 9112, 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.messages import (
    CHUNKED,
    LAST_CHUNK,
    Added,
    Buffer,
    chunk_of,
    content_length,
    gather,
    has_body,
)

if TYPE_CHECKING:
    from carpool_sidecar.http1.parsing import RequestHead


def framing_fields(head: RequestHead, status: int, length: int | None) -> Added:
    """Return the field lines for the framing of the answer to a request; `length`: of its body, None if not known."""
    if length is not None:
        # A 304 would state the length of a body that it does not send.
        return (content_length(length),) if status != 204 and (length or status != 304) else ()
    return (CHUNKED,) if head.minor_version and has_body(head.method, status) else ()


class BodyWriter:
    """Frames the body of an answer that comes in pieces.

    If its length is not known, it is chunked or, for HTTP/1.0, ends with the connection.
    """

    __slots__ = ("_chunked", "_owed")

    def __init__(self, head: RequestHead, length: int | None) -> None:
        self._chunked = length is None and head.minor_version > 0
        self._owed = length  # bytes of the announced length that have not been written

    def piece(self, chunk: Buffer) -> list[Buffer]:
        """Return what to write for the next piece. Raises ValueError beyond the announced length."""
        if self._owed is not None:
            self._owed -= len(chunk)
            if self._owed < 0:
                raise ValueError("more was written than the answer's announced length")
        return gather(chunk_of(chunk)) if self._chunked else [chunk]

    @property
    def is_complete(self) -> bool:
        """Whether the announced length was written, if one was announced."""
        return not self._owed

    def last(self) -> list[Buffer]:
        """Return what to write at the end."""
        return [LAST_CHUNK] if self._chunked else []
