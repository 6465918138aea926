"""The injector's memory under reviews of any size, as the kernel counts it for a process of its own."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
import yaml

from carpool.policy.durations import Quantity
from carpool_operator.webhook.server import LARGE, LARGE_AT_ONCE, MAX_OBJECT, MAX_REVIEW

SERVER = """
import asyncio, sys
from aiohttp import web
from carpool_operator.webhook import server
from carpool_operator.webhook.main import BUFFER, Injector, InjectorSettings

async def main():
    server.READ = 600.0  # a machine that pauses turns no review away
    injector = Injector(InjectorSettings(image="i", version="1", public_key="0" * 64))
    runner = web.AppRunner(injector.webhook(), access_log=None, read_bufsize=BUFFER)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
VALUES = Path(__file__).parents[3] / "charts" / "carpool" / "values.yaml"
LIMIT = Quantity.parse(yaml.safe_load(VALUES.read_text("utf-8"))["injector"]["resources"]["limits"]["memory"])

POD = {
    "metadata": {
        "name": "web-0",
        "annotations": {"carpool.dev/inject": "true"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "controller": True}],
    },
    "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 8000}], "env": []}]},
}


def pod(size, one):
    """A pod of so many bytes, made of equal variables."""
    spare = size - len(json.dumps(POD))
    (container,) = POD["spec"]["containers"]
    container = container | {"env": [one] * (spare // (len(json.dumps(one)) + 2))}
    return POD | {"spec": {"containers": [container]}}


def review(size, one, old=0):
    request = {"uid": "u", "namespace": "n", "kind": {"kind": "Pod"}, "object": pod(size, one)}
    if old:
        request["oldObject"] = pod(old, one)
    return json.dumps({"request": request}).encode()


EMPTY, NAMED, TEXT = {}, {"name": "A", "value": "1"}, {"name": "A", "value": "x" * 10_000}
STORM = [
    (200, review(MAX_OBJECT - 100, EMPTY)),
    (200, review(MAX_OBJECT - 100, NAMED)),
    (200, review(MAX_OBJECT - 100, NAMED, old=MAX_REVIEW - MAX_OBJECT - 1000)),
    (200, review(MAX_REVIEW - 1000, TEXT)),  # not read
    (200, review(LARGE - 1000, NAMED)),
    (413, review(2 * MAX_REVIEW, TEXT)),
]


@pytest.fixture
def injector():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as process:  # noqa: S603 - our own words
        yield process, int(process.stdout.readline())
        process.stdin.close()


def peak(process):
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


async def test_it_stays_below_its_limit_whatever_comes(injector):
    process, port = injector
    answers = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as http:

        async def post(expected, body):
            async with http.post("/mutate", data=io.BytesIO(body)) as response:
                answers[response.status == expected] += 1

        await asyncio.gather(*(post(*each) for each in STORM * 8))

    assert answers == {True: len(STORM) * 8}
    assert peak(process) < LIMIT, peak(process)


async def test_large_reviews_that_do_not_come_hold_up_no_small_one(injector):
    _, port = injector
    head = f"POST /mutate HTTP/1.1\r\nHost: i\r\nContent-Length: {MAX_REVIEW}\r\n\r\n"
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * LARGE_AT_ONCE)]
    for _, writer in held:
        writer.write(head.encode())
        await writer.drain()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{port}/mutate", data=review(10_000, NAMED)) as response,
    ):
        assert response.status == 200
        assert (await response.json())["response"]["patchType"] == "JSONPatch"
    for _, writer in held:
        writer.close()


async def test_what_is_not_read_is_left_unchanged_and_said(injector):
    _, port = injector
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        for size, patched in ((MAX_OBJECT - 100, True), (MAX_OBJECT + 1000, False)):
            async with http.post("/mutate", data=io.BytesIO(review(size, NAMED))) as response:
                answer = (await response.json())["response"]
            assert answer["allowed"]
            assert ("patch" in answer, "warnings" in answer) == (patched, not patched)
