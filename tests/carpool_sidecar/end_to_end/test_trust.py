"""The rights to read, change and drain a sidecar in a pod: admin port on every address, signed parameters."""

from __future__ import annotations

import json
import time
from base64 import b64encode, urlsafe_b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from carpool.batching.counters import LATE
from carpool.exchange.change import Change, Ticket, encode
from carpool.exchange.report import decode
from carpool.policy.parameters import Parameters
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar.admin.changes import BODY, SIGNATURE
from carpool_sidecar.tuning import control

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
THIEF = Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))
TARGET = "default/Deployment/resnet"
DRAIN_KEY = "0123456789abcdef"
READS = (b"/v1/stats", b"/v1/config", b"/v1/explain")


def change(generation=7, batch=2, **fields):
    plain = {"target": TARGET, "expires": time.time() + 3600, "parameters": {"*": Parameters(max_batch=batch)}}
    return Change(generation=generation, **plain | fields)


def signature(document, key=KEY):
    return [(b"X-Carpool-Signature", b64encode(key.sign(encode(document))))]


def ticket(key=KEY, **fields):
    body = encode(Ticket(**{"target": TARGET, "expires": time.time() + 3600} | fields))
    text = b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in (body, key.sign(body)))
    return [(b"Authorization", b"Carpool " + text)]


@pytest.fixture
async def injected(world):
    """A sidecar with what injection gives it; and a client of its admin port, from which nobody is local."""

    async def start(**fields):
        public = KEY.public_key().public_bytes_raw().hex()
        pod = {"admin": "0.0.0.0:0", "publicKey": public, "target": TARGET, "drainKey": DRAIN_KEY}
        sidecar = await world.sidecar(**pod | fields)
        return sidecar, world.client(f"127.0.0.1:{sidecar.admin.server.addresses[0][1]}")

    return start


async def put(admin, document, headers=None):
    return await admin.send(b"PUT", b"/v1/config", encode(document), headers or signature(document))


async def report(admin):
    return decode((await admin.get(b"/v1/stats", ticket())).body)


async def test_a_last_document_without_a_policy_brings_back_what_it_was_started_with(world, injected):
    passing = {"*": {"passThrough": True, "maxInFlight": 1024}}
    _, admin = await injected(policy={"slo": {"latency": {"p99": "1h"}}}, parameters=passing)
    client = world.client(world.sidecars[0].data.address)
    assert (await client.predict(b"1")).status == 200
    fresh = await report(admin)
    assert (await put(admin, change(7, policy=for_p99(0.05)))).status == 200
    steered = await report(admin)
    last = change(8, parameters={"*": Parameters(pass_through=True, max_in_flight=1024)})
    assert (await put(admin, last)).status == 200
    released = await report(admin)

    def state(one):
        return one.slo_seconds, {name: (lane.parameters, lane.pass_through) for name, lane in one.lanes.items()}

    assert state(steered) != state(fresh)
    assert state(released) == state(fresh)
    assert released.slo_seconds == 3600


async def test_without_a_ticket_nothing_is_read_and_the_answer_says_what_is_missing(injected):
    _, admin = await injected()
    for path in READS:
        for headers in ([], [(b"Authorization", b"Bearer of-the-service-account")]):
            answer = await admin.get(path, headers)
            assert (answer.status, "ticket signed by" in answer.json["error"]) == (403, True)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (ticket(THIEF), "signature"),
        (ticket(target="default/Deployment/other"), "target"),
        (ticket(target="other/Deployment/resnet"), "target"),
        (ticket(expires=time.time() - 3600), "expired"),
    ],
)
async def test_a_ticket_of_others_reads_nothing(injected, headers, reason):
    _, admin = await injected()
    for path in READS:
        answer = await admin.get(path, headers)
        assert (answer.status, answer.json["reason"]) == (403, reason)


async def test_a_ticket_reads_and_does_nothing_else(injected):
    sidecar, admin = await injected()
    for path in READS:
        assert (await admin.get(path, ticket())).status == 200
    assert (await admin.get(b"/drain", ticket())).status == 403
    answer = await admin.send(b"PUT", b"/v1/config", encode(change()), ticket())
    assert (answer.status, answer.json["reason"]) == (403, "signature")
    assert (sidecar.versions.generation, sidecar.data.server.draining) == (1, False)


async def test_who_may_read_does_not_learn_how_to_drain(injected):
    _, admin = await injected()
    shown = await admin.get(b"/v1/config", ticket())
    assert shown.json["config"]["drainKey"] == "(set)"
    assert DRAIN_KEY.encode() not in shown.body


async def test_the_drain_key_drains_and_does_nothing_else(injected):
    sidecar, admin = await injected()
    headers = [(b"X-Carpool-Drain", DRAIN_KEY.encode())]
    for path in READS:
        assert (await admin.get(path, headers)).status == 403
    for wrong in ([], [(b"X-Carpool-Drain", b"0123456789abcdee")], [(b"X-Carpool-Drain", b"\xff")]):
        answer = await admin.get(b"/drain", wrong)
        assert answer.status == 403
    assert "preStop hook" in answer.json["error"]
    assert not sidecar.data.server.draining
    assert (await admin.get(b"/drain", headers)).status == 200
    assert sidecar.data.server.draining


async def test_a_signed_change_brings_parameters_and_policy_and_asks_for_no_other_key(injected, world):
    sidecar, admin = await injected(key="secret")
    assert (await put(admin, change(policy=for_p99(0.07)))).json == {"generation": 7, "running": 7}
    assert (sidecar.driver.terms.due, sidecar.batcher.model("m").parameters.max_batch) == (0.07, 2)
    seen = await report(admin)
    assert (seen.generation, seen.running, seen.slo_seconds, seen.target) == (7, 7, 0.07, TARGET)
    assert seen.lanes["m"].parameters == Parameters(max_batch=2)
    # Without a policy it is the one that the pod was started with.
    assert (await put(admin, change(8))).status == 200
    assert sidecar.driver.terms.due == 5.0


async def test_everything_in_a_policy_takes_hold(injected, world):
    sidecar, admin = await injected()
    client = world.client(sidecar.data.address)
    assert (await client.predict(b"1")).status == 200
    policy = {
        "slo": {"latency": {"p99": "70ms"}},
        "models": [{"name": "m", "axis": "None", "maxBatch": 3}],
        "admission": {"timeout": "3s", "maxQueuedRows": 1},
    }
    document = {"target": TARGET, "generation": 9, "expires": time.time() + 60, "policy": policy}
    body = json.dumps(document | {"parameters": {"m": {"maxBatch": 4}}}).encode()
    answer = await admin.send(b"PUT", b"/v1/config", body, [(b"X-Carpool-Signature", b64encode(KEY.sign(body)))])
    assert answer.status == 200
    assert (sidecar.driver.terms.timeout, sidecar.batcher.model("m").cap) == (3.0, 3)
    assert next(iter(sidecar.models)).alone == "axis-none"
    first, rest = await world.queue_behind(sidecar, client, [b"1"])
    assert (await client.predict(b"2")).status == 429
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200]


@pytest.mark.parametrize(
    ("document", "key", "reason"),
    [
        (change(9), THIEF, "signature"),
        (change(9, target="default/Deployment/other"), KEY, "target"),
        (change(9, target="other/Deployment/resnet"), KEY, "target"),
        (change(9, expires=time.time() - 3600), KEY, "expired"),
        (change(6), KEY, "older"),
        (change(7, batch=9), KEY, "older"),
    ],
)
async def test_what_is_forged_foreign_expired_or_replayed_changes_nothing(injected, document, key, reason):
    sidecar, admin = await injected()
    assert (await put(admin, change(7))).status == 200
    answer = await put(admin, document, signature(document, key))
    assert (answer.status, answer.json["reason"]) == (403, reason)
    assert len(answer.json["error"].split(": ")) > 1, "what would help"
    assert (sidecar.versions.generation, sidecar.batcher.model("m").parameters.max_batch) == (7, 2)
    assert (await report(admin)).rejected == {reason: 1}
    metrics = (await admin.get(b"/metrics")).body
    assert b'carpool_changes_rejected_total{reason="%b"} 1.0' % reason.encode() in metrics
    assert b"carpool_config_generation 7.0" in metrics


async def test_a_change_that_is_signed_and_wrong_is_named(injected):
    sidecar, admin = await injected()
    answer = await put(admin, change(parameters={}))
    assert (answer.status, answer.json["error"][:11]) == (400, "parameters:")
    assert sidecar.versions.generation == 1


async def test_a_change_reaches_a_pod_that_drains(injected, world):
    sidecar, admin = await injected(shutdown={"lame": "20s", "limit": "21s"})
    drained = admin.get(b"/drain", [(b"X-Carpool-Drain", DRAIN_KEY.encode())])
    await world.until(lambda: sidecar.data.server.draining)
    assert (await put(admin, change())).status == 200
    assert sidecar.batcher.model("m").parameters.max_batch == 2
    drained.leave()


async def test_a_new_pod_begins_with_what_its_directory_holds_and_follows_it(injected, tmp_path):
    for name, document in (("..1", change(7)), ("..2", change(8, batch=4))):
        (tmp_path / name).mkdir()
        (tmp_path / name / BODY).write_bytes(encode(document))
        (tmp_path / name / SIGNATURE).write_bytes(signature(document)[0][1])
    for name, to in (("..data", "..1"), (BODY, f"..data/{BODY}"), (SIGNATURE, f"..data/{SIGNATURE}")):
        (tmp_path / name).symlink_to(to)
    sidecar, admin = await injected(changes=str(tmp_path))
    assert (sidecar.versions.generation, sidecar.batcher.model("m").parameters.max_batch) == (7, 2)
    assert (await put(admin, change(6))).status == 403
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    sidecar.versions.changes.look()
    assert (sidecar.versions.generation, sidecar.batcher.model("m").parameters.max_batch) == (8, 4)
    assert (await put(admin, change(8, batch=4))).status == 200  # what came by the file may come by the port
    assert (await put(admin, change(7))).status == 403
    (tmp_path / "..2" / SIGNATURE).write_bytes(b"AAAA")
    sidecar.versions.changes.look()
    seen = await report(admin)
    assert (seen.generation, "change.sig" in seen.change_error) == (8, True)


async def test_a_directory_that_holds_nothing_yet_leaves_the_pod_as_it_was_started(injected, tmp_path):
    sidecar, admin = await injected(changes=str(tmp_path / "optional"))
    assert sidecar.batcher.model("m").parameters.max_batch == 8
    assert (await report(admin)).change_error is None


async def test_a_change_of_parameters_costs_nothing_that_was_learned(injected):
    sidecar, admin = await injected()
    assert (await put(admin, change(7, policy=for_p99(0.05)))).status == 200
    observer, lane = sidecar.control.observer, sidecar.batcher.model("m")
    generation = observer.generation("m")
    assert (await put(admin, change(8, batch=5, policy=for_p99(0.05)))).status == 200
    assert (observer.generation("m"), lane.parameters.max_batch) == (generation, 5)
    assert (await put(admin, change(9, batch=5, policy=for_p99(0.06)))).status == 200
    assert observer.generation("m") == generation + 1


async def test_parameters_that_miss_the_slo_are_rolled_back_and_reported(injected, monkeypatch):
    monkeypatch.setattr(control, "INTERVAL", 3600.0)
    sidecar, admin = await injected()
    counters, rollback, now = sidecar.batcher.model("m").counters, sidecar.control.in_force.rollback, sidecar.clock()
    assert (await put(admin, change(7, batch=4))).status == 200

    def serve(seconds, late=0):
        nonlocal now
        for _ in range(2 * seconds):
            counters.rows += 100
            counters.hits += 100 - late
            counters.misses[LATE] = counters.misses.get(LATE, 0) + late
            now += 0.5
            rollback.observe(now, stalled=False)

    serve(15)
    assert (await put(admin, change(8, batch=6))).json == {"generation": 8, "running": 8}
    serve(2, late=30)
    seen = await report(admin)
    assert (seen.generation, seen.running, seen.lanes["m"].parameters.max_batch) == (8, 7, 4)
    (told,) = seen.rolled_back
    assert (told.model, told.generation, told.rejected.max_batch, told.back_to.max_batch) == ("m", 8, 6, 4)
    metrics = (await admin.get(b"/metrics")).body
    for line in (
        b'carpool_rollbacks_total{model="m"} 1.0',
        b"carpool_config_running 7.0",
        b"carpool_config_generation 8.0",
    ):
        assert line in metrics
    assert (await put(admin, change(8, batch=6))).json == {"generation": 8, "running": 7}
    assert (await put(admin, change(9, batch=4))).json == {"generation": 9, "running": 9}
    assert (await report(admin)).rolled_back == []
