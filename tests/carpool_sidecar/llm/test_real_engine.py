"""OpenVINO GenAI itself, with a model of random weights, behind a whole sidecar."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino_genai", reason="the extra llm is not installed")

from carpool_cli.demo.random_model import SIZES, Size, write
from carpool_sidecar.config.settings import Llm
from carpool_sidecar.generation.engine_metrics import parse
from carpool_sidecar.llm.messages import Add, Cancel, Sampling
from carpool_sidecar.llm.worker import OpenVino, Worker, Wrong
from carpool_sidecar.sidecar import Sidecar

LOADING = 120.0
POLICY = {"slo": {"ttft": {"p99": "60s"}, "tpot": {"p99": "10s"}}, "generation": {"maxRunning": 4}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    write(path, SIZES["tiny"], every_byte=True, ends=True)
    return path


@pytest.fixture(scope="module")
def machine(model):
    return OpenVino(Llm(str(model), threads=1, kv_tokens=2048))


def played(worker, *adds):
    """Compute to the end; return texts, numbers of tokens and reasons by key."""
    for add in adds:
        worker.take(add)
    texts, tokens, ends = {}, {}, {}
    while worker.busy:
        for piece in list(worker.step())[-1].pieces:
            texts[piece.key] = texts.get(piece.key, "") + piece.text
            tokens[piece.key] = tokens.get(piece.key, 0) + piece.tokens
            ends[piece.key] = piece.end
    return texts, tokens, ends


def test_one_alone_or_among_others_gets_the_same_words(machine):
    def greedy(key, prompt):
        return Add(key, prompt, [], 20, [], Sampling(temperature=0.0, ignore_eos=True))

    prompts = ["ba be", "zo", "Hello there, you"]
    alone = [played(Worker(machine), greedy(at + 1, prompt))[0][at + 1] for at, prompt in enumerate(prompts)]
    texts, tokens, ends = played(Worker(machine), *(greedy(at + 10, prompt) for at, prompt in enumerate(prompts)))
    assert list(texts.values()) == alone
    assert set(tokens.values()) == {20}
    assert set(ends.values()) == {"length"}


def test_seeds_repeat_and_differ(machine):
    def drawn(key, seed):
        return Add(key, "ba", [], 24, [], Sampling(temperature=2.0, seed=seed, ignore_eos=True))

    texts, _, _ = played(Worker(machine), drawn(20, 1), drawn(21, 1), drawn(22, 2))
    assert texts[20] == texts[21] != texts[22]


def test_pieces_of_broken_characters_are_the_whole_text(machine):
    """Tokens are any bytes here, so characters break everywhere."""
    worker = Worker(machine)
    worker.take(Add(30, "ba", [], 300, [], Sampling(temperature=2.0, seed=4, ignore_eos=True, logprobs=True)))
    ids, text = [], ""
    read = worker._live[30].handle.read

    def kept():
        new = read()
        ids.extend(new[0])
        return new

    class Kept:
        read = staticmethod(kept)
        cancel = staticmethod(lambda: None)

    worker._live[30].handle = Kept()
    while worker.busy:
        text += "".join(piece.text for piece in list(worker.step())[-1].pieces)
    assert len(ids) == 300
    assert text == machine.decode([ids])[0]


def test_an_answer_begins_although_a_cancelled_one_still_has_the_whole_cache(machine):
    worker = Worker(machine)
    for key in (60, 61):
        worker.take(Add(key, [9] * 1000, [], 40, [], Sampling(ignore_eos=True)))
    for _ in range(9):  # of 256 tokens of prompts each
        list(worker.step())
    for key in (60, 61):
        worker.take(Cancel(key))
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    texts, tokens, ends = played(worker, Add(62, [3] * 100, [], 8, [], greedy))
    assert (tokens, ends) == ({62: 8}, {62: "length"})
    assert played(worker, Add(63, [3] * 100, [], 8, [], greedy))[0][63] == texts[62]


def test_the_end_token_ends_an_answer(machine):
    _, tokens, ends = played(
        Worker(machine), *(Add(40 + at, "ba", [], 400, [], Sampling(temperature=2.0, seed=at)) for at in range(8))
    )
    assert "stop" in ends.values()
    assert min(tokens.values()) < 400


def test_chats_go_through_the_template(machine):
    messages = [{"role": "user", "content": "hi"}]
    ids = machine.encode(Add(1, "", messages, 1, [], Sampling()))
    assert machine.decode([ids]) == ["user: hi\nassistant:"]
    with pytest.raises(Wrong, match="there is no token 5000") as caught:
        machine.encode(Add(1, [5000], [], 1, [], Sampling()))
    assert caught.value.field == "prompt"


def test_a_text_that_the_tokenizer_would_cut_is_refused(tmp_path):
    write(tmp_path / "long.gguf", Size(128, 2, 256, 20_000))
    machine = OpenVino(Llm(str(tmp_path / "long.gguf"), threads=1, kv_tokens=64))
    assert machine.longest_text == 8191
    assert len(machine.encode(Add(1, "\n" * 8191, [], 1, [], Sampling()))) == 8191
    assert len(machine.encode(Add(1, [5] * 12_000, [], 1, [], Sampling()))) == 12_000
    chat = [{"role": "user", "content": "la " * 12_000}]
    for prompt, messages, field in (("la " * 12_000, [], "prompt"), ("", chat, "messages")):
        with pytest.raises(Wrong, match=r"may have 8191 tokens, .*send token ids") as caught:
            machine.encode(Add(1, prompt, messages, 1, [], Sampling()))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"), [("min_p", 1.0), ("temperature", 1e-50), ("top_p", 1e-50), ("repetition_penalty", 1e-50)]
)
def test_values_that_only_the_runtime_refuses_are_named(machine, field, value):
    refused = Worker(machine).take(Add(70, "ba", [], 3, [], Sampling(**{field: value})))
    assert refused.field == field
    assert field in refused.why


def test_a_cache_larger_than_the_memory_names_its_fields(tmp_path):
    path = tmp_path / "long.gguf"
    write(path, Size(128, 2, 256, 2**32 - 32))
    with pytest.raises(MemoryError, match=r"Lower llm.kvTokens, now 4294967264 tokens, 2,048 GiB: .* llm.context"):
        OpenVino(Llm(str(path), threads=1))
    assert OpenVino(Llm(str(path), threads=1, kv_tokens=64)).kv_tokens == 64


class Served:
    """A sidecar with the engine, and a client."""

    def __init__(self, world, sidecar, client):
        self.world, self.sidecar, self.client = world, sidecar, client

    def post(self, path=b"/v1/chat/completions", **fields):
        return self.client.send(b"POST", path, json.dumps(fields).encode())

    async def said(self):
        """What the engine says of itself."""
        return parse((await self.client.get(b"/metrics")).body)

    async def ready(self):
        await self.until(self.healthy)
        return self

    async def healthy(self):
        return (await self.client.get(b"/health")).status == 200

    async def until(self, condition):
        """Ask the engine until something is so."""
        async with asyncio.timeout(LOADING):
            while not await condition():  # noqa: ASYNC110 - the engine is another process
                await asyncio.sleep(0.01)

    async def runs(self, number):
        await self.until(lambda: self._runs(number))

    async def _runs(self, number):
        said = await self.said()
        return said.running == number and (number or not said.waiting)


@pytest.fixture
async def served(world, model):
    sidecar, client = await world.start(
        upstream=None,
        policy=POLICY,
        llm={"path": str(model), "threads": 1, "kvTokens": 8192, "timeout": "100s"},
    )
    return await Served(world, sidecar, client).ready()


async def test_it_answers_counts_leaves_and_comes_back(served):
    """One process for all of it: it takes seconds to start."""
    hello = [{"role": "user", "content": "hi"}]
    # 1. Whole, and in events: the same words
    asked = {"messages": hello, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = (await served.post(**asked)).json
    assert whole["usage"] == {"prompt_tokens": 16, "completion_tokens": 12, "total_tokens": 28}
    stream = await served.post(**asked, stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in stream.body.decode().split("\n\n") if line.startswith("data: {")]
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in events if each["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"] == whole["usage"]
    # 2. The sidecar counted them
    counts = dict(served.sidecar.streams.models)[""]
    assert (counts.output_tokens, counts.prompt_tokens) == (24, 32)
    # 3. Errors are the engine's own
    refused = await served.post(messages=hello, max_tokens=9999)
    assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")
    # 4. Every client that leaves ends its sequence in the engine, those that wait at the gate never reach it
    gone = [served.post(messages=hello, max_tokens=3000, stream=True, ignore_eos=True) for _ in range(6)]
    await served.runs(4)
    assert served.sidecar.streams.gatekeeper.queued == 2
    for each in gone:
        each.leave()
    await served.runs(0)
    assert served.sidecar.streams.under_way == set()
    # 5. A killed engine fails what it had, says so, and comes back
    lost = served.post(messages=hello, max_tokens=3000, ignore_eos=True)
    await served.runs(1)
    os.kill(computing(os.getpid()), signal.SIGKILL)
    answer = await lost
    assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
    await served.ready()
    assert (await served.post(**asked)).json["choices"] == whole["choices"]


def computing(parent):
    """The process that computes: a grandchild of this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"carpool_sidecar.llm.worker" in command and parent_of(parent_of(int(process.name))) == parent:
                found.append(int(process.name))
        except OSError:
            continue  # it has ended
    (one,) = found
    return one


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


async def test_the_engine_of_a_killed_sidecar_ends_and_leaves_no_folder(model, tmp_path):
    folder = tmp_path / "carpool-engine-1"
    folder.mkdir()
    address = f"{folder}/engine.sock"
    engine = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "carpool_sidecar.llm.main",
        Llm(str(model), threads=1).argument(),
        f"unix:{address}",
        stdin=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LOADING):
        while not Path(address).exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.01)
        engine.stdin.close()
        assert await engine.wait() == 0
    assert not folder.exists()


async def test_a_file_that_does_not_load_is_named(world, tmp_path):
    path = tmp_path / "unknown.gguf"
    write(path, SIZES["tiny"])
    path.write_bytes(path.read_bytes().replace(b"llama", b"lemma"))
    config = world.parsed(json.dumps({**json.loads(world.config()), "upstream": None, "llm": {"path": str(path)}}))
    sidecar = Sidecar(config)
    await sidecar.start()
    world.sidecars.append(sidecar)
    why = await asyncio.wait_for(sidecar.engine.broken, LOADING)
    assert why.startswith(f"{path} can't be loaded: ")
    socket = Path(sidecar.engine.upstream.address[2])
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    await sidecar.close()
    assert not socket.parent.exists()
