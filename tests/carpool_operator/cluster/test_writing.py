from __future__ import annotations

import asyncio
from random import Random

import pytest
from fake_api import FakeApi

from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.writing import Backoff, NotLeading, Writer

MAPS = "/api/v1/namespaces/ns/configmaps"


async def test_who_does_not_lead_writes_nothing_but_may_read():
    async with FakeApi() as api:
        kube = api.kube()
        leads = True
        writer = Writer(kube, lambda: leads)
        await writer.send("POST", MAPS, {"metadata": {"name": "a"}})
        leads = False

        with pytest.raises(NotLeading):
            await writer.send("POST", MAPS, {"metadata": {"name": "b"}})

        assert b'"a"' in await writer.read(f"{MAPS}/a")
        assert [each["metadata"]["name"] for each in api.all("configmaps")] == ["a"]
        kube.close()


async def test_however_much_waits_to_be_written_the_lease_is_renewed_meanwhile():
    async with FakeApi() as api:
        kube, stall = api.kube(), asyncio.Event()
        writer = Writer(kube, lambda: True)
        api.fail("POST", times=100, stall=stall)
        waiting = [
            asyncio.create_task(writer.send("POST", MAPS, {"metadata": {"name": str(number)}})) for number in range(20)
        ]
        await api.until(lambda: api.log)

        with pytest.raises(ApiError, match="not found"):
            await kube.request("GET", f"{MAPS}/a")  # as the election does

        assert not any(each.done() for each in waiting)
        stall.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        kube.close()


def test_failures_double_the_wait_up_to_a_minute_and_success_ends_it():
    backoff = Backoff(Random(1))
    waits = []
    now = 0.0
    for _ in range(9):
        backoff.failed("a", now)
        waits.append(next(wait for wait in range(1, 100) if backoff.ready("a", now + wait)))

    assert all(2**n / 2 <= wait <= 2**n + 1 for n, wait in enumerate(waits[:6]))
    assert max(waits) <= 60
    assert backoff.ready("b", now)
    backoff.succeeded("a")
    assert backoff.ready("a", now)


def test_the_server_s_own_wait_is_kept():
    backoff = Backoff(Random(1))

    backoff.failed("a", 100.0, at_least=30.0)

    assert not backoff.ready("a", 129.9)
    assert backoff.ready("a", 130.0)


def test_what_is_gone_is_forgotten():
    backoff = Backoff(Random(1))
    backoff.failed("a", 0.0)
    backoff.failed("b", 0.0)

    backoff.forget(lambda key: key == "b")

    assert backoff.ready("a", 0.0)
    assert not backoff.ready("b", 0.0)


def test_what_is_not_tried_again_is_forgotten():
    backoff = Backoff(Random(1))
    backoff.failed("a", 0.0)
    backoff.failed("a", 1.0)
    backoff.rest(60.0)
    backoff.failed("a", 60.0)
    assert not backoff.ready("a", 61.9)  # the third time in a row

    backoff.rest(125.0)
    backoff.failed("a", 125.0)
    assert backoff.ready("a", 126.0)
