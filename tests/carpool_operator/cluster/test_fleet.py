from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy
from times import Quick

from carpool_operator.api.model import Target
from carpool_operator.cluster.fleet import Fleet, Lister, Sync, watch_of
from carpool_operator.cluster.kinds import PODS, POLICIES
from carpool_operator.cluster.kube import ApiError


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def fleet():
    return Fleet(Clock())


@pytest.fixture
def late():
    return []


def syncing(kube, fleet, namespaces, interval=1.0, found=lambda *_: None):
    log = logging.getLogger("test")
    lister = Lister(kube, fleet, namespaces, found=found, log=log)
    return Sync(lister, interval=interval, clock=Clock(), log=log, random=Quick())


@pytest.fixture
def sync(api, fleet, late):
    kube = api.kube()
    yield syncing(kube, fleet, [None], interval=1e-3, found=lambda *news: late.append(news))
    kube.close()


async def test_the_first_list_fills_the_caches(api, fleet, sync):
    api.put(*POLICY, policy())
    api.put(*DEPLOYMENT, deployment())
    api.put("apps/v1", "statefulsets", deployment("db"))
    api.put(*POD, pod())
    api.put(*POD, pod("web-2", injected=False))

    await sync.once()

    assert fleet.coverage.synced
    assert sync.ok.is_set()
    assert fleet.sizes() == {
        "policies": 1, "deployments": 1, "statefulsets": 1, "daemonsets": 0, "replicasets": 0,
        "namespaces": 0, "pods": 1, "horizontalpodautoscalers": 0,
    }  # fmt: skip
    assert fleet.workload(Target("ns", "StatefulSet", "db")).target.kind == "StatefulSet"
    assert fleet.workload(Target("ns", "Deployment", "db")) is None
    assert [each.name for each in fleet.pods_by_target()[Target("ns", "Deployment", "web")]] == ["web-1"]


async def test_names_that_nobody_resolves_hold_no_list_up(api, fleet, sync):
    """Addresses that policies name are looked up in the loop's own threads, for a minute each where DNS is down."""
    api.put(*POLICY, policy())
    down, threads = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    looked_up = asyncio.get_running_loop().run_in_executor(None, down.wait)
    try:
        async with asyncio.timeout(20):
            await sync.once()
    finally:
        down.set()
        await looked_up

    assert len(fleet.policies) == 1


async def test_nothing_counts_as_listed_while_a_list_fails(api, fleet, sync):
    api.fail("GET /api/v1/pods", 500)

    with pytest.raises(ApiError):
        await sync.once()

    assert not fleet.coverage.synced
    assert not sync.ok.is_set()


async def test_it_lists_again_and_again_also_after_failures(api, fleet, sync):
    api.fail("GET", 500, times=3)
    running = asyncio.create_task(sync.run())
    await sync.ok.wait()
    api.put(*POLICY, policy())
    lists = len(api.log)
    await api.until(lambda: len(api.log) > lists + 8)
    running.cancel()

    assert len(fleet.policies) == 1


async def test_who_doubts_has_all_listed_at_once(api, fleet, sync):
    sync._interval = 3600.0
    sync._random = Random(0)
    running = asyncio.create_task(sync.run())
    async with asyncio.timeout(20):
        await sync.ok.wait()
        api.put(*POLICY, policy())
        sync.doubt()
        assert not sync.ok.is_set()
        await sync.ok.wait()
    running.cancel()

    assert len(fleet.policies) == 1


async def test_a_list_from_before_a_doubt_says_nothing(api, fleet, sync):
    sync.doubt()

    await sync.once()

    assert fleet.coverage.synced
    assert not sync.ok.is_set()


async def test_an_event_that_was_lost_is_found_by_the_next_list(api, fleet, sync, late):
    api.put(*POLICY, policy("deleted"))
    await sync.once()
    late.clear()
    api.remove(*POLICY, "deleted")
    api.put(*POLICY, policy("made"))

    await sync.once()

    assert [each.name for each in fleet.policies] == ["made"]
    assert (POLICIES, 2) in late


async def test_a_watch_that_has_gone_deaf_is_noticed(api, fleet, sync):
    await sync.once()
    for number in range(3):
        api.put(*POLICY, policy(f"p{number}"))
        await sync.once()
    assert fleet.coverage.unheard == {(kind, None): 3 * (kind == POLICIES) for kind in fleet.coverage.present}

    fleet.handle_event(POLICIES, False, api.put(*POLICY, policy("p9")))
    api.put(*POLICY, policy("p10"))
    await sync.once()
    assert fleet.coverage.unheard[POLICIES, None] == 0


async def test_one_namespace_s_watch_that_has_gone_deaf_is_noticed_though_others_hear(kube, api, fleet):
    sync = syncing(kube, fleet, ["a", "b"])
    await sync.once()
    for number in range(3):
        fleet.handle_event(POLICIES, False, api.put(*POLICY, policy(f"p{number}"), "a"))
        api.put(*POLICY, policy(f"p{number}"), "b")
        await sync.once()

    assert (fleet.coverage.unheard[POLICIES, "a"], fleet.coverage.unheard[POLICIES, "b"]) == (0, 3)


def rollout(name="web"):
    status = {"observedGeneration": "1", "updatedReplicas": 1, "currentPodHash": "a", "stableRS": "a"}
    return {**deployment(name), "status": status}


ROLLOUT = ("argoproj.io/v1alpha1", "rollouts")


async def test_a_kind_that_is_not_installed_breaks_nothing(api, fleet, sync, late):
    await sync.once()

    assert sync.ok.is_set()
    assert "rollouts" not in fleet.coverage.present
    assert "rollouts" not in fleet.sizes()
    assert fleet.workload(Target("ns", "Rollout", "web")) is None


async def test_a_kind_comes_and_goes_with_its_crd(api, fleet, sync, late):
    await sync.once()
    sync.kinds_changed.clear()
    api.absent.discard("rollouts")
    api.put(*ROLLOUT, rollout())

    await sync.once()

    assert sync.kinds_changed.is_set()
    assert fleet.workload(Target("ns", "Rollout", "web")).replicas == 1
    assert fleet.sizes()["rollouts"] == 1
    assert set(late) == {(kind, 0) for kind in fleet.coverage.present - {"rollouts"}}, "no event of it could have come"

    sync.kinds_changed.clear()
    await sync.once()
    assert not sync.kinds_changed.is_set()

    api.absent.add("rollouts")
    await sync.once()

    assert sync.kinds_changed.is_set()
    assert fleet.workload(Target("ns", "Rollout", "web")) is None
    fleet.handle_event("rollouts", False, api.put(*ROLLOUT, rollout()))  # an event that was on its way
    assert list(fleet.workloads()) == []


@pytest.mark.parametrize("status", [403, 404])
async def test_a_kind_that_can_not_be_listed_in_one_namespace_stays_in_the_others(kube, api, fleet, status):
    api.absent.discard("rollouts")
    a, b = Target("a", "Rollout", "web"), Target("b", "Rollout", "web")
    for target in (a, b):
        api.put(*ROLLOUT, rollout(), target.namespace)
    sync = syncing(kube, fleet, ["a", "b"])
    assert not fleet.coverage.lists_workloads("Rollout", "a")
    await sync.once()
    assert [fleet.coverage.lists_workloads("Rollout", each) for each in "ab"] == [True, True]

    api.fail("GET /apis/argoproj.io/v1alpha1/namespaces/b", status)
    await sync.once()

    assert [each.target for each in fleet.workloads()] == [a]
    assert [fleet.coverage.lists_workloads("Rollout", each) for each in "ab"] == [True, False], "that of b may exist"
    assert "rollouts" in fleet.coverage.present

    await sync.once()
    assert {each.target for each in fleet.workloads()} == {a, b}
    assert fleet.coverage.lists_workloads("Rollout", "b")


@pytest.fixture
def of_two(kube, fleet):
    """Lists two namespaces by name."""
    return syncing(kube, fleet, ["a", "b"])


def populate(api):
    for namespace in "ab":
        api.put(*POLICY, policy(), namespace)
        api.put(*DEPLOYMENT, deployment(), namespace)
        api.put(*POD, pod(), namespace)


def places(fleet):
    """The namespaces of the known policies, pods, and workloads."""
    kept = (fleet.policies, fleet.pods, (each.target for each in fleet.workloads()))
    return [{each.namespace for each in objects} for objects in kept]


async def test_a_namespace_that_can_not_be_read_is_left_out_and_the_others_go_on(api, fleet, of_two, caplog):
    """It was deleted, and its Role with it."""
    populate(api)
    await of_two.once()
    assert places(fleet) == [{"a", "b"}] * 3
    of_two.kinds_changed.clear()
    late = api.put(*DEPLOYMENT, deployment("late"), "b")

    api.close("b")
    api.put(*POLICY, policy("q"), "a")
    for _ in range(3):
        await of_two.once()
        fleet.handle_event(DEPLOYMENT[1], False, late)

    assert of_two.ok.is_set()
    assert places(fleet) == [{"a"}] * 3
    assert len(fleet.policies) == 2
    assert of_two.kinds_changed.is_set(), "kopf would end"
    assert fleet.coverage.followed()[1] == ["a"]
    assert {place[1] for place in fleet.coverage.unheard} == {"a"}
    said = [(each.message, each.namespace, each.status) for each in caplog.records if each.levelname == "WARNING"]
    assert said == [("a namespace can't be read, and is left out until it can", "b", 403)]

    api.closed.clear()
    of_two.kinds_changed.clear()
    await of_two.once()

    assert places(fleet) == [{"a", "b"}] * 3
    assert of_two.kinds_changed.is_set()
    assert sorted(fleet.coverage.followed()[1]) == ["a", "b"]
    fleet.handle_event(DEPLOYMENT[1], True, late)
    assert fleet.workload(Target("b", "Deployment", "late")) is None


async def test_why_a_namespace_can_not_be_read_is_logged_once_though_listing_fails(api, of_two, caplog):
    caplog.set_level("INFO")
    api.close("b")
    for _ in range(3):
        api.fail("GET /apis/apps/v1/namespaces/a/statefulsets")
        with pytest.raises(ApiError):
            await of_two.once()
    await of_two.once()
    logged = [(each.message, each.status) for each in caplog.records if hasattr(each, "namespace")]
    assert logged == [("a namespace can't be read, and is left out until it can", 403)]

    caplog.clear()
    api.closed.clear()
    api.fail("GET /apis/carpool.dev/v1alpha1/namespaces/b/", 404)
    await of_two.once()
    await of_two.once()
    assert [(each.message, each.namespace) for each in caplog.records if hasattr(each, "namespace")] == [
        ("a namespace can't be read, and is left out until it can", "b"),  # for another reason
        ("a namespace can be read again", "b"),
    ]


async def test_an_operator_starts_though_a_namespace_is_gone(api, fleet, of_two):
    populate(api)
    api.close("a")

    await of_two.once()

    assert fleet.coverage.synced
    assert of_two.ok.is_set()
    assert places(fleet) == [{"b"}] * 3


async def test_a_namespace_where_one_kind_is_refused_is_left_out_as_a_whole(api, fleet, of_two):
    """Without its policies, an annotated workload would seem to have none."""
    populate(api)
    api.fail("GET /apis/carpool.dev/v1alpha1/namespaces/a/", 403)
    await of_two.once()
    assert places(fleet) == [{"b"}] * 3

    api.fail("GET /apis/apps/v1/namespaces/b/statefulsets", 404)
    await of_two.once()
    assert places(fleet) == [{"a"}] * 3


async def test_where_no_namespace_can_be_read_the_list_fails_and_nothing_is_forgotten(api, fleet, of_two):
    populate(api)
    await of_two.once()
    api.close("a")
    api.close("b")

    with pytest.raises(ApiError):
        await of_two.once()

    assert places(fleet) == [{"a", "b"}] * 3


async def test_a_kind_that_is_refused_in_one_namespace_is_not_watched_by_kopf(api, fleet, of_two):
    """kopf watches every kind in every namespace, and ends where it may not. This kind is listed only."""
    api.absent.discard("rollouts")
    for number in range(5):
        api.fail("GET /apis/argoproj.io/v1alpha1/namespaces/b", 403)
        api.put(*ROLLOUT, rollout(f"web-{number}"), "a")
        await of_two.once()

    kinds, namespaces = fleet.coverage.followed()
    assert "rollouts" not in kinds
    assert sorted(namespaces) == ["a", "b"]
    assert len(list(fleet.workloads())) == 5
    assert not any(fleet.coverage.unheard.values()), "no events of it could have come"

    await of_two.once()
    assert "rollouts" in fleet.coverage.followed()[0]


async def test_a_kind_that_this_version_does_not_know_is_not_listed(fleet, sync):
    await sync.once()

    assert not fleet.coverage.lists_workloads("Job", "ns")


async def test_a_kind_without_a_right_to_it_is_as_good_as_absent(api, fleet, sync):
    api.absent.discard("rollouts")
    api.fail("GET /apis/argoproj.io", 403)

    await sync.once()

    assert sync.ok.is_set()
    assert "rollouts" not in fleet.coverage.present


async def test_a_kind_that_every_cluster_has_is_not_done_without(api, fleet, sync):
    api.fail("GET /apis/apps/v1/deployments", 403)

    with pytest.raises(ApiError):
        await sync.once()

    assert not fleet.coverage.synced


NAMESPACE = {"metadata": {"name": "ns", "annotations": {"carpool.dev/slo-p99": "80ms", "carpool.dev/mod": "Hold"}}}


async def test_the_defaults_of_a_namespace_are_read(api, fleet, sync):
    api.put("v1", "namespaces", NAMESPACE, "")
    api.put("v1", "namespaces", {"metadata": {"name": "plain", "annotations": {"other": "x"}}}, "")

    await sync.once()

    (found,) = fleet.namespaces
    assert (found.name, found.defaults) == ("ns", {"carpool.dev/slo-p99": "80ms"})
    assert found.problems == ("carpool.dev/mod is no default: did you mean carpool.dev/mode?",)


async def test_with_rights_in_some_namespaces_each_is_read_by_itself(kube, api, fleet):
    api.put("v1", "namespaces", NAMESPACE, "")
    api.put("v1", "namespaces", {"metadata": {"name": "b"}}, "")
    sync = syncing(kube, fleet, ["ns", "b"])

    await sync.once()

    assert [each.name for each in fleet.namespaces] == ["ns"]
    assert {line for line in api.log if "namespaces" in line and line.count("/") == 4} == {
        "GET /api/v1/namespaces/ns", "GET /api/v1/namespaces/b",
    }  # fmt: skip


async def test_parts_of_other_workloads_are_none(api, fleet, sync):
    body = deployment("bert-predictor")
    body["metadata"]["ownerReferences"] = [
        {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "name": "bert", "controller": True}
    ]
    api.put(*DEPLOYMENT, body)

    await sync.once()

    assert fleet.workload(Target("ns", "Deployment", "bert-predictor")) is None


async def test_events_add_and_remove_workloads(api, fleet):
    body = api.put(*DEPLOYMENT, deployment())
    fleet.handle_event(DEPLOYMENT[1], False, body)
    fleet.handle_event(DEPLOYMENT[1], False, body)
    assert len(list(fleet.workloads())) == 1

    fleet.handle_event(DEPLOYMENT[1], True, body)
    assert len(list(fleet.workloads())) == 0


async def test_the_lists_of_two_namespaces_do_not_disturb_each_other(api, fleet):
    api.put(*POLICY, policy(), "a")
    api.put(*POLICY, policy(), "b")
    api.put(*POLICY, policy(), "c")
    kube = api.kube()
    sync = syncing(kube, fleet, ["a", "b"])

    await sync.once()

    assert sorted(each.namespace for each in fleet.policies) == ["a", "b"]
    assert all("/namespaces/" in line for line in api.log)
    kube.close()


async def test_pods_are_followed(api, fleet):
    kube = api.kube()
    pods = watch_of(kube, fleet, PODS, "ns", asyncio.get_running_loop(), log=logging.getLogger("test"), random=Quick())
    pods.start()
    await api.until(lambda: api.watchers)
    before = fleet.coverage.last_event["pods"]
    api.put(*POD, pod())
    api.bookmark()
    await api.until(lambda: len(fleet.pods) == 1)

    assert fleet.coverage.last_event["pods"] > before
    pods.stop()
    api.end_watches()
    kube.close()
