"""What a pass begins, in which order, and how long it may take."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from lives import Steps, populate, status
from things import CONFIG_MAP, DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool.exchange.change import read_change
from carpool_operator.loop import passes
from carpool_operator.loop.passes import apart
from carpool_operator.workloads.metadata import Key


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


async def test_when_all_is_as_it_should_be_nothing_is_written(world):
    populate(world.api)
    await world.passes(4)
    world.api.writes.clear()

    await world.passes(5)

    assert not world.api.writes
    assert len(world.sidecar.changes) == 1


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
    await asyncio.gather(*world.loop.tasks.running.values())

    assert world.fleet.policies.get(Key("ns", "deployment-other")) is not None


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
    await asyncio.gather(*world.loop.tasks.running.values())
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

    assert Key("ns", "hangs") in world.loop.tasks.running
    hang.set()
    await asyncio.gather(*world.loop.tasks.running.values())
    server.close()
    await server.wait_closed()


async def test_passes_go_on_until_they_are_ended(world):
    populate(world.api)
    await world.look()
    world.time = asyncio.get_running_loop().time
    running = asyncio.create_task(world.loop.run(0.001))
    await world.api.until(lambda: status(world.api).get("targets"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.loop.tasks.end(20.0)

    assert b"carpool_operator_pass_seconds_count" in world.metrics.text()
