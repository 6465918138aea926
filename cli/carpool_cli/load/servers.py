"""Requests to a V1 or V2 server, for a client that only sends and receives."""

from __future__ import annotations

import math
import re
import socket
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import click
import msgspec
from msgspec import Struct

from carpool_cli.answers import NO_ANSWER, UNREADABLE, get
from carpool_cli.load import tensors
from carpool_cli.load.tensors import CODES, Malformed, Tensor
from carpool_cli.options import in_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from carpool_cli.options import Address
    from carpool_sidecar.http1.messages import Headers

Protocol: TypeAlias = Literal["v1", "v2", "v2-binary"]
PROTOCOLS: tuple[Protocol, ...] = ("v1", "v2", "v2-binary")

DATATYPES = (*CODES, "BYTES")
"""Datatypes whose values can be generated."""

GUESSED_DIM = 8
"""Default size of a trailing dimension that the model leaves open."""


class InputSpec(NamedTuple):
    """An input of a model: ``row`` is the shape of one row, without the batch axis."""

    name: str
    datatype: str
    row: tuple[int, ...]


class Request(Struct, frozen=True):
    """A body to send, with its header fields."""

    body: bytes
    headers: list[tuple[bytes, bytes]]


class _Described(Struct):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(Struct):
    inputs: list[_Described]


def target(address: Address, protocol: Protocol, model: str) -> str:
    """Return the request target for inference."""
    name = in_path(model)
    return f"{address.path}/v1/models/{name}:predict" if protocol == "v1" else f"{address.path}/v2/models/{name}/infer"


class Goal(NamedTuple):
    """The destination of requests: ``target`` is the request target, on ``server``."""

    server: Address
    """The base URL, for metadata."""
    target: str
    protocol: Protocol
    model: str
    known: bool
    """Whether the target is one of V1 or V2, so that bodies can be generated for it."""

    @property
    def url(self) -> str:
        """The whole URL, for users."""
        return f"{self.server._replace(path='')}{self.target}"


_V1 = re.compile(r"(?P<prefix>.*)/v1/models/(?P<model>[^/]+):predict")
_V2 = re.compile(r"(?P<prefix>.*)/v2/models/(?P<model>[^/]+(?:/versions/[^/]+)?)/infer")


def goal(server: Address, model: str | None, protocol: Protocol | None) -> Goal:
    """Return the destination: the URL's path unchanged, or, without one or with a ``model``, a path below it.

    Raises ``click.UsageError`` if the path belongs to another protocol than ``protocol``.
    """
    if model is not None or not server.path:
        model, protocol = model or "standin", protocol or "v1"
        return Goal(server, target(server, protocol, model), protocol, model, known=True)
    for pattern, spoken in ((_V1, ("v1",)), (_V2, ("v2", "v2-binary"))):
        if (found := pattern.fullmatch(server.path)) is not None:
            if protocol is not None and protocol not in spoken:
                raise click.UsageError(f"{server} is a path of {spoken[0]}: leave --protocol {protocol} out")
            chosen: Protocol = protocol or ("v1" if spoken == ("v1",) else "v2")
            return Goal(server._replace(path=found["prefix"]), server.path, chosen, found["model"], known=True)
    return Goal(server, server.path, protocol or "v1", "", known=False)


def check_reachable(address: Address, timeout: float) -> None:
    """Open one connection, so that a wrong address gives one error and not one per request.

    Raises ``click.ClickException`` naming the host and the fix.
    """
    try:
        socket.create_connection((address.host, address.port), timeout).close()
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise click.ClickException(
            f"the host {address.host!r} of {address} is not known ({why}): check its name, or write its IP address"
        ) from None
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or error
        raise click.ClickException(
            f"nothing listens at {address} ({why}): start the server, or name its host and port"
        ) from None


ACCESS = {
    401: "which wants other credentials: name them with --header",
    403: "which does not allow this caller: check --header",
}
"""Statuses that only other credentials change, and what to do."""


def check_access(address: Address, status: int) -> None:
    """Report a status of `ACCESS`.

    Raises ``click.ClickException`` naming ``--header``.
    """
    if status in ACCESS:
        raise click.ClickException(f"status {status} of {address}, {ACCESS[status]}")


def fields_of(headers: Headers) -> dict[str, str]:
    """Return header fields as `get` takes them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def inputs_of(address: Address, model: str, timeout: float, headers: Headers = ()) -> list[InputSpec]:
    """Ask a V2 server for the inputs of a model; open dimensions other than the rows get ``GUESSED_DIM``.

    Raises ``click.ClickException`` with the alternative.
    """
    path = f"{address.path}/v2/models/{in_path(model)}"
    try:
        status, body = get(address, path, timeout, fields_of(headers))
    except NO_ANSWER as error:
        why = str(error) or type(error).__name__
        raise click.ClickException(
            f"no answer from {address}: {why}; is the server up? Does it speak HTTP there?"
        ) from None
    check_access(address, status)
    if status == 503:
        raise click.ClickException(f"model {model!r} at {address} is not ready (status 503): try again once it serves")
    try:
        if status != 200:
            raise Malformed(f"status {status}")  # noqa: TRY301 - one message for both ways to fail
        described = msgspec.json.decode(body, type=_Metadata).inputs
    except (Malformed, *UNREADABLE) as error:
        raise click.ClickException(
            f"no metadata of model {model!r} at {address} ({error}): check --model, or describe its input by --shape"
        ) from None
    return [
        InputSpec(one.name, one.datatype, tuple(GUESSED_DIM if dim < 0 else dim for dim in one.shape[1:]))
        for one in described
    ]


def random_tensor(spec: InputSpec, rows: int, rng: Random) -> Tensor:
    """Return random values of an input's type: small numbers that every type represents well enough."""
    shape = (rows, *spec.row)
    count = math.prod(shape)
    values: list[Any]
    if spec.datatype not in DATATYPES:
        raise click.ClickException(f"input {spec.name!r} is {spec.datatype}, which can't be made up: give a --body")
    if spec.datatype == "BOOL":
        values = [rng.random() < 0.5 for _ in range(count)]
    elif spec.datatype == "BYTES":
        values = [f"text {rng.randrange(10_000)}" for _ in range(count)]
    elif spec.datatype.startswith("FP"):
        # Multiples of 1/8 are exact in half precision, too, so that an echo can be compared value by value.
        values = [rng.randrange(-64, 64) / 8 for _ in range(count)]
    else:
        values = [rng.randrange(100) for _ in range(count)]
    return Tensor(spec.name, spec.datatype, shape, json=msgspec.json.encode(values))


def request_of(protocol: Protocol, inputs: Sequence[Tensor]) -> Request:
    """Build an inference request of tensors; V1 takes one, whose rows become the instances."""
    if protocol == "v1":
        (one,) = inputs
        rows = nested(one.values(), one.shape)
        return Request(msgspec.json.encode({"instances": rows}), [(b"content-type", b"application/json")])
    binary = protocol == "v2-binary"
    fields = {"parameters": {"binary_data_output": True}} if binary else {}
    body, header_length = tensors.encode(fields, "inputs", [(tensor, binary) for tensor in inputs])
    if header_length is None:
        return Request(body, [(b"content-type", b"application/json")])
    return _binary_request(body, header_length)


def request_from(protocol: Protocol, body: bytes) -> Request:
    """Make a request from an inference body in a file.

    Raises ``Malformed`` if it violates the protocol.
    """
    if protocol == "v2-binary":
        # A header field has the JSON header's length, which a file lacks: the header ends where the object ends.
        depth, quoted, escaped = 0, False, False
        for position, byte in enumerate(body):
            if escaped:
                escaped = False
            elif quoted:
                escaped, quoted = byte == ord("\\"), byte != ord('"')
            elif byte == ord('"'):
                quoted = True
            elif byte in b"{}":
                depth += 1 if byte == ord("{") else -1
                if not depth:
                    request = _binary_request(body, position + 1)
                    tensors.decode_request(body, b"%d" % (position + 1))
                    return request
        raise Malformed("no JSON header at its beginning")
    if protocol == "v2":
        tensors.decode_request(body, None)
    elif not isinstance(_decoded(body), dict):
        raise Malformed("not a JSON object")
    return Request(body, [(b"content-type", b"application/json")])


def is_echo(protocol: Protocol, request: Request, header_length: bytes | None, body: bytes) -> bool:
    """Return whether an answer has the request's rows, in their order, value by value."""
    try:
        if protocol == "v1":
            asked = _decoded(request.body)
            return bool(_decoded(body).get("predictions") == asked.get("instances"))
        sent = dict(request.headers).get(tensors.HEADER_LENGTH)
        asked_tensors = tensors.decode_request(request.body, sent).tensors
        given = {tensor.name: tensor for tensor in tensors.decode_answer(body, header_length).tensors}
        return all(
            (answer := given.get(tensor.name)) is not None
            and (answer.datatype, answer.shape) == (tensor.datatype, tensor.shape)
            and answer.as_binary() == tensor.as_binary()
            for tensor in asked_tensors
        )
    except Malformed:
        return False


def nested(values: Sequence[Any], shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - lists as deep as the shape is long
    """Nest flat values by their shape."""
    if len(shape) <= 1:
        return list(values) if shape else values[0]
    step = len(values) // shape[0]
    return [nested(values[index * step : (index + 1) * step], shape[1:]) for index in range(shape[0])]


def _decoded(body: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return msgspec.json.decode(body)
    except UNREADABLE as error:
        raise Malformed(str(error)) from None


def _binary_request(body: bytes, header_length: int) -> Request:
    content_type = (b"content-type", b"application/octet-stream")
    return Request(body, [content_type, (tensors.HEADER_LENGTH, b"%d" % header_length)])
