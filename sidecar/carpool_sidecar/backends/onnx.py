"""An ONNX file served in this process: one session, shared by concurrent runs in a pool of threads.

Batches come as the bytes that an upstream would get, merged by the same functions under the same rules. Each is
decoded, run and encoded on its own thread; the runtime releases Python's lock while it computes.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec

from carpool.policy.plain import PolicyError
from carpool_sidecar.backends.arrays import (
    DATATYPES,
    HEADER_LENGTH,
    JSON,
    Invalid,
    Spec,
    TooLong,
    read_v1,
    read_v2,
    text_size,
    write_v1,
    write_v2,
)
from carpool_sidecar.backends.base import Document, Traffic
from carpool_sidecar.backends.dimensions import Dimension, axis_of
from carpool_sidecar.backends.sessions import Model, check
from carpool_sidecar.config.settings import MAX_ANSWER
from carpool_sidecar.http1.messages import find, parts_of
from carpool_sidecar.protocols import route

if TYPE_CHECKING:
    from carpool_sidecar.config.settings import Onnx
    from carpool_sidecar.generation.requests import Endpoint
    from carpool_sidecar.generation.stream import Watcher
    from carpool_sidecar.http1.client.calls import Receiver
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.protocols import common
    from carpool_sidecar.protocols.models import Axis

MAX_THREADS = 64
"""Most batches computed at once; threads start when needed, so the slots in use decide."""

VERSION = "1"


class OnnxBackend:
    """One model, named ``config.model``, version 1."""

    readiness = b"/v2/health/ready"

    def __init__(self, config: Onnx, *, max_answer: int = MAX_ANSWER) -> None:
        """Load the file. ``max_answer``: bytes of the outputs of one answer at most.

        Raises ``PolicyError`` if it can't be served: missing, broken, a type that V2 has no name for, or a missing
        device.
        """
        self.model = config.model
        self._max_text, self._max_answer = config.max_text, max_answer
        self._session = Model(config.path, threads=config.threads, device=config.device)
        inputs, outputs = self._session.inputs, self._session.outputs
        self.inputs = [_spec(value, config.path) for value in inputs]
        self.outputs = [_spec(value, config.path) for value in outputs]
        self._axis = axis_of(self.model, [_first(value) for value in inputs], [_first(value) for value in outputs])
        if self._axis.kind == "First":
            self._session.warm()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="onnx")
        self._log = logging.getLogger("carpool.onnx")
        if self._session.fallback:
            self._log.warning("the model is computed on the CPU", extra={"detail": self._session.fallback})
        if self._axis.kind == "None":
            self._log.warning(
                "the model is served without batching", extra={"model": self.model, "detail": self._axis.reason}
            )

    @staticmethod
    def check(config: Onnx) -> None:
        """Check what can be checked before the file is loaded; raises ``PolicyError``."""
        check(config.path)

    def send(
        self,
        target: bytes,
        headers: Headers,
        body: Body,
        receiver: Receiver,
        *,
        idempotent: bool = True,  # noqa: ARG002 - nothing is computed twice here
        merged: bool = False,
    ) -> Run:
        """Compute on a thread of the pool."""
        run = Run(receiver)
        future = asyncio.get_running_loop().run_in_executor(self._threads, self.serve, target, headers, body, merged)
        future.add_done_callback(run.done)
        return run

    def forward(self, exchange: Exchange, *, inference: bool = False) -> Local:  # noqa: ARG002 - the port's signature
        """Answer a request that is no inference."""
        return Local(self, exchange)

    def generate(self, exchange: Exchange, endpoint: Endpoint, watcher: Watcher) -> Local:  # noqa: ARG002 - the port's signature
        """Answer like any other request: no language model is served here."""
        return self.forward(exchange)

    def passage(self, exchange: Exchange) -> None:
        """Return None: only HTTP/1.1 is supported."""

    @property
    def streams(self) -> bool:
        """Return False: a body has to be read completely."""
        return False

    def axis(self, model: str) -> Axis | None:
        """Return the batch axis from the file: First if nothing in the file contradicts it."""
        return self._axis if model == self.model else None

    @property
    def traffic(self) -> Traffic:
        """Return no counts: health requests are always answered."""
        return Traffic(0, 0)

    async def ask(self, target: bytes) -> Document:
        """Answer a request for a document, as an upstream would."""
        return self.document(target)

    async def connect(self) -> Document:
        """Return that the model is there."""
        return Document(0, foreign=True)

    async def close(self) -> None:
        """Start no more runs. A run under way can't be stopped and may never end, so it is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def serve(self, target: bytes, headers: Headers, body: Body, merged: bool = False) -> tuple[int, Headers, bytes]:
        """Answer one inference request; on a thread."""
        endpoint = self._endpoint(target)
        if endpoint is None:
            return 404, [JSON], _error(f"{target.decode('latin-1')} names no model here; there is {self.model!r}")
        encoding = find(headers, b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            return 415, [JSON], _error("content-encoding: bodies are not decoded here: send them as they are")
        try:
            data = b"".join(parts_of(body))
            size = text_size(find(headers, HEADER_LENGTH) if endpoint.protocol == "v2" else None, data)
            if size > self._max_text:
                raise TooLong(  # noqa: TRY301 - one place answers
                    f"body: {size} bytes of JSON; onnx.maxText is {self._max_text}: raise it, or send binary tensors"
                )
            if endpoint.protocol == "v1":
                arrays, columns = read_v1(data, self.inputs)
                return 200, *write_v1(
                    self._run(arrays, [spec.name for spec in self.outputs], pad=merged), columns=columns
                )
            length = find(headers, HEADER_LENGTH)
            arrays, asked = read_v2(length, data, self.inputs, self.outputs, max_text=self._max_text)
            names = [name for name, _ in asked.outputs]
            return 200, *write_v2(self.model, self._run(arrays, names, pad=merged), self.outputs, asked)
        except Invalid as error:
            return error.status, [JSON], _error(str(error))
        except Exception as error:  # noqa: BLE001 - the runtime may raise anything, and the caller must get an error
            # The runtime's own message: the cause may be one item, or the batch's size.
            self._log.warning("the model could not compute a batch", extra={"error": str(error)})
            return 500, [JSON], _error(f"{type(error).__name__}: {error}")

    def _endpoint(self, target: bytes) -> common.Endpoint | None:
        """Return the endpoint of inference with this model that a target names, if it does."""
        endpoint = route(target)
        served = endpoint is not None and endpoint.model == self.model and endpoint.version in {"", VERSION}
        return endpoint if served else None

    def methods(self, target: bytes) -> tuple[bytes, ...]:
        """Return the methods that a target can be asked with; none if it is not served here."""
        if self._endpoint(target) is not None:
            return (b"POST",)
        return (b"GET", b"HEAD") if _path(target) in self._documents() else ()

    def document(self, target: bytes) -> Document:
        """Answer a request about the server or its model."""
        path = _path(target)
        described = self._documents().get(path)
        if described is None:
            return Document(404, _error(f"{path} is not served here; the model is {self.model!r}"))
        return Document(200, msgspec.json.encode(described))

    def _documents(self) -> dict[str, dict[str, Any]]:
        """Return what is described, by path; see `_path` for its form."""
        model, quoted, ready = self.model, quote(self.model, safe=""), {"name": self.model, "ready": True}
        metadata = {
            "name": model,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [spec._asdict() for spec in self.inputs],
            "outputs": [spec._asdict() for spec in self.outputs],
        }
        return {
            "/v1/models": {"models": [model]},
            f"/v1/models/{quoted}": ready,
            "/v2": {
                "name": "carpool",
                "version": version("carpool-serving"),
                "extensions": ["binary_tensor_data"],
            },
            "/v2/health/live": {"live": True},
            "/v2/health/ready": {"ready": True},
            f"/v2/models/{quoted}": metadata,
            f"/v2/models/{quoted}/versions/{VERSION}": metadata,
            f"/v2/models/{quoted}/ready": ready,
            f"/v2/models/{quoted}/versions/{VERSION}/ready": ready,
        }

    def _run(self, arrays: dict[str, Any], names: list[str], *, pad: bool) -> dict[str, Any]:
        outputs = self._session.run(names, arrays, pad=pad)
        size = sum(output.nbytes for output in outputs)
        if size > self._max_answer:
            raise TooLong(
                f"the outputs have {size} bytes; bodies.maxAnswer is {self._max_answer}: raise it, or send fewer rows"
            )
        return dict(zip(names, outputs, strict=True))


class Run:
    """One batch on its thread. If cancelled, it is still computed to its end, but the receiver is not called."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver

    def cancel(self) -> None:
        """Do not call the receiver."""
        self._receiver = None

    def done(self, future: asyncio.Future[tuple[int, Headers, bytes]]) -> None:
        """Call the receiver; on the loop's thread."""
        if self._receiver is not None and not future.cancelled():
            self._receiver.answered(*future.result())


class Local:
    """An exchange that is answered at once."""

    __slots__ = ("_backend", "_exchange")

    def __init__(self, backend: OnnxBackend, exchange: Exchange) -> None:
        self._backend = backend
        self._exchange = exchange

    def begin(self) -> None:
        """Buffer the body, as is the default."""

    def request(self) -> None:
        """Answer."""
        exchange = self._exchange
        methods = self._backend.methods(exchange.target)
        if methods and exchange.method not in methods:
            allowed = b", ".join(methods)
            text = f"{exchange.path.decode('latin-1')} takes {allowed.decode()} only"
            exchange.fail(405, "method", text, [(b"allow", allowed)])
            return
        document = self._backend.document(exchange.target)
        exchange.respond(document.status, [JSON], document.body)

    def cancel(self) -> None:
        """Do nothing: there is no work to cancel."""


def _spec(value: Any, path: str) -> Spec:  # noqa: ANN401 - the runtime publishes no types
    datatype = DATATYPES.get(value.type)
    if datatype is None:
        raise PolicyError("onnx.path", f"{value.name!r} of {path} is a {value.type}, which is not served")
    return Spec(value.name, datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _first(value: Any) -> Dimension:  # noqa: ANN401 - the runtime publishes no types
    if not value.shape:
        return Dimension(value.name, None, None, scalar=True)
    size = value.shape[0]
    return Dimension(value.name, size, None) if isinstance(size, int) else Dimension(value.name, None, size)


def _path(target: bytes) -> str:
    """Return a target's path in one form: clients may write `a+b` as `a%2Bb`, and the resolver does.

    Segment by segment, so that an encoded `/` stays part of a name.
    """
    path = target.partition(b"?")[0].decode("latin-1")
    return "/".join(quote(unquote(segment), safe="") for segment in path.split("/"))


def _error(text: str) -> bytes:
    return msgspec.json.encode({"error": text})
