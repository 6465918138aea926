from __future__ import annotations

import asyncio

from carpool_sidecar.backends.upstream import UpstreamBackend
from carpool_sidecar.config import Upstream


def backend(world, **fields):
    config = Upstream(url=f"http://127.0.0.1:{world.model.port}", **fields)
    return UpstreamBackend(config, max_answer=1 << 20, clock=asyncio.get_running_loop().time)


async def test_questions_are_answered_while_all_connections_are_taken(world):
    made = backend(world, max_connections=1)
    world.model.holding = True
    made.send(b"/v1/models/m:predict", [(b"host", b"x")], b"", None)
    await world.until(lambda: world.model.held)
    assert (await made.ask(b"/v2/health/ready")).status == 200
    assert (await made.ask(b"/nope")).status == 404
    world.model.held.clear()


async def test_nobody_there_and_nobody_answering_are_told_apart(world, monkeypatch):
    made = backend(world)
    assert (await made.ask(b"/v2/health/ready")).status == 200
    await world.model.die()
    gone = await made.ask(b"/v2/health/ready")
    assert (gone.status, gone.reachable) == (0, False)
    await made.close()


async def test_readiness_may_be_asked_elsewhere(world):
    assert backend(world).readiness == b"/v2/health/ready"
    assert backend(world, ready="/healthz").readiness == b"/healthz"
