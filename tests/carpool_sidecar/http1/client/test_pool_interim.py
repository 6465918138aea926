"""Answers before the answer, and other signs of life, until the timeout of a call."""

from __future__ import annotations

import pytest
from server_messages import GET, OK, post

from carpool_sidecar.http1.client.calls import Upload

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_interim_responses_are_bounded_in_number(timed, kit, stream, at_once):
    receiver = kit.Receiver()
    (timed.pool.stream if stream else timed.pool.send)(GET, b"", receiver)
    timed.feed(INTERIM * 64)
    assert not receiver.over.is_set()
    assert receiver.events == [("interim", 102)] * (64 if stream else 0)
    timed.feed(INTERIM * 10_000 if at_once else INTERIM)
    assert receiver.events[-1] == ("failed", "protocol", True)
    assert receiver.events.count(("interim", 102)) == (64 if stream else 0)
    assert timed.closing


async def test_the_next_call_has_a_count_of_its_own(timed, kit):
    for _ in range(3):
        receiver = kit.Receiver()
        timed.pool.send(GET, b"", receiver)
        timed.feed(INTERIM * 60 + OK)
        assert receiver.events == [("answered", 200, b"hello")]


async def test_a_head_that_never_ends_does_not_put_the_deadline_off(timed, kit):
    receiver = kit.Receiver()
    timed.pool.send(GET, b"", receiver, timeout=10.0)
    for _ in range(9):
        timed.feed(
            b"H"
            if not timed.protocol._heads._beginning
            else b"TTP/1.1 200 OK\r\nX: "[len(timed.protocol._heads._beginning) - 1 :][:1]
        )
        timed.after(1.0)
    assert receiver.events == []
    timed.after(1.5)
    assert receiver.events == [("failed", "timeout", True)]


async def test_interim_responses_are_signs_of_life(timed, kit):
    receiver = kit.Receiver()
    timed.pool.send(GET, b"", receiver, timeout=10.0)
    for _ in range(3):
        timed.after(9.0)
        timed.feed(INTERIM)
    assert receiver.events == []
    for _ in range(200):
        timed.after(1.0)
        timed.feed(INTERIM)
        if timed.closing:
            break
    assert receiver.events == [("failed", "protocol", True)], "but not for ever"


async def test_the_upstream_may_be_silent_until_the_request_is_complete(timed, kit):
    receiver = kit.Receiver()
    call = timed.pool.send(post(5), Upload(5, kit.Sink()), receiver, timeout=10.0)
    timed.after(1000.0)
    assert receiver.events == []
    call.write(b"hello")
    call.end()
    timed.after(9.0)
    assert receiver.events == []
    timed.after(2.0)
    assert receiver.events == [("failed", "timeout", False)]


async def test_a_body_that_comes_slowly_is_a_sign_of_life_too(timed, kit):
    receiver = kit.Receiver()
    timed.pool.send(GET, b"", receiver, timeout=10.0)
    timed.feed(OK[:-5])
    for byte in b"hello":
        timed.after(9.0)
        timed.feed(bytes([byte]))
    assert receiver.events == [("answered", 200, b"hello")]
