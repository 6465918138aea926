from __future__ import annotations

import pytest

GET = b"GET /a%20b?c=d?e HTTP/1.1\r\nHost: h\r\n\r\n"
OLD = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"


@pytest.fixture
def asked(site):
    """A connection and the exchange of its first request, not answered."""

    def ask(request: bytes = GET):
        site.app.answers = False
        wire = site.connect()
        wire.feed(request)
        return wire, site.app.exchanges[-1]

    return ask


async def test_the_request_is_as_received(asked):
    _, exchange = asked()
    assert exchange.method == b"GET"
    assert exchange.target == b"/a%20b?c=d?e"
    assert exchange.path == b"/a%20b"
    assert exchange.query == b"c=d?e"
    assert exchange.headers == [(b"Host", b"h")]
    assert exchange.version == (1, 1)
    assert exchange.length == 0
    assert exchange.body == b""


async def test_a_body_in_parts_is_sent_in_order_and_large_parts_uncopied(asked):
    wire, exchange = asked()
    large = bytes(100_000)
    exchange.respond(200, [(b"X", b"y")], [b"ab", memoryview(b"cd"), large, b"ef"])
    assert wire.written == b"HTTP/1.1 200 OK\r\nX: y\r\ncontent-length: 100006\r\n\r\nabcd" + large + b"ef"
    assert len(wire.writes) == 3
    assert wire.writes[1] is large


async def test_a_small_answer_is_one_write(asked):
    wire, exchange = asked()
    exchange.respond(200, [], [b"ab", b"cd"])
    assert len(wire.writes) == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(asked, status):
    wire, exchange = asked()
    exchange.respond(status, [], b"")
    assert b"content-length" not in wire.written
    assert wire.written.endswith(b"\r\n\r\n")


async def test_chunks(asked):
    wire, exchange = asked()
    exchange.start(200, [], None)
    exchange.write(b"hello")
    exchange.write(b"")
    exchange.write(memoryview(b"0123456789abcdef"))
    exchange.end()
    assert wire.written == (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    )
    assert not wire.closing


async def test_without_a_length_http_1_0_ends_with_the_connection(asked):
    wire, exchange = asked(OLD)
    exchange.start(200, [], None)
    exchange.write(b"hello")
    exchange.end()
    assert wire.written == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello"
    assert wire.closing
    assert not wire.aborted


async def test_a_known_length(asked):
    wire, exchange = asked()
    exchange.start(200, [], 5)
    exchange.write(b"hel")
    exchange.write(b"lo")
    exchange.end()
    assert wire.written == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    assert not wire.closing


async def test_more_than_announced_is_an_error(asked):
    _, exchange = asked()
    exchange.start(200, [], 3)
    with pytest.raises(ValueError, match="announced"):
        exchange.write(b"hello")


async def test_less_than_announced_cuts_the_connection(asked, site):
    wire, exchange = asked()
    exchange.start(200, [], 5)
    exchange.write(b"he")
    exchange.end()
    assert wire.aborted
    wire.lose()
    assert site.app.events[-1][0] == "disconnected"


async def test_head_keeps_the_length_and_drops_the_body(asked):
    wire, exchange = asked(GET.replace(b"GET", b"HEAD"))
    exchange.start(200, [], 5)
    exchange.write(b"hello")
    exchange.end()
    assert wire.written == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    assert not wire.closing


@pytest.mark.parametrize("request_head", [GET, OLD])
async def test_abort_cuts_so_that_nothing_looks_complete(asked, site, request_head):
    wire, exchange = asked(request_head)
    exchange.start(200, [], None)
    exchange.write(b"he")
    exchange.abort()
    assert wire.aborted
    assert not wire.written.endswith(b"0\r\n\r\n")
    exchange.write(b"llo")
    exchange.end()
    assert wire.written.endswith((b"he", b"he\r\n"))
    wire.lose()
    assert [event[0] for event in site.app.events if event[0] != "request"] == ["disconnected"]


async def test_abort_waits_for_the_answers_before_it(asked, site):
    wire, second = asked(GET + GET)
    second.abort()
    assert not wire.aborted
    site.app.exchanges[0].respond(200, [], b"first")
    assert wire.written.endswith(b"first")
    assert wire.aborted


async def test_errors_are_json(asked):
    wire, exchange = asked()
    exchange.fail(503, "draining", 'no "more"', [(b"retry-after", b"1")])
    head, body = wire.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json")
    assert body == rb'{"error":"no \"more\"","reason":"draining"}'


async def test_a_second_answer_is_a_mistake_of_the_application(asked):
    _, exchange = asked()
    exchange.start(200, [], 1)
    with pytest.raises(RuntimeError, match="begun"):
        exchange.respond(200, [])


async def test_a_header_with_a_line_break_is_refused_and_another_answer_still_possible(asked):
    wire, exchange = asked()
    with pytest.raises(ValueError, match="line break"):
        exchange.respond(200, [(b"X", b"a\r\nSet-Cookie: b")])
    assert wire.written == b""
    exchange.respond(200, [])
    assert wire.written.startswith(b"HTTP/1.1 200 OK")
