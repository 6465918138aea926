"""Answers whose body comes after their head: the upstream may wait until the head is acknowledged."""

from __future__ import annotations

import socket

import pytest
from server_messages import GET

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


class Options:
    """A socket that notes which options are set."""

    def __init__(self, family):
        self.family = family
        self.set = []

    def setsockopt(self, *option):
        self.set.append(option)


@pytest.fixture
def begun(timed, kit):
    """Send a request; return its receiver."""

    def begun():
        receiver = kit.Receiver()
        timed.pool.send(GET, b"", receiver)
        return receiver

    return begun


@pytest.mark.parametrize("stream", [False, True])
async def test_a_head_without_its_body_is_acknowledged_at_once(timed, kit, stream):
    options = timed._extra["socket"] = Options(socket.AF_INET)
    receiver = kit.Receiver()
    (timed.pool.stream if stream else timed.pool.send)(GET, b"", receiver)
    timed.protocol.data_received(HEAD)
    assert options.set == [(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)]
    timed.protocol.data_received(b"ok")
    assert receiver.over.is_set()
    assert len(options.set) == 1


async def test_a_whole_answer_needs_no_acknowledgement(timed, begun):
    options = timed._extra["socket"] = Options(socket.AF_INET)
    receiver = begun()
    timed.protocol.data_received(HEAD + b"ok")
    assert receiver.over.is_set()
    assert options.set == []


async def test_a_unix_socket_has_none(timed, begun):
    options = timed._extra["socket"] = Options(socket.AF_UNIX)
    begun()
    timed.protocol.data_received(HEAD)
    assert options.set == []
