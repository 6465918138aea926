from __future__ import annotations

import base64
import json
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from carpool.exchange import report
from carpool_sidecar.admin.metrics import Exposition


@pytest.fixture
def private_key():
    return Ed25519PrivateKey.generate()


async def test_stats_show_what_was_counted_and_the_state_of_each_lane(world):
    sidecar, client = await world.start()
    admin = world.client(sidecar.admin.address)
    await client.predict(b"1")
    await client.send(b"POST", b"/v1/models/m:predict", b'{"instances":[1]}', [(b"Content-Encoding", b"gzip")])
    stats = (await admin.get(b"/v1/stats?arrivals=10")).json
    assert stats["stats"]["models"]["m"]["arrivals"] == 2
    assert (stats["ready"], stats["sloSeconds"], stats["generation"]) == (True, 5.0, 1)
    lane = stats["lanes"]["m"]
    assert (lane["cap"], lane["parameters"]["maxBatch"], len(lane["arrivals"])) == (8, 8, 2)
    assert stats["models"][0]["axis"] == "the policy says axis First"
    assert stats["alone"] == [{"model": "m", "reason": "encoded", "requests": 1}]
    assert (await admin.get(b"/v1/stats")).json["lanes"]["m"]["arrivals"] == []


async def test_the_last_arrivals_come_with_their_rows_as_many_as_are_asked_for(world):
    sidecar, client = await world.start()
    admin = world.client(sidecar.admin.address)
    for rows in (1, 3, 2):
        await client.predict(b",".join([b"1"] * rows))
    decoded = report.decode((await admin.get(b"/v1/stats?arrivals=4096")).body)
    times = [time for time, _ in decoded.lanes["m"].arrivals]
    assert [rows for _, rows in decoded.lanes["m"].arrivals] == [1, 3, 2]
    assert times == sorted(times)
    assert times[-1] <= decoded.stats.at
    last = report.decode((await admin.get(b"/v1/stats?arrivals=2")).body)
    assert [rows for _, rows in last.lanes["m"].arrivals] == [3, 2]
    assert report.decode((await admin.get(b"/v1/stats?arrivals=no")).body).lanes["m"].arrivals == []


async def test_config_shows_what_is_in_force_and_what_is_wrong(world, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(world.config())
    sidecar = await world.sidecar(world.config(), path=path)
    admin = world.client(sidecar.admin.address)
    path.write_text("no")
    sidecar.versions.file.look()
    config = (await admin.get(b"/v1/config")).json
    assert (config["generation"], config["tuned"]) == (1, False)
    assert "mapping" in config["error"]
    assert config["config"]["policy"]["slo"]["latency"] == {"p99": "5s"}
    assert config["parameters"]["m"]["maxBatch"] == 8


async def test_explain_is_empty_before_the_first_decision(world):
    sidecar = await world.sidecar()
    explained = (await world.client(sidecar.admin.address).get(b"/v1/explain")).json
    assert explained == {"tuned": False, "tunerPid": sidecar.control.link.pid, "decisions": [], "lastBusy": {}}


async def test_metrics_are_text_for_prometheus(world):
    sidecar, client = await world.start()
    await client.predict(b"1")
    answer = await world.client(sidecar.admin.address).get(b"/metrics")
    assert answer.header(b"content-type").startswith(b"text/plain")
    assert b'carpool_requests_total{code="200",model="m",protocol="v1"} 1.0' in answer.body


async def test_unknown_paths_list_the_known_ones_and_unknown_methods_get_405(world):
    sidecar = await world.sidecar()
    admin = world.client(sidecar.admin.address)
    missing = await admin.get(b"/nope")
    assert (missing.status, "/v1/stats" in missing.json["error"]) == (404, True)
    for method, path, allow in (
        (b"DELETE", b"/v1/stats", b"GET, HEAD"),
        (b"PUT", b"/drain", b"GET, HEAD, POST"),
        (b"POST", b"/v1/config", b"GET, HEAD, PUT"),
    ):
        answer = await admin.send(method, path)
        assert (answer.status, answer.header(b"allow")) == (405, allow)
    assert (await admin.send(b"POST", b"/nope")).status == 404
    assert (await admin.send(b"HEAD", b"/livez")).status == 200


async def test_metrics_that_can_not_be_written_are_an_error_and_no_silence(world, monkeypatch):
    async def fails(_):
        raise ValueError("no text")

    sidecar, _ = await world.start()
    monkeypatch.setattr(Exposition, "text", fails)
    answer = await world.client(sidecar.admin.address).get(b"/metrics")
    assert (answer.status, json.loads(answer.body)["reason"]) == (500, "metrics")


async def test_with_a_key_all_but_probes_and_metrics_need_it(world):
    sidecar = await world.sidecar(key="secret")
    admin = world.client(sidecar.admin.address)
    for path in (b"/livez", b"/readyz", b"/startupz", b"/metrics"):
        assert (await admin.get(path)).status == 200
    for path in (b"/v1/stats", b"/v1/stats?arrivals=9", b"/v1/config", b"/v1/explain", b"/drain"):
        assert (await admin.get(path)).status == 401
        assert (await admin.get(path, [(b"Authorization", b"Bearer wrong")])).status == 401
    for path in (b"/v1/stats", b"/v1/config", b"/v1/explain"):
        assert (await admin.get(path, [(b"Authorization", b"Bearer secret")])).status == 200
    assert not sidecar.data.server.draining


async def test_without_a_key_only_loopback_addresses_are_served(world):
    sidecar = await world.sidecar(admin="0.0.0.0:0")
    admin = world.client(f"127.0.0.1:{sidecar.admin.server.addresses[0][1]}")
    assert (await admin.get(b"/livez")).status == 200
    answer = await admin.get(b"/v1/stats")
    assert (answer.status, "apiKeyFile" in answer.json["error"]) == (403, True)


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ((b"Sec-Fetch-Site", b"cross-site"), 403),
        ((b"Sec-Fetch-Site", b"same-site"), 403),
        ((b"Sec-Fetch-Site", b"none"), 200),
        ((b"Host", b"evil.example:9090"), 403),
        ((b"Host", b"localhost:9090"), 200),
        ((b"Host", b"[::1]:9090"), 200),
        ((b"Host", b"127.0.0.1"), 200),
    ],
)
async def test_a_web_page_of_another_site_is_not_served(world, field, status):
    """An image of it with the address of /drain would end a workstation's sidecar."""
    sidecar = await world.sidecar()
    admin = world.client(sidecar.admin.address)
    assert (await admin.get(b"/livez", [field])).status == 200
    assert (await admin.get(b"/v1/stats", [field])).status == status
    assert (await admin.get(b"/drain", [field])).status == status
    assert sidecar.data.server.draining is (status == 200)


async def test_drain_answers_when_nothing_is_left_to_lose(world):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    admin = world.client(sidecar.admin.address)
    one, two = admin.get(b"/drain"), admin.send(b"POST", b"/drain", b"", [(b"Host", b"127.0.0.1")])
    await world.until(lambda: sidecar.data.server.draining)
    assert (await admin.get(b"/readyz")).body == b"draining\n"
    assert not one.future.done()
    world.model.release()
    assert (await first).status == 200
    assert [(await each).status for each in (one, two)] == [200, 200]
    assert (await admin.get(b"/drain")).status == 200


def _signed(private_key, **fields):
    change = {
        "target": "uid-1",
        "generation": 7,
        "expires": time.time() + 60,
        "parameters": {"m": {"maxBatch": 2, "maxWait": "1ms"}},
        **fields,
    }
    body = json.dumps(change).encode()
    return body, [(b"X-Carpool-Signature", base64.b64encode(private_key.sign(body)))]


async def test_signed_parameters_are_applied(world, private_key):
    public = private_key.public_key().public_bytes_raw().hex()
    sidecar = await world.sidecar(publicKey=public, target="uid-1")
    admin = world.client(sidecar.admin.address)
    body, headers = _signed(private_key)
    answer = await admin.send(b"PUT", b"/v1/config", body, headers)
    assert (answer.status, answer.json) == (200, {"generation": 7, "running": 7})
    assert sidecar.batcher.model("m").parameters.max_batch == 2
    assert sidecar.versions.generation == 7
    again = await admin.send(b"PUT", b"/v1/config", body, headers)
    assert (again.status, again.json) == (200, {"generation": 7, "running": 7})
    other = await admin.send(b"PUT", b"/v1/config", *_signed(private_key, parameters={"m": {"maxBatch": 3}}))
    assert (other.status, "not newer" in other.json["error"]) == (403, True)


async def test_a_new_file_does_not_make_an_old_change_new_again(world, private_key):
    signing = {"publicKey": private_key.public_key().public_bytes_raw().hex(), "target": "uid-1"}
    path = world.tmp_path / "sidecar.json"
    path.write_text(world.config(**signing))
    sidecar = await world.sidecar(path.read_text(), path=path)
    admin = world.client(sidecar.admin.address)
    old = _signed(private_key, generation=5)
    for body, headers in (old, _signed(private_key, generation=6)):
        assert (await admin.send(b"PUT", b"/v1/config", body, headers)).status == 200
    sidecar.versions.file.look()
    path.write_text(world.config(**signing, log="Debug"))
    sidecar.versions.file.look()
    assert sidecar.versions.generation == 2
    again = await admin.send(b"PUT", b"/v1/config", *old)
    assert (again.status, "not newer" in again.json["error"]) == (403, True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": "uid-2"}, "for target"),
        ({"expires": 1.0}, "expired"),
        ({"generation": 1}, "not newer"),
    ],
)
async def test_what_was_signed_for_others_or_another_time_changes_nothing(world, private_key, fields, words):
    public = private_key.public_key().public_bytes_raw().hex()
    sidecar = await world.sidecar(publicKey=public, target="uid-1")
    admin = world.client(sidecar.admin.address)
    body, headers = _signed(private_key, **fields)
    answer = await admin.send(b"PUT", b"/v1/config", body, headers)
    assert (answer.status, words in answer.json["error"]) == (403, True)
    assert sidecar.batcher.model("m").parameters.max_batch == 8


async def test_an_unsigned_or_altered_change_is_refused_and_a_wrong_one_named(world, private_key):
    public = private_key.public_key().public_bytes_raw().hex()
    sidecar = await world.sidecar(publicKey=public, target="uid-1")
    admin = world.client(sidecar.admin.address)
    body, headers = _signed(private_key)
    for altered, lines in ((body + b" ", headers), (body, []), (body, [(b"X-Carpool-Signature", b"!")])):
        assert (await admin.send(b"PUT", b"/v1/config", altered, lines)).status == 403
    wrong = await admin.send(b"PUT", b"/v1/config", *_signed(private_key, parameters={"m": {"maxBatch": 0}}))
    assert (wrong.status, "maxBatch" in wrong.json["error"]) == (400, True)
    assert sidecar.versions.generation == 1


async def test_without_a_public_key_the_file_alone_changes_things(world, private_key):
    sidecar = await world.sidecar()
    admin = world.client(sidecar.admin.address)
    answer = await admin.send(b"PUT", b"/v1/config", *_signed(private_key))
    assert (answer.status, answer.json["reason"]) == (403, "read-only")
