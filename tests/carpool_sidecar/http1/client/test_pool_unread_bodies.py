"""Connections with a body that the server may not have read: no later call may use them."""

from __future__ import annotations

import pytest
from server_messages import OK, post

from carpool_sidecar.http1.client.calls import Upload
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import content_length, encode_request_head

# A server that answers before it has read the body takes it for the next request


def request(method: bytes, size: int) -> bytes:
    return encode_request_head(method, b"/", [(b"Host", b"h"), content_length(size)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("method", "size", "status", "kept"),
    [
        (b"POST", 5, 200, True),
        (b"PUT", 5, 201, True),
        (b"PATCH", 5, 204, True),
        (b"POST", 5, 307, False),
        (b"POST", 5, 401, False),
        (b"PUT", 5, 404, False),
        (b"PATCH", 5, 500, False),
        (b"POST", 0, 401, True),
        (b"GET", 0, 200, True),
        (b"GET", 0, 404, True),
        (b"GET", 5, 200, False),
        (b"HEAD", 5, 200, False),
        (b"OPTIONS", 5, 200, False),
        (b"DELETE", 5, 200, False),
        (b"PROPFIND", 5, 207, False),
    ],
)
async def test_a_connection_with_a_body_that_may_be_unread_is_closed(timed, kit, *, method, size, status, kept, stream):
    receiver = kit.Receiver()
    (timed.pool.stream if stream else timed.pool.send)(request(method, size), bytes(size), receiver)
    timed.feed(b"HTTP/1.1 %d Any\r\nContent-Length: 0\r\n\r\n" % status)
    assert receiver.events == [("answered", status, b"")]
    assert (timed.pool.idle == 1, timed.aborted) == (kept, not kept)


@pytest.mark.parametrize(
    ("method", "status", "kept"), [(b"POST", 200, True), (b"POST", 401, False), (b"GET", 200, False)]
)
async def test_a_streamed_body_may_be_unread_too(timed, kit, *, method, status, kept):
    receiver = kit.Receiver()
    call = timed.pool.send(request(method, 5), Upload(5, kit.Sink()), receiver)
    call.write(b"hello")
    call.end()
    timed.feed(b"HTTP/1.1 %d Any\r\nContent-Length: 0\r\n\r\n" % status)
    assert receiver.events == [("answered", status, b"")]
    assert timed.aborted is not kept


async def test_an_answer_that_overtakes_the_body_closes_the_connection(timed, kit):
    receiver = kit.Receiver()
    timed.unsent = 1  # below the limit from which on the call is paused
    timed.pool.send(post(5), b"hello", receiver)
    timed.feed(OK)
    assert receiver.events == [("answered", 200, b"hello")]
    assert timed.aborted


async def test_where_all_calls_are_of_one_caller_errors_keep_the_connection(kit):
    pool = Pool(limits=ClientLimits(tick=1e6), shared=False)
    link = kit.MemoryTransport(Upstream(pool))
    pool.send(post(5), b"hello", kit.Receiver())
    link.feed(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
    assert pool.idle == 1
    await pool.close()


async def test_what_is_smuggled_in_a_body_answers_nobody(upstream, pool, ask):
    def unread(peer, received):
        """Answer as a server does that never reads a body."""
        while b"\r\n\r\n" in received:
            line, _, received = received.partition(b"\r\n\r\n")
            line = line.split(b"\r\n")[0]
            peer.received = received
            peer.transport.write(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(line), line))

    upstream.script = unread
    smuggled = encode_request_head(b"GET", b"/smuggled", [(b"Host", b"h")])
    for method in (b"POST", b"GET"):
        assert (await ask(request(method, len(smuggled)), smuggled))[0][1] == 401
        assert await ask() == [("answered", 401, b"GET / HTTP/1.1")]
