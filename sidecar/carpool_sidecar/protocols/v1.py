"""KServe V1 (the TensorFlow Serving REST API): ``POST /v1/models/M:predict`` with ``instances`` or ``inputs``.

Rows are merged and split as slices of the JSON they came in, so that every digit and escape arrives. What decides:

- Every top-level field but the rows belongs to the key and is sent once for the batch.
- Rows ride together only if their signatures are equal: nesting, sizes, kinds of leaves, names of fields. In an array
  of numbers alone one fraction makes all of it float, as it does for numpy: ``[1, 2.5]`` rides with ``[1.5, 2.5]``,
  since Go and JavaScript print 1.0 as ``1``; ``[1, 2]`` rides with neither. Elsewhere each leaf counts by itself.
- ``instances`` has the batch in dim 0 by protocol. An ``inputs`` array has it only if the model is known to
  (``first_by_protocol`` is False); an ``inputs`` object is a set of named columns and rides alone.
- An answer is an object with ``predictions`` (or ``outputs``, where ``inputs`` was asked), one element a row. Its other
  fields are about the batch and go to every rider as they are, unless they hold an array, which may be other callers'
  rows: then the answer is refused. A request that has its answer to itself gets every field. Of an answer put together
  from several, the other fields are those of the first.

Bodies this module has no opinion about (no rows, other media types, CloudEvents envelopes) ride alone, untouched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.protocols import json_scan
from carpool_sidecar.protocols.common import (
    UNREADABLE,
    BadRequest,
    Endpoint,
    Message,
    Parsed,
    Piece,
    Ride,
    WrongRows,
    check_shareable,
    pieces_of,
    total_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.protocols.common import Buffer, Headers
    from carpool_sidecar.protocols.headers import Facts

_ONLY = {
    name: re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"' + name + rb'"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
    for name in (b"instances", b"inputs", b"predictions", b"outputs")
}
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]")
_FLOAT = re.compile(rb"-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_INT = re.compile(rb"-?\d+")
# What stands between strings most often, and its outline.
_PLAIN = {text: text.strip() for text in (b":", b": ", b",", b", ", b"}", b"]")}
_DIGIT = re.compile(rb"\d")
_NUMBERS = b"0123456789+-.eE" + json_scan.WHITESPACE
_JSON_TYPES = frozenset(
    {
        b"",
        b"application/json",
        b"text/json",
        b"text/plain",
        b"application/octet-stream",
        b"application/x-www-form-urlencoded",
    }
)
# Longer signatures are kept as their digest: a 224x224 image has 150 kB of commas.
_MAX_SIGNATURE = 256


@dataclass(slots=True)
class Rows:
    """The rows of a request. ``inner`` is all of them as they came, without the brackets."""

    name: bytes
    inner: bytes
    rows: list[msgspec.Raw]
    rest: bytes

    def slice(self, start: int, stop: int) -> bytes:
        """Rows ``start`` to ``stop``, comma-separated."""
        return self.inner if stop - start == len(self.rows) else b",".join(self.rows[start:stop])


@dataclass(slots=True)
class Answer:
    """The rows of an answer between what stands before and after them."""

    head: bytes
    rows: list[msgspec.Raw]
    tail: bytes


def parse(endpoint: Endpoint, facts: Facts, body: Buffer) -> Parsed[Rows | None]:
    """Validate a ``:predict`` body and find its rows."""
    if facts.content_encoding not in {b"", b"identity"}:
        return _alone(endpoint, facts, body, "encoded")
    if facts.content_type not in _JSON_TYPES and not _is_json(facts.content_type):
        return _alone(endpoint, facts, body, "content-type")
    text = bytes(body)
    try:
        json_scan.check_text(text, "body")
        # 1. The rows, and what stands around them
        found = _only(b"instances", text)
        if found is None:
            fields = json_scan.members(text, "body")
            if len(fields.keys() & {"instances", "inputs"}) != 1:
                return _alone(endpoint, facts, body, "no-rows")
            name = "instances" if "instances" in fields else "inputs"
            array = fields.pop(name)
            if array[:1] == b"{" and name == "inputs":
                return _alone(endpoint, facts, body, "columns")
            if array[:1] != b"[":
                raise BadRequest(f"{name}: expected an array, got {json_scan.kind(array)}")
            rows, rest = json_scan.elements(array, name), b"".join(_member(*field) for field in sorted(fields.items()))
        else:
            name, rest = "instances", b""
            array, rows = found
    except json_scan.Surrogates:
        return _alone(endpoint, facts, body, "surrogates")
    except json_scan.Malformed as error:
        raise BadRequest(str(error)) from None
    if not rows:
        raise BadRequest(f"{name}: empty, expected at least one row", reason="empty")
    # 2. What the rows look like
    shape = signature(bytes(rows[0]))
    alone = None if len(rows) == 1 or _alike(array, rows, shape) else "mixed-rows"
    field = name.encode()
    return Parsed(
        endpoint,
        b"\x00".join((b"v1", endpoint.target, facts.key, field, shape, rest)),
        len(rows),
        len(text),
        # Exact for arrays of numbers; commas inside strings are counted too, which text pays for its length.
        array.count(b",") + 1,
        Rows(field, array[1:-1], rows, rest),
        alone,
        form=field + rest,
        first_by_protocol=name == "instances",
    )


def merge(rides: Sequence[Ride]) -> Message:
    """``{"instances": [...], other fields}`` with the rows of all rides."""
    first: Rows = rides[0].parsed.state
    inner = b",".join([ride.parsed.state.slice(ride.start, ride.stop) for ride in rides])
    return Message([], [b'{"%b":[%b]%b}' % (first.name, inner, first.rest)])


def split(rides: Sequence[Ride], headers: Headers, body: Buffer) -> list[Piece]:  # noqa: ARG001 - the codec's signature
    """Check that the answer has one prediction a row, and share it out."""
    text = bytes(body)
    wanted = [b"predictions", b"outputs"] if rides[0].parsed.state.name == b"inputs" else [b"predictions"]
    try:
        json_scan.check_text(text, "answer")
        found = _only(wanted[0], text)
        if found is not None:
            array, rows = found
            head = b'{"%b":[' % wanted[0]
            tail = b"]}"
        else:
            fields = json_scan.members(text, "answer")
            name = next((name.decode() for name in wanted if name.decode() in fields), None)
            if name is None:
                raise WrongRows(f"answer has no `{wanted[0].decode()}`", reason=UNREADABLE)
            array = fields.pop(name)
            rows = json_scan.elements(array, f"answer's {name}")
            if len({id(ride.parsed) for ride in rides}) > 1:
                check_shareable(fields)
            head = b'{"%b":[' % name.encode()
            tail = b"]" + b"".join(_member(*field) for field in fields.items()) + b"}"
    except json_scan.Malformed as error:
        raise WrongRows(str(error), reason=UNREADABLE) from None
    total = total_rows(rides)
    if len(rows) != total:
        raise WrongRows(f"answer has {len(rows)} predictions for {total} rows")
    return pieces_of(Answer(head, rows, tail), rides)


def assemble(parsed: Parsed[Rows], pieces: Sequence[Piece]) -> Message:  # noqa: ARG001 - the codec's signature
    """Put together the predictions of one request."""
    first: Answer = pieces[0].answer
    rows = [row for piece in pieces for row in piece.answer.rows[piece.start : piece.stop]]
    return Message([], [first.head + b",".join(rows) + first.tail])


def signature(row: bytes) -> bytes:
    """Find what must be equal for two rows to ride together: structure, kinds of leaves, names of fields."""
    whole = _tensor(row)
    if whole is None:
        pieces = json_scan.STRING_PARTS.split(row)
        out = [_outline(pieces[0])]
        for string, text in zip(pieces[1::2], pieces[2::2], strict=True):
            outline = _PLAIN.get(text) or _field(text)
            # A string before a colon is the name of a field.
            out += (string if outline.startswith(b":") else b"s", outline)
        whole = b"".join(out)
    return whole if len(whole) <= _MAX_SIGNATURE else b"#" + blake2b(whole, digest_size=32).hexdigest().encode()


def _tensor(text: bytes) -> bytes | None:
    """Sign numbers alone: ``[1, 2.5]`` is ``f[,]``. None for other leaves and for empty arrays.

    The commas tell all sizes, since no array is empty: a few passes in C instead of one step a number.
    """
    bones = text.translate(None, _NUMBERS)
    if bones.strip(b"[],") or (b"[]" in bones and _EMPTY.search(text)):
        return None
    return (b"f" if b"." in text or b"e" in text or b"E" in text else b"i") + bones


def _field(text: bytes) -> bytes:
    """Outline JSON after a string, the numbers of a field taken together: ``: [1, 2.5], `` is ``:f[,],``."""
    start = text.lstrip(json_scan.WHITESPACE)
    if start.startswith(b":"):
        value, end, after = start[1:].partition(b"}")
        tensor = _tensor(value)
        # An array still open goes on after the next string: its leaves count one by one.
        if tensor is not None and _DIGIT.search(value) and tensor.count(b"[") == tensor.count(b"]"):
            return b":" + tensor + end + (_outline(after) if after else b"")
    return _outline(text)


def _outline(text: bytes) -> bytes:
    """Outline JSON between two strings, each number an ``i`` or ``f``: ``, 1, true, `` is ``,i,b,``."""
    if b"u" in text or b"l" in text:
        text = text.replace(b"true", b"b").replace(b"false", b"b").replace(b"null", b"n")
    return _INT.sub(b"i", _FLOAT.sub(b"f", text)).translate(None, json_scan.WHITESPACE)


def _alike(array: bytes, rows: list[msgspec.Raw], first: bytes) -> bool:
    """Whether all rows have the first one's signature."""
    whole = _tensor(array)
    if whole is not None:
        unit = bytes(rows[0]).translate(None, _NUMBERS)
        if whole[1:] != b"[" + b",".join([unit] * len(rows)) + b"]":
            return False
        if whole[:1] == b"i":
            return True
    return all(signature(bytes(row)) == first for row in rows[1:])


def _only(name: bytes, text: bytes) -> tuple[bytes, list[msgspec.Raw]] | None:
    """Find the array of ``{"name": [...]}`` if that is all there is, the usual case: nothing can come twice then."""
    start = _ONLY[name].match(text)
    end = text.rfind(b"}")
    if start is None or text[end + 1 :].strip(json_scan.WHITESPACE):
        return None
    array = text[start.end() : end].rstrip(json_scan.WHITESPACE)
    try:
        return array, json_scan.elements(array, "")
    except json_scan.Malformed:
        return None  # other fields follow, or an error that the whole body explains better


def _member(name: str, value: bytes) -> bytes:
    return b",%b:%b" % (msgspec.json.encode(name), value)


def _is_json(content_type: bytes) -> bool:
    """Whether a media type says JSON, or nothing of use. Without one, or with curl's default, people send JSON too."""
    media, _, parameters = content_type.lower().partition(b";")
    charset = parameters.partition(b"charset=")[2].strip(b' "')
    if charset not in {b"", b"utf-8", b"utf8", b"us-ascii"}:
        raise BadRequest(f"content-type: charset {charset.decode('latin-1')}, expected utf-8", status=415)
    media = media.strip()
    return media in _JSON_TYPES or (media.endswith(b"+json") and not media.startswith(b"application/cloudevents"))


def _alone(endpoint: Endpoint, facts: Facts, body: Buffer, reason: str) -> Parsed[Rows | None]:
    """Describe a request forwarded as it is, counted as one row."""
    key = b"\x00".join((b"v1", endpoint.target, facts.key, b"alone"))
    return Parsed(endpoint, key, 1, len(body), 1, None, reason)
