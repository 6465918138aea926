"""When all connections are taken, those that ask nothing make room."""

from __future__ import annotations

import asyncio

import pytest

GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
OK0 = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
async def full(kit):
    """A server for four connections."""
    return kit.Site(max_connections=4)


def reap(*wires) -> list:
    """Let aborted transports end; return those."""
    gone = [wire for wire in wires if wire.aborted]
    for wire in gone:
        wire.lose()
    return gone


async def test_1800_incomplete_heads_cost_nobody_else_anything(kit):
    site = kit.Site(max_connections=100)
    healthy = [site.connect() for _ in range(10)]
    for n, wire in enumerate(healthy):
        assert wire.feed(GET % n) == OK0
    slow = []
    for n in range(1800):
        slow.append(site.connect())
        slow[-1].feed(b"GET / HTTP/1.1\r\nHos")
        reap(*slow[-200:])
        site.clock.now += 0.01
        if n % 50 == 0:  # each healthy client asks twice a second or so
            for wire in healthy:
                assert not wire.aborted
                assert wire.feed(GET % n) == OK0
            newcomer = site.connect()
            assert newcomer.feed(GET % n) == OK0
            newcomer.lose()
            reap(*slow)
    assert site.server.connections <= 100
    assert not any(event[0] == "refused" for event in site.app.events)


async def test_who_is_longest_in_a_head_goes_before_who_is_idle(full):
    idle = full.connect()
    idle.feed(GET % 1)
    full.clock.now += 5.0
    slow = full.connect()
    slow.feed(b"GET / HT")
    full.clock.now += 3.0  # 3 of 10 s in its head; the other is 8 of 75 s idle
    later = full.connect()
    later.feed(b"GET / HT")
    full.connect()
    full.connect()
    assert reap(idle, slow, later) == [slow]


async def test_who_has_said_nothing_goes_before_who_has_asked_before(full):
    used, silent = full.connect(), full.connect()
    used.feed(GET % 1)
    full.clock.now += 5.0
    full.connect(), full.connect(), full.connect()
    assert reap(used, silent) == [silent]


async def test_who_is_longest_idle_goes_first(full):
    wires = [full.connect() for _ in range(4)]
    for n in (2, 0, 3, 1):
        full.clock.now += 1.0
        wires[n].feed(GET % n)
    full.clock.now += 1.0
    for n in (2, 0, 3, 1):
        full.connect().feed(POST)
        assert reap(*wires) == [wires[n]]
        wires[n].aborted = False  # so that the next is the only one


async def test_who_waits_for_an_answer_or_sends_a_body_stays(full):
    full.app.answers = False
    waits, sends, both = full.connect(), full.connect(), full.connect()
    waits.feed(GET % 1)
    sends.feed(POST + b"he")
    both.feed(GET % 2 + b"GET /half")
    lingers = full.connect()
    lingers.feed(b"GET / HTTP/1.1\r\n\r\n")
    assert lingers.eof
    assert not lingers.closing
    newcomer = full.connect()
    assert reap(waits, sends, both, lingers) == [lingers]
    newcomer.feed(GET % 3)
    refused = full.connect()
    assert b"503" in refused.written
    assert b"too-many-connections" in refused.written
    assert not reap(waits, sends, both, newcomer)


async def test_that_nobody_is_dispensable_is_remembered_for_a_tick(kit, monkeypatch):
    full = kit.Site(max_connections=4, tick=1.0)
    full.app.answers = False
    wires = [full.connect() for _ in range(4)]
    for n, wire in enumerate(wires):
        wire.feed(GET % n)
    looks = []
    kind = type(wires[0].protocol)
    patience_used = kind.patience_used
    monkeypatch.setattr(kind, "patience_used", lambda self, now: (looks.append(self), patience_used(self, now))[1])
    for _ in range(10):
        refused = full.connect()
        assert b"503" in refused.written
        refused.lose()
    assert len(looks) < 10
    full.app.exchanges[0].respond(200, [])
    full.clock.now += full.limits.tick
    assert b"503" not in full.connect().written
    assert reap(*wires) == [wires[0]]


async def test_one_look_serves_many_newcomers(kit, monkeypatch):
    site = kit.Site(max_connections=1000)
    wires = [site.connect() for _ in range(1000)]
    looks = []
    kind = type(wires[0].protocol)
    patience_used = kind.patience_used
    monkeypatch.setattr(kind, "patience_used", lambda self, now: (looks.append(self), patience_used(self, now))[1])
    for _ in range(500):
        wires.append(site.connect())
        await asyncio.sleep(0)
        for wire in reap(*wires):
            wires.remove(wire)
    assert site.server.connections == 1000
    assert not any(event[0] == "refused" for event in site.app.events)
    assert len(looks) < 500 * 60, "every newcomer had all connections looked at"
