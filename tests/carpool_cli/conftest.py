from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from carpool_cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from click.testing import Result

# Test folders are no packages: make the fake engine importable.
sys.path.insert(0, str(Path(__file__).parent))

TINY = {"name": "tiny", "source": "synthetic", "executors": 2, "rows": [1, 64], "seconds": [0.0002, 0.0005]}


@contextmanager
def standin(profile: Path, *options: str) -> Iterator[str]:
    """A standin in a process of its own; its base URL."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "carpool_cli", "standin", "--profile", str(profile), "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert " at http://" in line, "the standin did not start"
        yield line.split(" at ")[1].strip()
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(30) == 0


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="session")
def echo(tiny) -> Iterator[str]:
    with standin(tiny) as url:
        yield url


class Up(NamedTuple):
    """A `carpool up` in a process of its own."""

    process: subprocess.Popen[str]
    lines: list[str]
    """What it printed at the start, up to the line to try."""
    data: str
    admin: str


@contextmanager
def running(*options: object) -> Iterator[Up]:
    """`carpool up` on free ports, ended by SIGTERM if it has not ended yet."""
    ports = ("--port", "0", "--admin-port", "0")
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "carpool_cli", "up", *map(str, options), *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        while "  try " not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
            lines.append(line)
        named = dict(line.split(maxsplit=2)[:2] for line in lines)
        yield Up(process, [*lines, line], named["requests"], named["admin"])
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def up(echo) -> Iterator[Up]:
    with running("--upstream", echo, "--slo-p99", "50ms") as started:
        yield started


@pytest.fixture
def launched() -> Callable[..., object]:
    return running


@pytest.fixture
def standing_in() -> Callable[..., object]:
    return standin


@pytest.fixture
def nasty(tiny) -> Callable[..., object]:
    return lambda *options: standin(tiny, *options)


class Guarded:
    """A V1 and V2 server of one model that wants credentials, and echoes. ``asked``: number of requests."""

    def __init__(self) -> None:
        self.asked = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> tuple[int, object]:
                asked = self.rfile.read(int(self.headers.get("content-length", 0)))
                server.asked += 1
                if self.headers["authorization"] != "Bearer x":
                    return 401, {"error": "who are you?"}
                if "/models/m" not in self.path:
                    return 404, {"error": "no such model"}
                if not asked:
                    tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
                    return 200, {"name": "m", "inputs": [tensor], "outputs": [tensor]}
                body = json.loads(asked)
                if "instances" in body:
                    return 200, {"predictions": body["instances"]}
                return 200, {"model_name": "m", "outputs": body["inputs"]}

            def do_POST(self) -> None:
                status, said = self.handle_one()
                text = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST  # noqa: N815 - the base class's name

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def serving() -> Callable[[ThreadingHTTPServer], AbstractContextManager[None]]:
    """Let a server answer, from a thread of its own."""

    @contextmanager
    def answering(http: ThreadingHTTPServer) -> Iterator[None]:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield
        http.shutdown()
        thread.join()
        http.server_close()

    return answering


@pytest.fixture
def guarded(serving: Callable[[ThreadingHTTPServer], AbstractContextManager[None]]) -> Iterator[Guarded]:
    found = Guarded()
    with serving(found.http):
        yield found


@pytest.fixture
def carpool() -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="carpool")
        # A traceback would show here as an exception that is not click's own exit.
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return run


def onnx_file(path, nodes, first="batch"):
    """A model of x, rows by n floats, that gives y of the same shape."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [first, "n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [first, "n"])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


DOUBLE = [helper.make_node("Add", ["x", "x"], ["y"])]
# Subtracts the mean over the rows: the answer to a row depends on the other rows of the batch.
MIXING = [
    helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
    helper.make_node("Sub", ["x", "m"], ["y"]),
]


@pytest.fixture(scope="session")
def double(tmp_path_factory) -> Path:
    return onnx_file(tmp_path_factory.mktemp("models") / "double.onnx", DOUBLE)


@pytest.fixture(scope="session")
def mixing(tmp_path_factory) -> Path:
    return onnx_file(tmp_path_factory.mktemp("models") / "mixing.onnx", MIXING)


@pytest.fixture(scope="session")
def fixed(tmp_path_factory) -> Path:
    return onnx_file(tmp_path_factory.mktemp("models") / "fixed.onnx", DOUBLE, first=1)
