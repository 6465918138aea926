from __future__ import annotations

import threading

import pytest

from carpool_cli.batch.formats import Item, JsonLines
from carpool_cli.batch.job import Job, SizeSearch, Stopped, Stopping
from carpool_cli.batch.journal import Journal
from carpool_cli.profiling.targets import TargetError


def settle(most, cost):
    sizes, asked = SizeSearch(most), []
    while not sizes.settled:
        asked.append(sizes.size)
        sizes.observe(sizes.size, cost(sizes.size))
    return sizes.size, asked


def test_sizes_double_until_the_cheapest_is_known():
    size, asked = settle(64, lambda rows: 0.005 + 0.0005 * rows)
    assert size == 64
    assert asked == [step for step in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)]


def test_the_smallest_within_5_percent_is_taken():
    assert settle(64, lambda rows: max(0.010, 0.001 * rows))[0] == 16


def test_growth_ends_when_rows_get_dearer():
    size, asked = settle(4096, lambda rows: 0.001 * rows**1.3)
    assert size == 1
    assert max(asked) == 4


def test_a_batch_of_another_size_teaches_nothing():
    sizes = SizeSearch(8)
    for _ in range(10):
        sizes.observe(5, 1.0)
    assert sizes.size == 1


def test_a_size_refused_is_never_asked_for_again():
    sizes = SizeSearch(64)
    for _ in range(9):
        sizes.observe(sizes.size, 0.01)
    assert sizes.size == 8
    sizes.refuse(8)
    assert sizes.size == 4


class Numbers:
    """Rows 1 to n."""

    assemble = None
    ahead = 1000

    def __init__(self, size):
        self.size = size
        self.position = 0
        self.encoded = 0
        self.most = 0
        """Rows that were read and not answered, at most."""

    @property
    def number(self):
        return self.position

    def read(self, count):
        first = self.position
        self.position = min(first + count, self.size)
        self.most = max(self.most, self.position - self.encoded)
        return [Item(row + 1, row + 1, row + 1) for row in range(first, self.position)], []

    def encode(self, answers):
        self.encoded += len(answers)
        return b"".join(answer + b" " for answer in answers if isinstance(answer, bytes))

    def report(self, row):
        return b"%d\n" % row.number

    def close(self): ...


class Noted(Stopping):
    """Waits for nothing, and notes for how long it was to wait."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        return self.is_set()


def work(
    tmp_path,
    run,
    *,
    size=20,
    batch=8,
    concurrency=1,
    retries=3,
    source=None,
    ahead=0,
    stopping=None,
    said=None,
    isolates=False,
):
    stopping = stopping or Noted()
    sizes = SizeSearch(batch)
    sizes.size, sizes.settled = batch, True

    def texts(rows):
        return [b"%d" % answer for answer in run(rows)]

    with Journal(tmp_path / "out", "job") as journal:
        job = Job(
            source or Numbers(size), texts, journal, sizes, concurrency=concurrency, retries=retries, max_bad=None,
            clock=lambda: 0.0, stopping=stopping, ahead=ahead, isolates=isolates,
            waits=[].append if said is None else said.append,
        )  # fmt: skip
        job.go(lambda position: None)
        journal.finish(None)
    return [int(row) for row in (tmp_path / "out").read_bytes().split()], job, sizes, getattr(stopping, "waits", None)


@pytest.mark.parametrize("batch", [1, 8])
def test_rows_that_make_the_server_hang_up_are_bad_where_it_answers_others(tmp_path, batch):
    def run(rows):
        if {3, 17} & set(rows):
            raise TargetError("the server closed the connection", input_fault=False, no_answer=True)
        return rows

    answers, job, _, _ = work(tmp_path, run, batch=batch, retries=1, isolates=True)
    assert answers == [row for row in range(1, 21) if row not in {3, 17}]
    assert job.results.skipped == 2


def test_a_server_that_comes_back_at_last_loses_no_row(tmp_path):
    failures = iter([False, True, True, True])

    def run(rows):
        if rows == [5, 6] and next(failures, False):
            raise TargetError("gone", input_fault=False, no_answer=True)
        return rows

    answers, job, _, _ = work(tmp_path, run, batch=2, retries=1, isolates=True)
    assert (answers, job.results.skipped) == (list(range(1, 21)), 0)


def test_a_server_that_answers_no_row_any_more_stops_the_job(tmp_path):
    def run(rows):
        if rows[0] > 4:
            raise TargetError("gone", input_fault=False, no_answer=True)
        return rows

    gone = []

    def breaks(rows):
        if rows[0] > 4:
            gone.append(rows)
        if gone:
            raise TargetError("gone", input_fault=False, no_answer=True)
        return rows

    with pytest.raises(Stopped, match="gone"):
        work(tmp_path, breaks, batch=2, retries=1, isolates=True)
    with pytest.raises(Stopped, match="gone"):
        work(tmp_path, run, batch=2, retries=1)


def test_a_row_that_crashes_the_server_is_found_though_a_restart_takes_time(tmp_path):
    class Clock(Noted):
        now = 0.0

        def wait(self, timeout=None):
            self.now += timeout
            return super().wait(timeout)

    clock, up_at = Clock(), [0.0]

    def run(rows):
        if clock.now < up_at[0]:
            raise TargetError("refused", input_fault=False, no_answer=True)
        if 7 in rows:
            up_at[0] = clock.now + 5.0
            raise TargetError("hung up", input_fault=False, no_answer=True)
        return rows

    answers, job, _, _ = work(tmp_path, run, batch=4, retries=3, isolates=True, stopping=clock)
    assert answers == [row for row in range(1, 21) if row != 7]
    assert job.results.skipped == 1


def test_a_server_that_asks_to_come_later_is_no_fault_of_a_row(tmp_path):
    def run(rows):
        if 7 in rows:
            raise TargetError("status 503", input_fault=False, retry_after=1.0)
        return rows

    with pytest.raises(Stopped, match="503"):
        work(tmp_path, run, batch=4, retries=1, isolates=True)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_order_is_kept(tmp_path, concurrency):
    answers, job, _, _ = work(tmp_path, lambda rows: rows, concurrency=concurrency)
    assert answers == list(range(1, 21))
    assert (job.results.answered, job.results.skipped) == (20, 0)


@pytest.mark.parametrize("batch", [1, 8])
def test_blank_lines_at_the_end_stay(tmp_path, batch):
    """Of a shard, say: the next one's lines follow."""
    (tmp_path / "in").write_bytes(b"1\n\n2\n\n \n")
    source = JsonLines(tmp_path / "in", 0, 0, None)
    work(tmp_path, lambda rows: [int(row) * 10 for row in rows], source=source, batch=batch)
    source.close()
    assert (tmp_path / "out").read_bytes() == b"10\n\n20\n\n\n"


def test_a_bad_row_costs_the_others_nothing(tmp_path):
    def run(rows):
        if {3, 4, 17} & set(rows):
            raise TargetError("no", input_fault=True)
        return rows

    answers, job, sizes, _ = work(tmp_path, run)
    assert answers == [row for row in range(1, 21) if row not in {3, 4, 17}]
    assert job.results.skipped == 3
    assert sizes.size == 8


def test_a_size_that_only_fails_as_a_whole_is_halved(tmp_path):
    def run(rows):
        if len(rows) > 3:
            raise TargetError("out of memory", input_fault=True)
        return rows

    answers, _, sizes, _ = work(tmp_path, run, size=40)
    assert answers == list(range(1, 41))
    assert sizes.size == 2


def test_what_is_not_the_inputs_fault_is_waited_out(tmp_path):
    left = [2]

    def run(rows):
        if left[0]:
            left[0] -= 1
            raise TargetError("busy", input_fault=False)
        return rows

    answers, _, _, slept = work(tmp_path, run)
    assert answers == list(range(1, 21))
    assert slept == [1.0, 2.0]


def test_patience_ends(tmp_path):
    def run(rows):
        raise TargetError("gone", input_fault=False)

    with pytest.raises(Stopped, match="gone"):
        work(tmp_path, run, retries=1)


def test_a_long_answer_holds_up_no_others_that_were_read_ahead(tmp_path):
    others = threading.Semaphore(0)

    def run(rows):
        if rows == [1]:
            for _ in range(19):
                assert others.acquire(timeout=30)
        else:
            others.release()
        return rows

    answers, *_ = work(tmp_path, run, batch=1, concurrency=2, ahead=20)
    assert answers == list(range(1, 21))


def test_answers_that_wait_for_one_in_front_of_them_are_few_where_they_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr("carpool_cli.batch.job.MOST_AHEAD", 10)
    others, source = threading.Semaphore(0), Numbers(60)

    def run(rows):
        if rows == [1]:
            for _ in range(10):
                assert others.acquire(timeout=30)
        else:
            others.release()
        return rows

    answers, *_ = work(tmp_path, run, batch=1, concurrency=4, ahead=50, source=source)
    assert answers == list(range(1, 61))
    # Answers 2 to 9 have one byte each and the next two each, so 11 answers are too much; three more were under way.
    assert source.most <= 14


def test_a_stop_ends_the_wait_for_a_retry(tmp_path):
    waits = threading.Semaphore(0)

    class Interrupted(Numbers):
        def read(self, count):
            if self.position:
                assert waits.acquire(timeout=30)
                raise KeyboardInterrupt
            return super().read(count)

    class Waiting(Stopping):
        def wait(self, timeout=None):
            waits.release()
            return super().wait(timeout)

    def run(rows):
        raise TargetError("busy", input_fault=False, retry_after=600.0)

    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, run, batch=1, concurrency=2, source=Interrupted(2), stopping=Waiting())


@pytest.mark.parametrize("ahead", [0, 3])
def test_no_more_is_read_ahead_than_fits_in_memory(tmp_path, ahead):
    source = Numbers(50)
    source.ahead = ahead
    answers, *_ = work(tmp_path, lambda rows: rows, batch=1, concurrency=2, ahead=20, source=source)
    assert answers == list(range(1, 51))
    assert source.most <= ahead + 1


def test_a_server_says_when_to_come_again(tmp_path):
    left = [2]

    def run(rows):
        if left[0]:
            left[0] -= 1
            raise TargetError("busy", input_fault=False, retry_after=1.5)
        return rows

    said = []
    assert work(tmp_path, run, said=said)[3] == [1.5, 2.0]
    assert said == ["busy; sent again in 1.5s", "busy; sent again in 2s"]


def test_what_may_be_the_rows_own_fault_is_in_the_end(tmp_path):
    def run(rows):
        if rows == [3]:
            raise TargetError("failed", input_fault=False, record=b"3")
        return rows

    answers, job, _, slept = work(tmp_path, run, batch=1, size=4, retries=1)
    assert (answers, job.results.skipped, slept) == ([1, 2, 4], 1, [1.0])
