"""A model server that answers with an echo after an accelerator's latency: it sleeps instead of computing.

Speaks KServe V1 and Open Inference V2 (JSON and binary tensors). Its answer is a function of the request, so a proxy in
front of it can be checked value by value. Its latency is that of a profile, so a proxy can be measured against a device
that is not there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import msgspec
from msgspec import Raw, Struct, field

from carpool_cli.load import tensors
from carpool_sidecar.http1.messages import Headers, find

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from carpool.learning.latency_model import ServiceTime
    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange

_JSON = (b"content-type", b"application/json")


class Nastiness(Struct, frozen=True):
    """Injected faults, for tests of proxies in front of it. Times in seconds since the start."""

    poison: str | float | None = None
    """A request with this value anywhere in its rows fails as a whole, with 500."""
    wrong_rows: bool = False
    """Answers to more than one row lack the last row."""
    cold: float = 0.0
    """The first batch of each size takes this much longer."""
    ready_at: float = 0.0
    """Not ready before: 503 for everything but liveness."""
    outages: tuple[tuple[float, float], ...] = ()
    """(from, to): 503 for everything but liveness."""

    def is_down(self, now: float) -> bool:
        """Return whether the model is unavailable at ``now``."""
        return now < self.ready_at or any(start <= now < stop for start, stop in self.outages)


def single_batch(curve: ServiceTime, rows: int, rng: Random) -> float:
    """Draw the seconds of one batch: gamma around the mean with the curve's noise, the mean itself without noise."""
    mean = curve.time(rows)
    if curve.noise <= 0 or mean <= 0:
        return mean
    shape = curve.noise**-2
    return rng.gammavariate(shape, mean / shape)


class Device:
    """Takes the profile's latency for each batch, with the profile's server concurrency, first come, first served.

    Each concurrent batch has a thread that sleeps: event loops wake at whole milliseconds, threads within 0.1 ms.
    """

    def __init__(
        self, curve: ServiceTime, rng: Random, cold: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.batches: Counter[int] = Counter()
        self.busy_seconds = 0.0
        """Wall time with at least one batch in service or waiting for it."""
        self.most_in_flight = 0
        self._curve = curve
        self._rng = rng
        self._cold = cold
        self._sleep = sleep
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(curve.executors, thread_name_prefix="executor")
        self._in_flight = 0
        self._busy_since = 0.0

    def serve(self, rows: int, done: Callable[[], None]) -> None:
        """Call ``done`` on the loop once the batch has been served."""
        seconds = single_batch(self._curve, rows, self._rng)
        if not self.batches[rows]:
            seconds += self._cold
        self.batches[rows] += 1
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self._threads.submit(self._run, seconds, done)

    def close(self) -> None:
        """Let batches in service end; drop waiting ones."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, seconds: float, done: Callable[[], None]) -> None:
        self._sleep(seconds)
        self._loop.call_soon_threadsafe(self._served, done)

    def _served(self, done: Callable[[], None]) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.busy_seconds += time.monotonic() - self._busy_since
        done()


class _V1Request(Struct):
    instances: list[Raw]


_v1_requests = msgspec.json.Decoder(_V1Request)


class Answer(Struct):
    """An answer that is ready before its time has passed."""

    rows: int
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [_JSON])


class Failure(Exception):  # noqa: N818 - an answer, not a fault of this program
    """An error answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Standin:
    """The application: routes requests, and answers after the device's latency.

    ``clock`` returns seconds since the start of the server.
    """

    def __init__(
        self, model: str, device: Device, nastiness: Nastiness, max_batch: int, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._device = device
        self._nastiness = nastiness
        self._max_batch = max_batch
        self._clock = clock
        self._requests = 0

    def head(self, exchange: Exchange) -> None:
        """Every body is buffered."""

    def sent(self, exchange: Exchange) -> None:
        """No state is kept per exchange."""

    def disconnected(self, exchange: Exchange) -> None:
        """Continue computing, as real servers do."""

    def refused(self, refusal: HttpError) -> None:
        """Nothing to do: the server has answered."""

    def request(self, exchange: Exchange) -> None:
        """Answer a request: inference after its service time, everything else at once."""
        try:
            answer = self._answer(exchange)
        except Failure as failure:
            body = msgspec.json.encode({"error": str(failure)})
            exchange.respond(failure.status, [_JSON], body)
            return
        if answer.rows:
            self._requests += 1
            self._device.serve(answer.rows, lambda: exchange.respond(200, answer.headers, answer.body))
        else:
            exchange.respond(200, answer.headers, answer.body)

    def _answer(self, exchange: Exchange) -> Answer:
        # Clients write a name in a path percent-encoded, and the option may have it like that, too.
        method, path, name = exchange.method, unquote(exchange.path.decode("latin-1")), unquote(self._model)
        steps = path.strip("/").split("/")
        if path == "/v2/health/live":
            return _plain({"live": True})
        if path == "/stats":
            return _plain(self.stats())
        if self._nastiness.is_down(self._clock()):
            raise Failure(503, "the model is not ready")
        if path == f"/v1/models/{name}:predict":
            return self._predict(method, bytes(exchange.body))
        if steps[:2] == ["v2", "models"] and len(steps) > 2 and steps[2] == name:
            rest = steps[5:] if steps[3:4] == ["versions"] else steps[3:]
            if rest == ["infer"]:
                return self._infer(method, exchange.headers, bytes(exchange.body))
            plain: dict[tuple[str, ...], Any] = {
                (): self._metadata(),
                ("ready",): {"ready": True},
                ("config",): {"name": self._model, "max_batch_size": self._max_batch},
            }
            if (found := plain.get(tuple(rest))) is not None:
                return _plain(found)
        plain_by_path: dict[str, Any] = {
            "/v2": {"name": "carpool-standin", "version": "1", "extensions": ["binary_tensor_data"]},
            "/v2/health/ready": {"ready": True},
            "/v1/models": {"models": [self._model]},
            f"/v1/models/{name}": {"name": self._model, "ready": True},
        }
        if path in plain_by_path:
            return _plain(plain_by_path[path])
        raise Failure(404, f"nothing at {path}; this serves one model, {self._model!r}")

    def stats(self) -> dict[str, Any]:
        """Return the device's counts so far."""
        return {
            "requests": self._requests,
            "rows": sum(rows * count for rows, count in self._device.batches.items()),
            "batches": {str(rows): count for rows, count in sorted(self._device.batches.items())},
            "busySeconds": self._device.busy_seconds,
            "mostInFlight": self._device.most_in_flight,
        }

    def _metadata(self) -> dict[str, Any]:
        tensor = {"name": "input", "datatype": "FP32", "shape": [-1, -1]}
        return {"name": self._model, "versions": ["1"], "platform": "standin", "inputs": [tensor], "outputs": [tensor]}

    def _predict(self, method: bytes, body: bytes) -> Answer:
        _must_post(method)
        try:
            rows = _v1_requests.decode(body).instances
        except msgspec.DecodeError as error:
            raise Failure(400, f"not a V1 request: {error}") from None
        self._check_rows(len(rows))
        if self._nastiness.poison is not None and _holds(msgspec.json.decode(body), self._nastiness.poison):
            raise Failure(500, "the model failed on this input")
        kept = rows[: self._kept(len(rows))]
        return Answer(len(rows), b'{"predictions":[%b]}' % b",".join(kept))

    def _infer(self, method: bytes, headers: Headers, body: bytes) -> Answer:
        _must_post(method)
        try:
            request = tensors.decode_request(body, find(headers, tensors.HEADER_LENGTH))
            rows = {tensor.shape[0] for tensor in request.tensors}
            if len(rows) != 1:
                _refuse(f"inputs have {sorted(rows)} rows; all must have the same, and there must be one")
            (count,) = rows
            self._check_rows(count)
            if self._nastiness.poison is not None and any(
                _holds(tensor.values(), self._nastiness.poison) for tensor in request.tensors
            ):
                raise Failure(500, "the model failed on this input")
            by_name = {tensor.name: tensor for tensor in request.tensors}
            wanted = request.wanted or tuple((name, request.binary_wanted) for name in by_name)
            if unknown := [name for name, _ in wanted if name not in by_name]:
                _refuse(f"no output {unknown[0]!r}; outputs are named as the inputs")
            kept = self._kept(count)
            outputs = [(_first_rows(by_name[name], kept), binary) for name, binary in wanted]
            fields = {"model_name": self._model, "model_version": "1"} | ({"id": request.id} if request.id else {})
            answer, header_length = tensors.encode(fields, "outputs", outputs)
        except tensors.Malformed as error:
            raise Failure(400, str(error)) from None
        if header_length is None:
            return Answer(count, answer)
        binary_type = (b"content-type", b"application/octet-stream")
        return Answer(count, answer, [binary_type, (tensors.HEADER_LENGTH, b"%d" % header_length)])

    def _check_rows(self, rows: int) -> None:
        if not 0 < rows <= self._max_batch:
            raise Failure(400, f"{rows} rows; this model takes 1 to {self._max_batch}")

    def _kept(self, rows: int) -> int:
        return rows - 1 if self._nastiness.wrong_rows and rows > 1 else rows


def _plain(value: object) -> Answer:
    return Answer(0, msgspec.json.encode(value))


def _refuse(message: str) -> NoReturn:
    raise Failure(400, message)


def _must_post(method: bytes) -> None:
    if method != b"POST":
        raise Failure(405, "inference is POST")


def _first_rows(tensor: tensors.Tensor, rows: int) -> tensors.Tensor:
    """Return the tensor's first rows; the original tensor, verbatim, if these are all rows."""
    if rows == tensor.shape[0]:
        return tensor
    kept = tensor.values()[: rows * len(tensor.values()) // tensor.shape[0]]
    return tensors.Tensor(tensor.name, tensor.datatype, (rows, *tensor.shape[1:]), json=msgspec.json.encode(kept))


def _holds(value: object, poison: str | float) -> bool:
    if isinstance(value, dict):
        return any(_holds(element, poison) for element in value.values())
    if isinstance(value, list):
        return any(_holds(element, poison) for element in value)
    return value == poison
