"""Two operators share one API server: the chart with two shards, and back to one."""

from __future__ import annotations

import pytest
import requests
from minicluster import carpool
from minicluster.operated import SYSTEM, conditions, pods, policy

from carpool_operator.cluster.sharding import Shard

CHART = str(carpool.ROOT / "charts" / "carpool")
NAMESPACES = ("team-a", "team-b", "team-c", "team-d", "team-e")
SHARDS = [Shard(index, 2) for index in range(2)]


@pytest.fixture(scope="module")
def cluster(own_cluster):
    """One of this file's own: there is one release to a cluster."""
    return own_cluster


@pytest.fixture(scope="module")
def helm(cluster):
    def run(verb, *arguments):
        return cluster.run("helm", verb, "carpool", *arguments, "--namespace", SYSTEM)

    return run


@pytest.fixture(scope="module")
def divided(cluster, api, helm):
    """The chart with two shards, and a policy in each of several namespaces."""
    helm("install", CHART, "--create-namespace", "--set", "operator.shards=2")
    for shard in SHARDS:
        api.until_ready(f"carpool-operator-{shard.index}", SYSTEM, timeout=120)
    for namespace in NAMESPACES:
        api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        objects = carpool.model("web", replicas=0)
        # In the template: the injector may not be ready yet, and is not what this is about.
        objects[1]["spec"]["template"]["metadata"]["annotations"] = {"carpool.dev/inject": "true"}
        api.apply(*objects, namespace=namespace)
        api.apply(policy("by-hand", "web"), namespace=namespace)


def until_seen(api):
    """Wait until each policy's status is of its spec."""

    def seen(found):
        return found and found[0].get("status", {}).get("observedGeneration") == found[0]["metadata"]["generation"]

    for namespace in NAMESPACES:
        found = api.until("batchingpolicies", namespace, seen, name="by-hand", timeout=120)
        assert conditions(found[0]["status"])["Accepted"].status == "True"


def maps(api):
    """What is published, by namespace: the objects' UIDs."""
    return {
        namespace: [
            each["metadata"]["uid"] for each in api.find("configmaps", namespace, labels="carpool.dev/change=true")
        ]
        for namespace in NAMESPACES
    }


def holder(api, lease):
    found = api.find("leases", SYSTEM, fields=f"metadata.name={lease}")
    return found[0]["spec"].get("holderIdentity") or "" if found else ""


def test_each_namespace_is_looked_after_by_its_own_shard(api, divided):
    until_seen(api)

    for shard in SHARDS:
        assert holder(api, shard.lease("carpool-operator")).startswith(f"carpool-operator-{shard.index}-")
        (pod,) = pods(api, SYSTEM, **{"carpool.dev/shard": str(shard.index)})
        own = [namespace for namespace in NAMESPACES if shard.has(namespace)]
        assert own
        text = requests.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=10).text
        assert f'carpool_operator_objects{{kind="policies"}} {float(len(own))}' in text
        assert 'code="403"' not in text
    assert all(len(uids) == 1 for uids in maps(api).values())


def test_back_to_one_it_goes_on_with_what_was_published(api, helm, divided):
    until_seen(api)
    before = maps(api)

    helm("upgrade", CHART, "--set", "operator.shards=1")
    for namespace in NAMESPACES:
        api.apply(policy("by-hand", "web", p99="80ms"), namespace=namespace)
    until_seen(api)

    assert holder(api, "carpool-operator").startswith("carpool-operator-")
    assert maps(api) == before
