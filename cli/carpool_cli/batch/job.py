"""An offline job: sends rows in order through a model, at the cheapest batch size, and sets bad rows aside."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import format_seconds
from carpool_cli.batch.formats import MOST_AHEAD, BadRow, Item, Row, Source
from carpool_cli.profiling.targets import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from carpool_cli.batch.journal import Journal

TRIALS = 3
COMMIT_EVERY = 1.0
"""Seconds between checkpoints: each waits for the disk."""


class SizeSearch:
    """Finds the batch size while serving: 1, 2, 4, ... rows, each ``TRIALS`` times, then the cheapest per row.

    It stops growing when the cost per row has risen twice in a row, and never exceeds ``most``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._trials = 0
        self.size = 1
        self.settled = most == 1

    def observe(self, rows: int, seconds: float) -> None:
        """Record a batch of ``rows`` that took ``seconds``; one of another size than requested is ignored."""
        if self.settled or rows != self.size:
            return
        self._seconds[rows] = min(seconds, self._seconds.get(rows, seconds))
        self._trials += 1
        if self._trials < TRIALS:
            return
        self._trials = 0
        costs = [taken / size for size, taken in self._seconds.items()]
        dearer = len(costs) > 2 and costs[-1] > costs[-2] > costs[-3]
        if rows == self._most or dearer:
            self.settled = True
            curve = ServiceTime.measured(self._seconds)
            self.size = min(self._seconds, key=lambda size: (curve.per_row(size) > 1.05 * min(costs), size))
        else:
            self.size = min(2 * rows, self._most)

    def refuse(self, rows: int) -> None:
        """Record that ``rows`` at once are too many, though each of them is valid."""
        self._most = max(rows // 2, 1)
        self.size = min(self.size, self._most)
        self.settled = self.settled or self._most == 1


class Served(NamedTuple):
    """The result of one batch, in the order of its rows. ``seconds`` is None if it had to be split."""

    items: list[Item]
    bad: list[BadRow]
    answers: list[Row]
    seconds: float | None
    too_large: bool
    position: int
    number: int

    @property
    def size(self) -> int:
        """Bytes of the answers."""
        return sum(map(_size, self.answers)) + sum(len(row.record) for row in self.bad)


class Stopping(threading.Event):
    """Set when a job stops before its end: waits for retries end."""


class Stopped(Exception):  # noqa: N818 - no fault of this program
    """The job can't go on now; completed work is kept."""


class TooManyBad(Stopped):
    """More rows are bad than allowed."""


class _Caller:
    """Calls ``run`` for batches, in several threads at once; arguments as of ``Job``."""

    def __init__(
        self,
        run: Callable[[Sequence[Row]], list[Row]],
        *,
        retries: int,
        isolates: bool,
        stopping: Stopping,
        waits: Callable[[str], None],
    ) -> None:
        self._run = run
        self._retries = retries
        self._isolates = isolates
        self._stopping = stopping
        self._waits = waits
        self._good: Row | None = None
        """The last row that was answered."""

    def isolate(self, items: list[Item], error: TargetError) -> tuple[list[Row], list[BadRow]]:
        """Halve a failed batch until the bad rows are isolated."""
        if len(items) == 1:
            return [], [BadRow(items[0].number, str(error), error.record)]
        answers: list[Row] = []
        bad: list[BadRow] = []
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            try:
                answers += self.call(half)
            except TargetError as again:
                more, culprits = self.isolate(half, again)
                answers += more
                bad += culprits
        return answers, bad

    def call(self, items: list[Item]) -> list[Row]:
        """Run a batch, and retry failures that it did not cause.

        Raises ``TargetError`` for a bad batch, and for a possibly bad one after the last retry; otherwise ``Stopped``
        then.
        """
        attempt, is_alive = 0, False
        while True:
            try:
                answers = self._run([item.row for item in items])
            except TargetError as error:
                is_last = attempt >= self._retries
                if error.input_fault or (is_last and error.record):
                    raise
                if error.final:
                    raise Stopped(str(error)) from None
                # A row may make the server hang up, or crash. If it answers others meanwhile, a batch is halved at its
                # second failure, and a single row is given up after all retries.
                if is_alive and error.no_answer and (is_last or len(items) > 1):
                    raise TargetError(str(error), input_fault=True) from None
                if is_last:
                    raise Stopped(str(error)) from None
                if self._stopping.is_set():  # the call was abandoned here: the server is not to blame
                    raise Stopped(str(error)) from None
                seconds = max(2.0**attempt, error.retry_after)
                self._waits(f"{error}; sent again in {format_seconds(seconds)}")
                if self._stopping.wait(seconds):
                    raise Stopped(str(error)) from None
                other = items[attempt % len(items)].row if self._good is None else self._good
                is_alive = self._isolates and error.no_answer and self._answers(other)
                attempt += 1
            else:
                self._good = items[-1].row
                return answers

    def _answers(self, row: Row) -> bool:
        """Whether the server answers a row."""
        try:
            self._run([row])
        except TargetError:
            return False
        return True


class Results:
    """What a job has written into its journal, in the order of the rows; earlier runs included."""

    def __init__(self, source: Source, journal: Journal) -> None:
        self.answered = journal.progress.answered
        self.skipped = journal.progress.skipped
        self._source, self._journal = source, journal
        self._written = source.number
        """Number of the last row whose line is in the journal."""

    def add(self, served: Served) -> None:
        """Write the next batch."""
        errors = b"".join(self._source.report(row) for row in sorted(served.bad))
        bad = {row.number: row for row in served.bad}
        good = (item.number for item in served.items if item.number not in bad)
        self._write(bad | dict(zip(good, served.answers, strict=True)), served.number, errors)
        self.answered += len(served.answers)
        self.skipped += len(served.bad)

    def end(self, position: int, number: int) -> None:
        """Write the blank lines at the end, as another shard's lines may follow, and commit all."""
        if number > self._written:
            self._write({}, number, b"")
        self.commit(position, number)

    def commit(self, position: int, number: int) -> None:
        """Commit what is written up to a position of the source, and its row's number."""
        self._journal.commit(position=position, number=number, answered=self.answered, skipped=self.skipped)

    def _write(self, found: Mapping[int, Row | BadRow], number: int, errors: bytes) -> None:
        rows = range(self._written + 1, number + 1)
        self._journal.append(self._source.encode([found.get(row) for row in rows]), errors)
        self._written = number


class Job:
    """Runs the rows of a source through ``run`` into a journal.

    ``run`` answers a batch or raises ``TargetError``. ``concurrency`` batches run at once; answers keep the order. At
    least ``ahead`` batches are read before earlier ones are answered. So a long answer delays no others, until answers
    of ``MOST_AHEAD`` bytes wait for it. Failures that the input did not cause are retried ``retries`` times, after 1,
    2, 4, ... seconds or as long as the server asks for; ``waits`` is called with the reason, in the batch's thread.
    ``isolates``: rows that get no answer, while the server answers another one, are bad ones. ``abandon`` ends running
    calls when the job stops before its end, and ``stopping`` ends the waits.
    """

    def __init__(
        self,
        source: Source,
        run: Callable[[Sequence[Row]], list[Row]],
        journal: Journal,
        sizes: SizeSearch,
        *,
        concurrency: int,
        retries: int,
        max_bad: int | None,
        clock: Callable[[], float],
        stopping: Stopping,
        ahead: int = 0,
        isolates: bool = False,
        abandon: Callable[[], None] = lambda: None,
        waits: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._caller = _Caller(run, retries=retries, isolates=isolates, stopping=stopping, waits=waits)
        self.results = Results(source, journal)
        self._sizes = sizes
        self._concurrency = concurrency
        self._ahead = max(ahead, concurrency)
        self._max_bad = max_bad
        self._clock = clock
        self._stopping = stopping
        self._abandon = abandon

    def go(self, tell: Callable[[int], None]) -> None:
        """Run to the end of the source; ``tell`` is called with the position after each batch.

        Raises ``Stopped``.
        """
        if self._too_many():  # in an earlier run
            raise TooManyBad(self._counted())
        committed, done = self._clock(), self._source.position
        under_way: deque[Future[Served]] = deque()
        finished: SimpleQueue[Future[Served]] = SimpleQueue()
        running = held = 0
        with ThreadPoolExecutor(self._concurrency) as threads:
            try:
                more = True
                while more or under_way:
                    while (
                        more
                        and running < self._concurrency
                        and len(under_way) < self._ahead
                        and self._source.position - done <= self._source.ahead
                        and held <= MOST_AHEAD
                    ):
                        items, bad = self._source.read(self._sizes.size)
                        more = bool(items or bad)
                        if more:
                            position, number = self._source.position, self._source.number
                            under_way.append(threads.submit(self._serve, items, bad, position, number))
                            under_way[-1].add_done_callback(finished.put)
                            running += 1
                    if running:
                        held += _size_of(finished.get())
                        running -= 1
                    while under_way and under_way[0].done():
                        served = under_way[0].result()
                        under_way.popleft()
                        held -= served.size
                        self._take(served)
                        done = served.position
                        tell(served.position)
                        if self._clock() - committed >= COMMIT_EVERY:
                            self.results.commit(served.position, served.number)
                            committed = self._clock()
                        if self._too_many():
                            self.results.commit(served.position, served.number)
                            number, error, _ = max(served.bad)
                            raise TooManyBad(f"{self._counted()}, the last in {self._source.unit} {number} ({error})")
            finally:
                self._stopping.set()
                for waiting in under_way:
                    waiting.cancel()
                if under_way:
                    self._abandon()
        self.results.end(self._source.position, self._source.number)

    def _too_many(self) -> bool:
        return self._max_bad is not None and self.results.skipped > self._max_bad

    def _counted(self) -> str:
        skipped = self.results.skipped
        return "1 row is bad" if skipped == 1 else f"{skipped} rows are bad"

    def _take(self, served: Served) -> None:
        self.results.add(served)
        if served.too_large:
            self._sizes.refuse(len(served.items))
        elif served.seconds is not None:
            self._sizes.observe(len(served.items), served.seconds)

    def _serve(self, items: list[Item], bad: list[BadRow], position: int, number: int) -> Served:
        """Answer a batch; if the model rejects it, find the bad rows."""
        if not items:
            return Served(items, bad, [], None, too_large=False, position=position, number=number)
        started = self._clock()
        try:
            answers = self._caller.call(items)
        except TargetError as error:
            found, culprits = self._caller.isolate(items, error)
            return Served(
                items, [*bad, *culprits], found, None, too_large=not culprits, position=position, number=number
            )
        seconds = self._clock() - started
        return Served(items, bad, answers, seconds, too_large=False, position=position, number=number)


def _size_of(done: Future[Served]) -> int:
    """Return the bytes of a batch's answers; 0 if it failed."""
    return 0 if done.cancelled() or done.exception() is not None else done.result().size


def _size(answer: Row) -> int:
    return sum(value.nbytes for value in answer.values()) if isinstance(answer, dict) else len(answer)
