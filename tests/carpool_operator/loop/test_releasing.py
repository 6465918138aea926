"""Pods whose policy is gone."""

from __future__ import annotations

from lives import populate
from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool_operator.api.injection import STANDBY
from carpool_operator.api.model import Target

WEB = Target("ns", "Deployment", "web")


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
