from __future__ import annotations

import json
import tracemalloc

import pytest

from carpool.policy.durations import Duration, Quantity
from carpool_sidecar.jobs.api.upload import Content
from carpool_sidecar.jobs.records import Answer, Outcome, Place, Refused, Rest, Stage
from carpool_sidecar.jobs.storage.files import PIECE, Mark

ENDPOINT = "/v1/completions"
LINES = 20_000


def line(number, **changes):
    fields = {"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": {"prompt": number}}
    return json.dumps(fields | changes).encode() + b"\n"


def uploaded(disk, chunks, now=0.0):
    """Hand a file in as it comes."""
    files, content, number = disk.files, Content(), 0
    files.begin("file-1", "in.jsonl", None, 0, now)
    for chunk in chunks:
        for piece in content.add(chunk):
            files.add("file-1", number, piece)
            number += 1
    if rest := content.rest():
        files.add("file-1", number, rest)
    return files.complete("file-1", content.size, content.lines)


def created(disk, text, seconds=100.0):
    file = uploaded(disk, [text])
    return disk.batches.create(file.id, ENDPOINT, "100s", seconds, b"null", None, 0.0)


def content(disk, identity):
    file, mark, parts = disk.files.get(identity), Mark(), []
    while mark is not None:
        data, mark = disk.files.piece(file, mark)
        parts.append(data)
    whole = b"".join(parts)
    assert len(whole) == file.size
    return [json.loads(text) for text in whole.splitlines()]


def good(task):
    return Outcome(task.of, Answer(200, [], json.dumps({"text": json.loads(task.call.body)}).encode()))


def test_every_line_is_answered_in_order_and_bad_ones_stand_apart(disk):
    disk = disk(max_request=Quantity(300))
    text = line(1) + b"no json\n" + line(2, url="/v1/other") + b"\n" + line(3, body="x" * 400) + line(4).rstrip()
    batch = created(disk, text)
    assert batch.total == 6
    tasks = disk.batches.claim(10, 1.0)
    assert [json.loads(task.call.body)["prompt"] for task in tasks] == [1, 4]
    disk.batches.finish(good(tasks[1]), 2.0)
    disk.batches.finish(Outcome(tasks[0].of, Answer(400, [], b'{"a":\n1}'), "status-400"), 3.0)
    batch = disk.batches.get(batch.id)
    assert (batch.stage, batch.total, batch.completed, batch.failed) == (Stage.COMPLETED, 5, 1, 4)
    [answer] = content(disk, batch.output)
    assert (answer["custom_id"], answer["response"]["body"]) == ("c4", {"text": {"prompt": 4}})
    errors = content(disk, batch.errors)
    assert [error["custom_id"] for error in errors] == ["c1", None, "c2", None]
    assert errors[0]["response"]["body"] == {"a": 1}
    assert [error["error"]["code"] for error in errors] == ["status-400"] + ["invalid_request"] * 3
    assert "jobs.maxRequest" in errors[3]["error"]["message"]


def test_a_line_may_end_anywhere_in_a_piece(disk):
    disk = disk()
    texts = [line(n, body={"pad": "x" * (PIECE // 3 - 7 * n)}) for n in range(12)] + [line(99)]
    uploaded(disk, [b"".join(texts)])
    disk.batches.create("file-1", ENDPOINT, "1h", 100.0, b"null", None, 0.0)
    bodies = [task.call.body for task in disk.batches.claim(100, 0.0)]
    assert bodies == [json.dumps(json.loads(text)["body"]).encode() for text in texts]


def test_a_new_process_goes_on_where_the_old_one_was_killed(disk):
    disk = disk()
    batch = created(disk, b"".join(map(line, range(6))))
    first = disk.batches.claim(3, 0.0)
    disk.batches.finish(good(first[1]), 0.0)
    assert disk.again() == 2
    again = disk.batches.claim(10, 0.0)
    assert [json.loads(task.call.body)["prompt"] for task in again] == [0, 2, 3, 4, 5]
    for task in again:
        disk.batches.finish(good(task), 0.0)
    found = content(disk, disk.batches.get(batch.id).output)
    assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(6)]
    assert [one.get("carpool") for one in found] == [
        {"attempts": 2, "rerun": True}, None, {"attempts": 2, "rerun": True}, None, None, None,
    ]  # fmt: skip


def test_a_refused_line_comes_again_and_was_no_attempt(disk):
    disk = disk()
    batch = created(disk, line(1))
    for _ in range(5):
        [task] = disk.batches.claim(4, 0.0)
        disk.batches.finish(Outcome(task.of, Answer(429, [], b""), "status-429", again=True, reached=False), 0.0)
    [task] = disk.batches.claim(4, 0.0)
    disk.batches.finish(good(task), 0.0)
    [found] = content(disk, disk.batches.get(batch.id).output)
    assert "carpool" not in found


def test_a_cancelled_batch_keeps_what_it_has_and_waits_for_what_is_under_way(disk):
    disk = disk()
    batch = created(disk, b"".join(map(line, range(5))))
    tasks = disk.batches.claim(3, 0.0)
    disk.batches.finish(good(tasks[0]), 1.0)
    assert disk.batches.cancel(batch.id, 2.0).stage is Stage.CANCELLING
    assert disk.batches.claim(5, 2.0) == []
    disk.batches.finish(good(tasks[1]), 3.0)
    disk.batches.finish(Outcome(tasks[2].of, None, "status-429", again=True, reached=False), 4.0)
    batch = disk.batches.get(batch.id)
    assert (batch.stage, batch.completed, batch.failed) == (Stage.CANCELLED, 2, 1)
    assert [one["custom_id"] for one in content(disk, batch.output)] == ["c0", "c1"]
    assert [one["error"]["code"] for one in content(disk, batch.errors)] == ["cancelled"]
    with pytest.raises(Refused, match="can't be cancelled"):
        disk.batches.cancel(batch.id, 5.0)


def test_a_window_that_is_over_ends_a_batch(disk):
    disk = disk()
    batch = created(disk, line(1) + line(2), seconds=10.0)
    [task] = disk.batches.claim(1, 0.0)
    disk.batches.sweep(10.0)
    disk.batches.finish(good(task), 11.0)
    batch = disk.batches.get(batch.id)
    assert (batch.stage, batch.completed) == (Stage.EXPIRED, 1)


def test_no_line_is_sent_once_the_window_is_over(disk):
    disk = disk()
    batch = created(disk, line(1) + line(2), seconds=10.0)
    assert disk.batches.claim(2, 10.0) == []
    disk.batches.sweep(10.0)
    batch = disk.batches.get(batch.id)
    assert (batch.stage, batch.completed, batch.failed) == (Stage.EXPIRED, 0, 0)


def test_a_line_that_was_refused_when_the_window_was_over_has_expired(disk):
    disk = disk()
    batch = created(disk, line(1) + line(2), seconds=10.0)
    [task] = disk.batches.claim(1, 0.0)
    disk.batches.sweep(10.0)
    disk.batches.finish(Outcome(task.of, Answer(429, [], b""), "status-429", again=True, reached=False), 11.0)
    [error] = content(disk, disk.batches.get(batch.id).errors)
    assert error["error"]["code"] == "expired"


@pytest.mark.parametrize("under_way", [1, 2])
def test_lines_that_are_ended_with_the_window_end_the_batch(disk, under_way):
    disk = disk()
    batch = created(disk, line(1) + line(2), seconds=10.0)
    for task in disk.batches.claim(under_way, 0.0):
        disk.batches.finish(Outcome(task.of, None, "expired"), 10.0)
    batch = disk.batches.get(batch.id)
    assert (batch.stage, batch.completed, batch.failed) == (Stage.EXPIRED, 0, under_way)
    assert {error["error"]["code"] for error in content(disk, batch.errors)} == {"expired"}


def test_while_all_lines_are_under_way_a_look_for_more_writes_nothing(disk):
    disk = disk()
    created(disk, line(1))
    assert len(disk.batches.claim(1, 0.0)) == 1
    before = disk.database.connection.total_changes
    assert disk.batches.claim(1, 1.0) == []
    assert disk.database.connection.total_changes == before


def test_a_path_that_may_not_begin_leaves_the_place_to_another_batch(disk):
    disk = disk()
    created(disk, b"".join(map(line, range(3))))
    other = "/v1/other"
    disk.batches.create("file-1", f"{other}?a=1", "100s", 100.0, b"null", None, 0.0)

    def taken(rest):
        return [task.of for task in disk.batches.claim(9, 1.0, rest)]

    assert taken(Rest({ENDPOINT: 0, other: 0})) == []
    assert taken(Rest({ENDPOINT: 2, other: 0})) == [Place(1, 1), Place(1, 2)]
    disk.batches.finish(Outcome(Place(1, 2), None, "status-503", again=True, reached=False), 1.0)
    assert taken(Rest({ENDPOINT: 0})) == []
    assert taken(Rest({ENDPOINT: 1})) == [Place(1, 2)]
    assert taken(Rest({})) == [Place(1, 3)]


def test_files_go_when_their_time_is_over_but_not_under_a_batch(disk):
    disk = disk(keep_for=Duration(10))
    batch = created(disk, line(1), seconds=1000.0)
    with pytest.raises(Refused, match="cancel it first"):
        disk.files.delete("file-1")
    disk.batches.sweep(50.0)
    [task] = disk.batches.claim(1, 60.0)
    disk.batches.finish(good(task), 60.0)
    output = disk.batches.get(batch.id).output
    disk.batches.sweep(65.0)
    with pytest.raises(Refused):
        disk.files.get("file-1")
    assert len(content(disk, output)) == 1
    for _ in range(3):
        disk.batches.sweep(71.0)
    with pytest.raises(Refused):
        disk.batches.get(batch.id)
    assert disk.totals == {}


def test_an_upload_that_was_cut_is_no_file(disk):
    disk = disk()
    disk.files.begin("file-1", "x", None, 0, 0.0)
    disk.files.add("file-1", 0, b"abc")
    disk.again()
    with pytest.raises(Refused):
        disk.files.get("file-1")
    disk.batches.sweep(0.0)
    disk.batches.sweep(0.0)
    assert disk.totals == {}


def test_memory_is_bounded_however_many_lines_there_are(disk):
    # 20,000 lines are 2 MB in and 3 MB out: held whole, they would show.
    disk = disk()
    run = disk.database.connection.execute
    tracemalloc.start()
    try:
        run("BEGIN")
        uploaded(disk, map(line, range(LINES)))
        batch = disk.batches.create("file-1", ENDPOINT, "1h", 1e9, b"null", None, 0.0)
        run("COMMIT")
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run("BEGIN")
        while tasks := disk.batches.claim(64, 0.0):
            for task in tasks:
                disk.batches.finish(good(task), 0.0)
        run("COMMIT")
        file, mark, lines = disk.files.get(disk.batches.get(batch.id).output), Mark(), 0
        while mark is not None:
            data, mark = disk.files.piece(file, mark)
            lines += data.count(b"\n")
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert lines == LINES
    assert file.size > 2 * 2**20
    assert peak < 2**20, f"{peak / 2**20:.1f} MiB"


def test_large_results_are_read_a_few_at_a_time(disk):
    disk = disk(max_bytes=Quantity(2**30))
    batch = created(disk, b"".join(map(line, range(40))))
    for task in disk.batches.claim(40, 0.0):
        answer = b'"%b"' % (b"x" * (PIECE // 3))
        disk.batches.finish(Outcome(task.of, Answer(200, [], answer)), 0.0)
    file, mark, sizes = disk.files.get(disk.batches.get(batch.id).output), Mark(), []
    while mark is not None:
        data, mark = disk.files.piece(file, mark)
        sizes.append(len(data))
    assert sum(sizes) == file.size
    assert max(sizes) < 2 * PIECE


def test_a_long_result_is_read_in_pieces(disk):
    disk = disk(max_bytes=Quantity(2**30))
    batch = created(disk, b"".join(map(line, range(4))))
    lengths = (5, 3 * PIECE, 10, PIECE)
    for task, length in zip(disk.batches.claim(4, 0.0), lengths, strict=True):
        disk.batches.finish(Outcome(task.of, Answer(200, [], b'"%b"' % (b"x" * length))), 0.0)
    output = disk.batches.get(batch.id).output
    assert [len(one["response"]["body"]) for one in content(disk, output)] == list(lengths)
    file, mark, sizes = disk.files.get(output), Mark(), []
    while mark is not None:
        data, mark = disk.files.piece(file, mark)
        sizes.append(len(data))
    assert max(sizes) <= PIECE


def test_many_bad_lines_are_passed_in_one_go(disk):
    disk = disk()
    batch = created(disk, b"no json\n" * 900 + line(1))
    assert len(disk.batches.claim(1, 0.0)) == 1
    assert disk.batches.get(batch.id).failed == 900


def test_a_line_that_nobody_knows_is_passed_over(disk):
    disk = disk()
    created(disk, line(1))
    disk.batches.finish(Outcome(Place(1, 77), None, "status-500"), 0.0)
    assert len(disk.batches.claim(5, 0.0)) == 1


NESTED = b"[" * 5000 + b"]" * 5000


def test_lines_and_answers_that_no_reader_reads_cost_themselves_alone(disk):
    disk = disk()
    odd = [b'{"custom_id":"caf\xe9","method":"POST","url":"%b","body":{}}\n' % ENDPOINT.encode()]
    odd.append(b'{"custom_id":"c","method":"POST","url":"%b","body":{"a":%b}}\n' % (ENDPOINT.encode(), NESTED))
    batch = created(disk, b"".join(odd) + line(1) + line(2) + line(3))
    first, second, third = disk.batches.claim(10, 1.0)
    disk.batches.finish(Outcome(first.of, Answer(200, [], NESTED)), 2.0)
    disk.batches.finish(Outcome(second.of, Answer(200, [], b'{"a":"\xe9"}')), 2.0)
    disk.batches.finish(good(third), 2.0)
    ended = disk.batches.get(batch.id)
    assert (ended.stage, ended.completed, ended.failed) == (Stage.COMPLETED, 3, 2)
    assert len(content(disk, ended.output)) == 3
    assert len(content(disk, ended.errors)) == 2


def test_a_batch_that_was_being_cancelled_when_the_process_ended_is_cancelled(disk):
    one = disk()
    batch = created(one, line(1) + line(2))
    one.batches.claim(1, 1.0)
    one.batches.cancel(batch.id, 2.0)
    assert one.batches.get(batch.id).stage is Stage.CANCELLING
    one.batches.recover(3.0, idempotent=True)
    ended = one.batches.get(batch.id)
    assert (ended.stage, ended.failed) == (Stage.CANCELLED, 1)
