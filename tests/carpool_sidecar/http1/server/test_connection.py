from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from client_messages import CHUNKED_POST, GET, OK0, OK5, POST, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool_sidecar.http1.messages import CONTINUE

# Reading


async def test_a_request_in_one_piece(site):
    assert site.connect().feed(POST + b"hello") == OK5
    assert site.app.events == [("request", b"/p", b"hello"), ("sent", b"/p", 200)]
    assert site.app.exchanges[0].received_at == site.clock.now
    assert site.app.exchanges[0].sent_at == site.clock.now


async def test_keep_alive_serves_one_after_the_other(site):
    wire = site.connect()
    for _ in range(3):
        assert wire.feed(POST, b"hello") == OK5
    assert not wire.closing


async def test_a_body_in_one_piece_of_its_own_is_not_copied(site):
    wire = site.connect()
    body = bytes(50_000)
    wire.feed(POST.replace(b"5", b"50000", 1), body)
    assert site.app.exchanges[0].body is body
    assert any(write is body for write in wire.writes), "the answer's body was copied"


@pytest.mark.parametrize("close", [b"Connection: close", b"connection: Foo, CLOSE"])
async def test_close_is_answered_and_meant(site, close):
    wire = site.connect()
    answer = wire.feed(b"GET / HTTP/1.1\r\nHost: h\r\n" + close + b"\r\n\r\n" + GET % 2)
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    assert wire.closing
    assert len(site.app.exchanges) == 1


async def test_http_1_0(site):
    wire = site.connect()
    assert b"connection: close" in wire.feed(b"GET / HTTP/1.0\r\n\r\n")
    assert wire.closing
    wire = site.connect()
    assert b"connection: keep-alive" in wire.feed(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert not wire.closing


async def test_head_has_no_body(site):
    site.app.on_head = lambda exchange: exchange.respond(200, [], b"hello")
    assert site.connect().feed(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n") == OK5[:-5]


async def test_a_chunked_body_and_its_trailers_dropped(site):
    wire = site.connect()
    answer = wire.feed(CHUNKED_POST, b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nX-Secret: 1\r\n\r\n" + GET % 2)
    assert answer == OK5 + OK0
    assert site.app.exchanges[0].body == b"hello"


async def test_line_breaks_before_a_request_are_skipped(site):
    wire = site.connect()
    assert wire.feed(b"\r\n", b"\r\n\r\n" + GET % 1) == OK0
    assert wire.feed(b"\r\n") == b""
    assert site.server.busy == 0


async def test_an_offer_to_upgrade_is_ignored(site):
    wire = site.connect()
    upgrade = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert wire.feed(upgrade + GET % 2) == OK0 + OK0


STREAM = (
    POST
    + b"hello"
    + CHUNKED_POST
    + b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: t\r\n\r\n"
    + GET % 1
    + b"\r\n"
    + POST
    + b"12345"
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=40), streamed=st.booleans())
def test_any_split_of_the_stream_reads_the_same(kit, cuts, streamed):
    async def serve():
        site = kit.Site()
        sinks = []

        def stream(exchange):
            sinks.append(kit.Sink())
            exchange.stream(sinks[-1])

        if streamed:
            site.app.on_head = stream
        wire = site.connect()
        wire.feed(*(STREAM[a:b] for a, b in pairwise(sorted({0, *cuts, len(STREAM)}))))
        return site.app, sinks, wire.written

    app, sinks, written = asyncio.run(serve())
    if streamed:
        assert {sink.events.pop() for sink in sinks} == {"end"}
        bodies = [b"".join(sink.events) for sink in sinks]
    else:
        bodies = [event[2] for event in app.events if event[0] == "request"]
        assert written.count(b"200 OK") == 4
    assert bodies == [b"hello", b"abc0123456789", b"", b"12345"]


# Pipelining


async def test_answers_go_out_in_the_order_of_the_requests(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(b"".join(GET % n for n in range(4)))
    for n in (2, 0, 3, 1):
        site.app.exchanges[n].respond(200, [], b"%d" % n)
    bodies = [part[:1] for part in wire.written.split(b"\r\n\r\n")[1:]]
    assert bodies == [b"0", b"1", b"2", b"3"]
    assert [event[1] for event in site.app.events if event[0] == "sent"] == [b"/0", b"/1", b"/2", b"/3"]


async def test_a_streamed_answer_waits_for_its_turn(site, kit):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + GET % 1)
    flow = kit.Sink()
    second = site.app.exchanges[1]
    second.start(200, [], None, flow)
    second.write(b"abc")
    assert flow.events == ["pause"]
    assert wire.written == b""
    site.app.exchanges[0].respond(200, [])
    assert flow.events == ["pause", "resume"]
    assert wire.written.endswith(b"3\r\nabc\r\n")
    second.end()
    assert wire.written.endswith(b"0\r\n\r\n")


async def test_pipelining_is_bounded(kit):
    site = kit.Site(max_pipelined=3)
    site.app.answers = False
    wire = site.connect()
    wire.feed(b"".join(GET % n for n in range(5)))
    assert len(site.app.exchanges) == 3
    assert wire.paused
    site.app.exchanges[0].respond(200, [])
    assert len(site.app.exchanges) == 4
    assert wire.paused
    for exchange in site.app.exchanges[1:]:
        exchange.respond(200, [])
    assert not wire.paused
    site.app.exchanges[4].respond(200, [])
    assert wire.written.count(b"200 OK") == 5


async def test_a_few_empty_lines_before_a_request_are_skipped_and_more_are_refused(site):
    wire = site.connect()
    assert wire.feed(b"\r\n" * 4 + GET % 0) == OK0
    assert wire.feed(b"\r\n" * 4 + GET % 0) == OK0
    assert refusal(wire.feed(b"\r\n" * 5 + GET % 0))[:2] == (400, "malformed-head")
    assert ("refused", 400, "malformed-head") in site.app.events
    assert len(site.app.exchanges) == 2


async def test_a_refusal_waits_for_the_answers_before_it(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + b"GET / HTTP/1.1\r\n\r\n" + GET % 2)
    assert wire.written == b""
    site.app.exchanges[0].respond(200, [])
    assert wire.written.startswith(OK0)
    assert refusal(wire.written[len(OK0) :])[0] == 400
    assert len(site.app.exchanges) == 1
    assert ("refused", 400, "bad-host") in site.app.events


# Expect


EXPECT = b"POST /e HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"


async def test_continue_is_sent_when_the_body_is_wanted(site):
    wire = site.connect()
    assert wire.feed(EXPECT) == CONTINUE
    assert wire.feed(b"hello") == OK5


async def test_continue_is_not_sent_when_the_body_is_here(site):
    assert site.connect().feed(EXPECT + b"hello") == OK5


async def test_continue_is_not_sent_when_the_answer_needs_no_body(site):
    site.app.on_head = lambda exchange: exchange.respond(403, [])
    wire = site.connect()
    assert wire.feed(EXPECT) == b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def test_continue_is_sent_when_its_turn_has_come(site):
    site.app.answers = False
    wire = site.connect()
    assert wire.feed(GET % 0 + EXPECT) == b""
    site.app.exchanges[0].respond(200, [])
    assert wire.written == OK0 + CONTINUE


async def test_other_expectations_fail(site):
    assert refusal(site.connect().feed(EXPECT.replace(b"100", b"200")))[0] == 417


# Limits


@pytest.mark.parametrize(
    ("limits", "request_bytes", "status", "named"),
    [
        (
            {"max_target_bytes": 100},
            b"GET /" + b"a" * 200 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
            414,
            "target is over 100 bytes, a fixed limit: send a shorter one",
        ),
        (
            {"max_target_bytes": 100},
            b"GET /" + b"a" * 200,
            414,
            "target is over 100 bytes, a fixed limit: send a shorter one",
        ),
        (
            {"max_head_bytes": 300},
            b"GET / HTTP/1.1\r\nX: " + b"a" * 400,
            431,
            "head is over 300 bytes, a fixed limit: send fewer headers",
        ),
        (
            {"max_head_bytes": 300},
            b"GET / HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n" % (b"a" * 400),
            431,
            "head is over 300 bytes, a fixed limit: send fewer headers",
        ),
        (
            {"max_headers": 5},
            b"GET / HTTP/1.1\r\nHost: h\r\n%b\r\n" % (b"X: y\r\n" * 5),
            431,
            "over 5 header fields, a fixed limit: send fewer",
        ),
        ({"max_body_bytes": 4}, POST, 413, "raise bodies.maxRequest"),
        ({"max_body_bytes": 4}, POST + b"hello", 413, "raise bodies.maxRequest"),
        ({"max_body_bytes": 4}, EXPECT, 413, "raise bodies.maxRequest"),
        ({"max_body_bytes": 4}, CHUNKED_POST + b"3\r\nabc\r\n2\r\nde\r\n", 413, "raise bodies.maxRequest"),
        ({"max_body_bytes": 4}, CHUNKED_POST + b"FFFFFF\r\nabcde", 413, "raise bodies.maxRequest"),
        ({"max_buffered_bytes": 4}, POST, 503, "raise bodies.maxBuffered"),
        ({"max_buffered_bytes": 4}, POST + b"hello", 503, "raise bodies.maxBuffered"),
        ({"max_buffered_bytes": 4}, EXPECT, 503, "raise bodies.maxBuffered"),
        ({"max_buffered_bytes": 4}, CHUNKED_POST + b"3\r\nabc\r\n2\r\nde\r\n", 503, "raise bodies.maxBuffered"),
        ({"max_connections": 0}, b"", 503, "a fixed limit: add replicas"),
    ],
)
async def test_limits_are_named_and_answered(kit, limits, request_bytes, status, named):
    site = kit.Site(**limits)
    wire = site.connect()
    wire.feed(request_bytes)
    told_status, _, text = refusal(wire.written)
    assert told_status == status
    assert named in text
    assert CONTINUE not in wire.written
    assert not any(event[0] == "request" for event in site.app.events)
    # Our side is ended and the client's read on, so that a reset can't overtake the answer.
    assert wire.eof
    assert not wire.closing
    assert not wire.feed_eof()


async def test_the_application_sets_its_own_limit(site):
    site.app.on_head = lambda exchange: exchange.buffer(4)
    assert refusal(site.connect().feed(POST))[0] == 413
    assert site.app.events == [("sent", b"/p", 413)]
    site.app.on_head = lambda exchange: exchange.buffer(5)
    assert site.connect().feed(POST + b"hello") == OK5


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello",
    ],
)
async def test_malformed_heads_are_refused_at_once_and_nothing_behind_them_is_read(site, head):
    wire = site.connect()
    answer = wire.feed(head)
    status, _, _ = refusal(answer)
    assert status in {400, 501}
    assert wire.feed(GET % 1) == b""
    assert not site.app.exchanges


async def test_a_broken_chunk_is_refused(site):
    wire = site.connect()
    assert refusal(wire.feed(CHUNKED_POST, b"3\r\nabc\r\n", b"zz\r\n"))[:2] == (400, "bad-chunk")
    assert site.app.events == [("sent", b"/c", 400)]


# Time


async def test_a_slow_head_times_out(site):
    wire = site.connect()
    for byte in b"GET / HTTP":
        wire.feed(bytes([byte]))
        site.after(0.9)
    assert wire.written == b""
    site.after(1.1)
    assert refusal(wire.written)[:2] == (408, "head-timeout")


async def test_a_slow_body_times_out_but_not_a_large_one_at_the_least_rate(kit):
    site = kit.Site(body_timeout=10.0, min_body_rate=100.0)
    wire = site.connect()
    wire.feed(b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(30):
        wire.feed(bytes(110))
        site.after(1.0)
    assert wire.written == b""
    for _ in range(20):
        wire.feed(b"x")
        site.after(1.0)
    assert refusal(wire.written)[:2] == (408, "body-timeout")
    assert site.app.events == [("sent", b"/p", 408)]


async def test_a_body_that_the_application_pauses_does_not_time_out(kit):
    site = kit.Site(body_timeout=10.0)
    sink = kit.Sink()
    site.app.on_head = lambda exchange: exchange.stream(sink)
    wire = site.connect()
    wire.feed(POST, b"he")
    site.app.exchanges[0].pause_reading()
    assert wire.paused
    site.after(100.0)
    site.app.exchanges[0].resume_reading()
    assert not wire.paused
    site.after(9.0)
    wire.feed(b"llo")
    assert sink.events == [b"he", b"llo", "end"]


@pytest.mark.parametrize("gets", [1, 3])
async def test_a_body_that_begins_while_reading_is_paused_times_out(kit, gets):
    # Three requests before it are as many as are taken at once: nothing is read until one is answered.
    site = kit.Site(body_timeout=10.0, max_pipelined=3)
    site.after(1e5)
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 1 * gets + b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\nhe")
    assert wire.paused == (gets == 3)
    for exchange in list(site.app.exchanges[:gets]):
        exchange.respond(200, [])
    assert not wire.paused
    site.after(13.0)
    assert refusal(wire.written.removeprefix(gets * OK0))[:2] == (408, "body-timeout")


async def test_half_a_line_break_keeps_no_connection_open(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 1)
    wire.feed(b"\r")
    site.app.exchanges[0].respond(200, [])
    site.after(site.limits.idle_timeout + 1)
    assert refusal(wire.written.removeprefix(OK0))[:2] == (408, "head-timeout")


async def test_idle_connections_close_silently(site):
    fresh, used = site.connect(), site.connect()
    used.feed(GET % 1)
    site.after(site.limits.idle_timeout + 1)
    assert fresh.closing
    assert fresh.written == b""
    assert used.closing
    assert used.written == OK0


async def test_no_timeout_while_the_application_thinks(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(POST + b"hello")
    site.after(1e6)
    assert not wire.closing
    site.app.exchanges[0].respond(200, [])
    assert wire.written == OK0


async def test_a_client_that_does_not_read_is_cut(site, kit):
    flow = kit.Sink()
    site.app.answers = False
    site.app.on_head = lambda exchange: exchange.start(200, [], None, flow)
    wire = site.connect()
    wire.feed(GET % 1)
    exchange = site.app.exchanges[0]
    exchange.write(bytes(300_000))
    wire.unsent = 300_000
    wire.protocol.pause_writing()
    assert flow.events == ["pause"]
    assert wire.paused
    assert not exchange.writable
    site.after(20.0)
    wire.unsent = 299_000  # some progress: it has until 30 s from when that is seen
    site.after(11.0)
    assert not wire.aborted
    site.after(29.0)
    assert not wire.aborted
    site.after(2.0)
    assert wire.aborted


async def test_a_client_that_reads_again_is_served_on(site, kit):
    flow = kit.Sink()
    site.app.answers = False
    site.app.on_head = lambda exchange: exchange.start(200, [], None, flow)
    wire = site.connect()
    wire.feed(GET % 1)
    wire.protocol.pause_writing()
    wire.protocol.resume_writing()
    assert flow.events == ["pause", "resume"]
    assert not wire.paused
    site.after(100.0)
    assert not wire.closing


async def test_closing_does_not_wait_for_ever_for_a_client_that_does_not_read(site):
    wire = site.connect()
    wire.unsent = 10
    wire.feed(b"GET / HTTP/1.0\r\n\r\n")
    assert wire.closing
    site.after(site.limits.write_timeout + 1)
    assert wire.aborted


# Answers before the end of the request


async def test_the_small_rest_of_a_body_is_skipped(site):
    site.app.on_head = lambda exchange: exchange.respond(403, []) if exchange.target == b"/p" else None
    wire = site.connect()
    assert wire.feed(POST) == b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"
    assert wire.feed(b"hel", b"lo" + GET % 1) == OK0


@pytest.mark.parametrize("head", [POST.replace(b"5", b"500000", 1), CHUNKED_POST])
async def test_for_a_large_rest_the_connection_closes(site, head):
    site.app.on_head = lambda exchange: exchange.respond(403, [])
    wire = site.connect()
    assert b"connection: close" in wire.feed(head)
    assert wire.eof
    assert wire.feed(bytes(100_000)) == b""
    assert not wire.closing
    assert not wire.paused
    site.after(site.limits.linger_timeout + 1)
    assert wire.aborted
    wire.lose()
    assert site.app.events == [("sent", head[5:7], 403)]


async def test_a_streamed_answer_may_begin_and_end_before_the_request_does(site, kit):
    sink = kit.Sink()

    def answer(exchange):
        exchange.stream(sink)
        exchange.start(200, [], 2)

    site.app.on_head = answer
    wire = site.connect()
    wire.feed(POST, b"he")
    site.app.exchanges[0].write(b"ok")
    site.app.exchanges[0].end()
    assert wire.written == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    site.app.on_head = None
    assert wire.feed(b"llo" + POST + b"hello") == OK5
    assert sink.events == [b"he"]


async def test_requests_that_came_while_the_client_did_not_read_are_answered_once_it_does(site):
    wire = site.connect()
    site.app.answers = False
    wire.feed(POST + b"hello")
    wire.protocol.pause_writing()
    assert wire.feed(POST + b"hello" + POST + b"hello") == b""
    site.app.exchanges[0].respond(200, [], b"hello")
    site.app.answers = True
    assert len(site.app.exchanges) == 1
    before = len(wire.written)
    wire.protocol.resume_writing()
    assert wire.written[before:] == OK5 * 2
    assert site.server.busy == 0


async def test_an_answer_that_the_system_has_not_taken_keeps_a_connection_busy(site):
    wire = site.connect()
    wire.feed(POST + b"hello")
    wire.unsent = 1
    assert site.server.busy == 1
    wire.unsent = 0
    assert site.server.busy == 0
