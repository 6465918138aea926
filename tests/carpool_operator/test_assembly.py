from __future__ import annotations

import asyncio
import json
import threading
import time

import aiohttp
import pytest
from fake_pod import FakePod
from things import CONFIG_MAP, DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool_operator.assembly import STUCK, Operator, Settings
from carpool_operator.cluster import objects
from carpool_operator.cluster.kinds import WATCHED
from carpool_operator.cluster.sharding import Shard
from carpool_operator.cluster.watching import Watch
from carpool_operator.delivery.signing import PUBLIC, PUBLIC_MAP

WHOLE = Shard()
LEASE = ("coordination.k8s.io/v1", "leases", "carpool-operator", "carpool")


def settings(identity="a", namespaces=(None,), shard=WHOLE):
    return Settings(
        shard=shard,
        namespaces=namespaces, namespace="carpool", lease="carpool-operator", identity=identity, interval=0.01,
        resync=0.2, metrics_host="127.0.0.1", metrics_port=0,
    )  # fmt: skip


@pytest.fixture
async def start(api):
    """Start operators; ``await end(one)`` stops one and waits for it."""
    lives = {}

    async def begin(identity="a", **options):
        operator, stop = Operator(settings(identity, **options), api.kube()), asyncio.Event()
        lives[operator] = (stop, asyncio.create_task(operator.run(stop)))
        return operator

    async def end(operator):
        stop, task = lives.pop(operator)
        stop.set()
        await task

    begin.end = end
    yield begin
    # kopf ends at once where it has begun, and else takes its time, longer than the server is there.
    await api.until(lambda: {each.plural for each in api.watchers} >= {"batchingpolicies", "pods"} or not lives)
    for operator in list(lives):
        await end(operator)
    api.end_watches()
    await api.until(lambda: not api.watchers and not any(each.name == "kopf" for each in threading.enumerate()))


@pytest.fixture
async def sidecar(monkeypatch):
    one = await FakePod().start()
    one.wall = time.time()
    monkeypatch.setattr(objects, "ADMIN_PORT", one.port)
    yield one
    await one.stop()


def holder(api):
    lease = api.get(*LEASE)
    return lease and lease["spec"]["holderIdentity"]


async def test_a_policy_gets_a_status_and_a_deployment_its_policy(api, start):
    api.put(*DEPLOYMENT, deployment(annotations={"carpool.dev/slo-p99": "50ms"}))
    await start()

    await api.until(lambda: (api.get(*POLICY, "deployment-web") or {}).get("status"))

    status = api.get(*POLICY, "deployment-web")["status"]
    assert {each["type"] for each in status["conditions"]} >= {"Accepted", "Programmed", "Ready"}
    assert len(bytes.fromhex(api.get("v1", "configmaps", PUBLIC_MAP, "carpool")["data"][PUBLIC])) == 32


async def test_pods_get_signed_parameters_and_acknowledge(api, start, sidecar):
    api.put(*POLICY, policy())
    api.put(*DEPLOYMENT, deployment())
    operator = await start()
    await api.until(lambda: api.get("v1", "configmaps", PUBLIC_MAP, "carpool"))
    sidecar.public_key = api.get("v1", "configmaps", PUBLIC_MAP, "carpool")["data"][PUBLIC]
    api.put(*POD, pod())

    def acknowledged():
        targets = (api.get(*POLICY, "p").get("status") or {}).get("targets") or [{}]
        return targets[0].get("acknowledged") == 1

    await api.until(acknowledged)
    stored = json.loads(api.get(*CONFIG_MAP, "carpool-deployment-web")["data"]["change.json"])
    assert sidecar.generation == stored["generation"]
    assert operator.stuck() == ""


async def test_of_two_one_writes_and_the_other_takes_over_when_it_ends(api, start):
    api.put(*POLICY, policy())
    a = await start("a")
    await api.until(lambda: holder(api) == "a")
    b = await start("b")
    await api.until(lambda: b.fleet.coverage.synced and api.get(*POLICY, "p").get("status"))
    assert (a.election.leads(), b.election.leads()) == (True, False)
    assert b.unready() == ""

    await start.end(a)
    api.put(*POLICY, policy("q"))
    await api.until(lambda: holder(api) == "b" and api.get(*POLICY, "q").get("status"))

    assert not a.election.leads()


async def test_an_operator_that_is_stopped_releases_the_lease(api, start):
    one = await start()
    await api.until(lambda: holder(api) == "a")

    await start.end(one)

    assert holder(api) == ""


async def test_probes_and_metrics_are_served(api, start):
    one = await start()
    await api.until(lambda: one.fleet.coverage.synced and one.election.leads())
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{one.health.port}") as session,
        session.get("/readyz") as ready,
        session.get("/livez") as live,
        session.get("/metrics") as metrics,
    ):
        text = await metrics.text()

    assert (ready.status, live.status) == (200, 200)
    assert "carpool_operator_leader 1.0" in text


async def test_it_waits_for_a_server_that_is_not_there_yet_and_is_alive_meanwhile(api, start):
    api.fail("/", 503, times=20)
    one = await start()
    await api.until(lambda: len(api.log) > 4)
    assert one.unready() != ""
    assert one.stuck() == ""

    api.faults.clear()
    await api.until(lambda: one.fleet.coverage.synced)


async def test_only_the_given_namespaces_are_read(api, start):
    api.put(*POLICY, policy(), "a")
    api.put(*POLICY, policy(), "b")
    await start(namespaces=("a",))
    await api.until(lambda: api.get(*POLICY, "p", "a").get("status"))

    assert "status" not in api.get(*POLICY, "p", "b")
    paths = {line.split()[1] for line in api.log}
    assert all("/namespaces/" in path for path in paths if len(path.split("/")) > 4), paths


async def test_a_namespace_that_is_deleted_stops_nothing_in_the_others(api, start):
    """Its Role is deleted with it, so every request there is refused."""
    for namespace in "ab":
        api.put(*POLICY, policy(), namespace)
        api.put(*DEPLOYMENT, deployment(), namespace)
    one = await start(namespaces=("a", "b"))
    await api.until(lambda: all(api.get(*CONFIG_MAP, "carpool-deployment-web", each) for each in "ab"))

    api.close("b")
    await api.until(lambda: {each.namespace for each in one.fleet.policies} == {"a"})
    api.put(*POLICY, policy("q", "web2"), "a")
    await api.until(lambda: api.get(*POLICY, "q", "a").get("status"))
    assert api.get(*CONFIG_MAP, "carpool-deployment-web", "b"), "its policy may be there still"

    await start.end(one)
    again = await start("b", namespaces=("a", "b"))
    api.put(*POLICY, policy("r", "web3"), "a")
    await api.until(lambda: api.get(*POLICY, "r", "a").get("status"))
    assert (again.unready(), again.stuck()) == ("", "")

    api.closed.clear()
    api.put(*POLICY, policy("r", "web3"), "b")
    await api.until(lambda: api.get(*POLICY, "r", "b").get("status"))


async def test_what_is_stuck_is_named(api, start):
    one = await start()
    await api.until(lambda: one.fleet.coverage.synced and one._loop is not None)
    one._clock = lambda: one.sync.ended + STUCK / 2
    assert one.stuck() == ""
    one.fleet.coverage.unheard["policies", None] = 3
    assert one.stuck() == "no events come of policies, though there are changes"
    one._loop.progress -= 2 * STUCK
    one.election.leads = lambda: True
    assert one.stuck() == "the reconcile loop is stuck"
    one._watches[0].heard -= 3 * STUCK
    assert one.stuck() == "the watch of /api/v1/pods is stuck"
    one.sync.ended -= 10 * STUCK
    one._clock = lambda: one.sync.ended + 3 * STUCK
    assert one.stuck() == "listing is stuck"
    del one.election.leads


async def test_one_namespace_s_watch_that_died_shows_though_the_others_live(api, start, monkeypatch):
    lives = Watch.run
    monkeypatch.setattr(Watch, "run", lambda watch: None if watch.listing.path.endswith("/b/pods") else lives(watch))
    one = await start(namespaces=("a", "b"))
    await api.until(lambda: one.fleet.coverage.synced and len(one._watches) == 2 * len(WATCHED))
    begun = one._clock()
    one._clock = lambda: begun + 3 * STUCK
    one.sync.ended = one._clock()
    for watch in one._watches:
        if not watch.listing.path.endswith("/b/pods"):
            watch.heard = one._clock()
    one.fleet.coverage.alive("pods")

    assert one.stuck() == "the watch of /api/v1/namespaces/b/pods is stuck"
    age = next(line for line in one.metrics.text().decode().splitlines() if 'event_age_seconds{kind="pods"}' in line)
    assert float(age.split()[1]) > 2 * STUCK


async def test_a_key_that_can_not_sign_keeps_it_from_leading_not_from_running(api, start):
    api.put("v1", "secrets", {"metadata": {"name": "carpool-signing-key"}, "data": {}}, "carpool")
    api.put(*POLICY, policy())
    one = await start()
    await api.until(lambda: one.fleet.coverage.synced and holder(api) == "a")

    assert one._loop is None
    assert "status" not in api.get(*POLICY, "p")


NAMESPACES = ("team-a", "team-c", "team-d", "team-b")
"""The last one is of the first of two shards, as the first is; the others are of the second."""
LEASES_OF_TWO = [("coordination.k8s.io/v1", "leases", f"carpool-operator-{index}-of-2", "carpool") for index in (0, 1)]


async def test_two_shards_share_the_namespaces_of_one_server(api, start):
    for namespace in NAMESPACES:
        api.put(*POLICY, policy(), namespace)
        api.put(*DEPLOYMENT, deployment(), namespace)
        api.put(*POD, pod(ip="127.0.0.9"), namespace)
    first, second = await start("a", shard=Shard(0, 2)), await start("b", shard=Shard(1, 2))
    await api.until(lambda: all(api.get(*CONFIG_MAP, "carpool-deployment-web", each) for each in NAMESPACES))
    await api.until(lambda: all(api.get(*POLICY, "p", each).get("status") for each in NAMESPACES))

    for operator, own in ((first, {"team-a", "team-b"}), (second, {"team-c", "team-d"})):
        assert operator.election.leads()
        assert {each.namespace for each in operator.fleet.policies} == own
        assert {each.namespace for each in operator.fleet.pods} == own
        assert {each.target.namespace for each in operator.fleet.workloads()} == own
    assert first._loop._p.signer.public == second._loop._p.signer.public
    assert {api.get(*each)["spec"]["holderIdentity"] for each in LEASES_OF_TWO} == {"a", "b"}


async def test_a_shard_leaves_what_is_of_others(api, start):
    for namespace in NAMESPACES:
        api.put(*POLICY, policy(), namespace)
        api.put(*DEPLOYMENT, deployment(), namespace)
    one = await start()
    await api.until(lambda: all(api.get(*CONFIG_MAP, "carpool-deployment-web", each) for each in NAMESPACES))
    await start.end(one)
    before = {each: api.get(*CONFIG_MAP, "carpool-deployment-web", each)["metadata"] for each in NAMESPACES}

    await start("b", shard=Shard(1, 2))
    await api.until(lambda: (api.get(*LEASES_OF_TWO[1]) or {}).get("spec", {}).get("holderIdentity") == "b")
    api.remove(*POLICY, "p", "team-a")
    api.remove(*POLICY, "p", "team-c")
    await api.until(lambda: api.get(*CONFIG_MAP, "carpool-deployment-web", "team-c") is None)

    for namespace in ("team-a", "team-b"):
        assert api.get(*CONFIG_MAP, "carpool-deployment-web", namespace)["metadata"] == before[namespace]


async def test_a_cluster_that_is_divided_anew_has_no_two_operators_of_one_namespace(api, start):
    for namespace in NAMESPACES:
        api.put(*POLICY, policy(), namespace)
    whole = await start("whole")
    await api.until(lambda: holder(api) == "whole")
    shards = [await start(name, shard=Shard(index, 2)) for index, name in enumerate("ab")]
    await api.until(lambda: all(each.fleet.coverage.synced for each in shards))
    assert [each.election.leads() for each in shards] == [False, False]

    await start.end(whole)
    await api.until(lambda: all(each.election.leads() for each in shards))

    assert not whole.election.leads()
