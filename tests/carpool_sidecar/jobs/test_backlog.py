from __future__ import annotations

import json

import pytest

from carpool_sidecar.jobs.backlog import Backlog
from carpool_sidecar.jobs.records import ANY, Answer, Call, Outcome, Place

ENDPOINT = "/v1/completions"
CALL = Call("POST", ENDPOINT, [], b"{}")


@pytest.fixture
def filled(disk):
    """A store with a batch of twelve lines, and as many single jobs as a test asks for."""

    def make(jobs):
        made = disk()
        lines = [{"custom_id": f"{n}", "method": "POST", "url": ENDPOINT, "body": {"prompt": n}} for n in range(12)]
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        made.files.begin("file-1", "in.jsonl", None, len(text), 0.0)
        made.files.add("file-1", 0, text)
        made.files.complete("file-1", len(text), len(lines))
        made.batches.create("file-1", ENDPOINT, "100s", 100.0, b"null", None, 0.0)
        for _ in range(jobs):
            made.store.submit(CALL, None, 0.0)
        made.store.count()
        return made

    return make


def lines_of(tasks):
    return sum(isinstance(task.of, Place) for task in tasks)


def test_jobs_leave_batches_one_place_in_four(filled):
    disk = filled(jobs=20)
    backlog = Backlog(disk.store, disk.batches, 2**30)
    assert backlog.waits
    taken = [lines_of(backlog.exchange([], 1, ANY, 1.0)) for _ in range(8)]
    assert taken == [0, 0, 0, 1, 0, 0, 0, 1]
    assert lines_of(backlog.exchange([], 8, ANY, 1.0)) == 2


def test_places_that_jobs_do_not_need_are_for_batches(filled):
    disk = filled(jobs=1)
    tasks = Backlog(disk.store, disk.batches, 2**30).exchange([], 5, ANY, 1.0)
    assert (len(tasks), lines_of(tasks)) == (5, 4)


def test_outcomes_are_stored_but_nothing_begins_in_a_full_store_or_without_room(filled):
    disk = filled(jobs=1)
    [task] = Backlog(disk.store, disk.batches, 2**30).exchange([], 1, ANY, 1.0)
    ended = [Outcome(task.of, Answer(200, [], b"good"))]
    assert Backlog(disk.store, disk.batches, 1).exchange(ended, 5, ANY, 2.0) == []
    assert disk.totals["done"] == 1
    assert Backlog(disk.store, disk.batches, 2**30).exchange([], 0, ANY, 2.0) == []
