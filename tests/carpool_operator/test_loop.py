from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import aiohttp
import msgspec
import pytest
from aiohttp import web
from fake_api import FakeApi
from fake_pod import WALL, FakePod
from things import CONFIG_MAP, DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool.exchange.change import Change, read_change
from carpool.policy.parameters import Parameters
from carpool_operator.api.injection import STANDBY
from carpool_operator.api.model import Document, Event, Missed, Outcome, Target
from carpool_operator.cluster.fleet import Fleet, Sync
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.writing import Backoff, Writer
from carpool_operator.delivery.publishing import ConfigMaps, Pusher
from carpool_operator.delivery.signing import Signer, new_key
from carpool_operator.loop import passes
from carpool_operator.loop.parts import Parts
from carpool_operator.loop.passes import Loop, apart
from carpool_operator.reporting.events import Recorder
from carpool_operator.reporting.inspection import Inspector
from carpool_operator.reporting.metrics import Metrics
from carpool_operator.tuning.sources.choice import Sources
from carpool_operator.tuning.sources.sidecar import Sidecars
from carpool_operator.workloads.metadata import Key

WEB = Target("ns", "Deployment", "web")
KEY = new_key()


class Steps:
    """Decides as little as can be: one document per target, repeated for pods that are behind; keeps its views."""

    def __init__(self):
        self.views = []
        self.changes = {}
        self.events = [Event(False, "Applied", "32 rows")]
        self.fault = None

    def restore(self, target, change):
        self.changes[target] = change

    def change(self, target):
        return self.changes.get(target)

    def step(self, view):
        if self.fault is not None:
            raise self.fault
        self.views.append(view)
        documents = []
        mine = [target for target, owner in view.owners.items() if owner.uid == view.policy.uid]
        for target in mine:
            if target not in self.changes:
                self.changes[target] = Change(
                    target=str(target), generation=int(view.wall * 1000), expires=view.wall + 1e6,
                    parameters={"*": Parameters()},
                )  # fmt: skip
                documents.append(Document(target, self.changes[target], None))
                continue
            behind = [
                each.uid
                for each in view.pods[target]
                if (seen := view.readings.get(each.uid)) is not None
                and seen.report is not None
                and seen.report.generation < self.changes[target].generation
            ]
            if behind:
                documents.append(Document(target, self.changes[target], tuple(behind)))
        told = [
            view.readings[each.uid].report for target in mine for each in view.pods[target] if each.uid in view.readings
        ]
        acknowledged = sum(each is not None and each.generation > 0 for each in told)
        targets = [{"kind": each.kind, "name": each.name, "acknowledged": acknowledged} for each in mine]
        status = {"observedGeneration": view.policy.generation, "targets": targets}
        events, self.events = self.events, []
        return Outcome(documents, status, events)


class World:
    """An API server, a pod, and an operator that can be killed and started again."""

    def __init__(self, api, sidecar):
        self.api = api
        self.sidecar = sidecar
        self.steps = []
        self.now = 1000.0
        self.cpu = 0.0
        self.lives = 0
        self.time = lambda: self.now
        self.leads = True
        self.writes_left = None
        self.metrics = Metrics()
        self.threads = ThreadPoolExecutor(1)
        self._kube = api.kube()

    def clock(self):
        return self.time()

    async def start(self):
        """Begin a life of the operator, with nothing remembered."""
        self.lives += 1
        self.session = aiohttp.ClientSession()
        writer = Writer(self._kube, lambda: self.leads)
        signer = Signer(KEY)
        self.fleet = Fleet(lambda: self.now)
        self.sync = Sync(
            self._kube, self.fleet, [None], interval=1.0, found=lambda *_: None, clock=lambda: self.now,
            log=logging.getLogger("test"), random=Random(1),
        )  # fmt: skip
        maps = ConfigMaps(writer, signer)
        await maps.read([None])
        at_once = asyncio.Semaphore(8)
        self.loop = Loop(
            Parts(
                controller=self._controller, fleet=self.fleet, writer=writer, signer=signer, maps=maps,
                sources=Sources(
                    writer, signer, Sidecars(self.session, at_once, lambda: self.now), self.session,
                    Backoff(Random(1)), clock=lambda: self.now, wall=lambda: WALL,
                ),
                pusher=Pusher(self.session, at_once), recorder=Recorder(writer, "operator-1"),
                inspector=Inspector(writer), metrics=self.metrics, backoff=Backoff(Random(1)), steps=self.threads,
                clock=self.clock, wall=lambda: WALL, cpu=lambda: self.cpu, log=logging.getLogger("test"),
            )
        )  # fmt: skip

    def _controller(self):
        self.steps.append(Steps())
        return self.steps[-1]

    async def end(self):
        await self.session.close()

    async def close(self):
        await self.end()
        self._kube.close()
        self.threads.shutdown()

    async def look(self):
        """See the cluster as it is. Lists that fail are made again, as ``Sync`` does."""
        while True:
            try:
                await self.sync.once()
            except ApiError:
                continue
            for kept, (version, one) in list(self.fleet.pods._items.items()):
                found = msgspec.structs.replace(one, admin_port=self.sidecar.port)
                self.fleet.pods._items[kept] = (version, found)
            return

    async def passes(self, count=1):
        for _ in range(count):
            await self.look()
            await self.loop.once()
            self.now += 2.0

    async def written(self):
        """Wait for what passes began and do not wait for: they end once all policies were looked at."""
        while self.loop._tasks.running:
            await asyncio.wait(set(self.loop._tasks.running.values()))

    def end_state(self):
        """What is there in the end, without what differs between any two lives; Events are for people, and may get
        lost."""

        def bare(body):
            meta = body["metadata"]
            kept = {name: meta.get(name) for name in ("name", "labels", "annotations")}
            kept["owners"] = [each["name"] for each in meta.get("ownerReferences") or []]
            return {**body, "metadata": kept}

        kinds = ("batchingpolicies", "configmaps")
        return {kind: [bare(each) for each in self.api.all(kind)] for kind in kinds}


@pytest.fixture
async def world():
    sidecar = await FakePod(Signer(KEY).public).start()
    async with FakeApi() as api:
        one = World(api, sidecar)
        await one.start()
        yield one
        await one.close()
    await sidecar.stop()


def populate(api):
    api.put(*POLICY, policy())
    api.put(*DEPLOYMENT, deployment())
    api.put(*DEPLOYMENT, deployment("other", annotations={"carpool.dev/slo-p99": "80ms"}))
    api.put(*POD, pod())


def status(api, name="p"):
    return api.get(*POLICY, name).get("status", {})


async def test_a_policy_gets_its_configuration_its_pods_theirs_and_its_status_says_so(world):
    populate(world.api)
    await world.passes(3)

    there = world.api.get(*CONFIG_MAP, "carpool-deployment-web")
    published = read_change(msgspec.json.decode(there["data"]["change.json"]))
    assert there["metadata"]["ownerReferences"][0]["name"] == "p"
    assert world.sidecar.changes == [published]
    assert status(world.api)["targets"] == [{"kind": "Deployment", "name": "web", "acknowledged": 1}]
    assert [each["reason"] for each in world.api.all("events")] == ["Applied", "Applied"]
    assert world.api.get(*POLICY, "deployment-other")["spec"]["slo"]["latency"]["p99"] == "80ms"


async def test_events_about_workloads_reach_the_decisions_on_their_policies(world):
    populate(world.api)
    world.api.put(*DEPLOYMENT, deployment(annotations={"carpool.dev/slo-p99": "50"}))
    injected = pod()
    injected["metadata"]["annotations"]["carpool.dev/status"] = json.dumps({"container": "model", "port": 9000})
    injected["spec"] = {"containers": [{"name": "model"}]}
    world.api.put(*POD, injected)
    port = {"port": 80, "targetPort": 9000}
    world.api.put(
        "v1", "services", {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [port]}}
    )

    await world.passes(3)

    (told,) = [step.views[-1].workload_events for step in world.steps if step.views[-1].policy.name == "p"]
    ((target, events),) = told.items()
    assert target.name == "web"
    assert [each.reason for each in events] == ["AnnotationInvalid", "ServiceBypassed"]
    about = [each["reason"] for each in world.api.all("events") if each["regarding"]["kind"] == "Deployment"]
    assert sorted(about) == ["AnnotationInvalid", "ServiceBypassed"]


async def test_when_all_is_as_it_should_be_nothing_is_written(world):
    populate(world.api)
    await world.passes(4)
    world.api.writes.clear()

    await world.passes(5)

    assert not world.api.writes
    assert len(world.sidecar.changes) == 1


async def fault_free():
    """The end state of a life in which nothing goes wrong, and how many writes it took."""
    sidecar = await FakePod(Signer(KEY).public).start()
    async with FakeApi() as api:
        one = World(api, sidecar)
        await one.start()
        populate(api)
        await one.passes(8)
        state, writes = one.end_state(), sum(api.writes.values())
        await one.close()
    await sidecar.stop()
    return state, writes


class Killed(BaseException):
    """SIGKILL."""


async def test_killed_after_any_write_it_comes_to_the_same_end(world):
    expected, writes = await fault_free()
    populate(world.api)
    assert writes > 6
    for _ in range(writes + 1):
        # Just after the next write that the server takes, this life is over: nothing that follows from it is done.
        taken = world.api._wrote
        dead = asyncio.Event()

        def wrote(key, taken=taken, dead=dead):
            if dead.is_set():
                raise Killed
            dead.set()
            world.leads = False
            taken(key)

        world.api._wrote = wrote
        await world.passes(1)
        await world.loop.end(20.0)
        world.api._wrote = taken
        world.leads = True
        await world.end()
        await world.start()
        world.now += 120.0
    await world.passes(8)

    assert world.end_state() == expected
    assert len(world.sidecar.changes) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_on_the_way_it_comes_to_the_same_end(world, seed):
    """Requests of all kinds refused, done without an answer, and cut; events (here: lists) late."""
    expected, _ = await fault_free()
    random = Random(seed)
    for _ in range(25):
        world.api.fail(
            random.choice(["GET /", "PATCH", "POST", "/configmaps", "/batchingpolicies", "/events", "status"]),
            random.choice([409, 429, 500, 503]),
            retry_after=random.choice(["", "1"]),
            after=random.random() < 0.3,
            drop=random.random() < 0.2,
        )
    populate(world.api)
    for _ in range(20):
        await world.passes(1)
        world.now += random.choice([0.0, 5.0, 70.0])
    world.api.faults.clear()
    world.now += 200.0
    await world.passes(8)

    assert world.end_state() == expected


async def test_a_server_that_refuses_is_not_asked_without_pause(world):
    populate(world.api)
    await world.passes(1)
    world.api.fail("PATCH", 500, times=10_000)
    world.api.put(*POLICY, policy("q", "web2"))
    world.api.put(*DEPLOYMENT, deployment("web2"))
    world.api.log.clear()

    await world.passes(60)  # two minutes

    # After 1 s, 2 s, 4 s up to a minute, halved at most: 11 tries of each of four objects, where 60 were possible.
    assert sum(line.startswith("PATCH") for line in world.api.log) <= 44


async def test_retry_after_is_kept(world):
    world.api.fail("PATCH", 429, retry_after="30", times=1)
    world.api.put(*POLICY, policy())
    await world.passes(1)
    world.api.log.clear()
    await world.passes(14)
    tried = [line for line in world.api.log if line.startswith("PATCH")]
    assert len(set(tried)) <= 1  # the one that was not refused
    await world.passes(2)

    assert status(world.api)["observedGeneration"] == 1
    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web")


async def test_a_policy_that_is_deleted_takes_its_configuration_along(world):
    populate(world.api)
    await world.passes(2)
    world.api.remove(*POLICY, "p")
    await world.passes(2)
    await world.written()

    assert [each["metadata"]["name"] for each in world.api.all("configmaps")] == ["carpool-deployment-other"]


def standby(change):
    return change.policy is None and change.parameters == {"*": STANDBY}


def gone(world):
    return sorted(each["type"] for each in world.api.all("events") if each["reason"] == "PolicyGone")


async def releases(world, passes):
    for _ in range(passes):
        await world.passes(1)
        await world.written()


async def test_pods_of_a_deleted_policy_return_to_the_state_without_one(world):
    populate(world.api)
    await world.passes(2)
    world.api.remove(*POLICY, "p")
    await releases(world, 5)
    assert len(world.sidecar.changes) == 1  # the policy may be back at once

    world.sidecar.status = 500
    await releases(world, 2)
    assert gone(world) == ["Warning"]
    world.sidecar.status = 200
    world.now += 60.0
    await releases(world, 2)
    asked = world.sidecar.asked
    await releases(world, 10)

    before, last = world.sidecar.changes
    assert standby(last)
    assert last.generation > before.generation
    assert world.sidecar.asked == asked  # forgotten
    assert gone(world) == ["Normal", "Warning"]


async def test_an_operator_that_was_not_there_for_the_deletion_releases_too(world):
    populate(world.api)
    await world.passes(2)
    await world.end()
    world.api.remove(*POLICY, "p")
    await world.start()
    await releases(world, 8)

    assert standby(world.sidecar.changes[-1])
    changes = len(world.sidecar.changes)
    await world.end()
    await world.start()
    await releases(world, 8)
    assert len(world.sidecar.changes) == changes


async def test_a_pod_of_the_webhook_is_released_though_its_policy_was_never_seen(world):
    # The server removes a policy's ConfigMap with it, so only what the pod runs shows that there was one.
    there = pod()
    there["metadata"]["annotations"]["carpool.dev/status"] = '{"version": "1", "container": "server"}'
    world.api.put(*DEPLOYMENT, deployment())
    world.api.put(*POD, there)
    world.sidecar.status = 500  # while it starts
    await releases(world, 10)
    assert not gone(world)
    assert not world.sidecar.changes

    world.sidecar.status = 200
    world.now += 60.0
    await releases(world, 2)
    assert [standby(change) for change in world.sidecar.changes] == [True]
    assert gone(world) == ["Normal"]


async def test_pods_that_a_selector_selects_no_more_are_released(world):
    selecting = policy()
    selecting["spec"]["targetSelector"] = {"matchLabels": {"team": "a"}}
    del selecting["spec"]["targetRefs"]
    populate(world.api)
    world.api.put(*POLICY, selecting)
    there = deployment()
    there["metadata"]["labels"] = {"team": "a"}
    world.api.put(*DEPLOYMENT, there)
    await world.passes(2)
    assert len(world.sidecar.changes) == 1
    world.api.put(*DEPLOYMENT, deployment())
    await releases(world, 8)

    assert standby(world.sidecar.changes[-1])


async def test_pods_whose_workload_is_not_listed_are_not_released(world):
    """Its kind may be one that the operator lost the right to list; a selector selects nothing of it then."""
    populate(world.api)
    await world.passes(2)
    world.api.remove(*DEPLOYMENT, "web")
    world.api.remove(*POLICY, "p")
    await releases(world, 10)

    assert len(world.sidecar.changes) == 1


async def test_a_workload_that_is_gone_is_forgotten_once_it_has_neither_pods_nor_a_document(world):
    populate(world.api)
    await world.passes(2)
    world.api.remove(*POLICY, "p")
    world.api.remove(*DEPLOYMENT, "web")
    await releases(world, 2)
    assert world.loop._releasing.releases.had(WEB)
    world.api.remove(*POD, "web-1")
    await releases(world, 2)
    assert not world.loop._releasing.releases.had(WEB)


async def test_nothing_is_released_that_may_have_a_policy_or_never_had_one(world):
    populate(world.api)
    await world.passes(2)
    broken = policy()
    broken["spec"]["slo"] = {"latency": {"p99": "fast"}}
    world.api.put(*POLICY, broken)  # it can't be read: what it names is unknown
    await releases(world, 10)
    assert len(world.sidecar.changes) == 1

    world.api.remove(*POLICY, "p")
    await world.passes(5)
    world.leads = False
    await releases(world, 3)
    assert len(world.sidecar.changes) == 1

    world.leads = True
    world.sidecar.changes.clear()  # its pod was recreated
    world.sidecar.status = 500
    await world.end()
    await world.start()
    world.now += 60.0
    await releases(world, 10)
    world.sidecar.status = 200
    world.now += 60.0
    await releases(world, 2)
    assert not world.sidecar.changes
    assert not gone(world)


async def test_a_policy_that_can_not_be_read_any_more_keeps_its_configuration(world):
    populate(world.api)
    await world.passes(2)
    broken = policy()
    broken["spec"]["slo"] = {"latency": {"p99": "fast"}}
    world.api.put(*POLICY, broken)
    await world.passes(2)

    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web") is not None
    assert world.steps[-1].views[-1].policy.error or any(each.views[-1].policy.error for each in world.steps)


async def test_an_annotation_taken_back_takes_its_policy_along(world):
    populate(world.api)
    await world.passes(2)
    world.api.put(*DEPLOYMENT, deployment("other"))
    await world.passes(2)
    await world.written()

    assert world.api.get(*POLICY, "deployment-other") is None
    assert world.api.get(*CONFIG_MAP, "carpool-deployment-other") is None


@pytest.mark.parametrize("code", [403, 404])
async def test_a_kind_that_can_not_be_listed_for_a_moment_costs_no_policy(world, code):
    rollouts = ("argoproj.io/v1alpha1", "rollouts")
    world.api.absent.discard("rollouts")
    body = deployment(annotations={"carpool.dev/slo-p99": "80ms"})
    world.api.put(*rollouts, {**body, "status": {"observedGeneration": "1"}})
    one = pod()
    one["metadata"]["annotations"]["carpool.dev/target"] = "Rollout/web"
    world.api.put(*POD, one)
    await world.passes(4)
    before = world.api.get(*POLICY, "rollout-web")
    published = world.api.get(*CONFIG_MAP, "carpool-rollout-web")["data"]

    world.api.fail(f"GET /apis/{rollouts[0]}", code)
    await world.passes(1)
    await world.written()

    assert not list(world.fleet.workloads())
    assert world.api.get(*POLICY, "rollout-web")["metadata"]["uid"] == before["metadata"]["uid"]
    await world.passes(10)
    assert world.api.get(*POLICY, "rollout-web")["metadata"]["uid"] == before["metadata"]["uid"]
    assert world.api.get(*CONFIG_MAP, "carpool-rollout-web")["data"] == published


async def test_a_configuration_stays_while_the_kind_that_its_policy_selects_can_not_be_listed(world):
    world.api.absent.discard("rollouts")
    body = deployment()
    body["metadata"]["labels"] = {"team": "a"}
    world.api.put("argoproj.io/v1alpha1", "rollouts", {**body, "status": {"observedGeneration": "1"}})
    selecting = policy()
    del selecting["spec"]["targetRefs"]
    selecting["spec"]["targetSelector"] = {
        "group": "argoproj.io", "kind": "Rollout", "matchLabels": {"team": "a"}
    }  # fmt: skip
    world.api.put(*POLICY, selecting)
    one = pod()
    one["metadata"]["annotations"]["carpool.dev/target"] = "Rollout/web"
    world.api.put(*POD, one)
    await world.passes(4)
    before = world.api.get(*CONFIG_MAP, "carpool-rollout-web")["data"]

    world.api.fail("GET /apis/argoproj.io", 403)
    await world.passes(1)
    await world.written()
    assert world.api.get(*CONFIG_MAP, "carpool-rollout-web")["data"] == before
    await world.passes(10)

    assert world.api.get(*CONFIG_MAP, "carpool-rollout-web")["data"] == before


async def test_a_namespace_that_can_not_be_read_for_a_moment_keeps_its_configurations(world):
    world.sync._namespaces = ["ns", "b"]
    populate(world.api)
    await world.passes(4)
    before = world.api.get(*CONFIG_MAP, "carpool-deployment-web")

    world.api.fail("GET /apis/carpool.dev/v1alpha1/namespaces/ns/", 403)
    await world.passes(1)
    await world.written()
    assert not len(world.fleet.policies)
    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web") == before
    await world.passes(10)

    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web") == before
    assert len(world.sidecar.changes) == 1


async def test_one_made_by_hand_while_its_namesake_is_deleted_is_seen(world):
    populate(world.api)
    await world.passes(2)
    world.api.put(*DEPLOYMENT, deployment("other"))
    stall = asyncio.Event()
    world.api.fail("DELETE", 409, stall=stall)
    await world.passes(1)
    world.api.remove(*POLICY, "deployment-other")
    world.api.put(*POLICY, policy("deployment-other", "other"))
    await world.look()
    stall.set()
    await asyncio.gather(*world.loop._tasks.running.values())

    assert world.fleet.policies.get(Key("ns", "deployment-other")) is not None


async def test_failures_of_what_is_gone_are_forgotten(world):
    world.api.fail("PATCH", 500, times=10_000)
    populate(world.api)
    await world.passes(2)
    assert world.loop._p.backoff._failures
    for key in list(world.api.objects):
        world.api.remove(key[0], key[1], key[3], key[2])
    world.now += 200.0
    await world.passes(1)

    assert not world.loop._p.backoff._failures


async def test_a_configmap_that_others_deleted_comes_back(world):
    populate(world.api)
    await world.passes(2)
    world.api.remove(*CONFIG_MAP, "carpool-deployment-web")
    await world.loop._p.maps.read([None])
    await world.passes(1)

    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web") is not None


async def test_a_pod_that_comes_later_gets_the_push_and_one_that_fails_is_asked_less_often(world):
    populate(world.api)
    await world.passes(2)
    world.sidecar.status = 500
    asked = world.sidecar.asked
    await world.passes(30)
    assert world.sidecar.asked - asked <= 10

    world.sidecar.status = 200
    world.sidecar.changes.clear()  # another process by now
    await world.passes(40)
    assert len(world.sidecar.changes) == 1


async def test_a_push_that_was_refused_is_reported_to_the_decisions(world):
    populate(world.api)
    world.sidecar.public_key = Signer(new_key()).public
    await world.passes(2)
    (view,) = [each.views[-1] for each in world.steps if each.views[-1].policy.name == "p"]

    assert ["403" in each for each in view.refused.values()] == [True]


async def test_a_fault_in_one_decision_costs_only_that_policy(world):
    populate(world.api)
    await world.passes(1)
    (faulty,) = [each for each in world.steps if each.views[-1].policy.name == "p"]
    faulty.fault = ZeroDivisionError("a mistake")
    world.api.put(*POLICY, policy("q", "web2"))
    await world.passes(2)

    assert status(world.api, "q")["observedGeneration"] == 1
    assert b"carpool_operator_step_errors_total 2.0" in world.metrics.text()


async def test_what_a_pass_has_no_time_for_comes_first_in_the_next(world, monkeypatch):
    populate(world.api)
    for name in ("q", "r"):
        world.api.put(*POLICY, policy(name, f"web-{name}"))
    await world.passes(2)  # what is annotated has its policy by now
    world.loop._slots = asyncio.Semaphore(1)
    before = [len(made.views) for made in world.steps]
    step = Steps.step

    def dear(made, view):
        world.cpu += 7.0
        return step(made, view)

    monkeypatch.setattr(Steps, "step", dear)

    def looks():
        return sorted(len(made.views) - known for made, known in zip(world.steps, before, strict=True))

    assert len(world.steps) == 4
    await world.passes(1)
    assert looks() == [0, 0, 1, 1]  # the second begins at 7 s of 10
    assert world.loop._budget.left_out
    await world.passes(1)
    assert looks() == [1, 1, 1, 1]
    hurried = [made.views[-1].hurried for made in world.steps]
    assert sorted(hurried) == [False, False, True, True]  # by the first of these passes, and by the second
    monkeypatch.setattr(Steps, "step", step)
    await world.passes(1)
    assert not world.loop._budget.left_out
    await world.passes(1)
    assert not any(made.views[-1].hurried for made in world.steps)


@pytest.mark.parametrize(
    ("cpu", "left_out", "expected"),
    [(0.5, False, 2.0), (6.0, False, 12.0), (10.0, True, 11.0), (0.5, True, 2.0)],
)
def test_passes_take_half_a_core_and_a_whole_one_while_policies_are_left_out(cpu, left_out, expected):
    assert apart(2.0, cpu, left_out=left_out) == pytest.approx(expected)


async def test_a_decision_that_never_ends_is_no_progress(world, monkeypatch):
    populate(world.api)
    await world.passes(2)
    assert world.loop.progress == world.now - 2.0
    (endless,) = [each for each in world.steps if each.views[-1].policy.name == "p"]
    begun, go_on, step = world.now, threading.Event(), endless.step
    monkeypatch.setattr(passes, "PATIENCE", 0.05)
    monkeypatch.setattr(endless, "step", lambda view: step(view) if go_on.wait() else None)
    try:
        await world.passes(5)
        assert world.loop.progress <= begun + 2.0
    finally:
        go_on.set()
    await asyncio.gather(*world.loop._tasks.running.values())
    await world.passes(1)

    assert world.loop.progress >= begun + 10.0


async def test_a_prometheus_that_hangs_holds_up_no_policy_but_its_own(world, monkeypatch):
    asked, hang = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader, writer):
        asked.set()
        await hang.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    body = policy("hangs", "web2")
    body["spec"]["metrics"] = {"source": "Prometheus", "prometheus": {"url": url}}
    monkeypatch.setattr(passes, "PATIENCE", 0.05)
    world.loop._slots = asyncio.Semaphore(1)
    world.api.put(*POLICY, body)
    world.api.put(*POD, pod("web2-1", "web2"))
    await world.passes(1)
    await asked.wait()

    populate(world.api)
    await world.passes(1)
    await world.api.until(lambda: status(world.api))

    assert Key("ns", "hangs") in world.loop._tasks.running
    hang.set()
    await asyncio.gather(*world.loop._tasks.running.values())
    server.close()
    await server.wait_closed()


async def test_who_leads_no_more_writes_no_more(world):
    populate(world.api)
    world.leads = False
    await world.passes(2)

    assert not world.api.writes


async def test_a_status_that_the_server_cuts_short_is_not_written_again_and_again(world):
    world.api.put(*POLICY, policy())
    put = world.api.put

    def older(api, plural, body, namespace="ns"):
        if body.get("status"):
            body = {**body, "status": {"observedGeneration": body["status"]["observedGeneration"]}}
        return put(api, plural, body, namespace)

    world.api.put = older
    await world.passes(3)
    world.api.writes.clear()
    await world.passes(3)

    assert not world.api.writes


async def test_pods_without_a_sidecar_and_services_around_it_are_found(world):
    world.api.put(*POLICY, policy())
    world.api.put(*DEPLOYMENT, deployment(replicas=2))
    world.api.put(*POD, pod())
    world.api.put(*POD, pod("web-2", injected=False))
    await world.passes(1)
    (view,) = [each.views[-1] for each in world.steps if each.views[-1].policy.name == "p"]

    assert view.missed[WEB] == (Missed("web-2"),)
    assert view.workloads[WEB].replicas == 2


async def test_services_are_checked_during_a_rollout_and_pods_without_a_sidecar_after_it(world):
    world.api.put(*POLICY, policy())
    rolling = deployment(replicas=2)
    rolling["status"]["updatedReplicas"] = 1
    world.api.put(*DEPLOYMENT, rolling)
    bypassed = pod()
    bypassed["metadata"]["annotations"]["carpool.dev/status"] = '{"container": "server", "port": 9000}'
    bypassed["spec"] = {"containers": [{"name": "server", "ports": [{"containerPort": 14080, "name": "http"}]}]}
    world.api.put(*POD, bypassed)
    world.api.put(*POD, pod("web-2", injected=False))
    by_number = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 9000}]}
    world.api.put("v1", "services", {"metadata": {"name": "web"}, "spec": by_number})
    await world.passes(1)
    (view,) = [each.views[-1] for each in world.steps if each.views[-1].policy.name == "p"]

    assert "Service web port 80 bypasses the sidecar" in view.workload_events[WEB][0].message
    assert WEB not in view.missed

    rolling["spec"]["paused"] = True
    rolling["status"]["observedGeneration"] = 2
    world.api.put(*DEPLOYMENT, rolling)
    await world.passes(1)
    assert world.steps[-1].views[-1].missed[WEB] == (Missed("web-2"),)


async def test_engines_without_a_sidecar_are_read_where_a_policy_only_recommends(world):
    asked = []

    async def answer(request):
        asked.append((await request.post())["query"])
        return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": []}})

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    body = policy()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    body["spec"] |= {
        "slo": {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}},
        "tuning": {"mode": "Recommend"},
        "metrics": {"source": "Prometheus", "prometheus": {"url": url}},
    }
    world.api.put(*POLICY, body)
    world.api.put(*DEPLOYMENT, deployment(inject=None))
    world.api.put(*POD, pod("web-2", injected=False))
    await world.passes(1)
    (view,) = [each.views[-1] for each in world.steps if each.views[-1].policy.name == "p"]
    assert "no metrics of vLLM" in view.engines[WEB]["web-2"]
    assert 'pod=~"web-2"' in asked[0]
    # With sidecars it is these that are read.
    world.api.put(*DEPLOYMENT, deployment())
    await world.passes(1)
    assert WEB not in world.steps[-1].views[-1].engines
    await runner.cleanup()


async def test_passes_go_on_until_they_are_ended(world):
    populate(world.api)
    await world.look()
    world.time = asyncio.get_running_loop().time
    running = asyncio.create_task(world.loop.run(0.001))
    await world.api.until(lambda: status(world.api).get("targets"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.loop.end(20.0)

    assert b"carpool_operator_pass_seconds_count" in world.metrics.text()
