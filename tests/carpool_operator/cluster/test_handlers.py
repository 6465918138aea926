from __future__ import annotations

import asyncio
import logging
import threading

import kubernetes.client
import pytest
from things import DEPLOYMENT, POLICY, deployment, policy
from times import Quick

from carpool_operator.cluster.fleet import Fleet, Lister, Sync
from carpool_operator.cluster.handlers import Kopf, credentials, settings
from carpool_operator.cluster.kube import Kube


class Synced:
    def __init__(self):
        self.ok, self.doubted, self.kinds_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def doubt(self):
        self.ok.clear()
        self.doubted.set()


@pytest.fixture
async def sync():
    one = Synced()
    one.ok.set()
    return one


@pytest.fixture
def namespaces():
    return [None]


@pytest.fixture
async def lists(api, kube, namespaces):
    """Fills the fleet that kopf reports to."""
    clock = asyncio.get_running_loop().time
    log = logging.getLogger("test")
    lister = Lister(kube, Fleet(clock), namespaces, found=lambda *_: None, log=log)
    return Sync(lister, interval=1.0, clock=clock, log=log, random=Quick())


@pytest.fixture
async def running(api, sync, lists):
    """Run kopf; gives the fleet that it reports to."""
    kube, fleet = api.kube(), lists._lister._fleet
    await lists.once()
    task = asyncio.create_task(Kopf(kube, fleet, sync, random=Quick()).run())
    yield fleet
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    api.end_watches()
    # Its thread ends a moment later, and would try again in vain, and log, once the server is gone.
    await api.until(lambda: not api.watchers and not any(each.name == "kopf" for each in threading.enumerate()))
    kube.close()


def watched(api):
    return {watcher.plural for watcher in api.watchers}


async def test_policies_and_workloads_are_watched_and_nothing_is_written(api, running):
    api.put(*POLICY, policy("early"))
    await api.until(lambda: len(api.watchers) == 5)
    workloads = {"deployments", "statefulsets", "daemonsets"}
    assert watched(api) == {"namespaces", "batchingpolicies", *workloads}
    api.put(*POLICY, policy("late"))
    api.put(*DEPLOYMENT, deployment(annotations={"carpool.dev/slo-p99": "50ms"}))
    await api.until(lambda: len(running.policies) == 2 and len(list(running.workloads())) == 1)
    api.remove(*POLICY, "early")
    await api.until(lambda: len(running.policies) == 1)

    assert not api.writes
    assert not any(line.startswith(("PATCH", "POST", "PUT")) for line in api.log)


async def test_where_it_gives_up_it_is_started_again_after_a_list(api, running, sync):
    await api.until(lambda: len(api.watchers) == 5)
    # Not 410: kopf takes that for the end of the operator.
    for watcher in list(api.watchers):
        watcher.queue.put_nowait({"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}})
    async with asyncio.timeout(20):
        await sync.doubted.wait()
    assert not api.watchers
    assert not sync.ok.is_set(), "a kind that is not there would not be watched"
    sync.ok.set()
    api.put(*POLICY, policy())
    await api.until(lambda: len(running.policies) == 1)


async def test_a_kind_that_comes_is_watched_and_one_that_goes_is_not(api, running, sync, lists):
    await api.until(lambda: len(api.watchers) == 5)
    api.absent.discard("rollouts")
    await lists.once()
    sync.kinds_changed.set()
    async with asyncio.timeout(20):
        await sync.doubted.wait()
    sync.ok.set()

    await api.until(lambda: watched(api) >= {"rollouts", "deployments"})
    assert not sync.kinds_changed.is_set()

    api.absent.add("rollouts")
    await lists.once()
    sync.doubted.clear()
    sync.kinds_changed.set()
    async with asyncio.timeout(20):
        await sync.doubted.wait()
    sync.ok.set()
    await api.until(lambda: watched(api) and "rollouts" not in watched(api))


@pytest.mark.parametrize("namespaces", [["a", "b"]])
async def test_a_namespace_that_is_gone_stops_no_watch_of_the_others(api, running, sync, lists):
    await api.until(lambda: len(api.watchers) == 8)
    assert {each.namespace for each in api.watchers} == {"a", "b"}
    api.close("b")
    await lists.once()
    sync.kinds_changed.set()
    async with asyncio.timeout(20):
        await sync.doubted.wait()
    sync.doubted.clear()
    sync.ok.set()

    await api.until(lambda: len(api.watchers) == 4)
    assert {each.namespace for each in api.watchers} == {"a"}
    api.put(*POLICY, policy(), "a")
    await api.until(lambda: len(running.policies) == 1)
    assert not sync.doubted.is_set()


def test_it_never_writes_and_looks_for_nothing_more():
    chosen = settings()

    assert chosen.scanning.disabled
    assert not chosen.posting.enabled


def test_it_connects_as_our_own_client_does():
    configuration = kubernetes.client.Configuration()
    configuration.host = "https://10.244.0.1:6443"
    configuration.api_key["BearerToken"] = "bearer secret"
    configuration.ssl_ca_cert = "/ca.crt"
    kube = Kube(configuration)

    found = credentials(kube)

    assert (found.server, found.scheme, found.token, found.ca_path) == (
        "https://10.244.0.1:6443", "Bearer", "secret", "/ca.crt"
    )  # fmt: skip
    kube.close()
