"""Models that run batches, one call at a time per thread: an ONNX file in this process, or a V1 or V2 server."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import click
import msgspec
import numpy as np

from carpool.policy.plain import PolicyError
from carpool_cli.answers import NO_ANSWER, UNREADABLE, BadFile
from carpool_cli.load import servers, tensors
from carpool_cli.load.servers import InputSpec, Request
from carpool_cli.load.tensors import Malformed
from carpool_cli.options import Address, need
from carpool_cli.profiling.arrays import DTYPES, Arrays, from_tensors, to_tensors
from carpool_sidecar.backends.arrays import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from carpool_sidecar.http1.messages import Headers

FIXES = {**servers.ACCESS, 404: "which does not have this model: check --model"}
"""Statuses that no other try would change, and what to do."""


class TargetError(Exception):
    """A batch without an answer. ``input_fault``: the model rejected this input, so other rows may succeed.

    ``record``: what is stored if the batch is given up; ``retry_after`` in seconds, from the server. ``no_answer``: it
    gave none, which the input may have caused, too. ``final``: every other request would get the same answer. These two
    name the server.
    """

    def __init__(
        self,
        message: str,
        *,
        input_fault: bool,
        record: bytes = b"",
        retry_after: float = 0.0,
        no_answer: bool = False,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.input_fault = input_fault
        self.record = record
        self.retry_after = retry_after
        self.no_answer = no_answer
        self.final = final


class Target(Protocol):
    """A model. ``prepare`` encodes a batch, so that the returned call can be timed alone."""

    @property
    def name(self) -> str:
        """Its name for users."""

    @property
    def inputs(self) -> list[InputSpec]:
        """Its inputs."""

    def prepare(self, batch: Arrays) -> Callable[[], Arrays]:
        """Return the call that runs a batch and returns its outputs; it raises ``TargetError``."""

    def close(self) -> None:
        """Close connections."""


class OnnxTarget:
    """A session of onnxruntime, on CUDA where that is present.

    ``dims``: sizes of dimensions that the model leaves open, by name.

    Raises ``BadFile`` for a file that does not load, and ``click.ClickException`` for a fixed batch axis or an unknown
    dimension.
    """

    def __init__(self, path: Path, threads: int, dims: dict[str, int]) -> None:
        need("onnxruntime", "onnx")
        from carpool_sidecar.backends import sessions  # noqa: PLC0415 - onnxruntime is an extra

        try:
            self._session = sessions.Model(path, threads=threads)
        except PolicyError as error:
            raise BadFile(str(error).removeprefix(f"{error.field}: ")) from None
        if self._session.fallback:
            click.echo(f"computed on the CPU: {self._session.fallback}", err=True)
        self.name = path.name
        self.inputs = [_spec(path, node, dims) for node in self._session.inputs]
        _check_dims(path, dims, [dim for node in self._session.inputs for dim in node.shape[1:]])
        self._outputs = [node.name for node in self._session.outputs]
        self.device = "gpu" if self._session.on_gpu else "cpu"

    def prepare(self, batch: Arrays) -> Callable[[], Arrays]:
        """Return the call."""

        def run() -> Arrays:
            try:
                values = self._session.run(None, batch)
            except Exception as error:  # noqa: BLE001 - onnxruntime's errors share no base class
                raise TargetError(_one_line(error), input_fault=True) from None
            return dict(zip(self._outputs, values, strict=True))

        return run

    def abandon(self) -> None:
        """Nothing to do: a run can't be cancelled."""

    def close(self) -> None:
        """Nothing to close."""


class Connections:
    """A server's address, with a connection per calling thread. ``timeout`` in seconds, of one request."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def post(
        self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a body; return the answer and its body.

        Raises ``TargetError`` if there is none.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=self._timeout)
            self._local.connection = connection
            self._connections.append(connection)
        try:
            connection.request("POST", path, body, {name.decode(): value.decode("latin-1") for name, value in headers})
            with connection.getresponse() as answer:
                return answer, answer.read()
        except NO_ANSWER as error:
            connection.close()  # the next request opens it again
            raise TargetError(
                f"no answer from {self._address}: {error or type(error).__name__}", input_fault=False, no_answer=True
            ) from None

    def abandon(self) -> None:
        """End the running calls: they get no answer."""
        for connection in list(self._connections):
            # Shut down, not closed: its thread reads from it, and is woken by that.
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close each thread's connection."""
        for connection in self._connections:
            connection.close()


class ServerTarget:
    """A model behind HTTP. V1 takes one input, whose name is not sent, or columns as objects."""

    def __init__(
        self,
        address: Address,
        model: str,
        protocol: servers.Protocol,
        inputs: list[InputSpec],
        timeout: float,
        headers: Headers = (),
    ) -> None:
        self.name = f"{model} at {address}"
        self.inputs = inputs
        self._address = address
        self._protocol = protocol
        self._path = servers.target(address, protocol, model)
        self._headers = headers
        self._server = Connections(address, timeout)
        self.abandon = self._server.abandon

    def prepare(self, batch: Arrays) -> Callable[[], Arrays]:
        """Return the call, without encoding and decoding: its time is the server's and the network's."""
        if self._protocol == "v1" and len(batch) > 1:
            columns = {name: array.tolist() for name, array in batch.items()}
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            request = Request(msgspec.json.encode({"instances": rows}), [(b"content-type", b"application/json")])
        else:
            request = servers.request_of(self._protocol, to_tensors(batch))
        return lambda: self._decoded(*self.post(request))

    def post(self, request: Request) -> tuple[bytes | None, bytes]:
        """Send a body; return the answer's ``tensors.HEADER_LENGTH`` and body.

        Raises ``TargetError``.
        """
        answer, body = self._server.post(self._path, request.body, [*request.headers, *self._headers])
        if answer.status != 200:
            said = body[:200].decode("utf-8", "replace")
            # Most 4xx, and 500, depend on this input; 429, 503 and the like on the moment.
            fault = answer.status in {400, 413, 415, 422, 500}
            hint = FIXES.get(answer.status, "")
            raise TargetError(
                f"status {answer.status}{hint and f' of {self.name}, {hint}'}: {said}",
                input_fault=fault,
                final=bool(hint),
            )
        length = answer.headers.get(tensors.HEADER_LENGTH.decode())
        return (length.encode() if length is not None else None), body

    def close(self) -> None:
        """Close each thread's connection."""
        self._server.close()

    def _decoded(self, header_length: bytes | None, body: bytes) -> Arrays:
        try:
            if self._protocol != "v1":
                return from_tensors(tensors.decode_answer(body, header_length).tensors)
            rows = msgspec.json.decode(body, type=_Predictions).predictions
            try:
                array = np.array(rows)
            except ValueError:  # ragged
                array = np.empty(len(rows), object)
                array[:] = rows
        except (Malformed, *UNREADABLE) as error:
            raise TargetError(f"the answer is no {self._protocol} answer: {error}", input_fault=False) from None
        return {"predictions": array}


class _Predictions(msgspec.Struct):
    predictions: list[Any]


def of_server(
    address: Address,
    model: str,
    protocol: servers.Protocol,
    row: tuple[int, ...] | None,
    given: Arrays | None,
    timeout: float,
    headers: Headers = (),
) -> ServerTarget:
    """Return a server's model, with its inputs as given, else of the given shape, else from its metadata."""
    if given is not None:
        datatypes = {tensor.name: tensor.datatype for tensor in to_tensors(given)}
        specs = [InputSpec(name, datatypes[name], array.shape[1:]) for name, array in given.items()]
    elif protocol == "v1" or row is not None:
        specs = [InputSpec("input", "FP32", row or (servers.GUESSED_DIM,))]
    else:
        specs = servers.inputs_of(address, model, timeout, headers)
    return ServerTarget(address, model, protocol, specs, timeout, headers)


def check_names(target: Target, given: Arrays) -> Arrays:
    """Return the given inputs, cast to the model's types.

    Raises ``click.ClickException`` if names are missing.
    """
    missing = [spec.name for spec in target.inputs if spec.name not in given]
    if missing:
        raise click.ClickException(f"{target.name} takes {missing[0]!r}; the inputs given are {', '.join(given)}")
    return {
        spec.name: given[spec.name].astype(DTYPES[spec.datatype], copy=False)
        for spec in target.inputs
        if spec.datatype in DTYPES
    }


def _spec(path: Path, node: Any, dims: dict[str, int]) -> InputSpec:  # noqa: ANN401 - onnxruntime has no types
    shape: Sequence[int | str | None] = node.shape
    if not shape or isinstance(shape[0], int):
        raise click.ClickException(
            f"{path}: input {node.name!r} has the fixed shape {list(shape)}, so it can't be batched. Export it again "
            f"with a dynamic first axis: torch.onnx.export(..., dynamic_axes={{{node.name!r}: {{0: 'batch'}}}})"
        )
    if node.type not in DATATYPES:
        raise click.ClickException(f"{path}: input {node.name!r} is a {node.type}; only plain tensors can be batched")
    row = tuple(dim if isinstance(dim, int) else dims.get(str(dim), servers.GUESSED_DIM) for dim in shape[1:])
    return InputSpec(node.name, DATATYPES[node.type], row)


def _check_dims(path: Path, dims: dict[str, int], known: Sequence[int | str | None]) -> None:
    """Reject the size of a dimension that is not open in any of the inputs."""
    there = list(dict.fromkeys(dim for dim in known if isinstance(dim, str)))
    for name in dims:
        if name not in there:
            say = f"name one of {', '.join(there)}" if there else "leave --dim out: it has none but the rows"
            raise click.ClickException(f"{path} has no open dimension {name!r}: {say}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
