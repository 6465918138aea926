"""Batches on disk: lines and results one by one; nothing is held in memory as a whole."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.jobs.records import ANY, Batch, Call, Outcome, Place, Refused, Rest, Stage, Task, path_of
from carpool_sidecar.jobs.storage import lines
from carpool_sidecar.jobs.storage.database import SHIFT
from carpool_sidecar.jobs.storage.files import unknown
from carpool_sidecar.jobs.storage.jobs import MOST_ATTEMPTS, MOST_INTERRUPTED

if TYPE_CHECKING:
    from carpool_sidecar.config.settings import Jobs
    from carpool_sidecar.jobs.storage.database import Database
    from carpool_sidecar.jobs.storage.files import Files
    from carpool_sidecar.jobs.storage.jobs import JobStore

READ = 1000
"""Most lines that are read for one claim, if many can't be sent: some 10 ms."""

_BATCH = (
    "id, seq, stage, endpoint, window, file_id, created, expires, total, completed, failed, started, cancelling, ended,"
    " output, errors, metadata"
)
_JSON = [("content-type", "application/json")]


class Batches:
    """The batches. All methods are work for the writer's thread."""

    def __init__(self, database: Database, store: JobStore, files: Files, settings: Jobs) -> None:
        self._run = database.connection.execute
        self._store = store
        self._files = files
        self._settings = settings

    def create(
        self, file_id: str, endpoint: str, window: str, seconds: float, metadata: bytes, owner: bytes | None, now: float
    ) -> Batch:
        """Accept a batch; raises ``Refused``."""
        self._store.check_number()
        file = self._files.get(file_id)
        if file.batch is not None or not file.lines:
            raise Refused(400, "jobs-input", f"{file_id} has no requests: upload JSON lines with purpose batch")
        identity = f"batch_{secrets.token_hex(16)}"
        self._run(
            "INSERT INTO batches(id, owner, stage, endpoint, window, file, file_id, metadata, created, expires, total)"
            " VALUES (?, ?, 'in_progress', ?, ?, ?, ?, ?, ?, ?, ?)",
            (identity, owner, endpoint, window, file.seq, file_id, metadata, now, now + seconds, file.lines),
        )
        return self.get(identity)

    def get(self, identity: str) -> Batch:
        """Return a batch; raises ``Refused`` where there is none."""
        found = self._batches("id = ?", identity)
        if not found:
            raise unknown("batch", identity)
        return found[0]

    def listed(self, owner: bytes, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return an owner's batches, newest first; and whether there are more."""
        before = 2**62 if after is None else self.get(after).seq
        found = self._batches("owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?", owner, before, limit + 1)
        return found[:limit], len(found) > limit

    def cancel(self, identity: str, now: float) -> Batch:
        """Start no more lines of a batch; it is cancelled once those under way have their answers."""
        batch = self.get(identity)
        if batch.stage is not Stage.IN_PROGRESS:
            raise Refused(409, "jobs-ended", f"the batch is {batch.stage}: it can't be cancelled any more")
        self._run("UPDATE batches SET stage = 'cancelling', cancelling = ? WHERE seq = ?", (now, batch.seq))
        self._settle(batch.seq, now)
        return self.get(identity)

    # Lines

    def claim(self, most: int, now: float, rest: Rest = ANY) -> list[Task]:
        """Mark the next lines as running and return them, oldest batch first."""
        tasks: list[Task] = []
        open_ones = self._run(
            "SELECT seq, file, endpoint, expires, position, number FROM batches"
            " WHERE stage = 'in_progress' AND expires > ? ORDER BY seq",
            (now,),
        ).fetchall()
        for batch, file, endpoint, expires, position, number in open_ones:
            if len(tasks) >= most:
                break
            path = path_of(endpoint)
            room = int(min(most - len(tasks), rest.of(path)))
            if not room:
                continue
            found = self._again(batch, file, endpoint, expires, room)
            found += self._new(batch, file, endpoint, expires, position, number, room - len(found))
            rest.take(path, len(found))
            tasks += found
            # Nothing is written if nothing changes: this is called often while lines are under way.
            self._run("UPDATE batches SET started = ? WHERE seq = ? AND started IS NULL", (now, batch))
            self._settle(batch, now)
        return tasks

    def finish(self, outcome: Outcome, now: float) -> None:
        """Store the result of a line."""
        of = outcome.of
        assert isinstance(of, Place)  # noqa: S101 - for the type checker
        place = of.batch << SHIFT | of.number
        line = self._run("SELECT position, length, attempts, rerun FROM lines WHERE place = ?", (place,)).fetchone()
        if line is None:
            return
        position, length, attempts, rerun = line
        file, expires, stage, cancelling = self._run(
            "SELECT file, expires, stage, cancelling FROM batches WHERE seq = ?", (of.batch,)
        ).fetchone()
        if outcome.again and (attempts < MOST_ATTEMPTS or not outcome.reached):
            if stage == Stage.IN_PROGRESS and expires > now:
                self._run(
                    "UPDATE lines SET running = 0, rerun = max(rerun, ?), attempts = attempts - ? WHERE place = ?",
                    (outcome.reached, not outcome.reached, place),
                )
                return
            if not outcome.reached:
                outcome = Outcome(of, None, "expired" if cancelling is None else "cancelled")
        name = lines.custom_id(self._files.line(file, position, length))
        good = outcome.answer is not None and 200 <= outcome.answer.status < 300
        self._keep(place, lines.written(name, outcome, attempts, rerun=bool(rerun)), failed=not good)
        self._run("DELETE FROM lines WHERE place = ?", (place,))
        if outcome.reason == "expired":
            self._expire(of.batch)
        self._settle(of.batch, now)

    def recover(self, now: float, *, idempotent: bool) -> int:
        """Recover lines that were running when the process ended, and delete incomplete uploads."""
        self._files.recover()
        running = self._run(
            "SELECT place, attempts, stage FROM lines JOIN batches ON batches.seq = place >> ? WHERE running = 1",
            (SHIFT,),
        ).fetchall()
        for place, attempts, stage in running:
            if stage == Stage.IN_PROGRESS and idempotent and attempts < MOST_INTERRUPTED:
                self._run("UPDATE lines SET running = 0, rerun = 1 WHERE place = ?", (place,))
                continue
            self.finish(Outcome(Place(place >> SHIFT, place & (1 << SHIFT) - 1), None, "interrupted"), now)
        # A batch that was being cancelled has nothing under way any more.
        for (batch,) in self._run("SELECT seq FROM batches WHERE stage = 'cancelling'").fetchall():
            self._settle(batch, now)
        return len(running)

    def sweep(self, now: float) -> bool:
        """Delete what was kept long enough, and end what has expired; return whether there is more to do."""
        late = self._run("SELECT seq FROM batches WHERE stage = 'in_progress' AND expires <= ?", (now,)).fetchall()
        for (batch,) in late:
            self._expire(batch)
            self._settle(batch, now)
        more = self._files.sweep(now)
        self._run(
            "DELETE FROM batches WHERE ended <= ? AND NOT EXISTS (SELECT 1 FROM files WHERE batch = batches.seq)",
            (now - float(self._settings.keep_for),),
        )
        return more

    def _expire(self, batch: int) -> None:
        """Start no more lines of a batch: its completion window is over."""
        self._run("UPDATE batches SET stage = 'cancelling' WHERE seq = ? AND stage = 'in_progress'", (batch,))

    def _again(self, batch: int, file: int, endpoint: str, expires: float, most: int) -> list[Task]:
        """Claim lines that were put back."""
        tasks = []
        rows = self._run(
            "SELECT place, position, length FROM lines WHERE place >= ? AND place < ? AND running = 0"
            " ORDER BY place LIMIT ?",
            (batch << SHIFT, batch + 1 << SHIFT, most),
        ).fetchall()
        for place, position, length in rows:
            self._run("UPDATE lines SET running = 1, attempts = attempts + 1 WHERE place = ?", (place,))
            line = lines.read(self._files.line(file, position, length), endpoint)
            call = Call(line.method, endpoint, _JSON, bytes(line.body))
            tasks.append(Task(Place(batch, place & (1 << SHIFT) - 1), call, expires))
        return tasks

    def _new(
        self, batch: int, file: int, endpoint: str, expires: float, position: int, number: int, most: int
    ) -> list[Task]:
        """Claim lines that were not sent yet; those that can't be sent get their results at once."""
        tasks: list[Task] = []
        longest = int(self._settings.max_request)
        read = 0
        while len(tasks) < most and read < READ and (length := self._files.length(file, position)):
            number, read = number + 1, read + 1
            place = batch << SHIFT | number
            try:
                lines.check_length(number, length, longest)
                text = self._files.line(file, position, length)
                if text.strip():
                    line = lines.read(text, endpoint)
                    self._run("INSERT INTO lines VALUES (?, ?, ?, 1, 0, 1)", (place, position, length))
                    call = Call(line.method, endpoint, _JSON, bytes(line.body))
                    tasks.append(Task(Place(batch, number), call, expires))
                else:
                    self._run("UPDATE batches SET total = total - 1 WHERE seq = ?", (batch,))
            except lines.Wrong as wrong:
                self._keep(place, lines.refused(wrong), failed=True)
            position += length
        if read:
            self._run("UPDATE batches SET position = ?, number = ? WHERE seq = ?", (position, number, batch))
        return tasks

    def _keep(self, place: int, data: bytes, *, failed: bool) -> None:
        """Write a result."""
        self._run("INSERT INTO results VALUES (?, ?, ?)", (place, failed, data))
        counted = (
            "failed = failed + 1, errors_size = errors_size"
            if failed
            else ("completed = completed + 1, output_size = output_size")
        )
        self._run(f"UPDATE batches SET {counted} + ? WHERE seq = ?", (len(data), place >> SHIFT))  # noqa: S608 - our own names

    def _settle(self, batch: int, now: float) -> None:
        """End a batch with no lines under way and none left."""
        row = self._run(
            "SELECT id, owner, stage, file, position, cancelling, output_size, errors_size, completed, failed"
            " FROM batches WHERE seq = ?",
            (batch,),
        ).fetchone()
        identity, owner, stage, file, position, cancelling, output_size, errors_size, completed, failed = row
        stopping = stage == Stage.CANCELLING
        if stage not in {Stage.IN_PROGRESS, Stage.CANCELLING} or (
            not stopping and self._files.has_more(file, position)
        ):
            return
        under_way = "SELECT 1 FROM lines WHERE place >= ? AND place < ? AND running >= ? LIMIT 1"
        if self._run(under_way, (batch << SHIFT, batch + 1 << SHIFT, stopping)).fetchone() is not None:
            return
        self._run("DELETE FROM lines WHERE place >= ? AND place < ?", (batch << SHIFT, batch + 1 << SHIFT))
        ended = Stage.COMPLETED if not stopping else Stage.CANCELLED if cancelling is not None else Stage.EXPIRED
        made: list[str | None] = []
        for errors, size, count in ((False, output_size, completed), (True, errors_size, failed)):
            name = f"{identity}_{'error' if errors else 'output'}.jsonl"
            made.append(self._files.write(name, batch, owner, size, count, now, failed=errors) if count else None)
        self._run(
            "UPDATE batches SET stage = ?, ended = ?, output = ?, errors = ? WHERE seq = ?", (ended, now, *made, batch)
        )

    def _batches(self, condition: str, *values: object) -> list[Batch]:
        rows = self._run(f"SELECT {_BATCH} FROM batches WHERE {condition}", values).fetchall()  # noqa: S608 - our own text
        return [
            msgspec.convert(dict(zip(Batch.__struct_fields__, row, strict=True)), Batch, strict=False) for row in rows
        ]
