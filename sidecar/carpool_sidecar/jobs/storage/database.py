"""The file on disk: one SQLite database, its tables, and its lock.

Every acknowledgement is sent after its transaction has reached the disk (WAL, ``synchronous=FULL``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
from pathlib import Path

VERSION = 1
"""Of the tables."""

_APPLICATION = 0x43504A31

_BEGIN = b"SQLite format 3\0"
"""How every file of SQLite begins."""

_WRITABLE = "name a file in a directory that can be written"
_ANOTHER = "name another file, or mend or remove this one"
"""What to do."""

SHIFT = 32
"""A row of a batch or file is at ``its number << SHIFT | number of the row``: in order, and found by one key."""

_TABLES = """
CREATE TABLE secret(key BLOB NOT NULL);
CREATE TABLE totals(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB, state TEXT NOT NULL,
  method TEXT NOT NULL, target TEXT NOT NULL, headers BLOB NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  started REAL, ended REAL, attempts INTEGER NOT NULL DEFAULT 0, rerun INTEGER NOT NULL DEFAULT 0,
  status INTEGER, reason TEXT, size INTEGER NOT NULL);
CREATE INDEX jobs_by_state ON jobs(state, seq);
CREATE INDEX jobs_by_owner ON jobs(owner, seq) WHERE owner IS NOT NULL;
CREATE INDEX jobs_by_end ON jobs(ended) WHERE ended IS NOT NULL;
CREATE TABLE bodies(seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE answers(seq INTEGER PRIMARY KEY, headers BLOB NOT NULL, data BLOB NOT NULL);
CREATE TABLE files(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB, state TEXT NOT NULL,
  name TEXT NOT NULL, purpose TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL,
  lines INTEGER NOT NULL, batch INTEGER, failed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE pieces(place INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE batches(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB, stage TEXT NOT NULL,
  endpoint TEXT NOT NULL, window TEXT NOT NULL, file INTEGER NOT NULL, file_id TEXT NOT NULL, metadata BLOB NOT NULL,
  created REAL NOT NULL, expires REAL NOT NULL, started REAL, cancelling REAL, ended REAL,
  total INTEGER NOT NULL, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
  position INTEGER NOT NULL DEFAULT 0, number INTEGER NOT NULL DEFAULT 0,
  output TEXT, errors TEXT, output_size INTEGER NOT NULL DEFAULT 0, errors_size INTEGER NOT NULL DEFAULT 0);
CREATE INDEX batches_by_stage ON batches(stage, seq);
CREATE TABLE lines(
  place INTEGER PRIMARY KEY, position INTEGER NOT NULL, length INTEGER NOT NULL,
  attempts INTEGER NOT NULL, rerun INTEGER NOT NULL, running INTEGER NOT NULL);
CREATE TABLE results(place INTEGER PRIMARY KEY, failed INTEGER NOT NULL, data BLOB NOT NULL);
INSERT INTO totals VALUES ('bytes', 0), ('queued', 0), ('running', 0), ('done', 0), ('failed', 0), ('cancelled', 0);
CREATE TRIGGER job_in AFTER INSERT ON jobs BEGIN
  UPDATE totals SET value = value + new.size WHERE name = 'bytes';
  UPDATE totals SET value = value + 1 WHERE name = new.state; END;
CREATE TRIGGER job_moves AFTER UPDATE OF state, size ON jobs BEGIN
  UPDATE totals SET value = value + new.size - old.size WHERE name = 'bytes';
  UPDATE totals SET value = value - 1 WHERE name = old.state;
  UPDATE totals SET value = value + 1 WHERE name = new.state; END;
CREATE TRIGGER job_out AFTER DELETE ON jobs BEGIN
  UPDATE totals SET value = value - old.size WHERE name = 'bytes';
  UPDATE totals SET value = value - 1 WHERE name = old.state; END;
CREATE TRIGGER piece_in AFTER INSERT ON pieces BEGIN
  UPDATE totals SET value = value + length(new.data) WHERE name = 'bytes'; END;
CREATE TRIGGER piece_out AFTER DELETE ON pieces BEGIN
  UPDATE totals SET value = value - length(old.data) WHERE name = 'bytes'; END;
CREATE TRIGGER result_in AFTER INSERT ON results BEGIN
  UPDATE totals SET value = value + length(new.data) WHERE name = 'bytes'; END;
CREATE TRIGGER result_out AFTER DELETE ON results BEGIN
  UPDATE totals SET value = value - length(old.data) WHERE name = 'bytes'; END;
"""


class UnusableError(OSError):
    """The file can't be used; the message says why and what to do."""


def unusable(path: str) -> str:
    """Return why the file can't be opened or created, and what to do; "": nothing is wrong, as far as a look shows.

    Nothing is created, and a file in use is no problem: a sidecar with the same configuration may run. Missing folders
    are none either: a start creates them.
    """
    file, begin = Path(path), b""
    try:
        if not file.exists():
            folder = next(each for each in file.absolute().parents if each.exists())
            if not folder.is_dir():
                return f"{path}: {folder}: {os.strerror(errno.ENOTDIR)}: {_WRITABLE}"
            return "" if os.access(folder, os.W_OK | os.X_OK) else f"{path}: {os.strerror(errno.EACCES)}: {_WRITABLE}"
        if file.is_dir():
            return f"{path}: {os.strerror(errno.EISDIR)}: name a file in it"
        if file.is_file():
            with file.open("r+b") as stream:
                begin = stream.read(len(_BEGIN))
    except OSError as error:
        return f"{path}: {error.strerror}: {_ANOTHER}"
    return f"{path}: file is not a database: {_ANOTHER}" if begin not in {b"", _BEGIN} else ""


class Database:
    """The open file. ``key`` is its secret, for hashes that others can't make."""

    def __init__(self, path: str) -> None:
        """Open or create the file; raises ``UnusableError``."""
        if why := unusable(path):
            raise UnusableError(f"jobs.path: {why}")
        self._lock = _locked(path)
        try:
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._prepare()
        except sqlite3.Error as error:
            raise UnusableError(f"jobs.path: {path}: {error}: {_ANOTHER}") from None
        self.key: bytes = self.connection.execute("SELECT key FROM secret").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
        os.close(self._lock)

    def _prepare(self) -> None:
        run = self.connection.execute
        version, application = run("PRAGMA user_version").fetchone()[0], run("PRAGMA application_id").fetchone()[0]
        tables = run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and application != _APPLICATION:
            raise sqlite3.DatabaseError("a database, but not one of carpool's")
        if version > VERSION:
            raise sqlite3.DatabaseError(f"written by a newer carpool (version {version})")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("PRAGMA foreign_keys=OFF")
        run("PRAGMA cache_size=-8192")  # 8 MiB
        run("PRAGMA temp_store=MEMORY")
        run("PRAGMA journal_size_limit=67108864")
        if not tables:
            # One transaction: a process that is killed here leaves an empty file.
            self.connection.executescript(
                f"BEGIN;{_TABLES}INSERT INTO secret VALUES (x'{secrets.token_hex(32)}');"  # noqa: S608 - our own text
                f"PRAGMA application_id={_APPLICATION};PRAGMA user_version={VERSION};COMMIT;"
            )


def _locked(path: str) -> int:
    """Take the lock beside the file, so that no two sidecars run the same jobs."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Of the file itself, even if it was opened by a link.
        lock = os.open(f"{os.path.realpath(path)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnusableError(f"jobs.path: {path}: {error.strerror}: {_WRITABLE}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UnusableError(f"jobs.path: {path} is in use by another sidecar: give each its own file") from None
    # Requests and answers are private: only the file's owner may read it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return lock
