"""Clients that leave, or close their half of the connection."""

from __future__ import annotations

import pytest
from client_messages import GET, POST

from carpool_sidecar.http1.messages import CONTINUE

# Clients that leave


async def test_a_client_that_leaves_is_reported_once_per_request(site, kit):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + GET % 1)
    site.app.exchanges[1].respond(200, [])  # waits for the first, so it was never sent
    wire.lose(ConnectionResetError())
    assert site.app.events[2:] == [("disconnected", b"/0"), ("disconnected", b"/1")]
    site.app.exchanges[0].respond(200, [])
    site.app.exchanges[0].start(200, [], None)
    site.app.exchanges[0].write(b"x")
    site.app.exchanges[0].end()
    site.app.exchanges[0].abort()
    assert wire.written == b""
    assert site.server.connections == 0


@pytest.mark.parametrize("how", ["respond", "abort"])
async def test_an_application_may_answer_a_later_request_when_it_hears_that_the_client_left(site, how):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + GET % 1)
    first, second = site.app.exchanges
    noted = site.app.disconnected

    def disconnected(exchange):
        noted(exchange)
        if exchange is first:
            second.respond(200, []) if how == "respond" else second.abort()

    site.app.disconnected = disconnected
    wire.lose()
    assert site.app.events[2:] == [("disconnected", b"/0"), ("disconnected", b"/1")]
    assert wire.written == b""


async def test_leaving_after_the_answer_is_no_disconnect(site):
    wire = site.connect()
    wire.feed(GET % 0)
    wire.lose()
    assert site.app.events[-1] == ("sent", b"/0", 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_the_body(site, kit, stream):
    sink = kit.Sink()
    if stream:
        site.app.on_head = lambda exchange: exchange.stream(sink)
    wire = site.connect()
    wire.feed(POST, b"he")
    assert not wire.feed_eof()
    assert b"400 Bad Request" in wire.written
    assert b"truncated-body" in wire.written
    wire.lose()
    assert site.app.events == [("sent", b"/p", 400)]
    assert sink.events == ([b"he", "aborted"] if stream else [])


async def test_a_half_closed_client_hears_of_what_was_cut_off_in_its_turn(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + POST + b"he")
    assert wire.feed_eof()
    assert wire.written == CONTINUE
    site.app.exchanges[0].respond(200, [])
    assert wire.written.index(b"200 OK") < wire.written.index(b"truncated-body")
    assert wire.closing


async def test_leaving_in_the_head(site):
    wire = site.connect()
    wire.feed(b"GET / HT")
    assert not wire.feed_eof()
    assert b"truncated-head" in wire.written
    assert wire.closing


async def test_a_half_closed_client_gets_its_answer(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(POST + b"hello")
    assert wire.feed_eof()
    assert wire.written == CONTINUE  # a client that has gone answers this with a reset
    site.after(1.0)
    assert not wire.closing
    site.app.exchanges[0].respond(200, [])
    assert b"connection: close" in wire.written
    assert wire.closing
    assert site.app.events[-1] == ("sent", b"/p", 200)


async def test_a_half_closed_client_gets_all_its_answers(site):
    site.app.answers = False
    wire = site.connect()
    wire.feed(GET % 0 + GET % 1)
    assert wire.feed_eof()
    site.app.exchanges[0].respond(200, [])
    assert not wire.closing
    site.app.exchanges[1].respond(200, [])
    assert wire.written.count(b"200 OK") == 2
    assert wire.written.count(b"connection: close") == 1
    assert wire.closing


async def test_the_end_of_an_idle_connection(site):
    wire = site.connect()
    assert not wire.feed_eof()
    wire = site.connect()
    wire.feed(GET % 0)
    assert not wire.feed_eof()
