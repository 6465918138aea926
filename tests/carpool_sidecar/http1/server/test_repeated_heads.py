"""A connection keeps the last head that it read. Neither side may see a difference."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import (
    CONTINUE,
    FieldLines,
    content_length,
    encode_request_head,
    encode_response_head,
    forwardable,
)
from carpool_sidecar.http1.parsing import LONGEST_KEPT

POST = b"POST /p HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %d\r\nContent-Length: 5\r\n\r\n"
GET = b"GET /g HTTP/1.1\r\nHost: h\r\n\r\n"
EXPECTING = b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"

# Each is a request that keeps its connection; many begin alike, and bodies look like heads.
REQUESTS = [
    POST % 1 + b"hello",
    POST % 1 + b"HELLO",
    POST % 2 + b"hello",
    GET,
    b"GET /g HTTP/1.1\r\nHost: h\r\nX: 1\r\n\r\n",
    b"GET /g HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n",
    b"HEAD /g HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /g HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(GET) + GET,
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    EXPECTING + b"{}",
]


def seen(exchanges):
    return [(e.method, e.target, list(e.headers), e.version, e.length, e.body) for e in exchanges]


@given(asked=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=8), cuts=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_connection_reads_as_many_do(kit, asked, cuts):
    stream = b"".join(asked)
    places = sorted(cuts.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    pieces = [stream[a:b] for a, b in pairwise([0, *places, len(stream)])]

    async def compare():
        alone = kit.Site()
        answers = [alone.connect().feed(request) for request in asked]
        together = kit.Site()
        wire = together.connect()
        wire.feed(*pieces)
        assert seen(together.app.exchanges) == seen(alone.app.exchanges)
        # A client that expects 100 Continue gets it only if it has to wait. That depends on the cuts.
        assert wire.written.replace(CONTINUE, b"") == b"".join(answers)
        assert not wire.closing

    asyncio.run(compare())


async def test_the_same_head_is_read_once(site):
    wire = site.connect()
    wire.feed(POST % 1 + b"hello", POST % 1, b"world")
    first, second = site.app.exchanges
    assert (first.body, second.body) == (b"hello", b"world")
    assert first.headers is second.headers


@pytest.mark.parametrize("other", [POST % 2, (POST % 1).replace(b"/p", b"/q"), (POST % 1).replace(b"h\r", b"i\r")])
async def test_another_head_is_another_request(site, other):
    wire = site.connect()
    wire.feed(POST % 1 + b"hello", other + b"hello", POST % 1 + b"hello")
    told = [(exchange.target, list(exchange.headers)) for exchange in site.app.exchanges]
    assert told[0] == told[2] != told[1]
    assert site.app.exchanges[0].headers is not site.app.exchanges[2].headers, "only the last head is kept"


async def test_no_head_outlives_or_leaves_its_connection(site):
    site.connect().feed(POST % 1 + b"hello")
    site.connect().feed(POST % 1 + b"hello")
    first, second = site.app.exchanges
    assert first.headers is not second.headers


async def test_a_first_head_has_nothing_to_be_equal_to(site):
    for nonsense in (b"\0", b"no head yet", b"GET\r\n\r\n"):
        wire = site.connect()
        assert wire.feed(nonsense)[9:12] in {b"400", b"501"}
        assert wire.eof
    assert not site.app.exchanges


async def test_a_head_comes_again_with_part_of_its_body_or_none(site):
    wire = site.connect()
    wire.feed(POST % 1 + b"hello", POST % 1 + b"he", b"llo" + POST % 1, b"hello")
    assert [exchange.body for exchange in site.app.exchanges] == [b"hello"] * 3


async def test_a_head_comes_again_in_pieces(site):
    wire = site.connect()
    head = POST % 1
    wire.feed(head + b"hello", head[:20], head[20:] + b"hello", head[:30], head[30:] + b"hello")
    assert [exchange.body for exchange in site.app.exchanges] == [b"hello"] * 3
    assert wire.feed(b"GET /\0")[9:12] == b"400", "each beginning is checked for itself"


async def test_behind_what_was_refused_nothing_is_read(site):
    wire = site.connect()
    wire.feed(GET)
    assert b" 400 " in wire.feed(b"GET /g HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n" + GET)
    assert not wire.feed(GET)
    assert len(site.app.exchanges) == 1
    wire = site.connect()  # and a refused head is not kept as if it had been accepted
    for _ in range(2):
        wire = site.connect()
        assert b" 400 " in wire.feed(b"GET /g HTTP/1.1\r\n\r\n")


async def test_100_continue_is_for_who_waits_for_it(site):
    wire = site.connect()
    assert not wire.feed(EXPECTING + b"{}").startswith(CONTINUE)
    assert wire.feed(EXPECTING) == CONTINUE
    assert b" 200 " in wire.feed(b"{}")
    assert wire.feed(EXPECTING) == CONTINUE


async def test_the_application_decides_each_time(site):
    wire = site.connect()
    wire.feed(POST % 1 + b"hello")
    site.app.on_head = lambda exchange: exchange.buffer(4)
    assert b" 413 " in wire.feed(POST % 1 + b"hello")
    assert not wire.closing, "closing with a request unread would reset the connection"
    assert wire.eof


async def test_draining_ends_a_connection_whatever_it_repeats(site):
    wire = site.connect()
    wire.feed(GET)
    site.server.drain()
    assert b"connection: close" in wire.feed(GET)
    assert wire.closing


async def test_long_heads_are_not_kept(site):
    wire = site.connect()
    head = b"GET /g HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n" % (b"x" * LONGEST_KEPT)
    wire.feed(head, head)
    first, second = site.app.exchanges
    assert first.headers is not second.headers


async def test_a_whole_request_is_streamed_to_an_application_that_asks_for_it(site, kit):
    sinks = []

    def stream(exchange):
        sinks.append(kit.Sink())
        exchange.stream(sinks[-1])

    site.app.on_head = stream
    wire = site.connect()
    wire.feed(POST % 1 + b"hello" + GET)
    site.app.exchanges[0].respond(200, [])
    assert [sink.events for sink in sinks] == [[b"hello", "end"], ["end"]]


async def test_a_refusal_in_the_midst_of_a_head_leaves_earlier_answers_their_time(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET + b"GET", b" /\0")
    site.after(1e3)
    assert not wire.closing
    site.app.exchanges[0].respond(200, [])
    assert b" 200 " in wire.written
    assert b" 400 " in wire.written


# What is made of a head is kept with it


def test_what_is_kept_with_field_lines_is_what_would_be_made_of_them():
    fields = [(b"Host", b"h"), (b"Connection", b"x-hop"), (b"X-Hop", b"1"), (b"Expect", b"100-continue"), (b"A", b"b")]
    lines = FieldLines(fields)
    kept = forwardable(lines)
    assert kept == forwardable(fields) == [(b"Host", b"h"), (b"A", b"b")]
    assert forwardable(lines) is kept
    for method, target, added in (
        (b"GET", b"/a", ()),
        (b"POST", b"/a", ()),
        (b"POST", b"/b", ()),
        (b"POST", b"/b", (content_length(1),)),
        (b"POST", b"/b", (content_length(2),)),
    ):
        for _ in range(2):
            assert encode_request_head(method, target, kept, added) == encode_request_head(
                method, target, [*kept, *added]
            )
    for status, added in ((200, ()), (404, ()), (404, (content_length(3),))):
        for _ in range(2):
            assert encode_response_head(status, kept, added) == encode_response_head(status, [*kept, *added])


# The upstream's answers


class Asker:
    """Calls on one connection in memory."""

    def __init__(self, kit):
        self.kit = kit
        self.pool = Pool(limits=ClientLimits(tick=1e6, max_body_bytes=100), clock=kit.Clock())
        self.wire = kit.MemoryTransport(Upstream(self.pool))
        self.headers = []

    def ask(self, *pieces, method=b"GET", stream=False):
        receiver = self.kit.Receiver()
        told = receiver.answered

        def answered(status, headers, body):
            self.headers.append(headers)
            told(status, headers, body)

        receiver.answered = answered
        head = encode_request_head(method, b"/", [(b"Host", b"h")])
        (self.pool.stream if stream else self.pool.send)(head, b"", receiver)
        self.wire.feed(*pieces)
        return receiver.events


@pytest.fixture
async def asker(kit):
    asker = Asker(kit)
    yield asker
    await asker.pool.close()


OK = b"HTTP/1.1 200 OK\r\nSet-Cookie: %d\r\nContent-Length: 5\r\n\r\n"


async def test_the_same_answer_head_is_read_once(asker):
    assert asker.ask(OK % 1 + b"hello") == [("answered", 200, b"hello")]
    assert asker.ask(OK % 1 + b"world") == [("answered", 200, b"world")]
    assert asker.ask(OK % 2 + b"other") == [("answered", 200, b"other")]
    first, second, third = asker.headers
    assert first is second
    assert (b"Set-Cookie", b"2") in third


async def test_an_answer_head_comes_again_with_part_of_its_body(asker):
    asker.ask(OK % 1 + b"hello")
    head = OK % 1
    assert asker.ask(head, b"hello") == [("answered", 200, b"hello")]
    assert asker.ask(head[:9], head[9:] + b"he", b"llo") == [("answered", 200, b"hello")]
    assert asker.ask(head + b"he", b"llo", stream=True) == [("head", 200), b"he", b"llo", "end"]
    assert asker.ask(head + b"hello", stream=True) == [("answered", 200, b"hello")]


async def test_head_has_no_body_though_get_had_the_same_head(asker):
    for _ in range(2):
        assert asker.ask(OK % 1 + b"hello") == [("answered", 200, b"hello")]
    assert asker.ask(OK % 1, method=b"HEAD") == [("answered", 200, b"")]


async def test_surplus_behind_a_repeated_head_ends_the_connection(asker):
    asker.ask(OK % 1 + b"hello")
    assert asker.ask(OK % 1 + b"hello!") == [("answered", 200, b"hello")]
    assert asker.wire.aborted


async def test_a_repeated_head_that_announces_too_much(asker):
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + bytes(101)
    assert asker.ask(large, stream=True) == [("answered", 200, bytes(101))]
    assert asker.ask(large) == [("failed", "too-large", True)]


async def test_interim_answers_come_before_a_repeated_head(asker):
    for _ in range(2):
        assert asker.ask(b"HTTP/1.1 100 Continue\r\n\r\n" + OK % 1 + b"hello") == [("answered", 200, b"hello")]
        assert asker.ask(OK % 1 + b"hello") == [("answered", 200, b"hello")]


async def test_a_repeated_close_is_meant(asker):
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert asker.ask(closing) == [("answered", 200, b"")]
    assert asker.wire.aborted
