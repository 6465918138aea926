from __future__ import annotations

import pytest
from server_messages import GET

from carpool_sidecar.http1.client.calls import Call, Upload
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.client.waiting import WaitingCalls
from carpool_sidecar.http1.memory import Budget


@pytest.fixture
async def call(kit):
    pool = Pool()

    def call(timeout=60.0):
        return Call(pool, GET, b"", kit.Receiver(), None, timeout=timeout, retry_stale=False)

    yield call
    await pool.close()


async def test_a_call_that_is_sent_again_goes_first(call):
    waiting = WaitingCalls(10, 60.0, Budget(0))
    first, second, again = call(), call(), call()
    waiting.append(first, 0.0)
    waiting.append(second, 0.0)
    waiting.prepend(again, 0.0)
    assert list(waiting.queue) == [again, first, second]
    waiting.remove(first)
    waiting.remove(first)  # it does not wait any more
    assert list(waiting.queue) == [again, second]


async def test_connections_that_may_be_opened_add_to_the_limit(call):
    waiting = WaitingCalls(1, 60.0, Budget(0))
    waiting.append(call(), 0.0)
    assert waiting.is_full(0)
    assert not waiting.is_full(1)


async def test_a_call_waits_as_long_as_the_shorter_of_two_limits(call):
    waiting = WaitingCalls(10, 5.0, Budget(0))
    patient, hasty = call(60.0), call(2.0)
    waiting.append(patient, 100.0)
    waiting.append(hasty, 100.0)
    waiting.expire(102.0)
    assert list(waiting.queue) == [patient]
    assert hasty.receiver.events == [("failed", "timeout", False)]
    waiting.expire(105.0)
    assert not waiting.queue
    assert patient.receiver.events == [("failed", "timeout", False)]


async def test_what_waits_is_not_counted_once_all_calls_have_failed(kit):
    budget = Budget(1000)
    pool = Pool(max_connections=0, budget=budget)
    pool.stream(b"POST / HTTP/1.1\r\n\r\n", Upload(9, kit.Sink()), kit.Receiver()).write(b"123456789")
    assert budget.held > 9
    await pool.close()
    assert budget.held == 0
