from __future__ import annotations

import asyncio
import socket
import struct
from types import SimpleNamespace

import pytest

from carpool.policy.durations import Duration
from carpool_sidecar.backends.base import Document
from carpool_sidecar.backends.upstream import PROBES, UpstreamBackend
from carpool_sidecar.config.settings import Upstream
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.messages import find
from carpool_sidecar.http1.server.server import Server


class Asked:
    """A call under way: await it for status and body."""

    def __init__(self):
        self.future = asyncio.get_running_loop().create_future()

    def answered(self, status, headers, body):
        self.future.set_result((status, body))

    def failed(self, error):
        self.future.set_exception(error)

    def __await__(self):
        return asyncio.wait_for(self.future, 30.0).__await__()


def backend(world, **fields):
    return at(world.model.port, **fields)


def at(port, **fields):
    config = Upstream(url=f"http://127.0.0.1:{port}", **fields)
    return UpstreamBackend(config, max_answer=1 << 20, clock=asyncio.get_running_loop().time)


async def test_questions_are_answered_while_all_connections_are_taken(world):
    made = backend(world, max_connections=1)
    world.model.holding = True
    made.send(b"/v1/models/m:predict", [(b"host", b"x")], b"", None)
    await world.until(lambda: world.model.held)
    assert (await made.ask(b"/v2/health/ready")).status == 200
    assert (await made.ask(b"/nope")).status == 404
    world.model.held.clear()


@pytest.mark.parametrize(("seconds", "status"), [(0.01, 0), (60.0, 200)])
async def test_a_question_waits_for_its_answer_until_the_configured_timeout(seconds, status):
    asked, answers = asyncio.Event(), asyncio.Event()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await answers.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        made = at(server.sockets[0].getsockname()[1], ask_timeout=Duration(seconds))
        question = asyncio.ensure_future(made.ask(b"/v2/health/ready"))
        await asked.wait()
        if status:
            answers.set()
        assert await question == Document(status)
        answers.set()
        await made.close()


async def test_a_refused_connection_is_reported_as_unreachable(world, monkeypatch):
    made = backend(world)
    assert (await made.ask(b"/v2/health/ready")).status == 200
    await world.model.die()
    gone = await made.ask(b"/v2/health/ready")
    assert (gone.status, gone.reachable) == (0, False)
    assert "Errno 111" in gone.why
    await made.close()


async def test_why_nobody_is_there_is_said_in_the_words_of_the_system(tmp_path):
    made = UpstreamBackend(
        Upstream(url=f"unix:{tmp_path}/none.sock"), max_answer=1 << 20, clock=asyncio.get_running_loop().time
    )
    for found in (await made.ask(b"/v2/health/ready"), await made.connect()):
        assert not found.reachable
        assert "No such file or directory" in found.why
    await made.close()


async def test_a_server_may_be_there_where_no_connection_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    made = UpstreamBackend(
        Upstream(url=f"unix:{tmp_path}/file/within"), max_answer=1 << 20, clock=asyncio.get_running_loop().time
    )
    for found in (await made.ask(b"/v2/health/ready"), await made.connect()):
        assert (found.status, found.foreign, found.reachable) == (0, False, True)
        assert "Not a directory" in found.why
    await made.close()


@pytest.mark.parametrize("said", [b"", b"Connection: keep-alive\r\n"])
async def test_a_question_leaves_no_connection(said):
    """A server that serves one connection at a time answers callers between two questions, whatever it says itself."""
    requests, ended = [], []

    async def answer(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\n%bContent-Length: 0\r\n\r\n" % said)
        ended.append(await reader.read())  # until the sidecar closes
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        made = at(server.sockets[0].getsockname()[1])
        for asked in range(1, 3):
            assert (await made.ask(b"/v2/health/ready")).status == 404
            async with asyncio.timeout(30):
                while len(ended) < asked:  # noqa: ASYNC110 - the server's own handler ends
                    await asyncio.sleep(0)
        await made.close()
    assert [b"\r\nconnection: close\r\n" in request.lower() for request in requests] == [True, True]


async def test_a_connection_alone_shows_that_a_server_is_there(world):
    read = []

    async def accept(reader, writer):
        read.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        made = at(server.sockets[0].getsockname()[1])
        for looked in range(1, 4):
            found = await made.connect()
            assert (found.status, found.foreign) == (0, True)
            await world.until(lambda looked=looked: len(read) == looked)
    assert read == [b""] * 3
    assert not (await made.connect()).reachable
    await made.close()


GRPC = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64"
TLS = b"\x15\x03\x01\x00\x02\x02\x46"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("said", [GRPC, TLS, b"", b"HTTP/1.1 404 N"], ids=["grpc", "tls", "nothing", "half an answer"])
async def test_a_server_of_another_protocol_or_that_hangs_up_is_there(said, reset):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        made = at(server.sockets[0].getsockname()[1])
        found = await made.ask(b"/v2/health/ready")
        assert (found.status, found.reachable, found.foreign) == (0, True, True)
        await made.close()


async def test_readiness_may_be_asked_elsewhere(world):
    assert backend(world).readiness is None
    assert backend(world, ready="/healthz").readiness == b"/healthz"


async def test_what_callers_have_of_the_server_is_counted(world, other_server):
    made, client = other_server
    assert made.traffic == (0, 0)
    await made.ask(b"/v2/health/ready")
    await client.get(b"/v2/health/ready")  # a kubelet asks as well
    assert made.traffic == (0, 0)
    world.model.holding = True
    asked = Asked()
    made.send(PREDICT, [(b"host", b"x")], b'{"instances":[1]}', asked)
    forwarded = client.send(b"POST", b"/other", b"x")
    await world.until(lambda: len(world.model.held) == 2)
    assert made.traffic == (2, 0)
    world.model.release()
    await asked
    await forwarded
    assert made.traffic == (0, 2)


PREDICT = b"/v1/models/m:predict"


@pytest.fixture
async def other_server(world):
    """A backend with two connections of each kind, behind a server that forwards all."""
    made = backend(world, max_connections=2, max_forwarded=2)

    class All:
        def head(self, exchange):
            exchange.context = made.forward(exchange)
            exchange.context.begin()

        def request(self, exchange):
            exchange.context.request()

        def sent(self, exchange):
            pass

        def disconnected(self, exchange):
            exchange.context.cancel()

        refused = sent

    server = Server(All())
    await server.listen("127.0.0.1", 0)
    yield made, world.client("{}:{}".format(*server.addresses[0]))
    server.stop_accepting()
    server.abort()
    await made.close()


async def test_what_is_forwarded_and_hangs_costs_no_inference_and_no_probe(world, other_server):
    made, client = other_server
    world.model.holding = True
    hung = [client.send(b"POST", b"/other", b"x") for _ in range(4)]  # two under way, two wait
    await world.until(lambda: len(world.model.held) == 2 and made._forwarding.waiting == 2)
    refused = await client.send(b"POST", b"/other", b"x")
    assert (refused.status, refused.json["reason"]) == (503, "upstream-busy")
    assert "raise upstream.maxForwarded" in refused.json["error"]
    assert (await client.get(b"/v2/health/ready")).status == 200
    asked = Asked()
    made.send(PREDICT, [(b"host", b"x")], b'{"instances":[1]}', asked)
    await world.until(lambda: len(world.model.held) == 3)
    world.model.release()
    assert (await asked)[0] == 200
    assert [(await one).status for one in hung] == [200] * 4


async def test_inference_that_hangs_costs_nothing_that_is_forwarded(world, other_server):
    made, client = other_server
    world.model.holding = True
    asked = [Asked() for _ in range(5)]
    for one in asked:
        made.send(PREDICT, [(b"host", b"x")], b'{"instances":[1]}', one)
    await world.until(lambda: len(world.model.held) == 2)
    with pytest.raises(UpstreamError, match=r"raise upstream\.maxConnections") as busy:
        await asked[4]
    assert busy.value.kind == "busy"
    world.model.holding = False
    assert (await client.send(b"POST", b"/other", b'{"inputs":')).status == 200
    assert (await client.get(b"/v2/models/m")).status == 200
    world.model.release()
    assert [(await one)[0] for one in asked[:4]] == [200] * 4


async def test_probes_that_hang_are_forwarded_like_the_rest(world, other_server, monkeypatch):
    made, client = other_server
    held = []
    request = world.model.request
    hangs = lambda exchange: held.append(exchange) if exchange.target == b"/v2/models/hangs" else request(exchange)  # noqa: E731
    monkeypatch.setattr(world.model, "request", hangs)
    hung = [client.get(b"/v2/models/hangs") for _ in range(PROBES)]
    await world.until(lambda: len(held) == PROBES)
    assert not made._probes.free
    assert (await client.get(b"/v2/health/ready")).status == 200
    for exchange in held:
        exchange.respond(404, [])
    assert [(await one).status for one in hung] == [404] * PROBES


@pytest.mark.parametrize(
    ("method", "target", "probe"),
    [
        (b"GET", b"/v2/health/ready", True),
        (b"HEAD", b"/v2/health/live", True),
        (b"GET", b"/v2", True),
        (b"GET", b"/", False),
        (b"GET", b"/metrics", True),
        (b"GET", b"/v1/models", True),
        (b"GET", b"/v1/models/m", True),
        (b"GET", b"/v2/models/m/versions/1/ready", True),
        (b"GET", b"/v2/models/m/config?x=1", True),
        (b"GET", b"/custom/ready", True),
        (b"GET", b"/v2/models/m/generate_stream", False),
        (b"GET", b"/v1/models/m:predict", False),
        (b"GET", b"/events", False),
        (b"POST", b"/v2/health/ready", False),
        (b"DELETE", b"/v1/models/m", False),
    ],
)
@pytest.mark.pure
async def test_which_requests_are_probes(world, method, target, probe):
    made = backend(world, ready="/custom/ready")
    exchange = SimpleNamespace(method=method, path=target.partition(b"?")[0], length=0, upgrade=b"")
    assert made._is_probe(exchange) is probe
    exchange.length = 5
    assert not made._is_probe(exchange)
    exchange.length, exchange.upgrade = 0, b"websocket"
    assert not made._is_probe(exchange)


async def test_answers_count_in_the_budget_that_is_given(world):
    budget = Budget(1000)
    config = Upstream(url=f"http://127.0.0.1:{world.model.port}")
    made = UpstreamBackend(config, max_answer=1 << 20, clock=asyncio.get_running_loop().time, budget=budget)
    asked = Asked()
    made.send(PREDICT, [(b"host", b"x")], b'{"instances":["%b"]}' % (b"x" * 500_000), asked)
    with pytest.raises(UpstreamError, match=r"raise bodies\.maxBuffered") as full:
        await asked
    assert full.value.reason == "buffers-full"
    assert budget.held == 0
    await made.close()


async def test_a_caller_without_a_host_gets_the_model_s(world, other_server):
    made, _ = other_server
    asked = Asked()
    made.send(PREDICT, [], b'{"instances":[1]}', asked)
    assert (await asked)[0] == 200
    assert find(world.model.received[-1].headers, b"host") == b"127.0.0.1:%d" % world.model.port
