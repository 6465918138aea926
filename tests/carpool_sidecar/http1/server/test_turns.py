"""However much one side sends at once, others have their turn in between."""

from __future__ import annotations

import asyncio

import pytest

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.timing import Turns

GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
ASK = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
OK0 = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Working:
    """A clock by which each look at it comes a tenth of a turn later, as if something had been done in between."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.0002
        return self.now


@pytest.fixture
async def busy(kit):
    """A server whose every step takes time."""
    site = kit.Site()
    site.clock = Working()
    site.server.clock = site.clock
    site.server.turns = Turns(0.002, site.clock)
    return site


async def passes(done) -> int:
    """Let the loop pass until it is done; how many passes that took."""
    count = 0
    while not done():
        await asyncio.sleep(0)
        count += 1
        assert count < 10_000
    return count


async def test_a_thousand_requests_in_one_read_leave_turns_to_others(busy):
    flood, other = busy.connect(), busy.connect()
    flood.feed(b"".join(GET % n for n in range(1000)))
    assert len(busy.app.exchanges) < 20
    assert flood.paused
    assert other.feed(GET % 5000) == OK0, "one request of another is answered at once"
    most, before = 0, len(busy.app.exchanges)
    while len(busy.app.exchanges) < 1001:
        await asyncio.sleep(0)
        most, before = max(most, len(busy.app.exchanges) - before), len(busy.app.exchanges)
    assert most < 20
    assert flood.written == OK0 * 1000
    assert [exchange.target for exchange in busy.app.exchanges if exchange.target != b"/5000"] == [
        b"/%d" % n for n in range(1000)
    ]
    await passes(lambda: not flood.paused)
    assert flood.feed(GET % 1) == OK0


async def test_many_floods_share_one_turn(busy):
    floods = [busy.connect() for _ in range(20)]
    for flood in floods:
        flood.feed(b"".join(GET % n for n in range(100)))
    most, before = 0, len(busy.app.exchanges)
    while len(busy.app.exchanges) < 2000:
        await asyncio.sleep(0)
        most, before = max(most, len(busy.app.exchanges) - before), len(busy.app.exchanges)
    assert most < 20, "each flood had a turn of its own"
    assert all(flood.written == OK0 * 100 for flood in floods)


async def test_a_million_chunks_of_one_byte(busy):
    wire, other = busy.connect(), busy.connect()
    chunks = 40_000
    wire.feed(CHUNKED)
    wire.feed(b"1\r\nx\r\n" * chunks)
    assert wire.protocol._intake._reader.kept < chunks
    assert other.feed(GET % 1) == OK0
    assert await passes(lambda: wire.protocol._intake._reader.kept == chunks) > 2
    wire.feed(b"0\r\n\r\n" + GET % 2)
    await passes(lambda: wire.written.endswith(OK0))
    assert busy.app.events[-4][:2] == ("request", b"/c")
    assert busy.app.events[-4][2] == b"x" * chunks


async def test_a_client_that_leaves_before_its_turn(busy):
    wire = busy.connect()
    wire.feed(b"".join(GET % n for n in range(1000)))
    wire.lose()
    taken = len(busy.app.exchanges)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(busy.app.exchanges) == taken
    assert busy.server.buffered_bytes == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_tiny_chunks(kit, stream):
    pool = Pool(turns=Turns(0.002, Working()))
    link, other = kit.MemoryTransport(Upstream(pool)), kit.MemoryTransport(Upstream(pool))
    quick, slow = kit.Receiver(), kit.Receiver()
    pool.send(ASK, b"", quick)
    (pool.stream if stream else pool.send)(ASK, b"", slow)
    chunks = 40_000
    link.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * chunks)
    assert link.paused
    other.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert quick.over.is_set()
    assert await passes(lambda: not link.paused) > 2
    link.feed(b"0\r\n\r\n")
    assert slow.over.is_set()
    body = slow.events[0][2] if not stream else b"".join(slow.events[1:-1])
    assert body == b"x" * chunks
    assert len(slow.events) < 60, "each chunk was handed on by itself"
    assert pool.idle == 2
    await pool.close()


async def test_an_answer_in_tiny_chunks_that_is_paused_meanwhile(kit):
    pool = Pool(turns=Turns(0.002, Working()))
    link = kit.MemoryTransport(Upstream(pool))
    receiver = kit.Receiver()
    call = pool.stream(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)
    call.pause_reading()
    await passes(lambda: sum(map(len, receiver.events[1:])) == 5000)
    assert link.paused
    call.resume_reading()
    assert not link.paused
    call.cancel()
    await pool.close()


async def test_a_cancelled_answer_is_not_read_on(kit):
    pool = Pool(turns=Turns(0.002, Working()))
    link = kit.MemoryTransport(Upstream(pool))
    receiver = kit.Receiver()
    call = pool.stream(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40_000)
    call.cancel()
    told = len(receiver.events)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(receiver.events) == told
    await pool.close()


async def test_many_connections_are_looked_at_in_slices(kit):
    site = kit.Site()
    wires = [site.connect() for _ in range(3000)]
    site.after(site.limits.idle_timeout + 1)
    closed = sum(wire.closing for wire in wires)
    assert 0 < closed < 3000
    site.after(0.0)  # another tick while the last is not done
    assert sum(wire.closing for wire in wires) == closed
    await passes(lambda: all(wire.closing for wire in wires))


def test_turns_end_by_the_clock_and_begin_anew():
    order = []

    async def take_turns():
        clock = Working()
        turns = Turns(0.002, clock)
        turns.wait(lambda: order.append("first"))
        turns.wait(lambda: order.append("second"))
        assert order == []
        await asyncio.sleep(0)
        assert order == ["first", "second"]
        steps = 0
        while not turns.over():
            steps += 1
        assert 5 <= steps <= 10
        assert turns.over()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not turns.over()

    asyncio.run(take_turns())


async def test_large_reads_of_many_uploads_share_one_turn(busy):
    uploads = [busy.connect() for _ in range(20)]
    piece, size = bytes(256 * 1024), 8 * 256 * 1024
    for upload in uploads:
        upload.feed(b"POST /u HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size)
    await asyncio.sleep(0)
    for upload in uploads:
        upload.feed(piece)
    # What the kernel has more of is not read in this pass, of none of those that came after the turn was over.
    assert [upload.paused for upload in uploads[-10:]] == [True] * 10
    assert busy.connect().feed(GET % 1) == OK0
    for _ in range(7):
        for upload in uploads:
            await passes(lambda upload=upload: not upload.paused)
            upload.feed(piece)
    assert all(upload.written.endswith(b"\r\n\r\n" + bytes(size)) for upload in uploads), "each had its body echoed"


@pytest.mark.parametrize("stream", [False, True])
async def test_large_reads_of_many_answers_share_one_turn(kit, stream):
    pool = Pool(turns=Turns(0.002, Working()))
    links = [kit.MemoryTransport(Upstream(pool)) for _ in range(20)]
    receivers = [kit.Receiver() for _ in links]
    for receiver in receivers:
        (pool.stream if stream else pool.send)(ASK, b"", receiver)
    piece, pieces = bytes(256 * 1024), 4
    for link in links:
        link.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (pieces * len(piece)))
    for link in links:
        link.feed(piece)
    assert [link.paused for link in links[-5:]] == [True] * 5
    for _ in range(pieces - 1):
        for link in links:
            await passes(lambda link=link: not link.paused)
            link.feed(piece)
    assert all(receiver.over.is_set() for receiver in receivers)
    assert pool.idle == 20
    await pool.close()
