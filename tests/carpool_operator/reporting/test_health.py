from __future__ import annotations

import aiohttp
import pytest

from carpool_operator.reporting.health import Health
from carpool_operator.reporting.metrics import METRICS, OperatorMetrics


@pytest.fixture
async def get():
    """Ask for a path of one that is live and not ready."""
    health = Health(OperatorMetrics(), live=lambda: "", ready=lambda: "not everything has been listed yet")
    await health.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{health.port}") as session:

        async def ask(path):
            async with session.get(path) as answer:
                return answer.status, await answer.text()

        yield ask
    await health.stop()


async def test_probes_say_what_is_wrong(get):
    assert await get("/livez") == (200, "ok\n")
    assert await get("/readyz") == (503, "not everything has been listed yet\n")


async def test_metrics_are_served(get):
    status, text = await get("/metrics")

    assert status == 200
    for metric in METRICS:
        assert f"# HELP carpool_operator_{metric.name}" in text


async def test_a_port_that_is_taken_is_an_os_error(get):
    first = Health(OperatorMetrics(), live=str, ready=str)
    await first.start("127.0.0.1", 0)
    second = Health(OperatorMetrics(), live=str, ready=str)

    with pytest.raises(OSError, match="address"):
        await second.start("127.0.0.1", first.port)
    await first.stop()
    await second.stop()
