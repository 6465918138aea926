"""A curl line that works on a sidecar just started, made from the model's description of its inputs."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from carpool_cli.answers import NO_ANSWER, UNREADABLE, get
from carpool_cli.options import in_path

if TYPE_CHECKING:
    from carpool_cli.options import Address

PRINTABLE = 64
"""Most values in a line to paste: an image is too long."""

OPEN = 8
"""Size of a trailing dimension that the model leaves open."""


def curl_line(server: Address, models: list[str], timeout: float = 2.0) -> str | None:
    """Return an inference request if the model describes inputs that fit on a line, else one for its metadata.

    ``models`` may be served there; one that the server lists itself is found, too. ``None`` if no model describes
    itself: V1 has no metadata.
    """
    listed = _get(server, "/v1/models", _Listed, timeout)
    for model in [*models, *map(str, () if listed is None else listed.models)]:
        path = f"/v2/models/{in_path(model)}"
        described = _get(server, path, _Described, timeout)
        if described is None:
            continue
        body = example(msgspec.to_builtins(described.inputs))
        if body is None:
            return f"curl {shlex.quote(f'{server}{path}')}"
        return f"curl {shlex.quote(f'{server}{path}/infer')} -d {shlex.quote(body)}"
    return None


def example(inputs: list[dict[str, Any]]) -> str | None:
    """Return a V2 body of one row with made-up values; ``None`` if it would be too long, or is binary only."""
    tensors = []
    for spec in inputs:
        shape = [1, *(dim if dim > 0 else OPEN for dim in spec["shape"][1:])]
        count = math.prod(shape)
        value = _VALUES.get(spec["datatype"])
        if count > PRINTABLE or value is None:
            return None
        tensors.append({"name": spec["name"], "shape": shape, "datatype": spec["datatype"], "data": [value] * count})
    # An escaped apostrophe: the body then has no character that would end the shell's quotes.
    return msgspec.json.encode({"inputs": tensors}).decode().replace("'", "\\u0027")


def wrapped(line: str, width: int) -> str:
    """Break a line so that it still works when pasted: only in the body, after JSON's commas and brackets.

    There a line break, and blanks that a terminal may copy with it, have no meaning. A line break anywhere else would
    end the command, so everything before the body stays on one line, however narrow the terminal.
    """
    command, quote, body = line.partition("'")
    lines, part, inside, escaped = [], command + quote, False, False
    breakable = 0  # so many characters of `part` fit on a line of their own
    for character in body:
        if len(part) >= width and breakable:
            lines.append(part[:breakable])
            part, breakable = part[breakable:], 0
        part += character
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = inside
        elif character == '"':
            inside = not inside
        elif character in ",[{" and not inside:
            breakable = len(part)
    return "\n".join([*lines, part])


_VALUES: dict[str, object] = {
    "BOOL": True,
    "BYTES": "hello",
    "FP32": 0.5,
    "FP64": 0.5,
    **{f"{kind}{bits}": 1 for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
}


class _Listed(Struct):
    models: list[Any]


class _Input(Struct):
    name: str
    datatype: str
    shape: Annotated[list[int], Meta(min_length=1)]


class _Described(Struct):
    inputs: list[_Input]


T = TypeVar("T")


def _get(server: Address, path: str, form: type[T], timeout: float) -> T | None:
    """Return a JSON object of this type; None if there is none."""
    try:
        status, body = get(server, path, timeout)
        return msgspec.json.decode(body, type=form) if status == 200 else None
    except (*NO_ANSWER, *UNREADABLE):
        return None
