from __future__ import annotations

import pytest
from fake_api import FakeApi
from fake_pod import FakePod
from lives import KEY, World

from carpool_operator.delivery.signing import Signer


@pytest.fixture
async def world():
    sidecar = await FakePod(Signer(KEY).public).start()
    async with FakeApi() as api:
        one = World(api, sidecar)
        await one.start()
        yield one
        await one.close()
    await sidecar.stop()
