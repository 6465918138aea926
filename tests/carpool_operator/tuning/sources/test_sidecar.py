from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from fake_pod import WALL
from things import as_kept, pod

from carpool_operator.cluster.objects import RawPod
from carpool_operator.delivery.signing import Signer, new_key
from carpool_operator.tuning.sources import sidecar as module
from carpool_operator.tuning.sources.sidecar import Sidecars


@pytest.fixture
async def sidecars():
    async with aiohttp.ClientSession() as session:
        yield Sidecars(session, asyncio.Semaphore(4), lambda: 123.0)


def at(sidecar):
    return msgspec.structs.replace(as_kept(RawPod, pod()), admin_port=sidecar.port)


async def test_it_reads_a_report_with_a_ticket(sidecar, sidecars, signer):
    one = at(sidecar)

    reading = await sidecars.read(one, signer.ticket(one.target, WALL), reuse=True)

    assert (reading.at, reading.error) == (123.0, "")
    assert reading.report == sidecar.report()


async def test_it_keeps_its_connection_or_not(sidecar, sidecars, signer):
    one = at(sidecar)
    ticket = signer.ticket(one.target, WALL)
    for _ in range(3):
        await sidecars.read(one, ticket, reuse=True)
    assert len(sidecar.connections) == 1

    for _ in range(2):
        await sidecars.read(one, ticket, reuse=False)
    await sidecars.read(one, ticket, reuse=True)
    assert len(sidecar.connections) == 3


async def test_whatever_fails_is_said(sidecar, sidecars, signer, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    one = at(sidecar)
    ticket = signer.ticket(one.target, WALL)

    assert "401" in (await sidecars.read(one, Signer(new_key()).ticket(one.target, WALL), reuse=True)).error
    sidecar.status = 500
    assert (await sidecars.read(one, ticket, reuse=True)).error == "it answers 500: no"
    sidecar.status, sidecar.body = 200, b"[1]"
    assert "can't be read" in (await sidecars.read(one, ticket, reuse=True)).error
    monkeypatch.setattr(module, "LARGEST", 2)
    assert "longer" in (await sidecars.read(one, ticket, reuse=True)).error
    sidecar.stall = asyncio.Event()
    assert (await sidecars.read(one, ticket, reuse=True)).error == "no answer within 0.05 s"
    sidecar.stall.set()
    await sidecar.stop()
    gone = await sidecars.read(one, ticket, reuse=True)
    assert "onnect" in gone.error
    assert gone.report is None
