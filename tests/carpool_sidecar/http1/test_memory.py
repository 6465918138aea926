"""Bodies are held once, and everything that is held is counted in one budget until nobody needs it any more."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from pathlib import Path

import pytest

from carpool_sidecar.http1.bodies import LARGE, BodyReader
from carpool_sidecar.http1.client.calls import Upload
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.memory import HUGE_PAGE, Budget, Region, count_while_alive, counts_itself
from carpool_sidecar.http1.messages import encode_request_head
from carpool_sidecar.http1.parsing import IN_CHUNKS, UNTIL_CLOSE
from carpool_sidecar.http1.server.server import Server

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
ASK = encode_request_head(b"GET", b"/", [(b"Host", b"h")])
MIB = 1 << 20
READ = bytes(range(256)) * 1000
"""As much as one read of a socket brings."""


def collect(size: int, length: int) -> BodyReader:
    """Read a body of `size` bytes as a socket brings it; `length` is what its head says."""
    reader = BodyReader(length)
    left = size
    while left:
        piece = READ[:left]
        pieces = []
        reader.read(piece, 0, pieces)
        reader.keep(pieces)
        left -= len(piece)
    return reader


# Budget


def test_a_budget_says_when_there_is_no_room_and_remembers():
    budget = Budget(10)
    assert budget.take(10)
    assert not budget.short
    assert not budget.take(1)
    assert budget.short
    assert budget.held == 10
    budget.give(4)
    assert budget.take(4)


# Regions


@pytest.mark.parametrize("length", [LARGE + 12_345, UNTIL_CLOSE])
def test_a_large_body_is_collected_in_one_region(length):
    size = LARGE + 12_345
    reader = collect(size, length)
    assert reader.kept == size
    assert size <= reader.held < size + HUGE_PAGE
    body = reader.join()
    assert counts_itself(body)
    assert body.readonly
    assert bytes(body) == (READ * (size // len(READ) + 1))[:size]
    assert len(body.obj) == size  # nothing is reserved beyond
    assert reader.join() == b""


@pytest.mark.parametrize("size", [1, 256_000, LARGE])
def test_a_smaller_body_is_bytes(size):
    body = collect(size, size).join()
    assert type(body) is bytes
    assert not counts_itself(body)


def test_a_large_chunked_body_reads_the_same():
    content = READ * 20
    wire = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:77], content[77:])) + b"0\r\n\r\n"
    reader = BodyReader(IN_CHUNKS)
    for start in range(0, len(wire), 100_000):
        pieces = []
        reader.read(wire[start : start + 100_000], 0, pieces)
        reader.keep(pieces)
    assert reader.complete
    assert bytes(reader.join()) == content


def test_a_region_grows_without_reserving_much_more_than_the_body_will_be():
    region = Region(1000)
    region.add(bytes(1000), 5000)
    region.add(bytes(1), 5000)
    assert len(region) == 2002
    for _ in range(3999):
        region.add(b"x", 5000)
    assert len(region) == 5000
    assert bytes(region.finish()[-3999:]) == b"x" * 3999


def test_a_large_body_is_counted_until_the_last_view_of_it_is_gone():
    budget = Budget(100 * MIB)
    body = collect(LARGE + 1, LARGE + 1).join()
    count_while_alive(body, budget)
    part = body[5:10]
    del body
    gc.collect()
    assert budget.held == LARGE + 1
    assert bytes(part) == READ[5:10]
    del part
    assert budget.held == 0


async def test_a_server_counts_a_large_body_for_as_long_as_the_application_has_it(kit):
    site = kit.Site(max_body_bytes=100 * MIB)
    site.app.answers = False
    wire = site.connect()
    size = LARGE + 100_000
    wire.feed(POST % size)
    for start in range(0, size, len(READ)):
        wire.feed(READ[: min(len(READ), size - start)])
        assert start < site.server.buffered_bytes <= size + HUGE_PAGE
    assert site.server.buffered_bytes == size
    exchange = site.app.exchanges.pop()
    body = exchange.body
    assert isinstance(body, memoryview)
    site.app.events.clear()
    exchange.respond(200, [])
    del exchange
    assert site.server.buffered_bytes == size, "the application still has it"
    del body
    assert site.server.buffered_bytes == 0
    wire.feed(GET)
    assert b"200 OK" in wire.written
    wire.lose()
    assert site.server.buffered_bytes == 0


async def test_a_system_without_memory_is_a_refusal(site, monkeypatch):
    def refuse(cls, capacity):
        raise OSError(12, "no memory")

    monkeypatch.setattr(Region, "__new__", refuse)
    wire = site.connect()
    wire.feed(POST % (LARGE + 1), *[READ] * 17)
    assert b" 503 " in wire.written
    assert b'"reason":"buffers-full"' in wire.written
    assert site.server.buffered_bytes == 0


# What an application adds


async def test_an_application_may_charge_what_it_makes_of_a_body(kit):
    site = kit.Site(max_buffered_bytes=100)
    site.app.answers = False
    wire = site.connect()
    wire.feed(POST % 40 + bytes(40))
    (exchange,) = site.app.exchanges
    assert not exchange.charge(61)
    assert site.server.buffered_bytes == 40
    assert exchange.charge(60)
    assert site.server.buffered_bytes == 100
    exchange.refund(20)
    assert site.server.buffered_bytes == 80
    exchange.respond(200, [])
    assert site.server.buffered_bytes == 0
    assert not exchange.charge(1)
    exchange.refund(1)
    assert site.server.buffered_bytes == 0


async def test_what_was_charged_is_given_back_when_the_client_leaves(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET)
    assert site.app.exchanges[0].charge(1000)
    wire.lose()
    assert site.server.buffered_bytes == 0
    assert not site.app.exchanges[0].charge(1000)
    assert site.server.buffered_bytes == 0


# Answers of the upstream


@pytest.fixture
async def link(kit):
    """A pool with room for 100 bytes and one connection without a socket."""
    pool = Pool(budget=Budget(100), limits=ClientLimits(tick=1e6))
    transport = kit.MemoryTransport(Upstream(pool))
    transport.pool = pool
    yield transport
    await pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\n", bytes(60), bytes(41)],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"32\r\n" + bytes(50), b"\r\n33\r\n" + bytes(51)],
    ],
)
async def test_an_answer_without_room_fails_alone(link, kit, answer):
    other = kit.MemoryTransport(Upstream(link.pool))
    first, second = kit.Receiver(), kit.Receiver()
    link.pool.send(ASK, b"", first)  # on the connection that is used last: `other`
    link.pool.send(ASK, b"", second)
    other.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n", bytes(40))
    link.pool.budget.give(40)  # of the 100, none is taken by the first
    before = link.pool.budget.held
    link.feed(*answer)
    assert second.events == [("failed", "buffers-full", True)]
    assert link.closing
    assert link.pool.budget.held == before
    assert link.pool.budget.short
    link.pool.budget.held += 40
    other.feed(bytes(10))
    assert first.events == [("answered", 200, bytes(50))]
    assert link.pool.budget.held == 0


async def test_the_reason_is_the_same_as_for_a_request_without_room(link, kit):
    errors = []
    receiver = kit.Receiver()
    receiver.failed = errors.append
    link.pool.send(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n")
    (error,) = errors
    assert (error.status, error.reason) == (503, "buffers-full")
    assert "over 100 bytes would be buffered; raise bodies.maxBuffered" in str(error)


async def test_a_streamed_answer_needs_no_room(link, kit):
    receiver = kit.Receiver()
    link.pool.stream(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", bytes(500), bytes(500))
    assert receiver.events[0] == ("head", 200)
    assert receiver.events[-1] == "end"
    assert link.pool.budget.held == 0


@pytest.mark.parametrize("end", ["lost", "cancelled", "closed", "garbage"])
async def test_an_answer_that_is_not_completed_gives_back_what_it_had(link, kit, end):
    call = link.pool.send(ASK, b"", kit.Receiver())
    link.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n", bytes(30))
    assert link.pool.budget.held == 30
    match end:
        case "lost":
            link.lose(ConnectionResetError())
        case "cancelled":
            call.cancel()
        case "closed":
            await link.pool.close()
        case "garbage":
            link.feed(bytes(30))
    assert link.pool.budget.held == 0
    link.lose()
    assert link.pool.budget.held == 0


async def test_an_answer_that_ends_with_the_connection_gives_back_too(link, kit):
    receiver = kit.Receiver()
    link.pool.send(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\n\r\n", bytes(30))
    link.feed_eof()
    assert receiver.events == [("answered", 200, bytes(30))]
    assert link.pool.budget.held == 0


async def test_a_large_answer_is_counted_until_it_is_passed_on(link, kit):
    budget = link.pool.budget
    budget.limit = 100 * MIB
    bodies = []
    receiver = kit.Receiver()
    receiver.answered = lambda status, headers, body: bodies.append(body)
    size = LARGE + 7
    link.pool.send(ASK, b"", receiver)
    link.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
    for start in range(0, size, len(READ)):
        link.feed(READ[: min(len(READ), size - start)])
    (body,) = bodies
    assert bytes(body[:300]) == READ[:300]
    assert budget.held == size
    del body
    bodies.clear()
    assert budget.held == 0


# What the other side does not take


async def test_what_a_client_does_not_read_is_counted(site):
    wire = site.connect()
    wire.feed(POST % 1000 + bytes(1000))
    assert site.server.buffered_bytes == 0
    wire.unsent = 900
    site.after(1.0)
    assert site.server.buffered_bytes == 900
    wire.unsent = 0
    site.after(1.0)
    assert site.server.buffered_bytes == 0


async def test_a_small_unread_answer_does_not_stay_for_ever(site):
    wire = site.connect()
    wire.feed(POST % 1000 + bytes(1000))
    wire.unsent = 900  # too little for the transport to complain of
    site.after(1.0)
    site.after(site.limits.write_timeout - 1)
    assert not wire.aborted
    site.after(2.0)
    assert wire.aborted
    wire.lose()
    assert site.server.buffered_bytes == 0


async def test_a_large_body_that_is_written_is_not_counted_twice(kit):
    site = kit.Site(max_body_bytes=100 * MIB)
    budget = site.server.budget
    body = collect(LARGE + 1, LARGE + 1).join()
    count_while_alive(body, budget)
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET)
    site.app.exchanges[0].respond(200, [], body)
    wire.unsent = len(wire.written)
    site.after(1.0)
    assert budget.held == len(body)
    site.app.exchanges.clear()
    wire.feed(GET)
    site.app.exchanges[0].respond(200, [], bytes(500))
    wire.unsent = len(wire.written)
    site.after(1.0)
    assert len(body) + 500 < budget.held < len(body) + 600  # and the head of the second answer


async def test_what_waits_for_its_turn_is_counted(kit):
    site = kit.Site(max_pipelined=3)
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET * 3 + bytes(5000))
    site.app.exchanges[1].respond(200, [], bytes(700))
    site.after(1.0)
    assert 5700 < site.server.buffered_bytes < 5800
    outgoing = wire.protocol._outgoing
    wire.lose()
    assert site.server.buffered_bytes == 0
    assert not outgoing._held, "an answer refers to its connection, and would stay until a garbage collection"


@pytest.mark.parametrize("tunnelled", [False, True])
async def test_what_an_upstream_does_not_read_of_a_stream_is_counted(link, kit, tunnelled):
    head = encode_request_head(b"POST", b"/", [(b"Host", b"h"), (b"transfer-encoding", b"chunked")])
    if tunnelled:
        link.protocol.begin(link.pool.stream(ASK, b"", kit.Receiver(), upgrade=True), [])
        link.protocol._call = None
    else:
        link.pool.send(head, Upload(None, kit.Sink()), kit.Receiver())
    link.unsent = 80
    link.pool._expire(0.0)
    assert link.pool.budget.held == 80
    link.unsent = 0
    link.pool._expire(0.0)
    assert link.pool.budget.held == 0


async def test_streamed_requests_that_wait_for_a_connection_are_counted_at_once(kit):
    pool = Pool("127.0.0.1", 1, max_connections=0, budget=Budget(1000))
    calls = [pool.stream(POST % 500, Upload(500, kit.Sink()), kit.Receiver()) for _ in range(2)]
    for call in calls:
        call.write(bytes(300))
    assert 600 < pool.budget.held < 800, "before the next tick as many bytes again could be taken"
    held = pool.budget.held
    pool._expire(0.0)
    assert pool.budget.held == held
    kit.MemoryTransport(Upstream(pool))  # takes the first of them
    assert pool.budget.held == held / 2
    calls[1].cancel()
    pool._expire(0.0)
    assert pool.budget.held == 0
    await pool.close()


async def test_a_streamed_request_that_may_not_wait_is_not_counted(kit):
    pool = Pool("127.0.0.1", 1, max_connections=0, max_waiting=0, budget=Budget(1000))
    receiver = kit.Receiver()
    call = pool.stream(POST % 500, Upload(500, kit.Sink()), receiver)
    call.write(bytes(300))
    await receiver.over.wait()
    assert receiver.events == [("failed", "busy", False)]
    assert pool.budget.held == 0
    await pool.close()


# Making room


async def test_while_there_is_no_room_a_body_that_does_not_move_is_given_up(kit):
    site = kit.Site(max_buffered_bytes=100)
    site.app.answers = False
    stuck, smaller, newcomer = site.connect(), site.connect(), site.connect()
    stuck.feed(POST % 80 + bytes(60))
    smaller.feed(POST % 35 + bytes(30))
    site.after(site.limits.patience + 1)
    assert stuck.written == b"", "nobody needs the room"
    newcomer.feed(POST % 20 + bytes(20))
    assert b" 503 " in newcomer.written
    site.after(0.1)
    assert b" 503 " in stuck.written
    assert b"buffers-full" in stuck.written
    assert smaller.written == b""
    assert site.server.buffered_bytes == 30
    site.connect().feed(POST % 60 + bytes(60))
    assert site.app.events[-1] == ("request", b"/p", bytes(60))


async def test_while_there_is_no_room_a_client_that_does_not_read_is_cut(kit):
    site = kit.Site(max_buffered_bytes=100, write_timeout=1e6)
    reads, does_not = site.connect(), site.connect()
    does_not.feed(POST % 80 + bytes(80))
    does_not.unsent = 80
    reads.feed(GET)
    site.after(1.0)
    assert site.server.buffered_bytes == 80
    site.connect().feed(POST % 90 + bytes(90))
    site.after(1.0)
    assert not does_not.aborted, "it has had little time"
    site.after(site.limits.patience)
    site.connect().feed(POST % 90 + bytes(90))
    site.after(0.1)
    assert does_not.aborted
    assert not reads.closing


@pytest.mark.parametrize(("held", "cut"), [("body", True), ("answer", True), ("part of a body", False)])
async def test_while_there_is_no_room_a_client_with_requests_behind_a_slow_one_makes_some(kit, held, cut):
    site = kit.Site(max_buffered_bytes=100)
    site.app.answers = False
    hog, patient, newcomer = site.connect(), site.connect(), site.connect()
    patient.feed(POST % 10 + bytes(10))
    if held == "answer":
        hog.feed(GET + GET)
        site.app.exchanges[2].respond(200, [], bytes(85))
    else:
        hog.feed(GET + POST % 85 + bytes(85 if cut else 80))
    site.after(1.0)
    newcomer.feed(POST % 20 + bytes(20))
    assert b" 503 " in newcomer.written
    site.after(1.0)
    assert not hog.aborted, "it has had little time"
    site.after(site.limits.patience)
    site.connect().feed(POST % 20 + bytes(20))
    site.after(0.1)
    assert hog.aborted is cut
    if cut:
        hog.lose()
    assert not patient.closing
    assert site.server.buffered_bytes == 10


async def test_bodies_that_have_just_begun_are_left_alone(kit):
    site = kit.Site(max_buffered_bytes=100)
    wire = site.connect()
    wire.feed(POST % 80 + bytes(60))
    site.connect().feed(POST % 60)
    site.after(1.0)
    assert wire.written == b""
    wire.feed(bytes(20))
    assert wire.written.endswith(bytes(80))


# The process

PROXY = """
import asyncio, sys
import uvloop
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits, ServerLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.messages import content_length, encode_request_head
from carpool_sidecar.http1.server.server import Server

class Proxy:
    def head(self, exchange): exchange.buffer(1 << 30)
    def request(self, exchange):
        head = encode_request_head(b"POST", exchange.target, [(b"host", b"h"), content_length(len(exchange.body))])
        pool.send(head, exchange.body, Answer(exchange))
    def sent(self, exchange): pass
    disconnected = refused = sent

class Answer:
    def __init__(self, exchange): self.exchange = exchange
    def answered(self, status, headers, body): self.exchange.respond(status, [], body)
    def failed(self, error): self.exchange.fail(error.status, error.reason, str(error))

async def main():
    global pool
    budget = Budget(1 << 30)
    pool = Pool("127.0.0.1", int(sys.argv[1]), limits=ClientLimits(max_body_bytes=1 << 30), budget=budget)
    server = Server(Proxy(), ServerLimits(), budget=budget)
    await server.listen("127.0.0.1", 0)
    print(server.addresses[0][1], flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


def peak(pid: int) -> int:
    """The most memory that a process has had so far, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_process_holds_a_request_and_its_answer_once_each(upstream, serve, framing):
    size = 48 * MIB

    def script(peer, received):  # an upstream that does not keep what it is sent
        peer.taken = getattr(peer, "taken", 0) + len(received)
        peer.received = b""
        if peer.taken >= size:
            peer.taken = 0
            if framing == "length":
                peer.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
                peer.transport.write(bytes(size))
            else:
                peer.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(size // 65536):
                    peer.transport.write(b"10000\r\n" + bytes(65536) + b"\r\n")
                peer.transport.write(b"0\r\n\r\n")

    upstream.script = script
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROXY, str(upstream.port), stdout=asyncio.subprocess.PIPE
    )
    try:
        port = int(await child.stdout.readline())

        async def ask(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if framing == "length":
                writer.write(POST % count)
                writer.write(bytes(count))
            else:
                writer.write(CHUNKED)
                for _ in range(count // 65536):
                    writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
                writer.write(b"0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            for _ in range(count // 65536):
                await reader.readexactly(65536)
            writer.close()
            await writer.wait_closed()

        before = peak(child.pid)
        async with asyncio.timeout(60):
            await ask(size)
        # Both were joined from pieces before, and the answer came on top: over 3 times the size.
        assert peak(child.pid) - before < 2 * size + 16 * MIB
    finally:
        child.terminate()
        await child.wait()


async def test_the_budget_of_a_server_is_its_own_unless_it_is_given(kit):
    budget = Budget(5)
    server = Server(kit.App(), budget=budget)
    assert server.budget is budget
    assert Server(kit.App()).budget.limit == server.limits.max_buffered_bytes
