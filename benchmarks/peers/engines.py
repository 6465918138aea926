"""The engines: how each is started with its settings, called, and its answers read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SERVERS = Path(__file__).parent / "servers"
POISON = -666.0
"""As in servers/profiled_model.py, which no module of ours imports: it is the engines'."""

Row = list[float]
Settings = dict[str, Any]


class Place(NamedTuple):
    """Where an engine runs: its environment's `bin`, a folder of its own, free ports of 127.0.0.1."""

    bin: Path
    folder: Path
    profile: Path
    port: int
    others: tuple[int, int]

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.bin / "python")


class Form(NamedTuple):
    """How a request for one row and its answer are written in JSON. ``decode`` raises for what is no answer."""

    encode: Callable[[Row], Any]
    decode: Callable[[Any], Any]


def _only(values: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever it holds
    (one,) = values
    return one


ROW = Form(lambda row: {"row": row}, lambda answer: answer["row"])
ROWS = Form(lambda row: {"rows": [row]}, _only)
V1 = Form(lambda row: {"instances": [row]}, lambda answer: _only(answer["predictions"]))
V2 = Form(
    lambda row: {"inputs": [{"name": "row", "shape": [1, len(row)], "datatype": "FP32", "data": row}]},
    lambda answer: _only(answer["outputs"])["data"],
)


@dataclass(frozen=True)
class Engine:
    """An engine. ``default``: its behaviour without settings; ``grid``: settings that are also compared.

    ``prepare`` writes the files it needs and returns its commands, in the order they are started.
    """

    name: str
    title: str
    form: Form
    target: str
    default: str
    grid: Sequence[Settings]
    prepare: Callable[[Place, Settings], list[list[str]]]
    env: tuple[tuple[str, str], ...] = ()

    def encode(self, row: Row) -> bytes:
        """Return a request's body."""
        return msgspec.json.encode(self.form.encode(row))

    def echoes(self, row: Row, body: bytes) -> bool:
        """Say whether an answer gives back the row that was sent."""
        try:
            return bool(self.form.decode(msgspec.json.decode(body)) == row)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return False


def row_of(index: int, *, poisoned: bool = False) -> Row:
    """Return the row of a request: its first number identifies it, exact in FP32 up to 2**24."""
    return [float(index), POISON if poisoned else 0.5, *(0.125 * step for step in range(6))]


def grid(**choices: Sequence[Any]) -> list[Settings]:
    """Return every combination."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _carpool(place: Place, settings: Settings) -> list[list[str]]:
    carpool = [sys.executable, "-m", "carpool_cli"]
    model = ["--profile", str(place.profile), "--port", str(place.others[0]), "--poison", str(POISON)]
    return [
        [*carpool, "standin", *model],
        [
            *[*carpool, "up", "--upstream", f"http://127.0.0.1:{place.others[0]}", "--slo-p99", settings["slo_p99"]],
            *["--port", str(place.port), "--admin-port", str(place.others[1]), "--plain"],
        ],
    ]


def _mosec(place: Place, _: Settings) -> list[list[str]]:
    ipc = ["--path", str(place.folder / "ipc")]
    script = str(SERVERS / "mosec_server.py")
    return [[place.python, script, "--address", "127.0.0.1", "--port", str(place.port), "--log-level", "warning", *ipc]]


def _litserve(place: Place, _: Settings) -> list[list[str]]:
    return [[place.python, str(SERVERS / "litserve_server.py"), str(place.port)]]


def _bentoml(place: Place, _: Settings) -> list[list[str]]:
    where = ["--host", "127.0.0.1", "--port", str(place.port), "--working-dir", str(SERVERS)]
    return [[str(place.bin / "bentoml"), "serve", "bentoml_server:Echo", *where]]


def _mlserver(place: Place, settings: Settings) -> list[list[str]]:
    server = {
        "host": "127.0.0.1",
        "http_port": place.port,
        "grpc_port": place.others[0],
        "metrics_port": place.others[1],
        "metrics_dir": str(place.folder),
        "environments_dir": str(place.folder),
        "debug": False,
    }
    model = {"name": "echo", "implementation": "mlserver_server.Echo", **settings}
    for name, content in (("settings.json", server), ("model-settings.json", model)):
        (place.folder / name).write_bytes(msgspec.json.encode(content))
    return [[str(place.bin / "mlserver"), "start", str(place.folder)]]


def _ray(place: Place, _: Settings) -> list[list[str]]:
    return [[place.python, str(SERVERS / "ray_server.py"), str(place.port)]]


def _triton(place: Place, _: Settings) -> list[list[str]]:
    return [[place.python, str(SERVERS / "triton_server.py"), str(place.port), *map(str, place.others)]]


BATCHES = (8, 16, 32)

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "carpool",
            "Carpool, given a p99",
            V1,
            "/v1/models/standin:predict",
            "`carpool up --upstream ... --slo-p99 ...` before `carpool standin`; nothing else is set",
            [],
            _carpool,
        ),
        Engine(
            "mosec",
            "mosec",
            ROW,
            "/inference",
            "`append_worker(Worker)`: batches of one",
            grid(max_batch_size=BATCHES, max_wait_time=(1, 10)),
            _mosec,
        ),
        Engine(
            "litserve",
            "LitServe",
            ROW,
            "/predict",
            "`LitServer(LitAPI())`: batches of one",
            [
                *grid(max_batch_size=BATCHES, batch_timeout=(0.0, 0.01)),
                {"max_batch_size": 16, "batch_timeout": 0.0, "fast_queue": True},
            ],
            _litserve,
        ),
        Engine(
            "bentoml",
            "BentoML",
            ROWS,
            "/predict",
            "`@bentoml.api(batchable=True)`: batches up to 100, 60 s",
            grid(max_batch_size=BATCHES, max_latency_ms=(50, 100)),
            _bentoml,
            (("BENTOML_DO_NOT_TRACK", "True"),),
        ),
        Engine(
            "mlserver",
            "MLServer",
            V2,
            "/v2/models/echo/infer",
            "`max_batch_size` and `max_batch_time` unset: no batches",
            grid(max_batch_size=BATCHES, max_batch_time=(0.001, 0.01)),
            _mlserver,
        ),
        Engine(
            "ray",
            "Ray Serve",
            ROW,
            "/",
            "`@serve.batch`: batches up to 10, 10 ms; 5 requests in a replica at most",
            grid(max_ongoing_requests=(512,), max_batch_size=BATCHES, batch_wait_timeout_s=(0.0, 0.01)),
            _ray,
            (("RAY_USAGE_STATS_ENABLED", "0"),),
        ),
        Engine(
            "triton",
            "Triton (pytriton)",
            V2,
            "/v2/models/echo/infer",
            "pytriton's `ModelConfig()`: batches up to 4, no delay",
            grid(max_batch_size=BATCHES, max_queue_delay_microseconds=(0, 5000)),
            _triton,
        ),
    )
}
