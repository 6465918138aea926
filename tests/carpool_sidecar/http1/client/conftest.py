"""Calls through the pool of connections."""

from __future__ import annotations

import pytest
from server_messages import GET

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.limits import ClientLimits


@pytest.fixture
def ask(pool, kit):
    """Send a request and wait for its end; return the receiver's events."""

    async def ask(head=GET, body=b"", *, stream=False, **options):
        receiver = kit.Receiver()
        (pool.stream if stream else pool.send)(head, body, receiver, **options)
        await receiver.over.wait()
        return receiver.events

    return ask


@pytest.fixture
async def timed(kit):
    """A pool by a hand-set clock, and one connection of it without a socket."""
    clock = kit.Clock()
    pool = Pool(clock=clock, limits=ClientLimits(tick=1e6))
    link = kit.MemoryTransport(Upstream(pool))
    link.pool, link.clock = pool, clock

    def after(seconds):
        clock.now += seconds
        pool._expire(clock.now)

    link.after = after
    yield link
    await pool.close()
