from __future__ import annotations

import asyncio

import pytest
from forwarding_app import ForwardAll

from carpool_sidecar.http1.relay.intermediary import hops_left, one_hop_less, upgrade_fields


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ([], None),
        ([(b"Max-Forwards", b"0")], 0),
        ([(b"max-forwards", b"12")], 12),
        ([(b"Max-Forwards", b"-1")], None),
        ([(b"Max-Forwards", b"1e3")], None),
        ([(b"Max-Forwards", b"9" * 30)], None),
        ([(b"Max-Forwards", b"0"), (b"Max-Forwards", b"5")], None),
    ],
)
def test_hops_are_read_only_where_they_are_one_number(headers, left):
    assert hops_left(headers) == left


def test_a_hop_is_counted_in_place():
    assert one_hop_less([(b"A", b"1"), (b"Max-Forwards", b"3")], 3) == [(b"A", b"1"), (b"Max-Forwards", b"2")]


def test_an_upgrade_without_its_connection_option_is_none():
    assert upgrade_fields([(b"Upgrade", b"x")]) == ()
    assert upgrade_fields([(b"Connection", b"close"), (b"CONNECTION", b"upgrade"), (b"upgrade", b"x")]) == (
        (b"connection", b"Upgrade"),
        (b"upgrade", b"x"),
    )


@pytest.fixture
async def asked(upstream):
    requests = []
    upstream.script = lambda peer, received: (
        requests.append(received),
        peer.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    )
    return requests


@pytest.fixture
async def client(pool, serve):
    return await serve.connect(await serve.start(ForwardAll(pool)))


async def test_a_trace_that_ends_here_shows_the_request_and_no_secret(asked, client):
    client.write(
        b"TRACE /a?b HTTP/1.1\r\nHost: model:80\r\nMax-Forwards: 0\r\nVia: 1.1 lb\r\nUser-Agent: curl\r\n"
        b"Authorization: Bearer secret\r\nCookie: secret\r\nX-Api-Key: secret\r\nX-Whatever: secret\r\n"
        b"Proxy-Authorization: secret\r\n\r\n"
    )
    await client.until_received(b"curl\r\n\r\n")
    head, _, body = bytes(client.received).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: message/http" in head
    assert body == (
        b"TRACE /a?b HTTP/1.1\r\nHost: model:80\r\nMax-Forwards: 0\r\nVia: 1.1 lb\r\nUser-Agent: curl\r\n\r\n"
    )
    assert b"secret" not in client.received
    assert asked == []


async def test_an_options_that_ends_here_is_answered_here(asked, client):
    client.write(b"OPTIONS * HTTP/1.1\r\nHost: h\r\nMax-Forwards: 0\r\n\r\n")
    await client.until_received(b"\r\n\r\n")
    assert client.received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"allow: " in client.received
    assert asked == []


@pytest.mark.parametrize("method", [b"TRACE", b"OPTIONS"])
async def test_one_that_goes_on_has_a_hop_less(asked, client, method):
    client.write(method + b" /x HTTP/1.1\r\nHost: h\r\nMax-Forwards: 10\r\n\r\n")
    await client.until_received(b"ok")
    assert asked == [method + b" /x HTTP/1.1\r\nHost: h\r\nMax-Forwards: 9\r\n\r\n"]


@pytest.mark.parametrize("line", [b"GET /x", b"POST /x"])
async def test_other_methods_are_not_counted(asked, client, line):
    client.write(line + b" HTTP/1.1\r\nHost: h\r\nMax-Forwards: 0\r\n\r\n")
    await client.until_received(b"ok")
    assert asked == [line + b" HTTP/1.1\r\nHost: h\r\nMax-Forwards: 0\r\n\r\n"]


# Interim responses

HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nConnection: x\r\nX: 1\r\n\r\n"
OK2 = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_interim_responses_are_passed_on(upstream, client):
    upstream.script = lambda peer, received: peer.answer(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + HINTS + OK2
    )
    client.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await client.until_received(b"ok")
    assert client.received == (
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    )


async def test_they_come_before_the_answer_does(upstream, client):
    upstream.script = lambda peer, received: peer.answer(HINTS)
    client.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await client.until_received(b"</a>\r\n\r\n")
    upstream.peers[0].answer(OK2)
    await client.until_received(b"ok")


async def test_a_client_of_http_1_0_gets_none(upstream, client):
    upstream.script = lambda peer, received: peer.answer(HINTS + OK2)
    client.write(b"GET / HTTP/1.0\r\nHost: h\r\n\r\n")
    await client.until_received(b"ok")
    assert b"103" not in client.received


async def test_they_wait_for_their_turn(upstream, client, kit):
    asked = []
    upstream.script = lambda peer, received: asked.append((received, peer))
    client.write(b"GET /1 HTTP/1.1\r\nHost: h\r\n\r\nGET /2 HTTP/1.1\r\nHost: h\r\n\r\n")
    await kit.until(lambda: len(asked) == 2)
    (_, first), (_, second) = sorted(asked, key=lambda one: one[0])
    second.answer(HINTS + OK2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.received == b""
    first.answer(OK2)
    await client.until(lambda: client.received.count(b"ok") == 2)
    assert client.received.index(b"ok") < client.received.index(b" 103 ")
