"""The model behind Ray Serve: ray_server.py PORT."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import ray
from profiled_model import given
from ray import serve
from starlette.requests import Request  # noqa: TC002 - Ray reads annotations at run time

_, SETTINGS = given()
DEPLOYMENT = {name: value for name, value in SETTINGS.items() if name == "max_ongoing_requests"}
BATCH = {name: value for name, value in SETTINGS.items() if name != "max_ongoing_requests"}


@serve.deployment(**DEPLOYMENT)
class Echo:
    """One row a request."""

    def __init__(self) -> None:
        self.model, _ = given()

    @serve.batch(**BATCH)
    async def predict(self, rows: list[list[float]]) -> list[list[float]]:
        """Serve a batch, in a thread: a device leaves the loop free to take requests."""
        await asyncio.to_thread(self.model, rows)
        return rows

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Serve a request."""
        return {"row": await self.predict((await request.json())["row"])}


if __name__ == "__main__":
    ray.init(address="local", include_dashboard=False, num_cpus=4, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Echo.bind())
    threading.Event().wait()
