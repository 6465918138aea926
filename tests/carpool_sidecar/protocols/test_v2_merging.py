"""Requests of the Open Inference Protocol: merged, and their answers split by caller."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from v2_messages import LENGTH, binary, blob, parse, taken_apart, tensor, whole

from carpool_sidecar.protocols import headers, v2
from carpool_sidecar.protocols.common import JOINED, Portion, TooLarge, WrongRows
from carpool_sidecar.protocols.limits import FREE, Limits
from carpool_sidecar.protocols.tensors import WIDTHS, _ends

# --- merge, split, assemble


def test_merge_of_json():
    one = parse(b'{"id":"a","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.10, 1e5]}]}')
    two = parse(
        b'{"inputs":[{"shape":[2,2],"datatype":"FP32","name":"x","data":[ -0,2,3,4 ]}],"parameters":{"priority":1}}'
    )
    message = v2.merge(whole(one, two))
    assert message.headers == []
    assert (
        b"".join(message.parts)
        == b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3,2],"data":[1.10, 1e5,-0,2,3,4]}]}'
    )


def test_merge_of_binary_copies_no_tensor():
    bodies = [
        binary({"id": str(row), "inputs": [blob(8), blob(1, "y", (1,), "BOOL")]}, bytes([row]) * 8, b"\1")
        for row in range(3)
    ]
    message = v2.merge(whole(*[parse(*body) for body in bodies]))
    head, data = taken_apart(message)
    assert head == {"inputs": [blob(24, shape=(3, 2)), blob(3, "y", (3,), "BOOL")]}
    assert data == bytes(8) + b"\1" * 8 + b"\2" * 8 + b"\1" * 3
    assert [part.obj for part in message.parts[1:4]] == [body for body, _ in bodies]


def test_other_members_are_sent_once():
    body = {
        "inputs": [tensor()],
        "outputs": [{"name": "o"}],
        "parameters": {"timeout": 1, "b": True},
        "model_name": "m",
    }
    head, _ = taken_apart(v2.merge(whole(parse({**body, "id": "a"}), parse({**body, "id": "b"}))))
    assert head["inputs"] == [tensor(shape=(2, 2))]
    assert {name: value for name, value in head.items() if name != "inputs"} == {
        "outputs": [{"name": "o"}],
        "parameters": {"b": True},
        "model_name": "m",
    }


def answer(outputs, *buffers, **fields):
    body, length = binary({"model_name": "m", "model_version": "1", **fields, "outputs": outputs}, *buffers)
    return ([(b"Inference-Header-Content-Length", b"%d" % length)] if buffers else []), body


def waiters(*rows, **fields):
    return [
        parse({"id": f"r{index}", "inputs": [tensor(shape=(count, 2))], **fields}) for index, count in enumerate(rows)
    ]


def test_each_request_gets_its_rows_and_its_id():
    parsed = waiters(1, 2)
    outputs = [blob(12, "b", (3, 2), "UINT16", p=1), tensor("a", (3, 1), "INT64", [[10], [20], [30]], extra="e")]
    pieces = v2.split(whole(*parsed), *answer(outputs, b"aabbccddeeff", parameters={"q": 2}))
    head, data = taken_apart(v2.assemble(parsed[1], pieces[1:]))
    assert list(head) == ["model_name", "model_version", "parameters", "id", "outputs"]
    assert head == {
        "model_name": "m",
        "model_version": "1",
        "parameters": {"q": 2},
        "id": "r1",
        "outputs": [blob(8, "b", (2, 2), "UINT16", p=1), tensor("a", (2, 1), "INT64", [[20], [30]], extra="e")],
    }
    assert data == b"ccddeeff"


def test_binary_answers_are_views():
    parsed = waiters(1, 2)
    lines, body = answer([blob(24, "b", (3, 2))], bytes(range(24)))
    pieces = v2.split(whole(*parsed), lines, body)
    parts = v2.assemble(parsed[1], pieces[1:]).parts
    assert isinstance(parts[1], memoryview)
    assert parts[1].obj is body


def ids(portions, server_id):
    """The ids in the answers to portions of one row each."""
    pieces = v2.split(portions, *answer([tensor("o", (len(portions),), data=[0] * len(portions))], id=server_id))
    return [
        taken_apart(v2.assemble(portion.parsed, [piece]))[0]["id"]
        for portion, piece in zip(portions, pieces, strict=True)
    ]


def test_ids():
    body = {"inputs": [tensor()]}
    ours, none = parse({**body, "id": 'q"'}), parse(body)
    assert ids(whole(ours, none), "servers-own") == ['q"', "servers-own-1"]
    assert ids(whole(none), "servers-own") == ["servers-own"]
    pieces = v2.split(whole(ours, none), *answer([tensor("o", (2,), data=[1, 2])]))
    assert "id" not in taken_apart(v2.assemble(none, pieces[1:]))[0]


@pytest.mark.parametrize("server_id", ["9f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "request 7", 'a"b\\', ""])
def test_requests_that_share_a_servers_id_get_distinct_ones_made_of_it(server_id):
    portions = whole(*[parse({"inputs": [tensor()]}) for _ in range(64)])
    found = ids(portions, server_id)
    assert len(set(found)) == 64
    assert found == ids(portions, server_id)  # nothing but the server's id and the place in the batch decides
    assert not set(found) & set(ids(portions, server_id[:-1] + "x"))
    if len(server_id) == 36:
        assert all(str(UUID(one)) == one for one in found)
    else:
        assert all(one.startswith(server_id) for one in found)


def test_an_id_of_the_servers_that_is_no_string_stays_as_it_is():
    portions = whole(*[parse({"inputs": [tensor()]}) for _ in range(2)])
    assert ids(portions, 7) == [7, 7]


def test_a_callers_id_keeps_its_escapes():
    parsed = parse(b'{"id":"\\u0041\\/","inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}')
    pieces = v2.split(whole(parsed), *answer([tensor("o", (1,), data=[1])], id="servers-own"))
    assert b'"id":"\\u0041\\/"' in v2.assemble(parsed, pieces).parts[0]


@given(st.integers(1, 40), st.integers(1, 60), st.data())
def test_rows_of_flat_data_are_found_by_their_commas(count, width, data):
    elements = st.sampled_from([b"1", b"-0.125", b" 2 ", b"1" * 30, b"1" * 3000])
    rows = data.draw(
        st.lists(
            st.one_of(elements.map(lambda one: [one] * width), st.lists(elements, min_size=width, max_size=width)),
            min_size=count,
            max_size=count,
        )
    )
    text = b",".join(b",".join(row) for row in rows)
    cuts = list(_ends(text, count, width))
    assert [text[a : b - 1] for a, b in pairwise(cuts)] == [b",".join(row) for row in rows]


def test_large_json_tensors_are_not_copied():
    bodies = [json.dumps({"inputs": [tensor(shape=(1, JOINED), data=[n] * JOINED)]}).encode() for n in (1, 2)]
    parsed = [parse(body) for body in bodies]
    message = v2.merge(whole(*parsed))
    assert [part.obj for part in message.parts if isinstance(part, memoryview)] == bodies
    head, _ = taken_apart(message)
    assert head == {"inputs": [tensor(shape=(2, JOINED), data=[1] * JOINED + [2] * JOINED)]}


@pytest.mark.parametrize("spaces", ["", " ", "\n\t "])
@pytest.mark.parametrize("nested", [False, True])
def test_large_json_data_in_spaces_is_cut_at_its_rows(spaces, nested):
    rows = [[row + column / 8 for column in range(FREE)] for row in range(3)]
    data = spaces + json.dumps(rows if nested else [*chain(*rows)])[1:-1] + spaces
    tensor_text = f'{{"name":"x","shape":[3,{FREE}],"datatype":"FP32","data":{spaces}[{data}]{spaces}}}'
    body = f'{{"inputs":[{tensor_text}]}}'
    parsed = parse(body.encode())
    assert parsed.mergeable
    for start, stop in ((0, 1), (1, 3), (0, 3)):
        head, _ = taken_apart(v2.merge([Portion(parsed, start, stop)]))
        expected = rows[start:stop] if nested else [*chain(*rows[start:stop])]
        assert head == {"inputs": [tensor(shape=(stop - start, FREE), data=expected)]}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([tensor("o", (2, 60), data=[1] * 120)], "answer: .*; limits.maxAnswerText is 200"),
        ([tensor(f"o{n}", (2,), "INT8", []) for n in range(3)], "outputs: .*; limits.maxTensors is 2"),
    ],
)
def test_an_answer_beyond_the_limits_is_not_shared_out(outputs, message):
    limits = Limits(max_answer_text=200 if len(outputs) == 1 else 2000, max_tensors=2)
    with pytest.raises(TooLarge, match=message):
        v2.split(whole(*waiters(1, 1)), *answer(outputs), limits)


def test_an_answer_of_too_many_strings_is_not_shared_out():
    lines, body = answer([blob(4 * 9000, "o", (2, 4500), "BYTES")], bytes(4 * 9000))
    with pytest.raises(TooLarge, match=r"outputs\[0\]: over 8192; limits.maxStrings"):
        v2.split(whole(*waiters(1, 1)), lines, body)


def test_strings_and_deep_rows_in_json_answers():
    parsed = waiters(1, 1)
    outputs = [tensor("s", (2, 2), "BYTES", ["a,b", "[", "]", '"']), tensor("n", (2, 1, 2), data=[[[1, 2]], [[3, 4]]])]
    pieces = v2.split(whole(*parsed), *answer(outputs))
    head, _ = taken_apart(v2.assemble(parsed[1], pieces[1:]))
    assert [output["data"] for output in head["outputs"]] == [["]", '"'], [[[3, 4]]]]


def test_outputs_without_elements():
    parsed = waiters(1, 2)
    outputs = [tensor("f", (3, 0), data=[]), tensor("n", (3, 0), data=[[], [], []]), blob(0, "b", (3, 0))]
    lines, body = answer(outputs, b"")
    pieces = v2.split(whole(*parsed), lines, body)
    head, _ = taken_apart(v2.assemble(parsed[1], pieces[1:]))
    assert head["outputs"] == [tensor("f", (2, 0), data=[]), tensor("n", (2, 0), data=[[], []]), blob(0, "b", (2, 0))]


def test_a_datatype_of_the_servers_own():
    parsed = waiters(1, 1)
    lines, body = answer([blob(12, "o", (2, 2), "FP24")], b"abcdefghijkl")
    pieces = v2.split(whole(*parsed), lines, body)
    assert taken_apart(v2.assemble(parsed[1], pieces[1:]))[1] == b"ghijkl"


OUTPUT = tensor("o", (2, 2))


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        answer([tensor("o", (1, 2))]),
        answer([tensor("o", (3, 2))]),
        answer([OUTPUT, tensor("p", (1,), data=[1])]),
        answer([tensor("o", (), data=[1])]),
        answer([{**OUTPUT, "data": [1, 2, 3]}]),
        answer([{**OUTPUT, "data": [[1, 2, 3, 4]]}]),
        answer([blob(8, "o", (2,))], bytes(7)),
        answer([blob(7, "o", (2,), "FP24")], bytes(7)),
        answer([OUTPUT, OUTPUT]),
        answer([OUTPUT], parameters={"a": [1, 2]}),
        answer([OUTPUT], trace=[["a"], ["b"]]),
        answer([{**OUTPUT, "parameters": {"labels": ["a", "b"]}}]),
        ([], b""),
        ([], b"[]"),
        ([], b'{"error":"x"}'),
        ([], b'{"outputs":3}'),
        ([(LENGTH, b"99")], b"{}"),
        ([], b'{"outputs":[{"name":"o","shape":[2],"datatype":"BYTES","data":["\xff","a"]}]}'),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(lines, body):
    with pytest.raises(WrongRows):
        v2.split(whole(*waiters(1, 1)), lines, body)


def test_a_caller_alone_gets_arrays_too():
    (one,) = waiters(2)
    pieces = v2.split([Portion(one, 0, 1), Portion(one, 1, 2)], *answer([OUTPUT], trace=[["a"], ["b"]]))
    assert taken_apart(v2.assemble(one, pieces))[0]["trace"] == [["a"], ["b"]]


def test_parts_that_differ_make_no_answer():
    (one,) = waiters(2)
    first, second, wider = (
        v2.split([Portion(one, at, at + 1)], *answer([tensor("o", (1, width))]))[0]
        for at, width in ((0, 2), (1, 2), (1, 3))
    )
    assert v2.agree(first, second)
    assert not v2.agree(first, wider)


# --- any request, any batch, any cut


@dataclass
class Spec:
    """One input of a model: what each request sends of it is drawn row by row."""

    name: str
    datatype: str
    trailing: tuple[int, ...]
    form: str

    def rows(self, draw, count):
        element = self._element()
        return [[draw(element) for _ in range(prod(self.trailing))] for _ in range(count)]

    def _element(self):
        if self.form == "binary":
            width = WIDTHS[self.datatype]
            if width is None:
                return st.binary(max_size=5).map(lambda data: struct.pack("<I", len(data)) + data)
            return st.binary(min_size=width, max_size=width)
        if self.datatype == "BOOL":
            return st.sampled_from([b"true", b"false"])
        if self.datatype == "BYTES":
            return st.text(max_size=4).map(lambda text: json.dumps(text, ensure_ascii=False).encode())
        if self.datatype.startswith("FP"):
            return st.sampled_from([b"1.10", b"1e5", b"-0", b"12345678901234567890123", b"1e400", b"-1.50E-7", b"3"])
        return st.sampled_from([b"0", b"-0", b"7", b"-128", b"12345678901234567890123"])

    def sent(self, rows):
        shape = b",".join(b"%d" % dim for dim in (len(rows), *self.trailing))
        head = b'{"name":"%b","datatype":"%b","shape":[%b],' % (self.name.encode(), self.datatype.encode(), shape)
        if self.form == "binary":
            data = b"".join(map(b"".join, rows))
            return head + b'"parameters":{"binary_data_size":%d}}' % len(data), data
        return head + b'"data":[%b]}' % b",".join(self._row(row) for row in rows), b""

    def _row(self, row):
        if self.form == "flat":
            return b",".join(row)
        for dim in reversed(self.trailing):
            row = [b"[" + b",".join(row[at : at + dim]) + b"]" for at in range(0, len(row), dim)]
        return row[0]


@st.composite
def specs(draw):
    chosen = []
    for index in range(draw(st.integers(1, 3))):
        datatype = draw(st.sampled_from(sorted(WIDTHS)))
        forms = ["binary"] if datatype in {"FP16", "BF16"} else ["binary", "flat", "nested"]
        trailing = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        chosen.append(Spec(f"x{index}", datatype, trailing, draw(st.sampled_from(forms))))
    return chosen


def request(chosen, tensors, identity):
    sent = [spec.sent(rows) for spec, rows in zip(chosen, tensors, strict=True)]
    text = b'{"id":"%d","inputs":[%b]}' % (identity, b",".join(head for head, _ in sent))
    data = b"".join(data for _, data in sent)
    return text + data, len(text)


def echo(message):
    """A model server whose outputs are its inputs, byte for byte."""
    body = b"".join(message.parts)
    length = headers.find(message.headers, LENGTH)
    text = (body if length is None else body[: int(length)]).replace(b'{"inputs":', b'{"outputs":', 1)
    data = b"" if length is None else body[int(length) :]
    return ([] if length is None else [(LENGTH, b"%d" % len(text))]), text + data


@given(specs(), st.data())
def test_any_grouping_and_any_split_gives_every_caller_its_own_bytes(chosen, data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    requests = [[spec.rows(data.draw, count) for spec in chosen] for count in counts]
    any_binary = any(spec.form == "binary" for spec in chosen)
    parsed = []
    for index, tensors in enumerate(requests):
        body, length = request(chosen, tensors, index)
        parsed.append(parse(body, length if any_binary else None))
    assert {one.alone for one in parsed} == {None}
    assert len({one.key for one in parsed}) == 1
    # Cut all rows, in order, into batches; a request may travel in several.
    rows = [(index, row) for index, count in enumerate(counts) for row in range(count)]
    pieces = [[] for _ in parsed]
    while rows:
        size = data.draw(st.integers(1, 5))
        batch, rows = rows[:size], rows[size:]
        spans = {}
        for index, row in batch:
            spans.setdefault(index, []).append(row)
        portions = [Portion(parsed[index], span[0], span[-1] + 1) for index, span in spans.items()]
        for index, piece in zip(spans, v2.split(portions, *echo(v2.merge(portions))), strict=True):
            pieces[index].append(piece)
    for index, tensors in enumerate(requests):
        body, length = request(chosen, tensors, index)
        expected = b'{"id":"%d","outputs":[' % index + body[: length - 1].partition(b'"inputs":[')[2] + b"}"
        message = v2.assemble(parsed[index], pieces[index])
        assert b"".join(message.parts) == expected + body[length:]
        assert message.headers == ([(LENGTH, b"%d" % len(expected))] if any_binary else [])
