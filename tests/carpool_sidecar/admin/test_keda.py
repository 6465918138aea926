"""KEDA's `metrics-api` scaler reads the load of real sidecars, by the trigger of the example."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from minicluster import keda

from carpool.forecasting.capacity import Capacity
from carpool.policy.parameters import Parameters

EXAMPLE = Path(__file__).parents[3] / "examples/autoscaling/keda-metrics-api.yaml"


@pytest.fixture
def documents():
    return {each["kind"]: each for each in yaml.safe_load_all(EXAMPLE.read_text("utf-8"))}


@pytest.fixture
def trigger(documents):
    (found,) = documents["ScaledObject"]["spec"]["triggers"]
    return found["metadata"]


def slices(*ends, port=14090):
    ready = [{"addresses": [address], "conditions": {"ready": is_ready}} for address, is_ready in ends]
    return [{"endpoints": ready, "ports": [{"name": "carpool-admin", "port": port}]}]


def test_the_examples_service_is_the_one_that_its_trigger_asks(documents, trigger):
    service = documents["Service"]
    (port,) = service["spec"]["ports"]
    name = service["metadata"]["name"]
    assert trigger["url"] == f"http://{name}.default.svc.cluster.local:{port['targetPort']}/capacity"
    ends = slices(("10.0.0.1", True), ("10.0.0.2", False), ("10.0.0.1", True), port=port["targetPort"])
    assert list(keda.addresses(trigger["url"], ends)) == ["http://10.0.0.1:14090/capacity"]


async def test_it_reads_a_number_from_each_sidecar_and_adds_them_up(world, trigger):
    first, client = await world.start()
    port = int(first.admin.address.rpartition(":")[2])
    asked = {**trigger, "url": trigger["url"].replace("14090", str(port))}

    async def read():
        found = slices(("127.0.0.1", True), port=port)
        return await asyncio.to_thread(keda.read, asked, lambda namespace, service: found)

    # 1. Nothing comes: nothing is needed.
    assert await read() == 0.0
    # 2. Requests come and no batch was measured: no number, and KEDA changes nothing.
    for _ in range(20):
        await client.predict(b"1")
    await world.until(lambda: any(each.rate > 0 for each in first.control.load().models.values()))
    with pytest.raises(keda.ScalerError, match="no value"):
        await read()
    # 3. It is known what can be served.
    first.control._load.measured("m", Capacity(1000.0, 1000.0, Parameters()))
    assert 0 < await read() == pytest.approx(first.control.load().load, abs=0.05)


@pytest.mark.parametrize("body", [b'{"load": null}', b'{"load": true}', b'{"other": 1}', b'{"load": {"a": 1}}'])
def test_what_is_no_number_is_no_value(body):
    with pytest.raises(keda.ScalerError):
        keda.located(body, "load")
    assert keda.located(b'{"models": {"m": {"rate": 2}}}', "models.m.rate") == 2.0
