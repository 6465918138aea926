"""The driver's one timer, in virtual time: what is due is done when it is due, not when something else happens."""

from __future__ import annotations

import asyncio
import logging

import pytest

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Estimate
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Axis, Model
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar.dispatch.alarm import RESOLUTION
from carpool_sidecar.dispatch.driver import Driver
from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.models import ModelTable
from carpool_sidecar.protocols.common import Endpoint

pytestmark = pytest.mark.pure  # a double stands in for the class Exchange

ENDPOINT = Endpoint("v1", "m", "", b"/v1/models/m:predict")


class Exchange:
    def __init__(self, row, now, headers=()):
        self.headers = FieldLines(headers)
        self.peer = None
        self.body = b'{"instances":[%d]}' % row
        self.received_at = now
        self.context = None
        self.status = None

    def respond(self, status, headers, body=b""):
        self.status = status

    def fail(self, status, reason, error, headers=None):
        self.status = status


class Backend:
    def __init__(self, clock):
        self.sent = []
        self.clock = clock
        self.cancelled = 0

    def send(self, target, headers, body, receiver, *, idempotent=True, merged=False):
        self.sent.append((self.clock(), b"".join([body] if isinstance(body, bytes) else body), receiver))
        return self

    def cancel(self):
        self.cancelled += 1


@pytest.fixture
def make():
    def make(parameters):
        clock = asyncio.get_running_loop().time
        batcher = Batcher(parameters)
        backend = Backend(clock)
        models = ModelTable([Model(name="m", axis=Axis.FIRST)], batcher.forget)
        driver = Driver(
            batcher,
            backend,
            models,
            for_p99(5.0),
            clock=clock,
            largest=lambda model: 8,
            stalled=lambda start, end: False,
            unreachable=lambda: None,
            log=logging.getLogger("test"),
        )
        return driver, batcher, backend, clock

    return make


HOLDING = Parameters(max_batch=8, max_wait=Duration(0.02), max_in_flight=1)


@pytest.mark.looptime
async def test_a_held_batch_leaves_when_its_oldest_has_waited(make):
    driver, batcher, backend, clock = make(HOLDING)
    batcher.learn("m", Estimate(times=(0.0, 0.001), upper=(0.0, 0.001)), clock())
    driver.infer(Exchange(1, clock()), ENDPOINT)
    start = clock()
    await asyncio.sleep(0.012)
    driver.infer(Exchange(2, clock()), ENDPOINT)
    await asyncio.sleep(1.0)
    assert [body for _, body, _ in backend.sent] == [b'{"instances":[1,2]}']
    assert backend.sent[0][0] - start == pytest.approx(0.02, abs=2 * RESOLUTION)
    driver.stop()


@pytest.mark.looptime
async def test_a_deadline_ends_a_request_and_its_call_when_it_passes(make):
    driver, _, backend, clock = make(Parameters())
    exchange = Exchange(1, clock(), [(b"x-request-timeout-ms", b"30")])
    driver.infer(exchange, ENDPOINT)
    later = Exchange(2, clock())
    driver.infer(later, ENDPOINT)
    await asyncio.sleep(0.029)
    assert (exchange.status, backend.cancelled) == (None, 0)
    await asyncio.sleep(0.003)
    assert (exchange.status, backend.cancelled) == (504, 1)
    await asyncio.sleep(9.8)
    assert later.status is None
    await asyncio.sleep(0.2)
    assert later.status == 504
    driver.stop()


@pytest.mark.looptime
async def test_an_earlier_deadline_moves_the_timer_forward(make):
    driver, _, _, clock = make(Parameters())
    driver.infer(Exchange(1, clock()), ENDPOINT)
    urgent = Exchange(2, clock(), [(b"x-request-timeout-ms", b"5")])
    driver.infer(urgent, ENDPOINT)
    await asyncio.sleep(0.008)
    assert urgent.status == 504
    driver.stop()
