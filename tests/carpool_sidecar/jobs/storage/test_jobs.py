from __future__ import annotations

import sqlite3
import stat

import pytest

from carpool.policy.durations import Duration, Quantity
from carpool_sidecar.jobs.records import Answer, Call, Outcome, Refused, Rest, State
from carpool_sidecar.jobs.storage.database import Database, UnusableError
from carpool_sidecar.jobs.storage.jobs import MOST_ATTEMPTS, MOST_INTERRUPTED

CALL = Call("POST", "/v1/models/m:predict", [("content-type", "application/json")], b'{"instances":[1.50]}')
GOOD = Answer(200, [(b"x-a", b"\xe9")], b"good")


def submit(disk, now=0.0, owner=None):
    return disk.store.submit(CALL, owner, now)


def test_a_job_goes_from_queued_to_done_and_its_request_is_forgotten(disk):
    disk = disk()
    job = submit(disk)
    assert disk.totals["queued"] == 1
    [task] = disk.store.claim(5, 1.0)
    assert task.call == CALL
    assert disk.store.get(job.id).state is State.RUNNING
    before = disk.totals["bytes"]
    disk.store.finish(Outcome(task.of, GOOD), 2.0)
    job, answer = disk.store.answer(job.id)
    assert (job.state, job.status, job.attempts, job.rerun, job.started, job.ended) == (State.DONE, 200, 1, False, 1, 2)
    assert answer == GOOD
    headers = len('[["x-a","é"]]'.encode())
    assert disk.totals["bytes"] == before - len(CALL.body) + len(GOOD.body) + headers
    assert disk.store.claim(5, 3.0) == []


def test_jobs_are_taken_in_order_and_a_claimed_one_is_not_taken_twice(disk):
    disk = disk()
    ids = [submit(disk).id for _ in range(3)]
    assert [len(disk.store.claim(2, 0.0)), len(disk.store.claim(2, 0.0))] == [2, 1]
    assert [disk.store.get(one).state for one in ids] == [State.RUNNING] * 3


def test_a_path_that_may_not_begin_is_passed_over_and_its_jobs_keep_their_order(disk):
    disk = disk()
    for target in ("/a?1", "/b", "/a", "/a?2", "/b?1", "/c"):
        disk.store.submit(Call("POST", target, [], b""), None, 0.0)

    def taken(rest):
        return [task.call.target for task in disk.store.claim(9, 1.0, rest)]

    assert taken(Rest({"/a": 0, "/b": 1})) == ["/b", "/c"]
    assert taken(Rest({"/a": 2})) == ["/a?1", "/a", "/b?1"]
    assert taken(Rest({})) == ["/a?2"]


def test_a_refusal_is_no_attempt_and_an_uncertain_one_says_so(disk):
    disk = disk()
    job = submit(disk)
    for _ in range(10):  # as often as it takes
        [task] = disk.store.claim(1, 0.0)
        disk.store.finish(Outcome(task.of, Answer(429, [], b""), "status-429", again=True, reached=False), 0.0)
    assert disk.store.get(job.id).attempts == 0
    for attempt in range(1, MOST_ATTEMPTS + 1):
        [task] = disk.store.claim(1, 0.0)
        disk.store.finish(Outcome(task.of, Answer(502, [], b"bad"), "status-502", again=True), 0.0)
        job = disk.store.get(job.id)
        assert (job.attempts, job.rerun) == (attempt, True)
    assert (job.state, job.reason, job.status) == (State.FAILED, "status-502", 502)


def test_a_new_process_sends_again_what_was_running_and_says_so(disk):
    disk = disk()
    running, waiting = submit(disk).id, submit(disk).id
    disk.store.claim(1, 0.0)
    assert disk.again() == 1
    assert [task.call for task in disk.store.claim(5, 0.0)] == [CALL, CALL]
    assert (disk.store.get(running).attempts, disk.store.get(running).rerun) == (2, True)
    assert (disk.store.get(waiting).attempts, disk.store.get(waiting).rerun) == (1, False)


def test_a_job_that_ends_every_process_ends_itself(disk):
    disk = disk()
    job = submit(disk)
    for _ in range(MOST_INTERRUPTED):
        assert len(disk.store.claim(1, 0.0)) == 1
        disk.again()
    assert (disk.store.get(job.id).state, disk.store.get(job.id).reason) == (State.FAILED, "interrupted")


def test_what_is_not_idempotent_fails_when_it_was_cut(disk):
    disk = disk()
    job = submit(disk)
    disk.store.claim(1, 0.0)
    disk.again(idempotent=False)
    assert (disk.store.get(job.id).state, disk.store.get(job.id).reason) == (State.FAILED, "interrupted")


def test_a_cancelled_job_stays_so_whatever_comes_later(disk):
    disk = disk()
    job = submit(disk)
    [task] = disk.store.claim(1, 0.0)
    cancelled, running, forgotten = disk.store.cancel(job.id, 1.0)
    assert (cancelled.state, running, forgotten) == (State.CANCELLED, task.of, False)
    disk.store.finish(Outcome(task.of, GOOD), 2.0)
    assert disk.store.answer(job.id) == (cancelled, None)
    assert disk.store.cancel(job.id, 3.0) == (cancelled, None, True)
    with pytest.raises(Refused, match="was never here"):
        disk.store.get(job.id)
    assert disk.totals == {}


def test_bounds_are_refused_by_the_name_of_the_option(disk):
    disk = disk(max_jobs=2, max_bytes=Quantity(2100))
    with pytest.raises(Refused, match=r"jobs\.maxBytes") as refused:
        disk.store.submit(Call("POST", "/x", [], b"x" * 3000), None, 0.0)
    assert refused.value.status == 413
    disk.store.submit(Call("POST", "/x", [], b"x" * 1000), None, 0.0)
    with pytest.raises(Refused, match=r"jobs\.maxBytes") as refused:
        disk.store.submit(Call("POST", "/x", [], b"x" * 1000), None, 0.0)
    assert refused.value.status == 429
    disk.store.submit(Call("POST", "/x", [], b""), None, 0.0)
    with pytest.raises(Refused, match=r"jobs\.maxJobs") as refused:
        disk.store.submit(Call("POST", "/x", [], b""), None, 0.0)
    assert refused.value.status == 429


def test_results_are_kept_for_a_time_and_jobs_that_nobody_runs_expire(disk):
    disk = disk(keep_for=Duration(10), finish_within=Duration(100))
    done, late = submit(disk).id, submit(disk).id
    [task] = disk.store.claim(1, 0.0)
    disk.store.finish(Outcome(task.of, GOOD), 5.0)
    assert not disk.store.sweep(14.9)
    assert disk.store.get(done).state is State.DONE
    disk.store.sweep(15.0)
    with pytest.raises(Refused):
        disk.store.get(done)
    assert disk.store.claim(5, 100.0) == []
    assert (disk.store.get(late).state, disk.store.get(late).reason) == (State.FAILED, "expired")


def test_lists_are_by_owner_newest_first_in_pages(disk):
    disk = disk()
    mine, other = disk.store.owner(b"Bearer a"), disk.store.owner(b"Bearer b")
    ids = [submit(disk, owner=mine).id for _ in range(5)]
    submit(disk, owner=other)
    submit(disk)
    first, more = disk.store.listed(mine, None, 3)
    assert ([job.id for job in first], more) == (ids[:1:-1], True)
    second, more = disk.store.listed(mine, first[-1].id, 3)
    assert ([job.id for job in second], more) == (ids[1::-1], False)
    with pytest.raises(Refused):
        disk.store.listed(other, ids[0], 3)


def test_no_credential_is_on_disk_and_two_files_hash_it_differently(disk, tmp_path):
    disk = disk()
    owner = disk.store.owner(b"Bearer very-secret")
    submit(disk, owner=owner)
    disk.database.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"very-secret" not in (tmp_path / "jobs.db").read_bytes()
    other = Database(str(tmp_path / "other.db"))
    assert other.key != disk.database.key
    other.close()
    assert stat.S_IMODE((tmp_path / "jobs.db").stat().st_mode) == 0o600


def test_ids_have_128_random_bits(disk):
    disk = disk()
    ids = {submit(disk).id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(bytes.fromhex(one.removeprefix("job_"))) == 16 for one in ids)


def test_a_file_is_one_sidecars_and_no_other_databases(disk, tmp_path):
    disk()
    with pytest.raises(UnusableError, match="in use by another sidecar"):
        Database(str(tmp_path / "jobs.db"))
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t(x)")
    connection.close()
    with pytest.raises(UnusableError, match=r"not one of carpool's"):
        Database(str(foreign))
    (tmp_path / "text.db").write_bytes(b"no database at all, but long enough to be looked at" * 40)
    with pytest.raises(UnusableError, match="not a database"):
        Database(str(tmp_path / "text.db"))
    with pytest.raises(UnusableError, match=r"jobs\.path"):
        Database("/proc/nowhere/jobs.db")
