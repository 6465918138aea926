"""The upload of a file: written to disk piece by piece, at the disk's pace."""

from __future__ import annotations

import asyncio
import secrets
from time import time
from typing import TYPE_CHECKING

from carpool_sidecar.jobs.api.handling import Aside, no_room, respond
from carpool_sidecar.jobs.api.multipart import Form, FormError, Part
from carpool_sidecar.jobs.api.shapes import shown_file
from carpool_sidecar.jobs.records import Refused
from carpool_sidecar.jobs.storage.files import PIECE

if TYPE_CHECKING:
    from typing import Any

    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.jobs.api.handling import Handling
    from carpool_sidecar.jobs.desk import Desk
    from carpool_sidecar.jobs.records import File
    from carpool_sidecar.jobs.storage.files import Files
    from carpool_sidecar.jobs.storage.writer import Writer

AHEAD = 8
"""Pieces that may wait for the disk before the client is paused."""

LONGEST_FIELD = 1024
"""Most bytes of a field that is no file."""


class Upload(Aside):
    """The sink of one upload, and its exchange's context."""

    def __init__(self, desk: Desk, exchange: Exchange, handling: Handling, kind: bytes, owner: bytes | None) -> None:
        """Begin an upload; raises ``Refused`` if the request is no form, or there is no room."""
        try:
            self._form = Form(kind)
        except FormError as error:
            raise _wrong(str(error)) from None
        self._exchange, self._handling, self._owner = exchange, handling, owner
        self._fields: dict[str, bytes] = {}
        self._part: Part | None = None
        self._content = Content()
        self._file = Saving(desk.files, desk.writer)
        self._waiting = 0
        """Pieces that wait for the disk."""
        self._over = False
        self._failure: Refused | None = None

    # Called by the server

    def data(self, chunk: bytes) -> None:
        """Take the next bytes."""
        if self._over:
            return
        try:
            for event in self._form.feed(chunk):
                self._take(event)
        except FormError as error:
            self._refuse(_wrong(str(error)))
        except Refused as refused:
            self._refuse(refused)

    def end(self) -> None:
        """Complete the file."""
        if self._over:
            return
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if not self._form.complete or not self._file.begun:
            self._refuse(_wrong("the form has no file, or is not complete: send the fields purpose and file"))
        elif purpose != "batch":
            self._refuse(_wrong(f"purpose {purpose!r}: only batch is served"))
        else:
            if rest := self._content.rest():
                self._write(rest)
            self._over = True
            self._file.complete(self._content.size, self._content.lines).add_done_callback(self._completed)

    def aborted(self) -> None:
        """Drop what was received: the rest will not come."""
        self._drop()

    # Called by the application

    def request(self) -> None:
        """Never called: nothing is buffered."""

    def cancel(self) -> None:
        """Drop the upload: the client is gone."""
        self._drop()

    # Inside

    def _take(self, event: Part | bytes) -> None:
        if isinstance(event, Part):
            self._part = event
            if event.file is not None and event.name == "file":
                if self._file.begun:
                    raise _wrong("the form has two files")
                begun = self._file.begin(event.file[:256], self._owner, max(0, self._exchange.length))
                begun.add_done_callback(self._stored)
            return
        assert self._part is not None  # noqa: S101 - for the type checker: bytes belong to a part
        if self._part.name == "file" and self._part.file is not None:
            if not self._exchange.charge(len(event)):
                raise no_room("a file")
            for piece in self._content.add(event):
                self._write(piece)
            return
        value = self._fields.get(self._part.name, b"") + event
        if len(value) > LONGEST_FIELD:
            raise _wrong(f"field {self._part.name[:40]!r} is over {LONGEST_FIELD} bytes, which is too long")
        self._fields[self._part.name] = value

    def _write(self, piece: bytes) -> None:
        self._waiting += 1
        if self._waiting >= AHEAD:
            self._exchange.pause_reading()
        size = len(piece)
        self._file.add(piece).add_done_callback(lambda done: self._written(done, size))

    def _written(self, done: asyncio.Future[Any], size: int) -> None:
        self._exchange.refund(size)
        self._waiting -= 1
        if self._waiting < AHEAD and not self._over:
            self._exchange.resume_reading()
        self._stored(done)

    def _stored(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._failure = self._failure or (error if isinstance(error, Refused) else _broken())
            self._refuse(self._failure)

    def _completed(self, done: asyncio.Future[Any]) -> None:
        self._stored(done)
        if self._failure is not None:
            # All earlier pieces have been stored or have failed; the first failure says why.
            self._over = False
            self._refuse(self._failure)
        else:
            respond(self._exchange, 200, shown_file(done.result()))

    def _refuse(self, refused: Refused) -> None:
        if not self._over:
            self._drop()
            self._handling.refuse(refused)

    def _drop(self) -> None:
        if self._over:
            return
        self._over = True
        if self._file.begun:
            # If the disk fails here too, the next start deletes it.
            self._file.drop().add_done_callback(asyncio.Future.exception)


class Saving:
    """A file that is being saved: each method hands work to the writer's thread, and returns its future."""

    def __init__(self, files: Files, writer: Writer) -> None:
        self.begun = False
        self._files, self._writer = files, writer
        self._id = f"file-{secrets.token_hex(16)}"
        self._pieces = 0

    def begin(self, name: str, owner: bytes | None, size: int) -> asyncio.Future[None]:
        """Reserve room for about ``size`` bytes."""
        self.begun = True
        return self._writer.do(lambda: self._files.begin(self._id, name, owner, size, time()))

    def add(self, piece: bytes) -> asyncio.Future[None]:
        """Store the next piece."""
        number = self._pieces
        self._pieces += 1
        return self._writer.do(lambda: self._files.add(self._id, number, piece))

    def complete(self, size: int, lines: int) -> asyncio.Future[File]:
        """Complete the file: ``size`` bytes in so many lines."""
        return self._writer.do(lambda: self._files.complete(self._id, size, lines))

    def drop(self) -> asyncio.Future[None]:
        """Delete what was stored."""
        return self._writer.do(lambda: self._files.drop(self._id))


class Content:
    """A file's content, cut into pieces of one size."""

    def __init__(self) -> None:
        self.size = 0
        self.lines = 0
        self._parts: list[bytes] = []
        self._held = 0
        self._open = False
        """Whether the last line has no end yet."""

    def add(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the pieces that are full."""
        self.size += len(data)
        self.lines += data.count(b"\n")
        self._open = not data.endswith(b"\n")
        self._parts.append(data)
        self._held += len(data)
        if self._held < PIECE:
            return []
        whole = b"".join(self._parts)
        full = len(whole) // PIECE * PIECE
        self._parts, self._held = [whole[full:]], len(whole) - full
        return [whole[at : at + PIECE] for at in range(0, full, PIECE)]

    def rest(self) -> bytes:
        """Return the last piece, and count a last line without an end."""
        self.lines += self._open
        return b"".join(self._parts)


def _wrong(text: str) -> Refused:
    return Refused(400, "jobs-malformed", text)


def _broken() -> Refused:
    return Refused(503, "jobs-store", "jobs.path can't be written; the sidecar's log says why")
