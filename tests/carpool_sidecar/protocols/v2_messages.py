"""Requests and answers of the Open Inference Protocol, for its tests."""

from __future__ import annotations

import json
from math import prod

from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, v2
from carpool_sidecar.protocols.common import Portion

ENDPOINT = protocols.route(b"/v2/models/m/infer")
assert ENDPOINT is not None
LENGTH = b"inference-header-content-length"


def parse(body, header_length=None, lines=()):
    lines = [
        *lines,
        *([(b"Inference-Header-Content-Length", b"%d" % header_length)] if header_length is not None else []),
    ]
    text = json.dumps(body).encode() if isinstance(body, dict) else body
    return v2.parse(ENDPOINT, headers.read(lines), text)


def tensor(name="x", shape=(1, 2), datatype="FP32", data=None, **fields):
    return {
        "name": name,
        "shape": list(shape),
        "datatype": datatype,
        "data": [1.5] * prod(shape) if data is None else data,
        **fields,
    }


def binary(head, *buffers):
    """A body with binary tensors, and the length of its JSON header."""
    text = json.dumps(head).encode()
    return text + b"".join(buffers), len(text)


def blob(size, name="x", shape=(1, 2), datatype="FP32", **parameters):
    return {
        "name": name,
        "shape": list(shape),
        "datatype": datatype,
        "parameters": {"binary_data_size": size, **parameters},
    }


def whole(*parsed):
    return [Portion(one, 0, one.rows) for one in parsed]


def taken_apart(message):
    """The JSON object and the binary data of a message, checked against its header."""
    body = b"".join(message.parts)
    length = headers.find(message.headers, LENGTH)
    if length is None:
        return json.loads(body), b""
    return json.loads(body[: int(length)]), body[int(length) :]
