"""What several of the operator's tests start from. Test folders are no packages: their modules are made importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_api import FakeApi
from fake_pod import FakePod
from times import Clock

from carpool_operator.cluster.writing import Writer
from carpool_operator.delivery.signing import Signer, new_key


@pytest.fixture
async def api():
    async with FakeApi() as one:
        yield one


@pytest.fixture
def kube(api):
    one = api.kube()
    yield one
    one.close()


@pytest.fixture
def writer(kube):
    return Writer(kube, lambda: True)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def signer():
    return Signer(new_key())


@pytest.fixture
async def sidecar(signer):
    one = await FakePod(signer.public).start()
    yield one
    await one.stop()
