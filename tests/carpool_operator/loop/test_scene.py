"""What decisions get to know."""

from __future__ import annotations

import json

from aiohttp import web
from lives import populate
from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool_operator.api.model import Missed, Target

WEB = Target("ns", "Deployment", "web")


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
