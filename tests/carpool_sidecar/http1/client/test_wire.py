from __future__ import annotations

import pytest

from carpool_sidecar.http1.client.wire import UpstreamWire
from carpool_sidecar.http1.memory import Budget


class Protocol:
    """The transport needs one; it is not called."""

    def connection_made(self, transport):
        pass


@pytest.fixture
def wire(kit):
    return UpstreamWire(kit.MemoryTransport(Protocol()), 1000, Budget(100))


def test_it_is_read_again_when_neither_the_receiver_nor_other_connections_prevent_it(wire):
    wire.pause()
    wire.yield_turn(b"rest")
    assert wire.transport.paused
    wire.resume()
    assert wire.transport.paused
    assert wire.take_turn() == b"rest"
    wire.sync_reading()
    assert not wire.transport.paused
    assert wire.take_turn() == b""


def test_a_closing_transport_is_left_alone(wire):
    wire.transport.close()
    wire.pause()
    assert not wire.transport.paused


def test_unsent_bytes_count_as_held_unless_they_are_kept_elsewhere(wire):
    budget = wire._budget
    wire.transport.unsent = 80
    wire.weigh(kept=False)
    assert budget.held == 80
    wire.transport.unsent = 30
    wire.weigh(kept=False)
    assert budget.held == 30
    wire.let_go()
    assert budget.held == 0
    wire.weigh(kept=False)
    wire.weigh(kept=True)
    assert budget.held == 0
