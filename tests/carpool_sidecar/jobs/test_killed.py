"""A real sidecar, killed at many points: no accepted job is lost, and none runs twice without saying so."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from random import Random

import pytest

KILLS = 6
PATIENCE = 180.0
TARGET = "/v1/models/m:predict"


class Life:
    """One process after the other on one database."""

    def __init__(self, world, tmp_path) -> None:
        self.world = world
        self.folder = tmp_path
        self.path = tmp_path / "sidecar.json"
        self.process = None
        self.client = None

    def configure(self, **policy):
        self.path.write_text(self.world.config(jobs={"path": str(self.folder / "jobs.db")}, policy=policy))

    async def start(self):
        command = [sys.executable, "-m", "carpool_sidecar.main", "--config", str(self.path)]
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        while (line := json.loads(await self.process.stderr.readline()))["event"] != "listening":
            assert line["level"] == "warning", line
        self.client = self.world.client(line["data"])

    async def kill(self):
        if self.process.returncode is None:
            self.process.kill()
        self.process._transport.close()
        await self.process.wait()
        await self.client.pool.close()


@pytest.fixture
async def life(world, tmp_path):
    life = Life(world, tmp_path)
    yield life
    await life.kill()


def counting(world, seen, random):
    """Answer a little later, so that a kill finds calls under way; counts the rows that come."""

    def answer(exchange):
        rows = json.loads(exchange.body)["instances"]
        seen.update(row[0] for row in rows)
        body = json.dumps({"predictions": rows}).encode()
        asyncio.get_running_loop().call_later(
            0.02 * random.random(), exchange.respond, 200, [(b"content-type", b"application/json")], body
        )

    world.model.behave = answer


async def submit(client, name):
    """Hand a job in; return its id once it is accepted, or None if the process died before it said so."""
    body = json.dumps({"path": TARGET, "body": {"instances": [[name]]}}).encode()
    try:
        answer = await client.send(b"POST", b"/v1/jobs", body)
    except Exception:  # noqa: BLE001 - the process was killed: nothing was promised
        return None
    assert answer.status == 202, answer
    return answer.json["id"]


async def upload(client, names):
    """Upload a file and make a batch of it; return its id, or None likewise."""
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": TARGET, "body": {"instances": [[name]]}})
        for name in names
    ]
    head = '--B\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    form = head.format("purpose", "") + "batch\r\n" + head.format("file", '; filename="in.jsonl"')
    form += "\n".join(lines) + "\n\r\n--B--\r\n"
    kind = [(b"content-type", b"multipart/form-data; boundary=B")]
    try:
        file = await client.send(b"POST", b"/v1/files", form.encode(), kind)
        wanted = {"input_file_id": file.json["id"], "endpoint": TARGET, "completion_window": "1h"}
        return (await client.send(b"POST", b"/v1/batches", json.dumps(wanted).encode())).json["id"]
    except Exception:  # noqa: BLE001 - likewise
        return None


async def ended(client, path, key, running):
    async with asyncio.timeout(PATIENCE):
        while (record := (await client.get(path)).json)[key] in running:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.02)
    return record


async def check_jobs(client, accepted, seen):
    reruns = 0
    for name, identity in accepted.items():
        job = await ended(client, f"/v1/jobs/{identity}".encode(), "state", {"queued", "running"})
        assert (job["state"], job["status"]) == ("done", 200), job
        result = await client.get(f"/v1/jobs/{identity}/result".encode())
        assert result.json == {"predictions": [[name]]}
        assert 1 <= seen[name] <= job["attempts"], (job, seen[name])
        assert job["rerun"] is (job["attempts"] > 1)
        reruns += job["rerun"]
    return reruns


async def check_batch(client, identity, names, seen):
    batch = await ended(client, f"/v1/batches/{identity}".encode(), "status", {"in_progress"})
    assert batch["request_counts"] == {"total": len(names), "completed": len(names), "failed": 0}, batch
    content = await client.get(f"/v1/files/{batch['output_file_id']}/content".encode())
    lines = [json.loads(line) for line in content.body.splitlines()]
    assert [line["custom_id"] for line in lines] == names
    for line in lines:
        name = line["custom_id"]
        assert line["response"]["body"] == {"predictions": [[name]]}
        assert 1 <= seen[name] <= line.get("carpool", {"attempts": 1})["attempts"], (line, seen[name])


@pytest.mark.real
async def test_a_killed_sidecar_loses_no_accepted_job_and_says_which_ran_twice(world, life):
    random, seen = Random(7), Counter()
    life.configure()
    counting(world, seen, random)
    accepted, batches, number = {}, {}, 0
    for kill in range(KILLS):
        await life.start()
        if kill in {0, KILLS // 2}:
            names = [f"line {kill} {n}" for n in range(150)]
            identity = await upload(life.client, names)
            if identity is not None:
                batches[identity] = names
        # 1. Callers hand jobs in all the time; 2. the process ends when the model has seen so many rows more.
        until = sum(seen.values()) + random.randrange(1, 30)
        waiting = {}
        async with asyncio.timeout(PATIENCE):
            while sum(seen.values()) < until:
                waiting[f"job {number}"] = asyncio.ensure_future(submit(life.client, f"job {number}"))
                number += 1
                await asyncio.sleep(0.02)
        await life.kill()
        for name, task in waiting.items():
            if (identity := await task) is not None:
                accepted[name] = identity
    await life.start()
    reruns = await check_jobs(life.client, accepted, seen)
    for identity, names in batches.items():
        await check_batch(life.client, identity, names, seen)
    assert len(accepted) > KILLS
    assert batches
    # Without a kill that hit a call under way this would show nothing.
    assert reruns or max(seen.values()) > 1


@pytest.mark.real
async def test_what_is_not_idempotent_is_not_sent_again_and_says_why(world, life):
    seen = Counter()
    life.configure(idempotent=False)
    world.model.behave = lambda exchange: seen.update([exchange.body])  # never answers
    await life.start()
    identity = await submit(life.client, "once")
    await world.until(lambda: seen)
    await life.kill()
    await life.start()
    job = (await life.client.get(f"/v1/jobs/{identity}".encode())).json
    assert (job["state"], job["reason"], job["attempts"], job["rerun"]) == ("failed", "interrupted", 1, False)
    gone = await life.client.get(f"/v1/jobs/{identity}/result".encode())
    assert (gone.status, gone.json["reason"]) == (410, "jobs-failed")
    assert sum(seen.values()) == 1
