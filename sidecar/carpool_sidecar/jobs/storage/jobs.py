"""Jobs on disk: every method is work for the writer's thread, inside its transaction."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_sidecar.http1.memory import Region
from carpool_sidecar.jobs.records import ANY, Answer, Call, Job, Outcome, Refused, Rest, State, Task, path_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.config.settings import Jobs
    from carpool_sidecar.jobs.storage.database import Database

OVERHEAD = 512
"""Bytes counted for a job in addition to its body and its answer."""

MOST_ATTEMPTS = 3
"""Times that a request may reach the model, if no answer comes back."""

MOST_INTERRUPTED = 5
"""Times that it may be running when the process ends: a job that crashes the process must not do so forever."""

PURGED = 2000
"""Rows that one sweep deletes at most: some 20 ms."""

READ = 1 << 20
"""Bytes of an answer that are read at once."""

_OPEN = (State.QUEUED, State.RUNNING)
_COLUMNS = "id, state, method, target, created, expires, started, ended, attempts, rerun, status, reason"

_headers = msgspec.json.Decoder(list[tuple[str, str]])


class Cancelled(NamedTuple):
    """A job after a cancellation. ``running``: its number, if it was under way; ``forgotten``: it had ended before."""

    job: Job
    running: int | None
    forgotten: bool


class JobStore:
    """The jobs. ``now`` is in seconds since 1970."""

    def __init__(self, database: Database, settings: Jobs) -> None:
        self._run = database.connection.execute
        self._blob = database.connection.blobopen
        self._key = database.key
        self._settings = settings
        self.totals: dict[str, int] = {}
        """Bytes, jobs by state, and lines of batches without a result; as of the last transaction."""
        self.count()

    def count(self) -> None:
        """Read the totals."""
        lines = "SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE stage = 'in_progress'"
        self.totals = dict(self._run(f"SELECT name, value FROM totals UNION ALL SELECT 'lines', ({lines})").fetchall())  # noqa: S608 - our own text

    def owner(self, authorization: bytes | None) -> bytes | None:
        """Return the stored form of a credential: a hash that can't be compared without the file's key."""
        if not authorization:
            return None
        return hmac.digest(self._key, authorization, hashlib.sha256)

    def check_room(self, size: int, what: str) -> None:
        """Refuse a request that there is no room for."""
        most = int(self._settings.max_bytes)
        if size > most:
            raise Refused(413, "jobs-too-large", f"{what} of {size} bytes never fits: raise jobs.maxBytes ({most})")
        used = self._total("bytes")
        if used + size > most:
            text = f"{used} of {most} bytes are used: delete what is not needed any more, or raise jobs.maxBytes"
            raise Refused(429, "jobs-full", text)

    def check_number(self) -> None:
        """Refuse one job, or batch, too many."""
        most = self._settings.max_jobs
        batches = self._run("SELECT count(*) FROM batches WHERE stage IN ('in_progress', 'cancelling')").fetchone()[0]
        if self._total(State.QUEUED) + self._total(State.RUNNING) + batches >= most:
            raise Refused(429, "jobs-full", f"{most} jobs are not finished yet: try again later, or raise jobs.maxJobs")

    def submit(self, call: Call, owner: bytes | None, now: float) -> Job:
        """Accept a job; raises ``Refused``."""
        self.check_number()
        headers = msgspec.json.encode(call.headers)
        size = OVERHEAD + len(call.target) + len(headers) + len(call.body)
        self.check_room(size, "a job")
        expires = now + float(self._settings.finish_within)
        job = Job(f"job_{secrets.token_hex(16)}", State.QUEUED, call.method, call.target, now, expires)
        sequence = self._run(
            "INSERT INTO jobs(id, owner, state, method, target, headers, created, expires, size)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (job.id, owner, job.state, job.method, job.target, headers, now, expires, size),
        ).lastrowid
        self._run("INSERT INTO bodies VALUES (?, ?)", (sequence, call.body))
        return job

    def get(self, identity: str) -> Job:
        """Return a job; raises ``Refused`` where there is none."""
        row = self._run(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (identity,)).fetchone()  # noqa: S608 - our own names
        if row is None:
            raise _unknown(identity)
        return _job(row)

    def listed(self, owner: bytes, after: str | None, limit: int) -> tuple[list[Job], bool]:
        """Return an owner's jobs, newest first, following the one named ``after``; and whether there are more."""
        before = 2**62
        if after is not None:
            row = self._run("SELECT seq FROM jobs WHERE id = ? AND owner = ?", (after, owner)).fetchone()
            if row is None:
                raise _unknown(after)
            before = row[0]
        rows = self._run(
            f"SELECT {_COLUMNS} FROM jobs WHERE owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?",  # noqa: S608 - likewise
            (owner, before, limit + 1),
        ).fetchall()
        return [_job(row) for row in rows[:limit]], len(rows) > limit

    def answer_size(self, identity: str) -> int:
        """Return the bytes of the body that ``answer`` reads."""
        row = self._run(
            "SELECT length(data) FROM answers WHERE seq = (SELECT seq FROM jobs WHERE id = ?)", (identity,)
        ).fetchone()
        return 0 if row is None else row[0]

    def answer(self, identity: str) -> tuple[Job, Answer | None]:
        """Return a job and the model's answer, if there is one; its body is a view of a ``Region``."""
        job = self.get(identity)
        row = self._run(
            "SELECT headers, seq FROM answers WHERE seq = (SELECT seq FROM jobs WHERE id = ?)", (identity,)
        ).fetchone()
        if row is None or job.status is None:
            return job, None
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in _headers.decode(row[0])]
        return job, Answer(job.status, pairs, self._body(row[1]))

    def cancel(self, identity: str, now: float) -> Cancelled:
        """Cancel a job, or delete one that has ended."""
        job = self.get(identity)
        sequence: int = self._run("SELECT seq FROM jobs WHERE id = ?", (identity,)).fetchone()[0]
        if job.state not in _OPEN:
            self._delete(sequence)
            return Cancelled(job, None, forgotten=True)
        self._end(sequence, State.CANCELLED, "cancelled", now)
        return Cancelled(self.get(identity), sequence if job.state is State.RUNNING else None, forgotten=False)

    def claim(self, most: int, now: float, rest: Rest = ANY) -> list[Task]:
        """Mark the next jobs as running and return them; they are sent once that is on disk.

        Jobs of one path are taken in order. Some that could be taken may be left for the next claim.
        """
        rows = self._run(
            "SELECT seq, method, target, headers, expires FROM jobs WHERE state = 'queued'"
            " AND substr(target, 1, instr(target || '?', '?') - 1) NOT IN (SELECT value FROM json_each(?))"
            " ORDER BY seq LIMIT ?",
            (msgspec.json.encode(rest.closed).decode(), most),
        ).fetchall()
        tasks = []
        for sequence, method, target, headers, expires in rows:
            if expires <= now:
                self._end(sequence, State.FAILED, "expired", now)
                continue
            path = path_of(target)
            if not rest.of(path):
                continue
            rest.take(path)
            self._run(
                "UPDATE jobs SET state = 'running', started = ?, attempts = attempts + 1 WHERE seq = ?", (now, sequence)
            )
            body = self._run("SELECT data FROM bodies WHERE seq = ?", (sequence,)).fetchone()[0]
            tasks.append(Task(sequence, Call(method, target, _headers.decode(headers), body), expires))
        return tasks

    def finish(self, outcome: Outcome, now: float) -> None:
        """Store the outcome of a job; one that was cancelled meanwhile stays cancelled."""
        row = self._run("SELECT state, expires, attempts FROM jobs WHERE seq = ?", (outcome.of,)).fetchone()
        if row is None or row[0] != State.RUNNING:
            return
        expired = row[1] <= now
        if outcome.again and not expired and (row[2] < MOST_ATTEMPTS or not outcome.reached):
            if outcome.reached:
                self._run("UPDATE jobs SET state = 'queued', rerun = 1 WHERE seq = ?", (outcome.of,))
            else:
                self._run("UPDATE jobs SET state = 'queued', attempts = attempts - 1 WHERE seq = ?", (outcome.of,))
            return
        answer = outcome.answer
        if answer is not None:
            pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
            headers = msgspec.json.encode(pairs)
            self._run("INSERT INTO answers VALUES (?, ?, ?)", (outcome.of, headers, answer.body))
            self._run(
                "UPDATE jobs SET status = ?, size = size + ? WHERE seq = ?",
                (answer.status, len(headers) + len(answer.body), outcome.of),
            )
        good = answer is not None and 200 <= answer.status < 300
        reason = None if good else ("expired" if outcome.again and expired else outcome.reason)
        self._end(outcome.of, State.DONE if good else State.FAILED, reason, now)

    def recover(self, now: float, *, idempotent: bool) -> int:
        """Recover jobs that were running when the process ended: the model may or may not have computed them."""
        running = self._run("SELECT seq, attempts FROM jobs WHERE state = 'running'").fetchall()
        for sequence, attempts in running:
            if idempotent and attempts < MOST_INTERRUPTED:
                self._run("UPDATE jobs SET state = 'queued', rerun = 1 WHERE seq = ?", (sequence,))
            else:
                self._end(sequence, State.FAILED, "interrupted", now)
        return len(running)

    def sweep(self, now: float) -> bool:
        """Delete what was kept long enough, and end what has expired; return whether there is more to do."""
        keep = now - float(self._settings.keep_for)
        old = self._run("SELECT seq FROM jobs WHERE ended <= ? LIMIT ?", (keep, PURGED)).fetchall()
        for (sequence,) in old:
            self._delete(sequence)
        late = self._run(
            "SELECT seq FROM jobs WHERE state = 'queued' AND expires <= ? LIMIT ?", (now, PURGED)
        ).fetchall()
        for (sequence,) in late:
            self._end(sequence, State.FAILED, "expired", now)
        return PURGED in {len(old), len(late)}

    def _body(self, sequence: int) -> bytes | memoryview:
        with self._blob("answers", "data", sequence, readonly=True) as blob:
            size = len(blob)
            if not size:
                return b""
            region = Region(size)
            while piece := blob.read(READ):
                region.add(piece, size)
            return region.finish()

    def _end(self, sequence: int | object, state: State, reason: str | None, now: float) -> None:
        """End a job: its request is not needed any more."""
        size = self._run("SELECT length(data) FROM bodies WHERE seq = ?", (sequence,)).fetchone()
        self._run("DELETE FROM bodies WHERE seq = ?", (sequence,))
        self._run(
            "UPDATE jobs SET state = ?, reason = ?, ended = ?, size = size - ? WHERE seq = ?",
            (state, reason, now, 0 if size is None else size[0], sequence),
        )

    def _delete(self, sequence: int) -> None:
        for table in ("bodies", "answers", "jobs"):
            self._run(f"DELETE FROM {table} WHERE seq = ?", (sequence,))  # noqa: S608 - our own names

    def _total(self, name: str) -> int:
        value: int = self._run("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()[0]
        return value


def _job(row: Sequence[object]) -> Job:
    return msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), Job, strict=False)


def _unknown(identity: str) -> Refused:
    return Refused(404, "jobs-unknown", f"there is no job {identity!r}: it was never here, or jobs.keepFor is over")
