"""Incoming bodies: read from the stream, decoded, and kept until they are complete."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from carpool_sidecar.http1.memory import Region
from carpool_sidecar.http1.parsing import FIELD_TEXT, IN_CHUNKS, TOKEN, HttpError

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Buffer

# 15 hexadecimal digits are an exabyte; more could overflow a server behind this proxy. Whitespace before an extension
# has to be accepted (RFC 9112, 7.1.1); extensions are not passed on.
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;" + FIELD_TEXT + rb")?")
_TRAILER = re.compile(TOKEN + rb":" + FIELD_TEXT)
_LONGEST_CHUNK_LINE = 1024
_LONGEST_TRAILERS = 8192
# Lines of the chunked coding read in one call: about a millisecond. One read of the socket can hold 40,000.
_LINES_AT_ONCE = 1024

LARGE = 4 * 1024 * 1024
"""Bytes beyond which a body is collected in a `Region`. For smaller ones a warm heap is twice as fast."""


class ChunkedDecoder:
    """Decodes a chunked body (RFC 9112, 7.1) without copying; chunk extensions and trailers are dropped.

    Strict: CR LF ends every line, a size is hexadecimal digits with an extension or nothing behind it, a trailer is a
    well-formed field line.
    """

    __slots__ = ("_line", "_remaining", "_trailers", "done")

    def __init__(self) -> None:
        self._line = b""  # the beginning of a line whose end has not come
        self._remaining = -2  # bytes of the chunk still to come with its CR LF; -2: a size comes next
        self._trailers = -1  # bytes of trailers read; -1: the last chunk has not come
        self.done = False

    def feed(self, data: bytes, position: int, pieces: list[Buffer]) -> int:
        """Decode data[position:]; return where reading stopped.

        It stops at the end of the data or of the body, or earlier: one call reads a limited number of chunks, so that
        a caller that sends tiny ones does not block the thread. Content is appended to `pieces` as views of the data.
        Raises HttpError (400).
        """
        end = len(data)
        view = memoryview(data)
        lines = 0
        while position < end:
            remaining = self._remaining
            if remaining > 0:
                # `remaining` counts the bytes of the chunk still to come, with the two of its CR LF.
                taken = min(remaining, end - position)
                content = min(taken, remaining - 2)
                if content > 0:
                    pieces.append(view[position : position + content])
                elif content < 0:
                    content = 0
                expected = b"\r\n"[2 - min(remaining, 2) : 2 - (remaining - taken)] if taken > content else b""
                if data[position + content : position + taken] != expected:
                    raise HttpError(400, "bad-chunk", "a chunk is not followed by CR LF")
                position += taken
                self._remaining = remaining - taken or -2
                continue

            lines += 1
            if lines > _LINES_AT_ONCE:
                break
            stop = data.find(b"\n", position)
            part = data[position : stop + 1] if stop >= 0 else data[position:]
            line = self._line + part
            position += len(part)
            if len(line) > _LONGEST_CHUNK_LINE:
                raise HttpError(400, "bad-chunk", f"a chunk's size line or trailer is over {_LONGEST_CHUNK_LINE} bytes")
            if stop < 0:
                self._line = line
                return position
            self._line = b""
            if line[-2:] != b"\r\n":
                raise HttpError(400, "bad-chunk", "a bare LF between chunks")
            line = line[:-2]
            if self._trailers < 0:
                match = _CHUNK_SIZE.fullmatch(line)
                if match is None:
                    raise HttpError(400, "bad-chunk", "a chunk's size is not a hexadecimal number")
                if size := int(match[1], 16):
                    self._remaining = size + 2
                else:
                    self._trailers = 0
            elif line:
                self._trailers += len(line)
                if self._trailers > _LONGEST_TRAILERS or not _TRAILER.fullmatch(line):
                    raise HttpError(400, "bad-chunk", f"a trailer is malformed or over {_LONGEST_TRAILERS} bytes")
            else:
                self.done = True
                return position
        return position


class BodyReader:
    """Reads one body from a connection's stream.

    `length` is the body's in bytes, `IN_CHUNKS` or `UNTIL_CLOSE`. `size` counts the bytes read so far with their
    framing; `complete` is set after the last. Of the kept pieces, `kept` counts bytes of content, `held` bytes of
    memory.
    """

    __slots__ = ("_decoder", "_parts", "_region", "_small", "_taken_from", "complete", "kept", "remaining", "size")

    # Pieces below this are collected in larger ones on arrival. Otherwise a body in chunks of one byte would hold an
    # object of over 100 bytes for each of them.
    _SMALL: ClassVar[int] = 4096

    def __init__(self, length: int) -> None:
        self._decoder = ChunkedDecoder() if length == IN_CHUNKS else None
        self._parts: list[Buffer] = []
        self._region: Region | None = None
        self.kept = 0
        self._small: bytearray | None = None  # the last of the parts, if it is a collected one
        self._taken_from = 0  # bytes of the data that was last read from
        self.remaining: int | None = length if length >= 0 else None
        """Bytes still to come; None if that is unknown."""
        self.complete = False
        self.size = 0

    def read(self, data: bytes, position: int, pieces: list[Buffer]) -> int:
        """Add the content in data[position:] to `pieces`; return where reading stopped.

        It stops where the body or the data end; one call reads only some of many tiny chunks (see `ChunkedDecoder`).
        Pieces are views of the data, with two exceptions: data that are all content are passed on unchanged, and a
        body that is complete at once is copied to bytes. Raises HttpError (400) if the chunked coding is malformed.
        """
        self._taken_from = len(data)
        if self._decoder is not None:
            stop = self._decoder.feed(data, position, pieces)
            self.complete = self._decoder.done
        else:
            stop = len(data)
            if self.remaining is not None:
                stop = min(stop, position + self.remaining)
                self.remaining -= stop - position
                self.complete = not self.remaining
            if stop - position == len(data):
                pieces.append(data)
            elif self.complete and not self.size:
                pieces.append(data[position:stop])
            elif stop > position:
                pieces.append(memoryview(data)[position:stop])
        self.size += stop - position
        return stop

    @property
    def held(self) -> int:
        """Bytes of memory that the kept pieces use."""
        return self.kept if self._region is None else self._region.held

    def keep(self, pieces: list[Buffer]) -> None:
        """Keep pieces that were just read until the body is complete.

        Of a small body only two kinds of pieces are copied: small ones, and views of data that also contain something
        else. Pieces of a large body are copied into one region on arrival. Raises OSError if memory is exhausted.
        """
        content = sum(map(len, pieces))
        self.kept += content
        if self._region is None and self.kept <= LARGE:
            # A view keeps all of its data in memory: a body of one byte could keep a read of 256 KiB. The memory in
            # use has to be the memory counted, so a view is only kept if nearly all of its data is content.
            dense = 16 * content >= 15 * self._taken_from
            for piece in pieces:
                if (len(piece) >= self._SMALL or not self._parts) and (dense or isinstance(piece, bytes)):
                    self._parts.append(piece)
                    self._small = None
                elif self._small is not None and len(self._small) < 16 * self._SMALL:
                    self._small += piece
                else:
                    self._small = bytearray(piece)
                    self._parts.append(self._small)
            return
        total = None if self.remaining is None else self.kept + self.remaining
        if self._region is None:
            self._region = Region(self.kept if total is None else min(2 * self.kept, total))
            pieces = [*self._parts, *pieces]
            self._parts = []
            self._small = None
        for piece in pieces:
            self._region.add(piece, total)

    def join(self) -> bytes | memoryview:
        """Return what was kept, and release it; if it came as one bytes object, return that object.

        A large body is a view of its region.
        """
        parts, region = self._parts, self._region
        self.drop()
        if region is not None:
            return region.finish()
        if len(parts) == 1:
            return bytes(parts[0])  # the same object if it is bytes already
        return b"".join(parts)

    def drop(self) -> None:
        """Release what was kept."""
        self._parts = []
        self._region = None
        self._small = None
