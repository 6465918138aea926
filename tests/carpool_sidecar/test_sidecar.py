"""A whole sidecar's life: it starts, its configuration changes, its model restarts, it drains; nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from carpool_sidecar import shutdown as module
from carpool_sidecar.backends.base import Document
from carpool_sidecar.http1.client.errors import UpstreamError


async def test_a_model_that_was_restarted_is_learned_anew(world):
    sidecar, client = await world.start()
    counters = sidecar.batcher.model("m").counters
    for _ in range(2):
        assert (await client.predict(b"1")).status == 200
    # Where the machine pauses, a batch counts as stalled, whether it is the first of its size or not.
    before = counters.cold + counters.stalled
    assert before >= 1
    port = world.model.port
    await world.model.die()
    await world.until(lambda: not sidecar.ready)
    await world.model.listen(port)
    await world.until(lambda: sidecar.ready)
    assert (await client.predict(b"2")).status == 200
    assert counters.cold + counters.stalled == before + 1  # the first of its size is cold again


async def test_a_model_that_became_another_version_is_learned_anew(world):
    sidecar, client = await world.start(policy={"models": []})
    assert (await client.predict(b"1")).status == 200
    entry = next(iter(sidecar.models))
    await world.until(lambda: entry.known.axis is not None)
    lane, other = sidecar.batcher.model("m"), sidecar.batcher.model("n")
    assert lane.first_batches.seen
    other.first_batches.seen.add((0, 1))
    status, document = world.model.documents[b"/v2/models/m"]
    world.model.documents[b"/v2/models/m"] = (status, {**document, "versions": ["2"]})
    sidecar.models.ask_again()
    await world.until(lambda: not lane.first_batches.seen)
    assert other.first_batches.seen


async def test_configurations_change_under_load_and_no_request_is_lost(world, tmp_path):
    path = tmp_path / "sidecar.json"
    versions = [
        world.config(parameters={"*": {"maxBatch": batch, "maxInFlight": flights}})
        for batch, flights in ((8, 1), (1, 4), (3, 2), (16, 1))
    ]
    path.write_text(versions[0])
    sidecar = await world.sidecar(versions[0], path=path)
    client = world.client(sidecar.data.address)
    asked = []
    for turn in range(40):
        asked += [(client.predict(b"[%d]" % number), number) for number in range(turn, turn + 10)]
        path.write_text("broken" if turn % 5 == 4 else versions[turn % 4])
        sidecar.versions.file.look()
        await asyncio.sleep(0)
    answers = [((await one).json, number) for one, number in asked]
    assert all(answer == {"predictions": [[number]]} for answer, number in answers)
    assert sidecar.versions.file.rejected == 8
    assert sidecar.versions.generation > 20
    path.write_text(versions[3])
    sidecar.versions.file.look()
    assert sidecar.batcher.model("m").parameters.max_batch == 16


async def test_a_new_policy_takes_hold(world, tmp_path):
    path = tmp_path / "sidecar.json"
    path.write_text(world.config())
    sidecar = await world.sidecar(world.config(), path=path)
    policy = {
        "slo": {"latency": {"p99": "70ms"}},
        "models": [{"name": "m", "axis": "None", "maxBatch": 2}],
        "admission": {"timeout": "3s", "maxQueuedRows": 1},
    }
    path.write_text(world.config(policy=policy))
    sidecar.versions.file.look()
    assert (sidecar.driver.terms.due, sidecar.driver.terms.timeout) == (0.07, 3.0)
    assert sidecar.batcher.model("m").cap == 2
    assert next(iter(sidecar.models)).alone == "axis-none"
    client = world.client(sidecar.data.address)
    first, rest = await world.queue_behind(sidecar, client, [b"1"])
    assert (await client.predict(b"2")).status == 429
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200]


async def test_a_drain_loses_nothing_and_refuses_nobody_while_it_still_accepts(world):
    sidecar, client = await world.start(shutdown={"lame": "50ms", "limit": "20s"})
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    draining = asyncio.create_task(sidecar.drain())
    await world.until(lambda: sidecar.data.server.draining)
    assert not sidecar.ready
    late = client.predict(b"3")  # a load balancer that has not noticed yet
    await world.until(lambda: sidecar.batcher.queued_rows == 3)
    await world.until(lambda: not sidecar.data.server._listeners)
    assert not draining.done()
    world.model.release()
    await draining
    answers = [await one for one in (first, *rest, late)]
    assert [answer.status for answer in answers] == [200] * 4
    assert all(answer.header(b"connection") == b"close" for answer in answers)
    with pytest.raises(UpstreamError, match=r"no connection|closed"):
        await client.predict(b"4")


async def test_a_model_that_outlives_a_drain_needs_another_sidecar(world, monkeypatch):
    monkeypatch.setattr(module, "OUTLIVED", 0.0)
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    sidecar, _ = await world.start()
    await world.model.die()
    await world.until(lambda: not sidecar.ready)
    await sidecar.drain()
    await asyncio.sleep(0)
    assert not sidecar.shutdown.outlived.is_set()
    sidecar.health.observe(Document(200))
    await asyncio.wait_for(sidecar.shutdown.outlived.wait(), 60)


async def test_a_drain_ends_at_its_limit(world):
    sidecar, client = await world.start(shutdown={"lame": "0s", "limit": "30ms"})
    first, _ = await world.queue_behind(sidecar, client, [])
    await sidecar.drain()
    assert not first.future.done()
    first.leave()


async def test_what_comes_in_behind_the_drain_is_refused_in_words(world):
    sidecar, client = await world.start()
    sidecar.batcher.close()
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"]) == (503, "draining")
    assert answer.header(b"retry-after") == b"1"


async def test_an_upstream_on_a_unix_socket(world, tmp_path):
    path = str(tmp_path / "m.sock")
    await world.model.server.listen_unix(path)
    _, client = await world.start(upstream={"url": f"unix:{path}"})
    assert (await client.predict(b"1")).json == {"predictions": [1]}


async def test_a_new_version_with_a_fixed_wait_beyond_the_slo_is_taken_with_a_warning(world, tmp_path, caplog):
    path = tmp_path / "sidecar.json"
    first = world.config(parameters={"*": {"maxBatch": 2, "maxWait": "1ms"}})
    path.write_text(first)
    sidecar = await world.sidecar(first, path=path)
    sidecar.versions.file.look()
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    path.write_text(world.config(parameters={"*": {"maxBatch": 2, "maxWait": "1h"}}))
    sidecar.versions.file.look()
    assert sidecar.versions.file.error is None
    assert sidecar.versions.config.parameters["*"].max_wait == 3600
    (warned,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "parameters[*].maxWait: 1h is not below the SLO" in warned.error


async def test_a_server_without_v2_is_logged_with_what_becomes_of_its_v1_requests(world, caplog):
    caplog.set_level("INFO", "carpool")
    world.model.documents[b"/v2/models/m"] = (404, {})
    sidecar, client = await world.start(policy={"models": []})
    assert (await client.predict(b"1")).status == 200
    await world.until(lambda: "batch axis looked up" in caplog.messages)
    (line,) = [record for record in caplog.records if record.message == "batch axis looked up"]
    assert line.merges == "V1"
    assert line.detail == (
        "the server answers /v2/models/m with 404: `instances` of V1 are batched once the first requests have verified "
        "it; the batch axis of other requests is not known: if dim 0 of every tensor is the batch and rows do not "
        "affect each other, set `models: [{name: m, axis: First}]`"
    )
    assert sidecar.models
