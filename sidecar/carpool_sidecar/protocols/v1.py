"""KServe V1 (the TensorFlow Serving REST API): ``POST /v1/models/M:predict`` with ``instances`` or ``inputs``.

Rows are merged and split as slices of the original JSON, so that every digit and escape is kept. The rules:

- Every top-level field except the rows belongs to the key and is sent once for the batch.
- Rows are batched together only if their signatures are equal: nesting, sizes, kinds of leaves, names of fields. In an
  array of numbers alone one fraction makes all of it float, as it does for numpy: ``[1, 2.5]`` equals ``[1.5, 2.5]``,
  since Go and JavaScript print 1.0 as ``1``; ``[1, 2]`` equals neither. Elsewhere each leaf counts by itself. A whole
  number beyond 64 bits makes a request go alone: beside others numpy would read all of them as floats.
- ``instances`` has the batch in dim 0 by protocol. An ``inputs`` array has it only if the model is known to
  (``first_by_protocol`` is False); an ``inputs`` object is a set of named columns and is not batched.
- An answer is an object with ``predictions`` (or ``outputs``, if the request had ``inputs``), one element a row. Its
  other fields are about the batch and go to every request unchanged. If they contain an array, which may be other
  callers' rows, the answer is refused. A request that was not batched gets every field. An answer assembled from
  several has the other fields of the first.

Everything else (no rows, other media types, CloudEvents envelopes, no JSON, more than the limits) is forwarded
alone and unchanged: the server decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from carpool_sidecar.protocols import json_scan, padding
from carpool_sidecar.protocols.common import (
    JOINED,
    UNREADABLE,
    Endpoint,
    Message,
    Parsed,
    Piece,
    Portion,
    TooLarge,
    WrongRows,
    alone,
    check_shareable,
    longest,
    pieces_of,
    short,
    total_rows,
)
from carpool_sidecar.protocols.limits import DEFAULT, Limits
from carpool_sidecar.protocols.padding import Fit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool_sidecar.protocols.common import Buffer
    from carpool_sidecar.protocols.headers import Facts, Headers
    from carpool_sidecar.protocols.json_scan import Span
    from carpool_sidecar.protocols.padding import Sequence as SequenceAxis

_OPENING: Final = 0x5B
_POINT: Final = 0x2E
_E: Final = 0x65
_CAPITAL_E: Final = 0x45
"""``[.eE`` as numbers: looking for one in bytes takes a fifth of the time."""
_ONLY: Final = {
    name: re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"' + name + rb'"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
    for name in (b"instances", b"inputs", b"predictions", b"outputs")
}
_EMPTY: Final = re.compile(rb"\[[ \t\r\n]*\]")
_NUMBERS: Final = b"0123456789+-.eE" + json_scan.WHITESPACE
_WHOLE = b"0123456789+-" + json_scan.WHITESPACE
_POINTS = bytes.maketrans(b"eE", b"..")
_JSON_TYPES: Final = frozenset(
    {
        b"",
        b"application/json",
        b"text/json",
        b"text/plain",
        b"application/octet-stream",
        b"application/x-www-form-urlencoded",
    }
)
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG: Final = b"0" * 19
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{19,}(?![0-9.eE])")
_INT64 = range(-(2**63), 2**63)
_SCALARS = re.compile(rb"(?<=[\[,])(?=[,\]])")
"""The places of the numbers in the outline of arrays that ``_tensor`` makes."""
_PER_ROW: Final = 72
"""Bytes of memory for the position of one row."""
_FEW = Limits(max_keys=64)
"""Limits for the fields of a padded row: each row of a batch is split, 64 with 2048 fields would take 120 ms."""


class Rows:
    """The rows of a request: ``inner`` is their span in ``text``, without the brackets."""

    __slots__ = ("inner", "name", "rest", "rows", "text")

    def __init__(self, name: bytes, text: bytes, inner: Span, rows: list[msgspec.Raw], rest: bytes) -> None:
        self.name = name
        self.text = text
        self.inner = inner
        self.rows = rows
        self.rest = rest

    def slice(self, start: int, stop: int) -> Buffer:
        """Rows ``start`` to ``stop``, comma-separated; large ones are not copied."""
        if stop - start < len(self.rows):
            return b",".join(self.rows[start:stop])
        first, last = self.inner
        return self.text[first:last] if last - first <= JOINED else memoryview(self.text)[first:last]


class Answer:
    """The rows of an answer, and the text before and after them."""

    __slots__ = ("head", "rows", "tail")

    def __init__(self, head: bytes, rows: list[msgspec.Raw], tail: bytes) -> None:
        self.head = head
        self.rows = rows
        self.tail = tail


def parse(endpoint: Endpoint, facts: Facts, body: Buffer, limits: Limits = DEFAULT) -> Parsed[Rows] | Parsed[None]:
    """Find the rows of a ``:predict`` body."""
    if facts.clash:
        return alone(endpoint, facts, body, "malformed", facts.clash)
    if facts.content_encoding not in {b"", b"identity"}:
        return alone(endpoint, facts, body, "encoded")
    if facts.content_type not in _JSON_TYPES and not _is_json(facts.content_type):
        return alone(endpoint, facts, body, "content-type")
    try:
        json_scan.check_size(len(body), "body", "max_text", limits)
        text = body if type(body) is bytes else bytes(body)
        json_scan.check(text, "body", limits)
        # 1. The rows, and the text around them
        found = _only(b"instances", text, limits.max_rows)
        if found is None:
            fields = json_scan.members(text, "body", limits)
            if len(fields.keys() & {"instances", "inputs"}) != 1:
                return alone(endpoint, facts, body, "no-rows")
            name = "instances" if "instances" in fields else "inputs"
            span = fields.pop(name)
            opening = text[span[0] : span[0] + 1]
            if opening == b"{" and name == "inputs":
                return alone(endpoint, facts, body, "columns")
            if opening != b"[":
                return alone(endpoint, facts, body, "no-rows", f"{name} is {json_scan.kind(opening)}, not an array")
            rows = json_scan.elements(text, name, span, limits.max_rows)
            rest = b"".join([_member(field, text[start:stop]) for field, (start, stop) in sorted(fields.items())])
        else:
            name, rest = "instances", b""
            span, rows = found
        if rows is None or len(rows) > limits.max_rows:
            raise json_scan.Beyond(name, "max_rows", limits, None if rows is None else len(rows))
    except json_scan.Malformed as error:
        return alone(endpoint, facts, body, error.reason, str(error))
    if not rows:
        return alone(endpoint, facts, body, "empty")
    # 2. The shape of the rows
    start, stop = span
    array = text[start:stop]
    shape, alike, elements = _shapes(array, rows)
    reason = None
    if not alike:
        reason = "mixed-rows"
    elif not shape.startswith(b"f") and _has_large_integer(array):
        reason = "large-integers"
    field = name.encode()
    return Parsed(
        endpoint,
        b"\x00".join((b"v1", endpoint.target, facts.key, field, short(shape), short(rest) if rest else rest)),
        len(rows),
        len(text),
        elements,
        Rows(field, text, (start + 1, stop - 1), rows, rest),
        reason,
        expansion=_PER_ROW * len(rows) + len(rest) + (0 if text is body else len(text)),
        form=field + rest,
        first_by_protocol=name == "instances",
    )


def fit(parsed: Parsed[Rows], sequence: SequenceAxis) -> Fit:
    """Find the length of rows whose arrays of numbers are padded: fields of an object, or the row itself.

    All rows of a request have one shape, so the first one shows it.
    """
    state = parsed.state
    first = bytes(state.rows[0])
    try:
        spans = _arrays(first, sequence.pad, _FEW) if sequence.axis == 1 else {}
    except json_scan.Malformed as error:
        return Fit(sequence, why=padding.TOO_LARGE if isinstance(error, json_scan.Beyond) else padding.NOT_PADDABLE)
    # A request's form does not name the fields of its rows: rows without the mask need their own verification.
    form = "\0".join(sorted(spans)).encode()
    units, kinds = dict[str, bytes](), list[bytes]()
    lengths = set[int]()
    for name, (start, stop) in spans.items():
        text = first[start:stop]
        bones = _tensor(text)
        elements = json_scan.elements(text, "", (0, len(text)), len(text)) if bones else None
        if bones is None or not elements:
            return Fit(sequence, form=form, why=padding.NOT_PADDABLE)
        kind, inner = bones[:1], (_tensor(bytes(elements[0])) or b"")[1:]
        number = padding.number(sequence.pad[name], whole=kind == b"i")
        if number is None or not json_scan.repeats(bones[1:], inner, len(elements)):
            return Fit(sequence, form=form, why=padding.NOT_PADDABLE)
        lengths.add(len(elements))
        units[name] = _SCALARS.sub(number, inner) if inner else number
        kinds.append(name.encode() + b":" + kind + inner)
    if len(lengths) != 1:
        return Fit(sequence, form=form, why=padding.NOT_PADDABLE)
    length = lengths.pop()
    if not sequence.fits(length):
        return Fit(sequence, length=length, form=form, why=padding.TOO_LONG)
    top = sequence.bucket(length)
    added = sum([len(unit) + 1 for unit in units.values()]) * (top - length)
    if len(first) + added > padding.LARGEST_ROW:
        return Fit(sequence, length=length, form=form, why=padding.TOO_LARGE)
    own = b"\x00".join((short(_shape(first)), short(state.rest) if state.rest else state.rest))
    outline = _shape(_replaced(first, spans, dict.fromkeys(spans, b"0")))
    key = (parsed.key[: len(parsed.key) - len(own)], short(outline), *kinds, b"<=%d" % top, sequence.mark, state.rest)
    return Fit(sequence, length=length, key=b"\x00".join(key), units=units, growth=parsed.rows * added, form=form)


def _arrays(row: bytes, names: Collection[str], limits: Limits) -> dict[str, Span]:
    """Find the arrays of these names in a row, in order; a row that is itself an array has the only name.

    Raises ``Malformed`` for a row with a repeated name, or with too many names.
    """
    if row.startswith(b"["):
        return dict.fromkeys(names, (0, len(row))) if len(names) == 1 else {}
    fields = json_scan.members(row, "row", limits) if row.startswith(b"{") else {}
    return {name: span for name, span in fields.items() if name in names and row[span[0]] == _OPENING}


def _replaced(row: bytes, spans: dict[str, Span], values: dict[str, bytes]) -> bytes:
    """Return a row with other values at these spans, which are in order."""
    parts, at = list[bytes](), 0
    for name, (start, stop) in spans.items():
        parts += (row[at:start], values[name])
        at = stop
    return b"".join([*parts, row[at:]])


def _padded(portion: Portion, length: int) -> Buffer:
    """Rows of a portion, comma-separated, padded to ``length``."""
    fits = portion.parsed.fit
    state: Rows = portion.parsed.state
    if fits is None or fits.length == length:
        return state.slice(portion.start, portion.stop)
    tails = {name: (b"," + unit) * (length - fits.length) + b"]" for name, unit in fits.units.items()}
    rows = list[bytes]()
    for raw in state.rows[portion.start : portion.stop]:
        row = bytes(raw)
        spans = {name: (end - 1, end) for name, (_, end) in _arrays(row, fits.sequence.pad, _FEW).items()}
        rows.append(_replaced(row, spans, tails))
    return b",".join(rows)


def _cut_back(row: bytes, names: Collection[str], length: int, own: int) -> bytes:
    """Return a prediction with arrays of these names cut to its request's length, if they have the padded length."""
    try:
        spans = _arrays(row, names, DEFAULT) if names else {}
    except json_scan.Malformed as error:
        raise WrongRows(f"a prediction can't be cut back: {error}", reason=padding.WRONG_LENGTH) from None
    values = dict[str, bytes]()
    for name, (start, stop) in spans.items():
        elements = json_scan.elements(row, "", (start, stop), stop - start) or []
        if len(elements) != length:
            raise WrongRows(
                f"prediction {name!r} has {len(elements)} elements, but sequence.outputs says that it is as long "
                f"as the inputs, which have {length}",
                reason=padding.WRONG_LENGTH,
            )
        values[name] = b"[%b]" % b",".join(elements[:own])
    return _replaced(row, spans, values)


def merge(portions: Sequence[Portion]) -> Message:
    """``{"instances": [...], other fields}`` with the rows of all portions."""
    first: Rows = portions[0].parsed.state
    length = longest(portions)
    if length:
        slices = [_padded(portion, length) for portion in portions]
    else:
        slices = [portion.parsed.state.slice(portion.start, portion.stop) for portion in portions]
    if sum([len(rows) for rows in slices]) <= JOINED:
        return Message([], [b'{"%b":[%b]%b}' % (first.name, b",".join(slices), first.rest)])
    parts: list[Buffer] = [b'{"%b":[' % first.name]
    for rows in slices:
        parts += (rows, b",")
    parts[-1] = b"]%b}" % first.rest
    return Message([], parts)


def split(portions: Sequence[Portion], headers: Headers, body: Buffer, limits: Limits = DEFAULT) -> list[Piece]:  # noqa: ARG001 - the codec's signature
    """Check that the answer has one prediction a row, and split it."""
    total = total_rows(portions)
    most = max(total, limits.max_rows)
    wanted = [b"predictions", b"outputs"] if portions[0].parsed.state.name == b"inputs" else [b"predictions"]
    try:
        json_scan.check_size(len(body), "answer", "max_answer_text", limits)
        text = body if type(body) is bytes else bytes(body)
        if not text.isascii():
            json_scan.check_utf8(text, "answer")
        found = _only(wanted[0], text, most)
        if found is not None:
            rows = found[1]
            head = b'{"%b":[' % wanted[0]
            tail = b"]}"
        else:
            spans = json_scan.members(text, "answer", limits)
            name = next((name.decode() for name in wanted if name.decode() in spans), None)
            if name is None:
                raise WrongRows(f"answer has no `{wanted[0].decode()}`", reason=UNREADABLE)
            rows = json_scan.elements(text, f"answer's {name}", spans.pop(name), most)
            fields = {name: text[start:stop] for name, (start, stop) in spans.items()}
            if len({id(portion.parsed) for portion in portions}) > 1:
                check_shareable(fields, total)
            head = b'{"%b":[' % name.encode()
            tail = b"]" + b"".join(_member(*field) for field in fields.items()) + b"}"
    except json_scan.Beyond as beyond:
        raise TooLarge(str(beyond)) from None
    except json_scan.Malformed as error:
        raise WrongRows(str(error), reason=UNREADABLE) from None
    if rows is None or len(rows) != total:
        raise WrongRows(f"{'more' if rows is None else len(rows)} predictions for {total} rows")
    length = longest(portions)
    if length:
        at = 0
        for portion in portions:
            fits = portion.parsed.fit
            end = at + portion.stop - portion.start
            for row in range(at, end):
                if fits is not None:
                    rows[row] = msgspec.Raw(_cut_back(bytes(rows[row]), fits.sequence.outputs, length, fits.length))
            at = end
    return pieces_of(Answer(head, rows, tail), portions)


def agree(one: Piece, other: Piece) -> bool:  # noqa: ARG001 - the codec's signature
    """Whether both can be pieces of one answer: a row may have any form."""
    return True


def assemble(parsed: Parsed[Rows], pieces: Sequence[Piece]) -> Message:  # noqa: ARG001 - the codec's signature
    """Assemble the predictions of one request."""
    first: Answer = pieces[0].answer
    rows = [row for piece in pieces for row in piece.answer.rows[piece.start : piece.stop]]
    return Message([], [first.head + b",".join(rows) + first.tail])


def _shape(row: bytes) -> bytes:
    """Return what must be equal to batch two rows together: structure, kinds of leaves, names of fields."""
    return _tensor(row) or _structure(row)


def _shapes(array: bytes, rows: list[msgspec.Raw]) -> tuple[bytes, bool, int]:
    """Return the first row's shape, whether all rows have it, and how many elements there are in all.

    A few passes over the whole array, not some for each row. The elements are exact for arrays of numbers; commas
    inside strings are counted too, so long texts count for more.
    """
    count, whole = len(rows), _tensor(array)
    if whole is None:
        first = bytes(rows[0])
        # A row of numbers and one with other leaves have different outlines.
        unit = _structure(first)
        alike = count == 1 or json_scan.repeats(_structure(array), unit, count)
        return _tensor(first) or unit, alike, array.count(b",") + 1
    # The outline of equal rows is that of each, with a comma or a bracket behind it.
    unit = whole[2 : 1 + (len(whole) - 2) // count]
    alike = count == 1 or json_scan.repeats(whole[1:], unit, count)
    kind = whole[:1]
    if alike and count > 1 and kind == b"f":
        # If one row has a fraction each must, since each row is float by itself.
        alike = all(_has_fraction(bytes(row)) for row in rows)
    return kind + unit, alike, whole.count(b",") + 1


def _structure(text: bytes) -> bytes:
    """Outline JSON that has more than numbers.

    The text between strings is outlined at once. Only a few different outlines remain, each processed once.
    """
    parts = json_scan.parts(text)
    if len(parts) == 1:
        return _outline(text)
    outlines = _outline(b"\0".join(parts[::2])).split(b"\0")
    seen: dict[bytes, bytes] = {}
    out = [outlines[0]]
    for string, outline in zip(parts[1::2], outlines[1:], strict=True):
        found = seen.get(outline)
        if found is None:
            found = seen[outline] = _field(outline)
        # A string before a colon is the name of a field.
        out += (b'"', string, b'"', found) if outline.startswith(b":") else (b"s", found)
    return b"".join(out)


def _tensor(text: bytes) -> bytes | None:
    """Outline arrays of numbers: ``[1, 2.5]`` is ``f[,]``. None for other leaves and for empty arrays.

    The commas show all sizes, since no array is empty: a few passes in C instead of one step a number.
    """
    bones = text.translate(None, _NUMBERS)
    if bones.strip(b"[],") or (bones.find(b"[]") >= 0 and _EMPTY.search(text)):
        return None
    return (b"f" if _has_fraction(text) else b"i") + bones


def _field(outline: bytes) -> bytes:
    """Summarize a field's numbers in the outline after its name: ``:[,.],`` is ``:f[,],``."""
    if not outline.startswith(b":") or outline == b":":
        return outline
    value, end, after = outline[1:].partition(b"}")
    # An array still open continues after the next string: its leaves count one by one.
    if value.strip(b"[],.") or value.count(b"[") != value.count(b"]"):
        return outline
    return b":" + (b"f" if b"." in value else b"i") + value.replace(b".", b"") + end + after


def _outline(text: bytes) -> bytes:
    """Outline JSON between two strings: ``, 1, 2.5, true, `` is ``,,.,b,``.

    A whole number leaves nothing between its commas, one with a fraction leaves a point; an empty array is marked.
    """
    if b"u" in text or b"l" in text:
        text = text.replace(b"true", b"b").replace(b"false", b"b").replace(b"null", b"n")
    if b"[" in text:
        text = text.translate(None, json_scan.WHITESPACE).replace(b"[]", b"[_]")
    return text.translate(_POINTS, _WHOLE).replace(b"..", b".")


def _has_large_integer(array: bytes) -> bool:
    """Whether a whole number exceeds 64 bits with a sign: others in its batch might then be read as floats."""
    if _LONG not in array.translate(_DIGITS):
        return False
    found = (number[0] for number in _LONG_INTEGER.finditer(json_scan.outside(array)))
    return any(len(number) > len(b"-9223372036854775808") or int(number) not in _INT64 for number in found)


def _has_fraction(numbers: bytes) -> bool:
    return _POINT in numbers or _E in numbers or _CAPITAL_E in numbers


def _only(name: bytes, text: bytes, most: int) -> tuple[Span, list[msgspec.Raw] | None] | None:
    """Find the array of ``{"name": [...]}`` if there is nothing else, the usual case: no name can then come twice.

    Returns its span and its elements; None in place of the elements if there are far more than ``most``.
    """
    start = _ONLY[name].match(text)
    end = text.rfind(b"}")
    if start is None or text[end + 1 :].strip(json_scan.WHITESPACE):
        return None
    if text[end - 1] in json_scan.WHITESPACE:
        end = len(text[:end].rstrip(json_scan.WHITESPACE))
    span = (start.end(), end)
    try:
        return span, json_scan.elements(text, "", span, most)
    except json_scan.Malformed:
        return None  # other fields follow, or an error that the whole body explains better


def _member(name: str, value: bytes) -> bytes:
    return b",%b:%b" % (msgspec.json.encode(name), value)


def _is_json(content_type: bytes) -> bool:
    """Whether a media type is JSON, missing, or curl's default: people send JSON with all of these."""
    media, _, parameters = content_type.lower().partition(b";")
    charset = parameters.partition(b"charset=")[2].strip(b' "')
    if charset not in {b"", b"utf-8", b"utf8", b"us-ascii"}:
        return False
    media = media.strip()
    return media in _JSON_TYPES or (media.endswith(b"+json") and not media.startswith(b"application/cloudevents"))
