from __future__ import annotations

from carpool_sidecar.http1.client.connections import PoolConnections
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream


async def test_an_idle_connection_is_fresh_for_a_while_after_its_last_call():
    connections, link = PoolConnections(2, "maxConnections", 30.0, 0.75), Upstream(Pool())
    connections.open.add(link)
    connections.make_idle(link, 100.0)
    assert link.deadline == 130.0
    assert connections.is_fresh(link, 100.5)
    assert not connections.is_fresh(link, 100.75)


async def test_a_connection_that_is_gone_is_neither_open_nor_idle():
    connections, link = PoolConnections(2, "maxConnections", 30.0, 0.75), Upstream(Pool())
    connections.open.add(link)
    connections.make_idle(link, 0.0)
    assert connections.discard(link)
    assert not connections.open
    assert not connections.idle
    assert not connections.discard(link)


def test_the_error_names_the_limit_and_the_setting():
    text = PoolConnections(2, "maxConnections", 30.0, 0.75).taken(", and 3 calls wait")
    assert text == ("all 2 connections to the upstream are taken, and 3 calls wait; raise maxConnections or replicas")
