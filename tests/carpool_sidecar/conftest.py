"""A model server that does as the test says, a client, and sidecars between them, all on real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
import uvloop

from carpool_sidecar.admin.health import UNASKED
from carpool_sidecar.config.settings import parse
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.messages import content_length, encode_request_head, find
from carpool_sidecar.http1.server.server import Server
from carpool_sidecar.sidecar import Sidecar
from carpool_sidecar.tuning import control

PATIENCE = 30.0
LENGTH = b"inference-header-content-length"


def pytest_asyncio_loop_factories(config, item):
    """What is tested from end to end is tested on the loop that it runs on."""
    loop = uvloop if item.path.stem.startswith("test_end_to_end") else asyncio
    return {loop.__name__: loop.new_event_loop}


async def until(condition):
    """Turn the loop until something is so; a test that waits in vain fails."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event: it happens in the code under test
            await asyncio.sleep(0)


def echo(exchange):
    """Answer with the rows that came, digit for digit and byte for byte."""
    if b":predict" in exchange.target:
        body = exchange.body.replace(b'{"instances":', b'{"predictions":', 1)
        exchange.respond(200, [(b"Content-Type", b"application/json"), *exchange.context.headers], body)
        return
    length = find(exchange.headers, LENGTH)
    at = len(exchange.body) if length is None else int(length)
    text = exchange.body[:at].replace(b'{"inputs":', b'{"model_name":"m","outputs":', 1)
    headers = [] if length is None else [(LENGTH, b"%d" % len(text))]
    exchange.respond(200, [*headers, *exchange.context.headers], text + exchange.body[at:])


class Received(NamedTuple):
    """A request for inference as the model server got it."""

    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def rows(self):
        return json.loads(self.body)["instances"]


class ModelServer:
    """Echoes at once, or later (`hold`, `release`), or does what `behave` says."""

    def __init__(self) -> None:
        self.behave = echo
        self.headers: list[tuple[bytes, bytes]] = []
        self.received: list[Received] = []
        self.left = 0
        self.held: list[Any] = []
        self.holding = False
        self.documents = {
            b"/v2/health/ready": (200, {}),
            b"/v2/models/m": (
                200,
                {"name": "m", "versions": ["1"], "inputs": [_tensor("x")], "outputs": [_tensor("x")]},
            ),
        }
        self.server: Server

    async def listen(self, port=0):
        self.server = Server(self)
        await self.server.listen("127.0.0.1", port)
        return self

    @property
    def port(self):
        return self.server.addresses[0][1]

    async def die(self):
        """Close everything, as a crash does; the port stays free."""
        self.server.stop_accepting()
        self.server.abort()
        await asyncio.sleep(0)

    def release(self):
        self.holding = False
        held, self.held = self.held, []
        for exchange in held:
            self.behave(exchange)

    # Called by the server

    def head(self, exchange):
        exchange.context = self
        exchange.buffer(1 << 28)

    def request(self, exchange):
        exchange.body = bytes(exchange.body)  # a large one is a view
        if exchange.method == b"GET":
            status, document = self.documents.get(exchange.target, (404, {"error": "not here"}))
            exchange.respond(status, [], json.dumps(document).encode())
            return
        self.received.append(Received(exchange.target, exchange.headers, exchange.body))
        if self.holding:
            self.held.append(exchange)
        else:
            self.behave(exchange)

    def sent(self, exchange):
        pass

    def disconnected(self, exchange):
        self.left += 1

    def refused(self, error):
        pass


def _tensor(name):
    return {"name": name, "datatype": "FP32", "shape": [-1, 2]}


class Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    def header(self, name):
        return find(self.headers, name)


class Asked:
    """A request under way: await it for its answer, or leave."""

    def __init__(self) -> None:
        self.future = asyncio.get_running_loop().create_future()
        self.call: Any = None

    def answered(self, status, headers, body):
        if not self.future.done():  # nobody waits any more
            self.future.set_result(Answer(status, headers, body))

    def failed(self, error):
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # a test may have no interest in it

    def __await__(self):
        return asyncio.wait_for(self.future, PATIENCE).__await__()

    def leave(self):
        self.call.cancel()


class Client:
    """Sends requests to one port, each on a connection of its own while others are under way."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.pool = Pool(host, int(port), max_connections=1024)

    def send(self, method, path, body=b"", headers=()):
        asked = Asked()
        host = b"test" if method == b"POST" else b"localhost"  # the admin port serves no other name without a key
        own = [] if any(name.lower() == b"host" for name, _ in headers) else [(b"host", host)]
        lines = [*own, *headers, content_length(len(body))]
        asked.call = self.pool.send(encode_request_head(method, path, lines), body, asked)
        return asked

    def get(self, path, headers=()):
        return self.send(b"GET", path, b"", headers)

    def predict(self, text, headers=(), model="m"):
        """Post V1 instances, given as the text inside the brackets."""
        return self.send(b"POST", f"/v1/models/{model}:predict".encode(), b'{"instances":[%b]}' % text, headers)

    def infer(self, body, headers=(), model="m"):
        return self.send(b"POST", f"/v2/models/{model}/infer".encode(), body, headers)


def binary(tensors, **members):
    """A V2 request of binary tensors (name, datatype, shape, data): its body and headers."""
    described = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in tensors
    ]
    head = json.dumps({"inputs": described, **members}, separators=(",", ":")).encode()
    body = b"".join([head, *(data for _, _, _, data in tensors)])
    return body, [(b"Inference-Header-Content-Length", b"%d" % len(head))]


class World:
    """One model server, and sidecars in front of it."""

    until = staticmethod(until)
    binary = staticmethod(binary)
    parsed = staticmethod(parse)

    def __init__(self, tmp_path) -> None:
        self.tmp_path = tmp_path
        self.model = ModelServer()
        self.sidecars: list[Sidecar] = []
        self.clients: list[Client] = []

    def config(self, *, policy=None, parameters=None, **fields):
        # Without calls of the sidecar's own, so that tests of other things can count those of the clients.
        policy = {
            "slo": {"latency": {"p99": "5s"}},
            "models": [{"name": "m", "axis": "First"}],
            "verification": {"mode": "Never"},
            **(policy or {}),
        }
        plain = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "upstream": {"url": f"http://127.0.0.1:{self.model.port}"},
            "shutdown": {"lame": "0s"},
            "parameters": {"*": {"maxBatch": 8, "maxInFlight": 1}} if parameters is None else parameters,
            "policy": policy,
            **fields,
        }
        return json.dumps({name: value for name, value in plain.items() if value is not None})

    async def sidecar(self, text=None, *, path=None, key=None, **fields):
        config = parse(text or self.config(**fields))
        sidecar = Sidecar(config, path, key)
        await sidecar.start()
        self.sidecars.append(sidecar)
        await until(lambda: sidecar.health.reason != UNASKED)
        return sidecar

    def client(self, address):
        client = Client(address)
        self.clients.append(client)
        return client

    async def start(self, **fields):
        """A sidecar and a client of its data port."""
        sidecar = await self.sidecar(**fields)
        return sidecar, self.client(sidecar.data.address)

    @staticmethod
    async def queued(sidecar, rows):
        """Wait until so many rows are queued."""
        await until(lambda: sidecar.batcher.queued_rows == rows)

    async def occupy(self, client):
        """Have one request under way, held by the model: all others wait behind it. Returns it."""
        self.model.holding = True
        held = len(self.model.held)
        first = client.predict(b'"first"')
        await until(lambda: len(self.model.held) > held)
        return first

    async def queue(self, sidecar, *starts):
        """Call functions that send a request, each only when the one before is queued; returns the requests."""
        asked = []
        for start in starts:
            before = sidecar.batcher.queued_rows
            asked.append(start())
            await until(lambda before=before: sidecar.batcher.queued_rows > before)
        return asked

    async def queue_behind(self, sidecar, client, texts, headers=()):
        """Have one request under way, held by the model, and the others wait behind it; returns them all."""
        self.model.holding = True
        first = client.predict(b"0", headers)
        await until(lambda: self.model.held)
        rest = []
        for text in texts:
            before = sidecar.batcher.queued_rows
            rest.append(client.predict(text, headers))
            await until(lambda before=before: sidecar.batcher.queued_rows > before)
        return first, rest


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    log = logging.getLogger("carpool")
    async with AsyncExitStack() as closing:  # all of it, even if one fails: uvloop ends no loop that still listens
        closing.callback(log.setLevel, log.level)  # a configuration that changes sets it, for the whole process
        await world.model.listen()
        closing.push_async_callback(world.model.die)
        yield world
        for sidecar in world.sidecars:
            closing.push_async_callback(sidecar.close)
        for client in world.clients:
            closing.push_async_callback(client.pool.close)


@pytest.fixture
def untuned(monkeypatch):
    """Without the tuner's decisions: what a test has the batcher learn stays."""
    monkeypatch.setattr(control, "INTERVAL", 3600.0)


@pytest.fixture
def wait_until():
    return until
