"""What is read of namespaces, when, and what becomes of that where it can't be."""

from __future__ import annotations

import asyncio
import json

import pytest

from carpool_operator.cluster.kube import ApiError
from carpool_operator.injector.quotas import UNREAD
from carpool_operator.webhook import namespaces as module
from carpool_operator.webhook.namespaces import KEEP, MOST, Namespaces

QUOTA = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "8"}}}
RANGE = {"metadata": {"name": "l"}, "spec": {"limits": []}}


class Cluster:
    """An API server with one namespace's objects for all of them."""

    def __init__(self, quotas=()):
        self.annotations = {"carpool.dev/sidecar-cpu": "1"}
        self.quotas = list(quotas)
        self.asked = []
        self.error = None

    async def request(self, method, path, body=None, *, content=""):
        assert method == "GET"
        what = path.rsplit("/", 1)[1]
        self.asked.append(what)
        if self.error is not None:
            raise self.error
        answers = {"limitranges": {"items": [RANGE]}, "resourcequotas": {"items": self.quotas}}
        return json.dumps(answers.get(what, {"metadata": {"annotations": self.annotations}})).encode()


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def failures():
    return []


@pytest.fixture
def make(clock, failures, monkeypatch):
    monkeypatch.setattr(module, "WITHIN", 60.0)  # a host under load pauses longer than the webhook may take
    return lambda cluster: Namespaces(cluster, lambda: clock[0], lambda: failures.append(1))


async def test_it_is_read_once_for_a_while(make, clock):
    cluster = Cluster()
    known = make(cluster)
    around = await known.around("models")
    assert (around.annotations, around.limit_ranges, around.quotas) == (cluster.annotations, (RANGE,), ())
    assert sorted(cluster.asked) == ["limitranges", "models", "resourcequotas"]
    clock[0] = KEEP - 0.1
    assert await known.around("models") is around
    assert len(cluster.asked) == 3
    clock[0] = KEEP
    cluster.annotations = None
    assert (await known.around("models")).annotations == {}


async def test_what_a_quota_leaves_is_read_for_every_pod(make):
    cluster = Cluster([QUOTA])
    known = make(cluster)
    await known.around("models")
    used = {**QUOTA, "status": {"used": {"limits.cpu": "8"}}}
    cluster.quotas = [used]
    assert (await known.around("models")).quotas == (used,)
    assert cluster.asked[3:] == ["resourcequotas"]


async def test_what_cannot_be_read_is_as_it_was_and_else_unknown(make, clock, failures, caplog):
    cluster = Cluster()
    known = make(cluster)
    around = await known.around("models")
    clock[0] = KEEP
    cluster.error = ApiError(403, "namespaces is forbidden")
    assert await known.around("models") is around
    assert await known.around("other") is UNREAD
    assert len(failures) == 2
    assert "namespace other can't be read (namespaces is forbidden)" in caplog.text


async def test_a_slow_server_holds_no_pod_up(make, failures, monkeypatch):
    class Slow(Cluster):
        async def request(self, *_, **__):
            await asyncio.Event().wait()

    monkeypatch.setattr(module, "WITHIN", 0.0)
    assert await make(Slow()).around("models") is UNREAD
    assert failures == [1]


async def test_no_more_than_so_many_are_remembered(make):
    cluster = Cluster()
    known = make(cluster)
    for number in range(MOST + 1):
        await known.around(f"n{number}")
    asked = len(cluster.asked)
    await known.around(f"n{MOST}")
    assert len(cluster.asked) == asked
    await known.around("n0")
    assert len(cluster.asked) == asked + 3
