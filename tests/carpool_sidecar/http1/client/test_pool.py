from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from server_messages import CHUNKED_OK, GET, HEAD, OK, UNTIL_CLOSE_OK, answering, post

from carpool_sidecar.http1.client.calls import Upload
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.upstream import Upstream
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import CHUNKED, content_length, encode_request_head


async def test_one_connection_is_kept_and_used_again(upstream, pool, ask):
    for _ in range(3):
        assert await ask(post(5), b"hello") == [("answered", 200, b"hello")]
    assert len(upstream.peers) == 1
    assert (pool.connections, pool.idle, pool.waiting) == (1, 1, 0)


async def test_without_reuse_every_call_has_its_own_connection(upstream, kit):
    upstream.script = answering(OK)
    pool = Pool("127.0.0.1", upstream.port, max_connections=1, reuse=False)
    receivers = [kit.Receiver() for _ in range(3)]  # two wait for the one connection
    for receiver in receivers:
        pool.send(GET, b"", receiver)
    for receiver in receivers:
        await receiver.over.wait()
        assert receiver.events == [("answered", 200, b"hello")]
    assert (len(upstream.peers), pool.connections, pool.idle) == (3, 0, 0)
    await pool.close()


async def test_the_connection_used_last_is_used_first(upstream, pool, ask, kit):
    receivers = [kit.Receiver() for _ in range(3)]
    for receiver in receivers:
        pool.send(GET, b"", receiver)
    for receiver in receivers:
        await receiver.over.wait()
    assert pool.connections == 3
    last = pool._connections.idle[-1]
    for _ in range(5):
        await ask()
        assert pool._connections.idle[-1] is last


async def test_at_the_cap_calls_wait_in_order(upstream, kit):
    order = []
    upstream.script = lambda peer, received: (order.append(received[5:6]), peer.answer(OK))
    pool = Pool("127.0.0.1", upstream.port, max_connections=1)
    receivers = [kit.Receiver() for _ in range(4)]
    for n, receiver in enumerate(receivers):
        pool.send(encode_request_head(b"GET", b"/%d" % n, [(b"Host", b"h")]), b"", receiver)
    assert pool.waiting == 4
    for receiver in receivers:
        await receiver.over.wait()
    assert order == [b"0", b"1", b"2", b"3"]
    assert len(upstream.peers) == 1
    await pool.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("head", "answer", "close", "status", "body"),
    [
        (GET, OK, False, 200, b"hello"),
        (GET, CHUNKED_OK, False, 200, b"hello"),
        (GET, UNTIL_CLOSE_OK, True, 200, b"hello"),
        (GET, b"HTTP/1.0 200 OK\r\n\r\nhello", True, 200, b"hello"),
        (GET, b"HTTP/1.1 200 OK\r\n\r\n", True, 200, b""),
        (GET, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, False, 200, b"hello"),
        (GET, b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b""),
        (GET, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", False, 304, b""),
        (HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", False, 200, b""),
        (HEAD, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", False, 200, b""),
        (GET, b"HTTP/1.1 500 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno", False, 500, b"no"),
    ],
)
async def test_answers_of_every_framing(upstream, pool, ask, *, head, answer, close, status, body, stream):
    upstream.script = answering(answer, close=close)
    events = await ask(head, stream=stream)
    assert (("interim", 103) in events) == (stream and b" 103 " in answer)  # and 100 is nobody's business
    events = [event for event in events if event != ("interim", 103)]
    if events[0][0] == "answered":
        assert events == [("answered", status, body)]
    else:
        assert events[0] == ("head", status)
        assert b"".join(events[1:-1]) == body
        assert events[-1] == "end"
    announced = head is HEAD or status == 304  # a body may come in spite of it
    keeps = not close and b"Connection: close" not in answer and not announced
    assert pool.connections == keeps


@pytest.mark.parametrize("wire", [OK, CHUNKED_OK, b"HTTP/1.1 100 Continue\r\n\r\n" + OK])
@pytest.mark.parametrize("stream", [False, True])
async def test_any_split_of_an_answer_reads_the_same(kit, wire, stream):
    pool = Pool()
    link = kit.MemoryTransport(Upstream(pool))
    ends = range(len(wire) + 1)
    for cuts in [ends, *([cut] for cut in ends), *((cut, cut + 7) for cut in ends[:-7])]:
        receiver = kit.Receiver()
        (pool.stream if stream else pool.send)(GET, b"", receiver)
        link.feed(*(wire[a:b] for a, b in pairwise(sorted({0, *cuts, len(wire)}))))
        events = receiver.events
        assert receiver.over.is_set()
        assert (events[0][2] if events[0][0] == "answered" else b"".join(events[1:-1])) == b"hello"
    assert pool.idle == 1
    await pool.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
async def test_what_is_no_single_answer_is_a_protocol_error(upstream, pool, ask, garbage, stream):
    upstream.script = answering(garbage)
    events = await ask(stream=stream)
    assert events[-1] == ("failed", "protocol", True)
    assert pool.connections == 0


ANNOUNCED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("head", "answer", "surplus", "status", "body"),
    [
        (GET, OK, b"x", 200, b"hello"),
        (GET, OK, OK, 200, b"hello"),
        (GET, CHUNKED_OK, b"\r\n", 200, b"hello"),
        (GET, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"x", 200, b""),
        (GET, b"HTTP/1.1 204 No Content\r\n\r\n", b"x", 204, b""),
        (GET, b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", b"no", 204, b""),
        (GET, b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\n", 204, b""),
        (GET, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n", b"no", 304, b""),
        (HEAD, ANNOUNCED, b"ok", 200, b""),
        (HEAD, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nok\r\n0\r\n\r\n", 200, b""),
    ],
)
async def test_what_comes_behind_an_answer_is_dropped_with_the_connection(
    timed, kit, *, head, answer, surplus, status, body, stream
):
    wire = answer + surplus
    for cut in range(len(answer), len(wire) + 1):
        link = kit.MemoryTransport(Upstream(timed.pool))
        receiver = kit.Receiver()
        (timed.pool.stream if stream else timed.pool.send)(head, b"", receiver)
        for piece in (wire[:cut], wire[cut:]):
            if piece and not link.closing:
                link.feed(piece)
        told = receiver.events
        got = told[0][2] if told[0][0] == "answered" else b"".join(told[1:-1])
        assert (told[0][1], got) == (status, body)
        assert "failed" not in {event[0] for event in told if isinstance(event, tuple)}
        assert link.aborted
    for cut in range(1, len(answer)):
        link = kit.MemoryTransport(Upstream(timed.pool))
        receiver = kit.Receiver()
        (timed.pool.stream if stream else timed.pool.send)(head, b"", receiver)
        link.feed(wire[:cut], wire[cut:])
        told = receiver.events
        got = told[0][2] if told[0][0] == "answered" else b"".join(told[1:-1])
        assert (told[0][1], got) == (status, body)
        assert link.aborted


@pytest.mark.parametrize(
    ("head", "answer", "kept"),
    [
        (HEAD, ANNOUNCED, False),
        (HEAD, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (HEAD, b"HTTP/1.1 200 OK\r\n\r\n", True),
        (HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (GET, b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", False),
        (GET, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n", False),
        (GET, b"HTTP/1.1 304 Not Modified\r\n\r\n", True),
    ],
)
async def test_a_body_that_should_not_come_does_not_reach_the_next_call(timed, kit, head, answer, kept):
    receiver, following = kit.Receiver(), kit.Receiver()
    timed.pool.send(head, b"", receiver)
    call = timed.pool.send(GET, b"", following)  # it waits, and a free connection would serve it at once
    timed.feed(answer)
    assert len(receiver.events) == 1
    assert timed.written == head + GET * kept
    assert following.events == []
    call.cancel()


async def test_bytes_nobody_asked_for_close_an_idle_connection(upstream, pool, ask):
    await ask()
    upstream.peers[0].answer(OK)
    await upstream.peers[0].lost.wait()
    assert await ask() == [("answered", 200, b"")]
    assert len(upstream.peers) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "part",
    [b"", b"HTTP/1.1 20", OK[:-1], CHUNKED_OK[:-1], b"HTTP/1.1 100 Continue\r\n\r\n"],
)
async def test_an_upstream_that_closes_too_early(upstream, ask, part, stream):
    upstream.script = answering(part, close=True)
    assert (await ask(stream=stream))[-1] == ("failed", "reset", part != b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reset_does_not_complete_an_answer_that_ends_with_the_connection(upstream, pool, kit, stream):
    upstream.script = answering(UNTIL_CLOSE_OK)
    receiver = kit.Receiver()
    (pool.stream if stream else pool.send)(GET, b"", receiver)
    await kit.until(lambda: pool._connections.open and next(iter(pool._connections.open))._answer.body.size == 5)
    upstream.peers[0].reset()
    await receiver.over.wait()
    assert receiver.events[-1] == ("failed", "reset", True)


async def test_at_the_cap_the_oldest_idle_connection_makes_room_for_a_tunnel(upstream, kit):
    upstream.script = answering(OK)
    pool = Pool("127.0.0.1", upstream.port, max_connections=2)
    receivers = [kit.Receiver() for _ in range(2)]
    for receiver in receivers:
        pool.send(GET, b"", receiver)
    for receiver in receivers:
        await receiver.over.wait()
    assert (pool.connections, pool.idle) == (2, 2)
    oldest = pool._connections.idle[0]
    tunnels = [await pool.tunnel(patience=1.0)]
    assert oldest not in pool._connections.open
    assert (pool.connections, pool.idle) == (2, 1)
    tunnels.append(await pool.tunnel(patience=1.0))
    assert (pool.connections, pool.idle) == (2, 0)
    with pytest.raises(UpstreamError, match="all 2 connections"):
        await pool.tunnel(patience=1.0)
    for link in tunnels:
        link.close()
    await pool.close()


async def test_a_silent_upstream_times_out(upstream, ask):
    upstream.script = lambda peer, received: None
    assert await ask(timeout=0.02) == [("failed", "timeout", False)]
    upstream.script = answering(OK[:-1])
    assert await ask(timeout=0.02) == [("failed", "timeout", True)]


async def test_waiting_for_a_connection_times_out(upstream, kit):
    upstream.script = lambda peer, received: None
    pool = Pool("127.0.0.1", upstream.port, max_connections=1, limits=ClientLimits(tick=0.01))
    first, second = kit.Receiver(), kit.Receiver()
    pool.send(GET, b"", first)
    pool.send(GET, b"", second, timeout=0.02)
    await second.over.wait()
    assert second.events == [("failed", "timeout", False)]
    assert first.events == []
    await pool.close()
    assert first.events == [("failed", "reset", False)]


async def test_an_idle_connection_is_closed_in_time(upstream, kit):
    pool = Pool("127.0.0.1", upstream.port, idle_timeout=0.01, limits=ClientLimits(tick=0.01))
    receiver = kit.Receiver()
    pool.send(GET, b"", receiver)
    await upstream.connected.wait()
    await upstream.peers[0].lost.wait()
    assert receiver.events == [("answered", 200, b"")]
    assert pool.connections == 0
    await pool.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_too_large_an_answer(upstream, kit, stream):
    for answer in (b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + bytes(11)):
        upstream.script = answering(answer)
        pool = Pool("127.0.0.1", upstream.port, limits=ClientLimits(max_body_bytes=10))
        receiver = kit.Receiver()
        call = (pool.stream if stream else pool.send)(GET, b"", receiver)
        if stream:  # it is not kept, so it may be of any size
            await kit.until(lambda told=receiver.events: told)
            assert receiver.events[0] == ("head", 200)
            call.cancel()
        else:
            await receiver.over.wait()
            assert receiver.events == [("failed", "too-large", True)]
        await pool.close()


async def test_cancel_closes_the_connection_and_no_more_events_are_reported(upstream, pool, kit):
    upstream.script = lambda peer, received: None
    receiver = kit.Receiver()
    call = pool.send(GET, b"", receiver)
    await upstream.connected.wait()
    call.cancel()
    call.cancel()
    await upstream.peers[0].lost.wait()
    assert call.done
    assert receiver.events == []
    assert pool.connections == 0


async def test_cancel_while_waiting(upstream, pool, ask, kit):
    receiver = kit.Receiver()
    pool.send(GET, b"", receiver).cancel()
    assert pool.waiting == 0
    assert await ask() == [("answered", 200, b"")]
    assert receiver.events == []


async def test_cancel_from_inside_a_streamed_answer(upstream, pool, kit):
    receiver = kit.Receiver()
    told = receiver.head
    receiver.head = lambda status, headers: (told(status, headers), call.cancel())
    upstream.script = lambda peer, received: peer.answer(CHUNKED_OK[:-7]) if b"\r\n\r\n" in received else None
    call = pool.stream(GET, b"", receiver)
    await upstream.connected.wait()
    await upstream.peers[0].lost.wait()
    assert receiver.events == [("head", 200)]
    receiver = kit.Receiver()
    told_data = receiver.data
    receiver.data = lambda chunk: (told_data(chunk), call.cancel())
    call = pool.stream(GET, b"", receiver)
    await kit.until(lambda: len(upstream.peers) == 2)
    await upstream.peers[1].lost.wait()
    assert receiver.events == [("head", 200), b"hello"]


@pytest.mark.parametrize("retry_stale", [False, True])
async def test_a_stale_connection(upstream, ask, retry_stale):
    await ask()
    peer = upstream.peers[0]
    script, upstream.script = upstream.script, lambda peer, received: peer.reset()
    answer = asyncio.ensure_future(ask(post(5), b"hello", retry_stale=retry_stale))
    await peer.lost.wait()
    upstream.script = script
    if retry_stale:
        assert await answer == [("answered", 200, b"hello")]
    else:
        assert await answer == [("failed", "reset", False)]


async def test_a_stale_connection_is_retried_once_and_never_a_fresh_one(upstream, ask):
    await ask()
    upstream.script = lambda peer, received: peer.reset()
    assert await ask(retry_stale=True) == [("failed", "reset", False)]
    assert len(upstream.peers) == 2
    assert await ask(retry_stale=True) == [("failed", "reset", False)]
    assert len(upstream.peers) == 3


async def test_nothing_is_retried_once_an_answer_began(upstream, ask):
    await ask()
    upstream.script = answering(b"HTTP/1.1 2", close=True)
    assert await ask(retry_stale=True) == [("failed", "reset", True)]
    assert len(upstream.peers) == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_streamed_request(upstream, pool, kit, chunked):
    flow, receiver = kit.Sink(), kit.Receiver()
    end = b"0\r\n\r\n" if chunked else b"lo"
    upstream.script = lambda peer, received: peer.answer(OK) if received.endswith(end) else None
    framing = CHUNKED if chunked else content_length(5)
    head = encode_request_head(b"POST", b"/", [(b"Host", b"h"), framing])
    call = pool.send(head, Upload(None if chunked else 5, flow), receiver)
    assert not call.writable
    call.write(b"hel")
    await kit.until(lambda: "resume" in flow.events)
    assert call.writable
    assert upstream.peers == [] or not receiver.events
    call.write(b"lo")
    call.end()
    await receiver.over.wait()
    assert receiver.events == [("answered", 200, b"hello")]
    assert pool.idle == 1


async def test_a_streamed_request_keeps_to_its_length(pool, kit):
    head = post(5)
    call = pool.send(head, Upload(5, kit.Sink()), kit.Receiver())
    with pytest.raises(ValueError, match="2 bytes less"):
        call.write(b"hel") or call.end()
    with pytest.raises(ValueError, match="more"):
        call.write(b"lo!")
    with pytest.raises(ValueError, match=r"^more was written"):
        call.end()
    call.cancel()


async def test_an_answer_may_come_before_the_request_is_complete(upstream, pool, kit):
    upstream.script = answering(OK)
    receiver = kit.Receiver()
    call = pool.send(post(5), Upload(5, kit.Sink()), receiver)
    await receiver.over.wait()
    assert receiver.events == [("answered", 200, b"hello")]
    call.write(b"hello")
    call.end()
    await upstream.peers[0].lost.wait()
    assert pool.connections == 0


async def test_backpressure_both_ways(upstream, pool, kit):
    upstream.script = lambda peer, received: peer.transport.pause_reading()
    flow, receiver = kit.Sink(), kit.Receiver()
    head = encode_request_head(b"POST", b"/", [(b"Host", b"h"), CHUNKED])
    call = pool.stream(head, Upload(None, flow), receiver)
    await kit.until(lambda: call.writable)
    while "pause" not in flow.events[1:]:
        call.write(bytes(100_000))
        await asyncio.sleep(0)
    assert not call.writable
    upstream.script = lambda peer, received: None
    peer = upstream.peers[0]
    peer.transport.resume_reading()
    await kit.until(lambda: call.writable)
    assert flow.events[-1] == "resume"

    call.end()
    peer.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    await kit.until(lambda: len(receiver.events) == 2)
    call.pause_reading()
    peer.transport.write(b"1\r\nb\r\n0\r\n\r\n")
    for _ in range(50):
        await asyncio.sleep(0)
    assert receiver.events == [("head", 200), b"a"]
    call.resume_reading()
    await receiver.over.wait()
    assert receiver.events[2:] == [b"b", "end"]
    assert pool.idle == 1


async def test_a_closed_pool_refuses(pool, kit):
    await pool.close()
    receiver = kit.Receiver()
    pool.send(GET, b"", receiver)
    await receiver.over.wait()
    assert receiver.events == [("failed", "refused", False)]


async def test_a_large_body_goes_out_uncopied(pool, kit):
    large = bytes(1_000_000)
    call = pool.send(post(len(large)), [large[:0], large], kit.Receiver())
    assert any(piece is large for piece in call._pieces)
    call.cancel()


async def test_the_queue_for_connections_is_bounded(upstream, kit):
    upstream.script = lambda peer, received: None
    pool = Pool("127.0.0.1", upstream.port, max_connections=2, max_waiting=3, setting="upstream.maxForwarded")
    receivers = [kit.Receiver() for _ in range(8)]
    calls = [pool.send(GET, b"", receiver) for receiver in receivers]
    assert pool.waiting == 5
    await kit.until(lambda: len(upstream.peers) == 2 and not pool.free)
    await receivers[7].over.wait()
    assert [receiver.events for receiver in receivers] == [[]] * 5 + [[("failed", "busy", False)]] * 3
    errors = []
    late = kit.Receiver()
    late.failed = lambda error: (errors.append(error), late.over.set())
    pool.send(GET, b"", late)
    await late.over.wait()
    assert (errors[0].status, errors[0].reason) == (503, "upstream-busy")
    assert "all 2 connections to the upstream are taken, and 3 calls wait; raise upstream.maxForwarded" in str(
        errors[0]
    )
    refused = pool.send(GET, b"", kit.Receiver())
    refused.cancel()
    calls[4].cancel()
    assert pool.waiting == 2
    pool.send(GET, b"", kit.Receiver())
    assert pool.waiting == 3
    await pool.close()


async def test_whether_a_call_would_wait(upstream, kit):
    pool = Pool("127.0.0.1", upstream.port, max_connections=1)
    assert pool.free
    receiver = kit.Receiver()
    pool.send(GET, b"", receiver)
    assert not pool.free
    await receiver.over.wait()
    assert pool.free
    await pool.close()


# The upstream may close an idle connection just as a request goes out


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("idle", "retry_stale", "reused"), [(0.7, False, True), (0.8, False, False), (0.8, True, True), (20.0, True, True)]
)
async def test_what_cannot_be_sent_again_takes_no_connection_idle_for_long(
    upstream, kit, idle, retry_stale, reused, stream
):
    clock = kit.Clock()
    pool = Pool("127.0.0.1", upstream.port, max_connections=1, max_waiting=0, clock=clock)
    send = pool.stream if stream else pool.send
    first, second = kit.Receiver(), kit.Receiver()
    send(post(5), b"hello", first)
    await first.over.wait()
    clock.now += idle
    send(post(5), b"world", second, retry_stale=retry_stale)
    await second.over.wait()
    assert second.events == [("answered", 200, b"world")]
    assert len(upstream.peers) == 2 - reused
    assert pool.connections == 1, "the old connection made room"
    await pool.close()


async def test_a_streamed_request_takes_no_connection_idle_for_long(upstream, kit):
    clock = kit.Clock()
    pool = Pool("127.0.0.1", upstream.port, clock=clock)
    for body in (b"hello", b"world"):
        receiver = kit.Receiver()
        call = pool.stream(post(5), Upload(5, kit.Sink()), receiver, retry_stale=True)
        call.write(body)
        call.end()
        await receiver.over.wait()
        assert receiver.events == [("answered", 200, body)]
        clock.now += 1.0
    assert len(upstream.peers) == 2
    await pool.close()


async def test_as_many_old_connections_go_as_new_ones_come(upstream, kit):
    clock = kit.Clock()
    pool = Pool("127.0.0.1", upstream.port, max_connections=3, clock=clock)
    for _ in range(3):
        receivers = [kit.Receiver() for _ in range(3)]
        for receiver in receivers:
            pool.send(post(5), b"hello", receiver)
        for receiver in receivers:
            await receiver.over.wait()
            assert receiver.events == [("answered", 200, b"hello")]
        assert (pool.connections, pool.idle, pool.waiting) == (3, 3, 0)
        clock.now += 1.0
    assert len(upstream.peers) == 9
    await pool.close()
