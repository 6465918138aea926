"""Jobs from end to end, on real sockets: the model is the test's, the sidecar is in this process."""

from __future__ import annotations

import asyncio
import json

import pytest

TARGET = "/v1/models/m:predict"
ANN, BOB = [(b"authorization", b"Bearer ann")], [(b"authorization", b"Bearer bob")]
GATED = {"slo": {"ttft": {"p99": "5s"}, "tpot": {"p99": "1s"}}, "generation": {"maxRunning": 1}}


@pytest.fixture
async def started(world, tmp_path):
    async def start(policy=None, parameters=None, **settings):
        return await world.start(
            jobs={"path": str(tmp_path / "jobs.db"), **settings}, policy=policy, parameters=parameters
        )

    return start


async def submit(client, body=None, headers=ANN, **fields):
    given = {"path": TARGET, "body": {"instances": [1]} if body is None else body} | fields
    return await client.send(b"POST", b"/v1/jobs", json.dumps(given).encode(), headers)


async def ended(client, job, headers=()):
    path = f"/v1/jobs/{job['id']}".encode()
    async with asyncio.timeout(30):
        while (found := (await client.get(path, headers)).json)["state"] in {"queued", "running"}:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
    return found


async def result(client, job):
    return await client.get(f"/v1/jobs/{job['id']}/result".encode())


async def file_of(client, text, purpose=b"batch", name=b"file"):
    form = (
        b'--B\r\nContent-Disposition: form-data; name="%b"; filename="in.jsonl"\r\n\r\n%b\r\n'
        b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n--B--\r\n' % (name, text, purpose)
    )
    headers = [*ANN, (b"content-type", b"multipart/form-data; boundary=B")]
    return await client.send(b"POST", b"/v1/files", form, headers)


async def batch_of(client, lines, path=TARGET, window="24h"):
    text = b"".join(
        json.dumps({"custom_id": name, "method": "POST", "url": path, "body": body}).encode() + b"\n"
        for name, body in lines
    )
    file = (await file_of(client, text)).json["id"]
    wanted = {"input_file_id": file, "endpoint": path, "completion_window": window, "metadata": {"a": "b"}}
    return await client.send(b"POST", b"/v1/batches", json.dumps(wanted).encode(), ANN)


async def settled(client, batch):
    async with asyncio.timeout(30):
        while True:
            found = (await client.get(f"/v1/batches/{batch['id']}".encode())).json
            if found["status"] not in {"in_progress", "cancelling"}:
                return found
            await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------------------- jobs


async def test_a_job_is_accepted_run_and_its_answer_kept(world, started):
    _, client = await started()
    world.model.headers = [(b"x-model", b"7")]
    accepted = await submit(client)
    assert (accepted.status, accepted.header(b"location")) == (202, f"/v1/jobs/{accepted.json['id']}".encode())
    job = await ended(client, accepted.json)
    assert (job["state"], job["status"], job["attempts"], job["rerun"]) == ("done", 200, 1, False)
    answer = await result(client, job)
    assert (answer.status, answer.body, answer.header(b"x-model")) == (200, b'{"predictions": [1]}', b"7")
    [received] = world.model.received
    assert dict(received.headers)[b"x-carpool-priority"] == b"batch"
    assert not any(name.lower() == b"authorization" for name, _ in received.headers)


async def test_jobs_are_batched_together_and_take_no_part_in_the_slo(world, started):
    sidecar, client = await started(maxInFlight=8)
    sidecar.jobs.runner.headroom._limit = 8.0
    world.model.holding = True
    jobs = [(await submit(client, {"instances": [number]})).json for number in range(40)]
    await world.until(lambda: sidecar.batcher.queued_rows == 7)
    world.model.release()
    for number, job in enumerate(jobs):
        assert (await ended(client, job))["state"] == "done"
        assert (await result(client, job)).json == {"predictions": [number]}
    assert len(world.model.received) < 40
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (counted.arrivals, counted.hits) == (0, 0)


async def test_interactive_requests_go_before_jobs_that_wait(world, started):
    sidecar, client = await started(parameters={"*": {"maxBatch": 1, "maxInFlight": 1}})
    sidecar.jobs.runner.headroom._limit = 3.0
    world.model.holding = True
    jobs = [(await submit(client, {"instances": [f"job {number}"]})).json for number in range(3)]
    await world.until(lambda: world.model.held and sidecar.batcher.queued_rows == 2)
    people = [client.predict(b'"person"') for _ in range(2)]
    await world.until(lambda: sidecar.batcher.queued_rows == 4)
    world.model.release()
    for one in people:
        assert (await one).status == 200
    for job in jobs:
        await ended(client, job)
    assert [received.rows[0][:3] for received in world.model.received] == ["job", "per", "per", "job", "job"]


async def test_an_error_of_the_models_is_the_jobs_result(world, started):
    _, client = await started()
    world.model.behave = lambda exchange: exchange.respond(422, [], b'{"error":"no"}')
    job = await ended(client, (await submit(client)).json)
    assert (job["state"], job["status"], job["reason"]) == ("failed", 422, "status-422")
    answer = await result(client, job)
    assert (answer.status, answer.body) == (422, b'{"error":"no"}')


async def test_a_model_that_has_no_room_gets_the_job_later_and_that_is_no_attempt(world, started, monkeypatch):
    monkeypatch.setattr("carpool_sidecar.jobs.headroom.FIRST_PAUSE", 0.01)
    _, client = await started()
    good = world.model.behave
    answers = [lambda exchange: exchange.respond(429, [], b""), lambda exchange: exchange.respond(503, [], b"")]

    def answer(exchange):
        (answers.pop() if answers else good)(exchange)

    world.model.behave = answer
    job = await ended(client, (await submit(client)).json)
    assert (job["state"], job["attempts"], job["rerun"]) == ("done", 1, False)
    assert len(world.model.received) == 3


@pytest.fixture
def endless(monkeypatch):
    """A pause that begins lasts for the whole test."""
    monkeypatch.setattr("carpool_sidecar.jobs.headroom.FIRST_PAUSE", 1e6)
    monkeypatch.setattr("carpool_sidecar.jobs.headroom.LONGEST_PAUSE", 1e6)


async def test_a_path_that_has_no_room_pauses_alone(world, started, endless):
    sidecar, client = await started(policy={"models": [{"name": name, "axis": "First"} for name in "mn"]})
    busy, good = "/v1/models/n:predict", world.model.behave
    world.model.behave = lambda exchange: (
        exchange.respond(503, [], b"") if exchange.target.startswith(busy.encode()) else good(exchange)
    )
    waiting = [(await submit(client, path=f"{busy}?n={number}")).json for number in range(20)]
    await world.until(lambda: world.model.received and not sidecar.jobs.runner.flights)
    tried = len(world.model.received)
    for _ in range(3):
        assert (await ended(client, (await submit(client)).json))["state"] == "done"
    batch = await settled(client, (await batch_of(client, [("a", {"instances": [1]})])).json)
    assert batch["request_counts"]["completed"] == 1
    for job in waiting:
        found = (await client.get(f"/v1/jobs/{job['id']}".encode())).json
        assert (found["state"], found["attempts"]) == ("queued", 0)
    assert len(world.model.received) == tried + 4


async def test_a_batch_whose_path_has_no_room_delays_no_other(world, started, endless):
    _, client = await started()
    busy, good = TARGET.encode(), world.model.behave
    world.model.behave = lambda exchange: exchange.respond(503, [], b"") if exchange.target == busy else good(exchange)
    await batch_of(client, [("a", {"instances": [1]}), ("b", {"instances": [2]})])
    await world.until(lambda: world.model.received)
    other = await batch_of(client, [("c", {"instances": [3]})], "/v1/models/n:predict")
    assert (await settled(client, other.json))["request_counts"]["completed"] == 1
    assert (await ended(client, (await submit(client, path="/v1/models/n:predict")).json))["state"] == "done"


def pass_time(monkeypatch, seconds):
    """Have all timers of the loop see so many seconds pass at once."""
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + seconds)


@pytest.mark.parametrize("path", [TARGET, "/v1/forwarded"])
async def test_a_job_whose_time_is_over_leaves_the_model_and_has_expired(world, started, monkeypatch, path):
    _, client = await started(finishWithin="20s")
    world.model.holding = True
    job = (await submit(client, path=path)).json
    await world.until(lambda: world.model.held)
    pass_time(monkeypatch, 21)
    job = await ended(client, job)
    assert (job["state"], job["reason"], job["attempts"], job["rerun"]) == ("failed", "expired", 1, False)
    await world.until(lambda: world.model.left == 1)
    gone = await result(client, job)
    assert (gone.status, gone.json["reason"]) == (410, "jobs-failed")
    assert len(world.model.received) == 1


async def test_jobs_wait_for_a_model_that_is_not_there_yet(world, started):
    port = world.model.port
    sidecar, client = await started()
    await world.model.die()
    await world.until(lambda: not sidecar.health.ready)
    job = (await submit(client)).json
    assert (await client.get(f"/v1/jobs/{job['id']}".encode())).json["state"] == "queued"
    early = await result(client, job)
    assert (early.status, early.json["reason"], early.header(b"retry-after")) == (409, "jobs-not-finished", b"1")
    await world.model.listen(port)
    await world.until(lambda: sidecar.health.ready)
    assert (await ended(client, job))["state"] == "done"


async def test_a_cancelled_job_leaves_the_model_and_then_the_store(world, started):
    _, client = await started()
    world.model.holding = True
    job = (await submit(client)).json
    await world.until(lambda: world.model.held)
    path = f"/v1/jobs/{job['id']}".encode()
    assert (await client.send(b"DELETE", path)).json["state"] == "cancelled"
    await world.until(lambda: world.model.left == 1)
    assert (await result(client, job)).json["reason"] == "jobs-cancelled"
    assert (await client.send(b"DELETE", path)).json.get("deleted") is True
    assert (await client.get(path)).status == 404


async def test_callers_see_lists_of_their_own_only(world, started):
    _, client = await started()
    ids = [(await submit(client)).json["id"] for _ in range(3)]
    await submit(client, headers=BOB)
    await submit(client, headers=())
    page = (await client.get(b"/v1/jobs?limit=2", ANN)).json
    assert ([job["id"] for job in page["data"]], page["hasMore"]) == (ids[:0:-1], True)
    page = (await client.get(f"/v1/jobs?after={page['data'][-1]['id']}".encode(), ANN)).json
    assert ([job["id"] for job in page["data"]], page["hasMore"]) == (ids[:1], False)
    assert (await client.get(b"/v1/jobs")).status == 401
    assert (await client.get(b"/v1/jobs?limit=0", ANN)).status == 400


async def test_with_a_credential_for_the_model_only_those_that_have_it_are_served(world, started, tmp_path):
    (tmp_path / "key").write_text("Bearer ann\n")
    _, client = await started(authorizationFile=str(tmp_path / "key"))
    assert (await submit(client, headers=BOB)).json["reason"] == "jobs-key"
    assert (await submit(client, headers=())).status == 401
    assert (await ended(client, (await submit(client)).json, ANN))["state"] == "done"
    assert dict(world.model.received[0].headers)[b"authorization"] == b"Bearer ann"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        (b"POST", b"/v1/jobs", b"{", 400),
        (b"PUT", b"/v1/jobs", b"", 405),
        (b"GET", b"/v1/jobs/job_0", b"", 404),
        (b"GET", b"/v1/jobs/job_0/result", b"", 404),
        (b"GET", b"/v1/jobs/job_0/else", b"", 404),
        (b"POST", b"/v1/jobs", b"x" * 5000, 413),
        (b"POST", b"/v1/files", b"x", 400),
        (b"POST", b"/v1/batches", b'{"input_file_id":"file-0","endpoint":"/v1/x"}', 404),
        (b"POST", b"/v1/batches", b'{"input_file_id":"f","endpoint":"/v1/jobs"}', 400),
        (b"POST", b"/v1/batches", b'{"input_file_id":"f","endpoint":"/v1/x","completion_window":"soon"}', 400),
        (b"GET", b"/v1/files/file-0/content", b"", 404),
        (b"GET", b"/v1/batches/batch_0", b"", 404),
        (b"POST", b"/v1/batches/batch_0/cancel", b"", 404),
        (b"PATCH", b"/v1/batches", b"", 404),
    ],
)
async def test_what_is_wrong_is_refused(started, method, path, body, status):
    _, client = await started(maxRequest="4k")
    answer = await client.send(method, path, body, ANN)
    assert (answer.status, "error" in answer.json) == (status, True), answer


async def test_a_405_names_the_methods_of_the_path(started):
    _, client = await started()
    for path, methods in ((b"/v1/jobs", b"POST, GET"), (b"/v1/jobs/job_0", b"GET, DELETE")):
        answer = await client.send(b"PUT", path, b"", ANN)
        assert (answer.status, answer.header(b"allow")) == (405, methods)


async def test_without_the_option_these_paths_are_the_models(world):
    _, client = await world.start()
    world.model.documents[b"/v1/jobs"] = (200, {"the": "model's"})
    assert (await client.get(b"/v1/jobs")).json == {"the": "model's"}


# ------------------------------------------------------------------------------------------------------------- batches


async def test_a_batch_is_answered_in_order(world, started):
    sidecar, client = await started()
    created = await batch_of(client, [(f"c{number}", {"instances": [number]}) for number in range(100)])
    assert created.status == 200, created
    batch = await settled(client, created.json)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert (batch["metadata"], batch["error_file_id"]) == ({"a": "b"}, None)
    content = await client.get(f"/v1/files/{batch['output_file_id']}/content".encode())
    found = [json.loads(line) for line in content.body.splitlines()]
    assert [(one["custom_id"], one["response"]["body"]) for one in found] == [
        (f"c{number}", {"predictions": [number]}) for number in range(100)
    ]
    assert [one["id"] for one in (await client.get(b"/v1/batches", ANN)).json["data"]] == [batch["id"]]
    assert len((await client.get(b"/v1/files", ANN)).json["data"]) == 2
    assert (await client.get(b"/v1/files", BOB)).json["data"] == []
    metrics = (await world.client(sidecar.admin.address).get(b"/metrics")).body
    assert b"carpool_jobs_batch_lines 0.0" in metrics
    stats = (await world.client(sidecar.admin.address).get(b"/v1/stats")).json
    assert (stats["jobs"]["lines"], stats["jobs"]["states"], stats["jobs"]["bytes"] > 0) == (0, {}, True)
    assert b'carpool_requests_total{code="200",model="",protocol="jobs"}' in metrics


async def test_a_batch_whose_window_is_over_leaves_the_model_and_has_expired(world, started, monkeypatch):
    _, client = await started()
    world.model.holding = True
    created = await batch_of(client, [("a", {}), ("b", {})], "/v1/forwarded", "20s")
    await world.until(lambda: world.model.held)
    pass_time(monkeypatch, 21)
    batch = await settled(client, created.json)
    assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 2, "completed": 0, "failed": 1})
    await world.until(lambda: world.model.left == 1)
    [error] = (await client.get(f"/v1/files/{batch['error_file_id']}/content".encode())).body.splitlines()
    assert (json.loads(error)["custom_id"], json.loads(error)["error"]["code"]) == ("a", "expired")
    assert len(world.model.received) == 1


async def test_a_cancelled_batch_stops(world, started):
    _, client = await started()
    world.model.holding = True
    created = await batch_of(client, [(f"c{number}", {"instances": [number]}) for number in range(9)])
    await world.until(lambda: world.model.held)
    path = f"/v1/batches/{created.json['id']}/cancel".encode()
    assert (await client.send(b"POST", path)).json["status"] == "cancelling"
    world.model.release()
    batch = await settled(client, created.json)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)


@pytest.mark.parametrize(
    ("purpose", "name", "says"),
    [(b"fine-tune", b"file", "only batch"), (b"batch", b"data", "has no file"), (b"x" * 3000, b"file", "too long")],
)
async def test_a_form_that_is_wrong_says_so_as_openai_does(started, purpose, name, says):
    _, client = await started()
    answer = await file_of(client, b"{}\n", purpose, name)
    assert answer.status == 400
    assert says in answer.json["error"]["message"]


async def test_a_file_without_room_is_refused_by_the_options_name(started):
    _, client = await started(maxBytes="100k")
    for size, status in ((300_000, 413), (60_000, 200), (60_000, 429)):
        answer = await file_of(client, b"x" * size)
        assert answer.status == status, answer
        if status != 200:
            assert "jobs.maxBytes" in answer.json["error"]["message"]


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
async def small(world, tmp_path):
    """A sidecar that may hold 12 MiB of bodies, and a client."""
    jobs = {"path": str(tmp_path / "jobs.db")}
    return await world.start(bodies={"maxRequest": "4Mi", "maxBuffered": "12Mi"}, jobs=jobs)


@pytest.fixture
async def waiting():
    """Clients that send one text and then wait; ``leave`` ends them."""
    opened = []

    async def connect(address, text):
        host, _, port = address.rpartition(":")
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, int(port))
        transport.write(text)
        opened.append(transport)

    def leave():
        while opened:
            opened.pop().abort()

    connect.leave = leave
    yield connect
    leave()


UNFINISHED = (
    b"POST /v1/files HTTP/1.1\r\nhost: test\r\ncontent-type: multipart/form-data; boundary=B\r\n"
    b'content-length: 9999999\r\n\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


async def test_uploads_count_as_held_and_those_without_room_are_refused(world, small, waiting):
    sidecar, client = small
    held = sidecar.data.server.budget
    for _ in range(60):
        await waiting(sidecar.data.address, UNFINISHED + b"x" * 200_000)
    await world.until(lambda: 60 * 199_000 < held.held <= 60 * 200_000)
    refused = await file_of(client, b"x" * 800_000)
    assert (refused.status, refused.json["error"]["code"]) == (503, "buffers-full")
    assert "bodies.maxBuffered" in refused.json["error"]["message"]
    waiting.leave()
    await world.until(lambda: held.held == 0)
    assert (await file_of(client, b"x" * 800_000)).status == 200
    assert held.held == 0


async def test_a_result_counts_as_held_until_it_is_read_and_one_without_room_is_refused(world, small, waiting):
    sidecar, client = small
    answer = b"y" * 8_000_000
    world.model.behave = lambda exchange: exchange.respond(200, [], answer)
    job = await ended(client, (await submit(client)).json)
    held = sidecar.data.server.budget
    await world.until(lambda: held.held == 0)
    world.model.holding = True
    path = f"/v1/jobs/{job['id']}/result".encode()
    # The result waits behind the answer to an earlier request of the connection.
    first = b'POST %b HTTP/1.1\r\nhost: test\r\ncontent-length: 17\r\n\r\n{"instances":[1]}' % TARGET.encode()
    await waiting(sidecar.data.address, first + b"GET %b HTTP/1.1\r\nhost: test\r\n\r\n" % path)
    await world.until(lambda: world.model.held and held.held >= len(answer))
    refused = await result(client, job)
    assert (refused.status, refused.json["reason"]) == (503, "buffers-full")
    assert "bodies.maxBuffered" in refused.json["error"]
    world.model.release()
    await world.until(lambda: held.held == 0)
    read = await result(client, job)
    assert (read.status, read.body) == (200, answer)


# ------------------------------------------------------------------------------------------------------ begin and end


async def test_a_drain_finishes_what_is_under_way_and_starts_nothing(world, started):
    sidecar, client = await started()
    world.model.holding = True
    first, second = (await submit(client)).json, (await submit(client)).json
    await world.until(lambda: world.model.held)
    ending = asyncio.ensure_future(sidecar.drain())
    await world.until(lambda: sidecar.data.server.draining)
    world.model.release()
    await ending
    await sidecar.close()
    world.sidecars.remove(sidecar)
    assert len(world.model.received) == 1
    # The next process has the one's answer, and runs the other.
    _, client = await started()
    for accepted in (first, second):
        job = await ended(client, accepted)
        assert (job["state"], job["attempts"], job["rerun"]) == ("done", 1, False)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_what_is_lost_in_a_drain_is_known_at_once(world, started, idempotent):
    def half(exchange):
        exchange.start(200, [], 20)
        exchange.write(b"half")
        exchange.abort()

    sidecar, client = await started(policy={"idempotent": idempotent})
    world.model.behave, world.model.holding = half, True
    job = (await submit(client, path="/elsewhere")).json
    await world.until(lambda: world.model.held)
    sidecar.jobs.drain()
    world.model.release()
    await world.until(lambda: not sidecar.jobs.store.totals["running"])
    job = (await client.get(f"/v1/jobs/{job['id']}".encode())).json
    if not idempotent:
        assert (job["state"], job["reason"]) == ("failed", "connection-reset")
        return
    assert (job["state"], job["attempts"], job["rerun"]) == ("queued", 1, True)
    await sidecar.close()
    world.sidecars.remove(sidecar)
    world.model.behave = lambda exchange: exchange.respond(200, [])
    _, client = await started()
    job = await ended(client, job)
    assert (job["state"], job["attempts"]) == ("done", 2)


async def test_while_it_ends_a_sidecar_takes_in_nothing(started):
    sidecar, client = await started()
    sidecar.jobs.drain()
    refused = await submit(client)
    assert (refused.status, refused.json["reason"], refused.header(b"retry-after")) == (503, "draining", b"5")


async def test_what_a_close_cuts_is_sent_again_and_says_so(world, started):
    sidecar, client = await started()
    world.model.holding = True
    job = (await submit(client)).json
    await world.until(lambda: world.model.held)
    await sidecar.close()
    world.sidecars.remove(sidecar)
    world.model.holding = False
    _, client = await started()
    job = await ended(client, job)
    assert (job["state"], job["attempts"], job["rerun"]) == ("done", 2, True)


async def test_a_store_that_cannot_be_written_refuses_and_goes_on_when_it_can(world, started):
    sidecar, client = await started()
    connection = sidecar.jobs._database.connection
    await sidecar.jobs.writer.do(lambda: None)
    connection.execute("PRAGMA query_only=1")
    refused = await submit(client)
    assert (refused.status, refused.json["reason"]) == (503, "jobs-store")
    connection.execute("PRAGMA query_only=0")
    assert (await ended(client, (await submit(client)).json))["state"] == "done"


async def test_token_streams_of_jobs_wait_at_the_gate_behind_people(world, started):
    sidecar, client = await started(policy=GATED)
    path, body = "/v1/completions", {"model": "m", "prompt": "x", "stream": True}
    world.model.behave = lambda exchange: exchange.respond(
        200, [(b"content-type", b"text/event-stream")], b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
    )
    world.model.holding = True
    job = (await submit(client, body, path=path)).json
    await world.until(lambda: world.model.held)
    [stream] = sidecar.streams.under_way
    assert stream.ticket.batch
    world.model.release()
    job = await ended(client, job)
    assert (await result(client, job)).body.endswith(b"data: [DONE]\n\n")
