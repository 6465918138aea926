"""ConfigMaps, pushes and statuses."""

from __future__ import annotations

from lives import populate
from things import CONFIG_MAP, POD, POLICY, deployment, pod, policy

from carpool_operator.delivery.signing import Signer, new_key


async def test_a_policy_that_is_deleted_takes_its_configuration_along(world):
    populate(world.api)
    await world.passes(2)
    world.api.remove(*POLICY, "p")
    await world.passes(2)
    await world.written()

    assert [each["metadata"]["name"] for each in world.api.all("configmaps")] == ["carpool-deployment-other"]


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


async def test_a_policy_that_can_not_be_read_any_more_keeps_its_configuration(world):
    populate(world.api)
    await world.passes(2)
    broken = policy()
    broken["spec"]["slo"] = {"latency": {"p99": "fast"}}
    world.api.put(*POLICY, broken)
    await world.passes(2)

    assert world.api.get(*CONFIG_MAP, "carpool-deployment-web") is not None
    assert world.steps[-1].views[-1].policy.error or any(each.views[-1].policy.error for each in world.steps)


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
    world.lister._namespaces = ["ns", "b"]
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
