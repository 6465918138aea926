"""A model server that computes what a function says, in whatever protocol it is asked, and callers that ask it."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

LENGTH = b"Inference-Header-Content-Length"
DEBUG = (b"X-Carpool-Debug", b"1")

DATATYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "object": "BYTES"}
KINDS = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT64": np.int64}


def _plain(array):
    """As a server with a JSON encoder for arrays writes it."""
    return np.vectorize(bytes.decode, otypes=[object])(array).tolist() if array.dtype == object else array.tolist()


def _binary(array):
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(text)) + text for text in array.ravel())
    return array.tobytes()


def _named(outputs):
    outputs = outputs if isinstance(outputs, dict) else {"y": outputs}
    return {name: np.asarray(array) for name, array in outputs.items()}


def ask_v1(rows):
    return b"/v1/models/m:predict", json.dumps({"instances": rows.tolist()}).encode(), []


def ask_v2(rows):
    tensor = {"name": "x", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return b"/v2/models/m/infer", json.dumps({"inputs": [tensor]}).encode(), []


def ask_binary(rows):
    data = rows.astype(np.float32).tobytes()
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(rows.shape), "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return b"/v2/models/m/infer", head + data, [(LENGTH, b"%d" % len(head))]


ASK = {"v1": ask_v1, "v2": ask_v2, "binary": ask_binary}


def answering(model):
    """Make the behaviour of a model server of a function."""

    def behave(exchange):
        header = {name.lower(): value for name, value in exchange.headers}
        if b":predict" in exchange.target:
            rows = np.array(json.loads(exchange.body)["instances"], np.float32)
            outputs = _named(model(rows))
            if len(outputs) == 1:
                predictions = _plain(*outputs.values())
            else:
                columns = {name: _plain(array) for name, array in outputs.items()}
                predictions = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            exchange.respond(200, [], json.dumps({"predictions": predictions}).encode())
            return
        length = header.get(LENGTH.lower())
        at = len(exchange.body) if length is None else int(length)
        head = json.loads(exchange.body[:at])
        tensor = head["inputs"][0]
        if length is None:
            rows = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        else:
            rows = np.frombuffer(exchange.body[at:], np.float32).reshape(tensor["shape"])
        described, tail = [], b""
        for name, array in _named(model(rows)).items():
            one: dict[str, Any] = {"name": name, "datatype": DATATYPES[str(array.dtype)], "shape": list(array.shape)}
            if length is None and array.dtype != np.float16:
                one["data"] = _plain(array.ravel())
            else:
                data = _binary(array)
                one["parameters"] = {"binary_data_size": len(data)}
                tail += data
            described.append(one)
        text = json.dumps({"model_name": "m", "outputs": described}).encode()
        exchange.respond(200, [(LENGTH, b"%d" % len(text))] if tail else [], text + tail)

    return behave


def read(answer):
    """Return an answer's outputs as arrays, by name; V1 rows of several fields by field."""
    length = answer.header(LENGTH.lower())
    if length is None and "predictions" in answer.json:
        rows = answer.json["predictions"]
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return {"y": np.array(rows)}
    at = len(answer.body) if length is None else int(length)
    head = json.loads(answer.body[:at])
    outputs = {}
    for one in head["outputs"]:
        if "data" in one:
            flat = np.array(one["data"])
        else:
            size = one["parameters"]["binary_data_size"]
            data, at = answer.body[at : at + size], at + size
            flat = np.array(_texts(data)) if one["datatype"] == "BYTES" else np.frombuffer(data, KINDS[one["datatype"]])
        outputs[one["name"]] = flat.reshape(one["shape"])
    return outputs


def _texts(data):
    texts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return texts


def same(one, other):
    """Whether two answers agree to 1 % of the largest number of a row."""
    if one.keys() != other.keys():
        return False
    for name, array in one.items():
        expected = other[name]
        if not array.size and not expected.size:
            continue  # JSON has no shapes
        if array.shape != expected.shape:
            return False
        if array.dtype.kind in "US" or expected.dtype.kind in "USO":
            texts = [[t.decode() if isinstance(t, bytes) else str(t) for t in a.ravel()] for a in (array, expected)]
            if texts[0] != texts[1]:
                return False
        elif array.size:
            flat = [a.reshape(a.shape[0] if a.ndim else 1, -1).astype(float) for a in (array, expected)]
            allowed = 0.0101 * np.abs(flat[1]).max(1, keepdims=True) + 1e-6
            if (np.abs(flat[0] - flat[1]) > allowed).any():
                return False
    return True


class Answered(NamedTuple):
    """One request: its rows, its answer, and the rows of the batch that it was answered in."""

    rows: Any
    answer: Any
    batch: int


@pytest.fixture
def served(world):
    """Start a sidecar in front of a function, everything but the batch size at its default."""

    async def served(model, *, slow=True, policy=None, metadata=True, **fields):
        # What every exporter with a dynamic first dimension writes, whatever it means.
        described = {
            "name": "m",
            "versions": ["1"],
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
        }
        world.model.documents[b"/v2/models/m"] = (200, described) if metadata else (404, {})
        behave = answering(model)

        def later(exchange):
            # A moment, so that others come meanwhile.
            asyncio.get_running_loop().call_later(0.001, behave, exchange)

        world.model.behave = later if slow else behave
        policy = {"models": [], "verification": {}, **(policy or {})}
        sidecar, client = await world.start(policy=policy, **fields)
        await world.until(lambda: all(entry.alone != "axis-unknown" for entry in sidecar.models))
        return sidecar, client

    return served


@pytest.fixture
def load():
    """Have callers ask at once, each one request after the other, of one to five rows."""

    async def load(client, protocol, *, callers=6, requests=12, seed=16, draw=None):
        told = []

        async def caller(number):
            rng = np.random.default_rng([seed, number])
            for _ in range(requests):
                rows = int(rng.choice([1, 1, 1, 2, 5]))
                x = (draw or (lambda rng, rows: rng.normal(0, 2, (rows, 4)).astype(np.float32)))(rng, rows)
                target, body, headers = ASK[protocol](x)
                answer = await client.send(b"POST", target, body, [*headers, DEBUG])
                batch = answer.header(b"x-carpool-batch-size")
                told.append(Answered(x, answer, int(batch) if batch else 0))

        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(caller(number))
        return told

    return load


@pytest.fixture
def compare():
    """Say whether an answer is the one that a model gives to these rows alone."""

    def compare(model, told):
        if told.answer.status != 200:
            return False
        return same(read(told.answer), _alone(model(told.rows)))

    return compare


def _alone(outputs):
    return {name: array if array.ndim else array.reshape(()) for name, array in _named(outputs).items()}


@pytest.fixture(name="ask_v1")
def _ask_v1():
    return ask_v1
