"""Files on disk, in pieces: those that were uploaded, and the results of batches."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_sidecar.jobs.records import File, Refused
from carpool_sidecar.jobs.storage.database import SHIFT
from carpool_sidecar.jobs.storage.jobs import PURGED

if TYPE_CHECKING:
    from carpool_sidecar.config.settings import Jobs
    from carpool_sidecar.jobs.storage.database import Database
    from carpool_sidecar.jobs.storage.jobs import JobStore

PIECE = 256 * 1024
"""Bytes of a file in one row."""

_FILE = "id, seq, name, purpose, created, expires, size, lines, batch, failed"


class Mark(NamedTuple):
    """Where to go on in a file: at its piece, or its line, of this number; ``at``: bytes of the line that were read."""

    number: int = 0
    at: int = 0


class Files:
    """The files. All methods are work for the writer's thread."""

    def __init__(self, database: Database, store: JobStore, settings: Jobs) -> None:
        self._run = database.connection.execute
        self._blob = database.connection.blobopen
        self._store = store
        self._settings = settings
        self._piece: tuple[int, bytes] = (-1, b"")
        """The piece read last: its place and its content."""

    def begin(self, identity: str, name: str, owner: bytes | None, size: int, now: float) -> None:
        """Reserve room for a file of about ``size`` bytes. It exists from ``complete`` on."""
        self._store.check_room(size, "a file")
        self._run(
            "INSERT INTO files(id, owner, state, name, purpose, created, expires, size, lines)"
            " VALUES (?, ?, 'uploading', ?, 'batch', ?, ?, 0, 0)",
            (identity, owner, name, now, now + float(self._settings.keep_for)),
        )

    def add(self, identity: str, number: int, data: bytes) -> None:
        """Store the next piece of a file: ``PIECE`` bytes, except for the last."""
        self._store.check_room(len(data), "a file")
        added = self._run(
            "INSERT INTO pieces SELECT (seq << ?) | ?, ? FROM files WHERE id = ? AND state = 'uploading'",
            (SHIFT, number, data, identity),
        )
        if not added.rowcount:
            raise unknown("file", identity)

    def complete(self, identity: str, size: int, count: int) -> File:
        """Mark a file as complete, with so many lines."""
        # If a piece was refused there is no such file.
        self._run(
            "UPDATE files SET state = 'ready', size = :size, lines = :count WHERE id = :id AND :size ="
            " (SELECT coalesce(sum(length(data)), 0) FROM pieces WHERE place >= seq << :shift"
            " AND place < (seq + 1) << :shift)",
            {"id": identity, "size": size, "count": count, "shift": SHIFT},
        )
        return self.get(identity)

    def drop(self, identity: str) -> None:
        """Delete a file; the next sweeps delete its pieces."""
        self._run("UPDATE files SET state = 'gone' WHERE id = ?", (identity,))

    def get(self, identity: str) -> File:
        """Return a file; raises ``Refused`` where there is none."""
        found = self._found("id = ? AND state = 'ready'", identity)
        if not found:
            raise unknown("file", identity)
        return found[0]

    def delete(self, identity: str) -> None:
        """Delete a file that no batch reads."""
        file = self.get(identity)
        busy = self._run(
            "SELECT id FROM batches WHERE file = ? AND stage IN ('in_progress', 'cancelling')", (file.seq,)
        ).fetchone()
        if busy is not None:
            raise Refused(409, "jobs-in-use", f"batch {busy[0]} reads this file: cancel it first")
        self.drop(identity)

    def listed(self, owner: bytes, after: str | None, limit: int) -> tuple[list[File], bool]:
        """Return an owner's files, newest first; and whether there are more."""
        before = 2**62 if after is None else self.get(after).seq
        found = self._found(
            "owner = ? AND state = 'ready' AND seq < ? ORDER BY seq DESC LIMIT ?", owner, before, limit + 1
        )
        return found[:limit], len(found) > limit

    def piece(self, file: File, mark: Mark) -> tuple[bytes, Mark | None]:
        """Return the next bytes of a file, less than two pieces, and the next mark; None: the end."""
        if file.batch is None:
            row = self._run("SELECT data FROM pieces WHERE place = ?", (file.seq << SHIFT | mark.number,)).fetchone()
            return (b"", None) if row is None else (row[0], Mark(mark.number + 1))
        parts: list[bytes] = []
        size = 0
        for place, data in self._run(
            "SELECT place, CASE WHEN length(data) <= ? THEN data END FROM results"
            " WHERE place >= ? AND place < ? AND failed = ? ORDER BY place",
            (PIECE, file.batch << SHIFT | mark.number, file.batch + 1 << SHIFT, file.failed),
        ):
            number = place & (1 << SHIFT) - 1
            if data is None:
                return (b"".join(parts), Mark(number)) if parts else self._part(place, Mark(number, mark.at))
            parts.append(data)
            size += len(data)
            if size >= PIECE:
                return b"".join(parts), Mark(number + 1)
        return b"".join(parts), None

    # Lines of an uploaded file, by its number

    def length(self, file: int, position: int) -> int:
        """Return the bytes of the line that begins here, its end included; 0 at the end of the file."""
        length, at = 0, position
        while piece := self._read(file, at // PIECE):
            begin = at % PIECE
            end = piece.find(b"\n", begin)
            if end >= 0:
                return length + end + 1 - begin
            length += len(piece) - begin
            if len(piece) < PIECE:
                break
            at = (at // PIECE + 1) * PIECE
        return length

    def line(self, file: int, position: int, length: int) -> bytes:
        """Return a line."""
        parts = []
        while length > 0 and (piece := self._read(file, position // PIECE)):
            part = piece[position % PIECE : position % PIECE + length]
            if not part:
                break
            parts.append(part)
            position, length = position + len(part), length - len(part)
        return b"".join(parts)

    def has_more(self, file: int, position: int) -> bool:
        """Whether a file has bytes from this position on."""
        return bool(self._read(file, position // PIECE)[position % PIECE :])

    # Results

    def write(
        self, name: str, batch: int, owner: bytes | None, size: int, lines: int, now: float, *, failed: bool
    ) -> str:
        """Make a file of a batch's answers, or of its errors (``failed``); return its id."""
        identity = f"file-{secrets.token_hex(16)}"
        self._run(
            "INSERT INTO files(id, owner, state, name, purpose, created, expires, size, lines, batch, failed)"
            " VALUES (?, ?, 'ready', ?, 'batch_output', ?, ?, ?, ?, ?, ?)",
            (identity, owner, name, now, now + float(self._settings.keep_for), size, lines, batch, failed),
        )
        return identity

    def recover(self) -> None:
        """Delete incomplete uploads: the process that took them has ended."""
        self._run("UPDATE files SET state = 'gone' WHERE state = 'uploading'")

    def sweep(self, now: float) -> bool:
        """Delete what was kept long enough; return whether there is more to do."""
        self._run(
            "UPDATE files SET state = 'gone' WHERE batch IN (SELECT seq FROM batches WHERE ended <= ?)"
            " OR (expires <= ? AND batch IS NULL AND state = 'ready' AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE file = files.seq AND stage IN ('in_progress', 'cancelling')))",
            (now - float(self._settings.keep_for), now),
        )
        more = False
        for file, batch, failed in self._run("SELECT seq, batch, failed FROM files WHERE state = 'gone'").fetchall():
            if self._purge(file, batch, failed):
                more = True
            else:
                self._run("DELETE FROM files WHERE seq = ?", (file,))
        return more

    def _part(self, place: int, mark: Mark) -> tuple[bytes, Mark]:
        """Return the next piece of a long result."""
        with self._blob("results", "data", place, readonly=True) as blob:
            blob.seek(mark.at)
            data, whole = blob.read(PIECE), len(blob)
        at = mark.at + len(data)
        return data, Mark(mark.number, at) if at < whole else Mark(mark.number + 1)

    def _read(self, file: int, number: int) -> bytes:
        place = file << SHIFT | number
        if self._piece[0] != place:
            row = self._run("SELECT data FROM pieces WHERE place = ?", (place,)).fetchone()
            self._piece = (place, b"" if row is None else row[0])
        return self._piece[1]

    def _purge(self, file: int, batch: int | None, failed: int) -> bool:
        """Delete some of a file's bytes; return whether there were any."""
        if batch is None:
            table, owner, most, which = "pieces", file, 64, ""
        else:
            table, owner, most, which = "results", batch, PURGED, f" AND failed = {failed:d}"
        places = f"SELECT place FROM {table} WHERE place >= ? AND place < ?{which} LIMIT ?"  # noqa: S608 - our own names
        within = (owner << SHIFT, owner + 1 << SHIFT, most)
        return self._run(f"DELETE FROM {table} WHERE place IN ({places})", within).rowcount > 0  # noqa: S608 - likewise

    def _found(self, condition: str, *values: object) -> list[File]:
        rows = self._run(f"SELECT {_FILE} FROM files WHERE {condition}", values).fetchall()  # noqa: S608 - our own text
        return [msgspec.convert(dict(zip(_FILE.split(", "), row, strict=True)), File, strict=False) for row in rows]


def unknown(what: str, identity: str) -> Refused:
    """Return the refusal of a file or batch that is not here."""
    return Refused(404, "jobs-unknown", f"there is no {what} {identity!r}: it was never here, or jobs.keepFor is over")
