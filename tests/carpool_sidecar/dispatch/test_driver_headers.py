"""Headers by which requests are batched together or apart, credentials above all."""

from __future__ import annotations

import json

from carpool_sidecar.config.settings import parse
from carpool_sidecar.http1.messages import find
from carpool_sidecar.protocols.headers import WINDOW


async def test_callers_who_differ_in_a_header_across_which_is_batched_share_a_call(world):
    sidecar, client = await world.start(policy={"batchAcross": ["authorization"]})
    tokens = [[(b"Authorization", b"Bearer %d" % n)] for n in range(3)]
    first = await world.occupy(client)
    rest = await world.queue(sidecar, *[lambda n=n: client.predict(b"%d" % n, tokens[n]) for n in range(3)])
    world.model.release()
    assert (await first).status == 200
    assert [(await one).json for one in rest] == [{"predictions": [n]} for n in range(3)]
    call = world.model.received[-1]
    assert call.rows == [0, 1, 2]
    assert [value for name, value in call.headers if name == b"authorization"] == [b"Bearer 0"]


async def test_credentials_that_are_refused_cost_their_caller_alone(world):
    sidecar, client = await world.start(policy={"batchAcross": ["authorization"]})

    def guarded(exchange):
        bad = [(name.lower(), value) for name, value in exchange.headers].count((b"authorization", b"Bearer 0"))
        if bad:
            exchange.respond(401, [], b'{"error":"no"}')
        else:
            echo(exchange)

    echo, world.model.behave = world.model.behave, guarded
    tokens = [[(b"Authorization", b"Bearer %d" % n)] for n in range(3)]
    first = await world.occupy(client)
    rest = await world.queue(sidecar, *[lambda n=n: client.predict(b"%d" % n, tokens[n]) for n in range(3)])
    world.model.release()
    assert (await first).status == 200
    assert [(await one).status for one in rest] == [401, 200, 200]


async def test_headers_are_read_anew_once_the_policy_says_otherwise(world):
    """Also on a connection that has sent the same head before."""
    sidecar, client = await world.start()
    tokens = [[(b"Authorization", b"Bearer %d" % n)] for n in range(2)]
    for _ in range(2):
        for line in tokens:
            assert (await client.predict(b"7", line)).status == 200
    across = json.loads(world.config(policy={"batchAcross": ["authorization"]}))
    sidecar.versions.use(parse(json.dumps(across)))
    first = await world.occupy(client)
    rest = await world.queue(sidecar, *[lambda line=line: client.predict(b"7", line) for line in tokens])
    world.model.release()
    for one in (first, *rest):
        assert (await one).status == 200
    assert world.model.received[-1].rows == [7, 7]


async def test_who_waits_under_former_rules_shares_no_credentials_with_who_comes_under_new_ones(world):
    sidecar, client = await world.start(policy={"batchAcross": ["authorization"]})
    first = await world.occupy(client)
    alice = await world.queue(sidecar, lambda: client.predict(b"1", [(b"Authorization", b"Bearer alice")]))
    sidecar.versions.use(parse(world.config()))
    nobody = await world.queue(sidecar, lambda: client.predict(b"2"))
    world.model.release()
    assert [(await one).status for one in (first, *alice, *nobody)] == [200] * 3
    assert [call.rows for call in world.model.received[-2:]] == [[1], [2]]
    assert find(world.model.received[-1].headers, b"authorization") is None


async def test_a_header_with_its_own_value_in_each_request_is_named_once_with_the_fix(world, caplog):
    sidecar, client = await world.start()
    admin = world.client(sidecar.admin.address)
    for number in range(3 * WINDOW):
        assert (await client.predict(b"1", [(b"x-user-id", b"%d" % number)])).status == 200
    advised = (
        "almost every request has its own `x-user-id`, so they share no batches; "
        "if the model ignores it: batchAcross: [x-user-id]"
    )
    assert [record.detail for record in caplog.records if record.message == "requests share no batches"] == [advised]
    (model,) = (await admin.get(b"/v1/stats")).json["models"]
    assert model["trouble"] == advised
