"""What real engines answered, played through a sidecar: bytes pass as they came, and are read right.

`recorded/ENGINE/README.md` names the version; `make record-engines` records the answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from carpool_sidecar.generation.engine_metrics import parse
from carpool_sidecar.generation.picker import with_queue

RECORDED = Path(__file__).parent / "recorded"
ENGINES = sorted(each.name for each in RECORDED.iterdir() if each.is_dir())
TARGETS = {"slo": {"ttft": {"p99": "20s"}, "tpot": {"p99": "10s"}}}


class Taken:
    """One recorded exchange."""

    def __init__(self, engine, name):
        target, _, self.body = (RECORDED / engine / f"{name}.request").read_bytes().partition(b"\n")
        self.target = target
        self.wire = (RECORDED / engine / f"{name}.response").read_bytes()
        head, _, rest = self.wire.partition(b"\r\n\r\n")
        self.status = int(head.split()[1])
        self.chunked = b"transfer-encoding: chunked" in head.lower()
        self.pieces = list(_chunks(rest)) if self.chunked else [rest]
        self.head = head + b"\r\n\r\n"

    @property
    def answer(self):
        return b"".join(self.pieces)

    @property
    def asked(self):
        return json.loads(self.body)


def _chunks(rest):
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size or b"0", 16):
            return
        yield rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


def names(pattern):
    return [
        pytest.param(engine, path.stem, id=f"{engine}-{path.stem}")
        for engine in ENGINES
        for path in sorted((RECORDED / engine).glob(f"{pattern}.response"))
    ]


class Player:
    """An engine that answers one request with recorded bytes: each piece when the test says so."""

    def __init__(self, taken):
        self.taken = taken
        self.left = False
        self._go = asyncio.Semaphore(0)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._play, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self._server.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def go_on(self):
        self._go.release()

    async def _play(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST " + self.taken.target + b" "):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
            return
        assert await reader.readexactly(len(self.taken.body)) == self.taken.body
        writer.write(self.taken.head)
        for piece in self.taken.pieces:
            await self._go.acquire()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.taken.chunked else piece)
        await self._go.acquire()
        if self.taken.chunked and self.taken.wire.endswith(b"0\r\n\r\n"):
            writer.write(b"0\r\n\r\n")
        elif self.taken.chunked:  # the recording's client left, which is heard of at a next token
            with contextlib.suppress(ConnectionError):
                for _ in range(10_000):
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)
                return
            self.left = True
        writer.close()


async def play(chat, taken, player):
    """Play it; each piece must have passed before the next is sent."""
    streams = await chat.start(policy=TARGETS, upstream={"url": player.url})
    reader = chat.ask(taken.target, body=taken.body, headers=[(b"content-type", b"application/json")])
    passed = b""
    for piece in taken.pieces:
        player.go_on()
        passed += piece
        await chat.until(lambda passed=passed: reader.body == passed)
    player.go_on()
    return streams, reader


def counted(taken):
    """What OpenAI's and other clients read of the answer: prompt tokens, output tokens, reason; None: not said."""
    documents = [taken.answer]
    if b"text/event-stream" in taken.head:
        documents = [line[6:] for line in taken.answer.split(b"\n") if line.startswith(b"data: {")]
    prompt, output, reason, own = None, None, None, 0
    for document in map(json.loads, documents):
        found = document.get("response") or document.get("message") or document
        reason = next((each["finish_reason"] for each in found.get("choices", ()) if each.get("finish_reason")), reason)
        reason = found.get("stop_type") or found.get("stop_reason") or found.get("status") or reason
        reason = found.get("delta", {}).get("stop_reason") or reason if isinstance(found.get("delta"), dict) else reason
        usage = found.get("usage") or {}
        cached = usage.get("cache_read_input_tokens") or 0
        prompt = usage.get("prompt_tokens") or usage.get("input_tokens", -cached) + cached or prompt
        prompt = found.get("tokens_evaluated", prompt)
        output = usage.get("completion_tokens") or usage.get("output_tokens") or found.get("tokens_predicted") or output
        timings = found.get("timings")
        if timings and not usage and "tokens_predicted" not in found:
            own += timings["predicted_n"]
            prompt, output = timings["cache_n"] + timings["prompt_n"], own
    return prompt, output, reason


def texts(taken):
    """Events of a stream that have text, as a client reads them."""
    events = [json.loads(line[6:]) for line in taken.answer.split(b"\n") if line.startswith(b"data: {")]
    return sum(any(_says(choice) for choice in event.get("choices", [event])) for event in events)


def _says(choice):
    delta = choice.get("delta") or choice
    if isinstance(delta, str):
        return True
    calls = [call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ()]
    return any([delta.get("content"), delta.get("text"), delta.get("reasoning"), *calls])


REASONS = {
    "stop": "stop", "eos": "stop", "tool_calls": "stop", "end_turn": "stop", "completed": "stop",
    "length": "length", "limit": "length", "max_tokens": "length", "incomplete": "length",
}  # fmt: skip


def test_both_engines_were_recorded():
    assert {"llama-server"} <= set(ENGINES)
    assert all(len(list((RECORDED / engine).glob("*.response"))) >= 28 for engine in ENGINES)


@pytest.mark.parametrize(
    ("engine", "name"), [*names("chat-*"), *names("completions-*"), *names("responses-*"), *names("messages-*"),
                         *names("native-*")],
)  # fmt: skip
async def test_answers_pass_and_are_counted(chat, engine, name):
    taken = Taken(engine, name)
    assert taken.status == 200
    async with Player(taken) as player:
        streams, reader = await play(chat, taken, player)
        await reader
        assert (reader.status, reader.body) == (200, taken.answer)
        await chat.until(lambda: not streams.under_way)
        ((_, counts),) = streams.models
        prompt, output, reason = counted(taken)
        assert counts.ends == {REASONS[reason]: 1}
        assert counts.hits == 1
        if prompt is not None:
            assert counts.prompt_tokens == prompt
        if output is not None:
            assert counts.output_tokens == output
        else:  # nobody says: each event with text is taken for a token, though vLLM puts several in one
            assert counts.output_tokens == texts(taken)
        if b"text/event-stream" in taken.head:
            assert sum(counts.ttft.counts) == 1
            assert sum(counts.gaps.counts) >= min(1, texts(taken) - 1)


# What one engine refuses another may take.
@pytest.mark.parametrize(("engine", "name"), [each for each in names("error-*") if Taken(*each.values).status != 200])
async def test_errors_pass_and_are_counted_as_such(chat, engine, name):
    taken = Taken(engine, name)
    async with Player(taken) as player:
        streams, reader = await play(chat, taken, player)
        await reader
        assert (reader.status, reader.body) == (taken.status, taken.answer)
        await chat.until(lambda: not streams.under_way)
        assert [(counts.ends, counts.hits) for _, counts in streams.models] == [({str(taken.status): 1}, 0)]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_client_that_leaves_is_heard_of(chat, engine):
    taken = Taken(engine, "cancelled")
    async with Player(taken) as player:
        streams, reader = await play(chat, taken, player)
        reader.leave()
        await chat.until(lambda: player.left and not streams.under_way)
        ((_, counts),) = streams.models
        assert counts.ends == {"cancelled": 1}
        assert counts.output_tokens >= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_are_understood(engine):
    idle, busy, after = (parse(Taken(engine, f"metrics-{when}").answer) for when in ("idle", "busy", "after"))
    assert (idle.running, idle.waiting) == (0, 0)
    assert (busy.running, busy.waiting) == (2, 2)
    assert (after.running, after.waiting) == (0, 0)
    if engine == "vllm":
        assert 0 < busy.kv_share < 1
        assert (busy.preemptions, after.kv_share) == (0, 0)
        assert idle.kv_tokens == busy.kv_tokens == 8192 * 128  # blocks, and tokens of each
    else:
        assert 1 < after.busy_slots <= 2
        assert busy.kv_share is None  # this version does not say


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gates_queue_is_added_for_pickers(engine):
    text = Taken(engine, "metrics-busy").answer
    found = with_queue(text, 3, 4, None)
    assert parse(found).waiting == 5
    assert len(found.splitlines()) == len(text.splitlines())


@pytest.mark.parametrize("engine", ENGINES)
def test_models_and_health_were_answered(engine):
    assert [each["id"] for each in json.loads(Taken(engine, "models").answer)["data"]] == ["random"]
    assert Taken(engine, "health").status == 200
