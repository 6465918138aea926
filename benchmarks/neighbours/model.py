"""The model: a pure function of each row, so that wrong answers are recognised; and the check of answers.

A row `[a, b]` becomes `[a, b, 31a + b]`. A row whose first number is one of the poisons spoils the whole call, as it
does with real servers. The text of such an error names the row that caused it: nobody else may ever read it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

    Row = list[int]

PRIVATE = b"private to row"
"""In every error text of the model server: it belongs to the caller of that row."""

REFUSED, BROKEN, SHORT = -422, -500, -1
"""First numbers of poisoned rows: the call is answered with 422, with 500, or without this row."""

V1_TARGET = b"/v1/models/%b:predict"
V2_TARGET = b"/v2/models/%b/infer"
WIDTH = 2

LARGE, FITTING = 400_000_000, 250_000_000
"""Bytes of large answers: more than a sidecar buffers of one by default, and less."""


class Question(NamedTuple):
    """A request for inference. ``id``: the V2 id, or empty."""

    target: bytes
    body: bytes
    rows: list[Row]
    id: str

    @property
    def message(self) -> bytes:
        """The bytes to send. Every caller sends the same headers, so that all of them may share a batch."""
        return post(self.target, self.body)


class Answer(NamedTuple):
    """What the model server answers, and for how many rows it computes."""

    status: int
    body: bytes
    rows: int


def post(target: bytes, body: bytes, headers: bytes = b"") -> bytes:
    """Return a POST. ``headers``: further lines, each with its end."""
    return head(b"POST", target, b"Content-Length: %d\r\n" % len(body) + headers) + body


def head(method: bytes, target: bytes, headers: bytes = b"") -> bytes:
    """Return the head of a request with a JSON body."""
    return b"%b %b HTTP/1.1\r\nHost: model\r\nContent-Type: application/json\r\n%b\r\n" % (method, target, headers)


def v1(rows: list[Row], model: bytes = b"m") -> Question:
    """Ask in KServe's V1 form."""
    return Question(V1_TARGET % model, json.dumps({"instances": rows}).encode(), rows, "")


def v2(rows: list[Row], id_: str = "", model: bytes = b"m", **parameters: int) -> Question:
    """Ask in the Open Inference form."""
    flat = [value for row in rows for value in row]
    asked = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [len(rows), WIDTH], "data": flat}]}
    named = ({"id": id_} if id_ else {}) | ({"parameters": parameters} if parameters else {})
    return Question(V2_TARGET % model, json.dumps(named | asked).encode(), rows, id_)


def healthy(serial: int, rng: Random) -> Question:
    """Return a good caller's request: V1 and V2 in turn, mostly one row, never the same twice."""
    rows = [[rng.randrange(1, 1_000_000), serial] for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if serial % 2:
        return v1(rows)
    return v2(rows, f"caller-{serial}" if serial % 4 else "")


def computed(rows: list[Row]) -> list[Row]:
    """Return what the model makes of rows."""
    return [[a, b, 31 * a + b] for a, b in rows]


def reply(target: bytes, body: bytes) -> Answer:
    """Answer a request for inference, which may be a batch."""
    try:
        document = json.loads(body)
        v2_form = target.startswith(b"/v2/")
        rows = _rows(document["inputs"][0]) if v2_form else document["instances"]
        kept = [row for row in rows if row[0] != SHORT]
        poison = next((row for row in rows if row[0] in {REFUSED, BROKEN}), None)
        made = computed(kept)
    except (ValueError, LookupError, TypeError) as error:
        return Answer(400, _private("?", f"cannot be read: {error}"), 1)
    if poison is not None:
        return Answer(-poison[0], _private(poison[1], "is no input for this model"), len(rows))
    if not v2_form:
        return Answer(200, json.dumps({"predictions": made}).encode(), len(rows))
    flat = [value for row in made for value in row]
    output = {"name": "y", "datatype": "INT64", "shape": [len(made), WIDTH + 1], "data": flat}
    named = {"id": document["id"]} if "id" in document else {}
    return Answer(200, json.dumps({"model_name": "m", **named, "outputs": [output]}).encode(), len(rows))


def metadata(model: str) -> bytes:
    """Return the V2 metadata, which says that the first axis is the batch."""
    tensor = {"datatype": "INT64", "shape": [-1, WIDTH]}
    return json.dumps(
        {
            "name": model,
            "versions": ["1"],
            "platform": "",
            "inputs": [{"name": "x", **tensor}],
            "outputs": [{"name": "y", **tensor, "shape": [-1, WIDTH + 1]}],
        }
    ).encode()


def judge(question: Question, status: int, answer: bytes) -> str:
    """Return ``ok``, ``wrong``, ``foreign`` (somebody else's error text), or what kind of failure it is.

    ``answer``: head and body.
    """
    if PRIVATE in answer:
        return "foreign"
    body = answer.partition(b"\r\n\r\n")[2]
    if status != 200:
        return f"{status} {_reason(body)}"
    expected = computed(question.rows)
    try:
        document = json.loads(body)
        if question.target.startswith(b"/v1/"):
            right = document["predictions"] == expected
        else:
            (output,) = document["outputs"]
            flat = [value for row in expected for value in row]
            right = (
                output["data"] == flat
                and output["shape"] == [len(expected), WIDTH + 1]
                and document.get("id", "") == question.id
            )
    except (ValueError, LookupError, TypeError):
        right = False
    return "ok" if right else "wrong"


def _rows(tensor: dict[str, list[int]]) -> list[Row]:
    """Return a V2 tensor's rows, flat or nested."""
    count, width = tensor["shape"]
    data = tensor["data"]
    if data and isinstance(data[0], list):
        return list(data)
    if width != WIDTH or len(data) != count * width:
        raise ValueError(f"{len(data)} values for shape {tensor['shape']}")
    return [data[at : at + width] for at in range(0, len(data), width)]


def _private(row: object, why: str) -> bytes:
    return json.dumps({"error": f"{PRIVATE.decode()} {row}: it {why}"}).encode()


def _reason(body: bytes) -> str:
    """Return the sidecar's reason code, or the beginning of whatever came."""
    try:
        document = json.loads(body)
        return str(document.get("reason") or document.get("error"))[:60]
    except (ValueError, AttributeError):
        return repr(body[:60])
