from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, v1
from carpool_sidecar.protocols.common import JOINED, Portion, TooLarge, WrongRows
from carpool_sidecar.protocols.limits import DEFAULT, Limits

ENDPOINT = protocols.route(b"/v1/models/m:predict")
assert ENDPOINT is not None
NUMBERS = ["1.10", "1e5", "-0", "12345678901234567890123", "1e400", "0.1000", "-1.5E-7", "3"]


def parse(body, lines=()):
    return v1.parse(ENDPOINT, headers.read(list(lines)), body.encode() if isinstance(body, str) else body)


def of_rows(rows):
    return f'{{"instances":[{rows}]}}'


def body_of(message):
    assert message.headers == []
    return b"".join(message.parts)


def whole(*parsed):
    return [Portion(one, 0, one.rows) for one in parsed]


# --- parse


def test_rows_and_key():
    one, two = parse('{"instances": [[1.5, 2], [3, 4.5]]}'), parse(b' {"instances":[[0.5,7.25]]}\n')
    assert (one.rows, two.rows) == (2, 1)
    assert one.key == two.key
    assert one.mergeable
    assert one.first_by_protocol
    assert (one.tokens, one.size) == (4, 35)


@pytest.mark.parametrize(
    "endpoint", [b"/v1/models/n:predict", b"/v1/models/m/versions/2:predict", b"/v1/models/m:predict?a=1"]
)
def test_the_key_holds_the_endpoint(endpoint):
    route = protocols.route(endpoint)
    assert route is not None
    assert v1.parse(route, headers.read([]), b'{"instances":[1]}').key != parse('{"instances":[1]}').key


def test_the_key_holds_headers_and_other_fields():
    plain = parse('{"instances":[1]}')
    assert parse('{"instances":[1]}', [(b"x-tenant", b"a")]).key != plain.key
    assert parse('{"instances":[1]}', [(b"traceparent", b"a")]).key == plain.key
    named = parse('{"instances":[1],"signature_name":"x"}')
    assert named.key != plain.key
    assert named.key != parse('{"instances":[1],"signature_name":"y"}').key
    assert named.key == parse('{"signature_name":"x","instances":[2]}').key
    # V1 has no request id of its own: a field `id` is the model's.
    assert parse('{"instances":[1],"id":"x"}').key != plain.key


SIGNATURES = [
    ["1", "2", "-7", "12345678901234567890123"],
    ["1.5", "2.0", "1e5", "1E-5", "1e400"],
    ['"a"', '""', '"[1]"', '"\\"\\\\"', '"1.5"'],
    ["true", "false"],
    ["null"],
    ["[]", "[ ]"],
    ["{}"],
    ["[1]", "[ 7 ]"],
    ["[1.5]", "[1e3]"],
    ["[[1]]"],
    ["[[]]", "[[ ]]"],
    ["[[],[]]"],
    ["[1,2]", "[3 , 4]"],
    ["[1.0,2]", "[1,2.5]", "[1.5,2.5]", "[1e2,2]"],
    ["[[1,2],[3,4]]"],
    ["[[1,2,3],[4]]"],
    ["[true,1]"],
    ["[1,true]"],
    ["[true,1.5]"],
    ["[null,1]"],
    ['["a"]'],
    ['["a","b"]', '["c", "d"]'],
    ['["a",1]', '["b", 2]'],
    ['["a",1.5]', '["b",2.0]'],
    ['["a",1,2.5]'],
    ['["a",1.5,2.5]'],
    ['{"a":1}', '{"a" : 2}'],
    ['{"a":1.5}'],
    ['{"b":1}'],
    ['{"a":"x"}', '{"a": "1"}'],
    ['{"a":[1,2]}', '{"a" : [ 3 , 4 ] }'],
    ['{"a":[1,2.5]}', '{"a":[1.5,2.5]}'],
    ['{"a":[]}', '{"a":[ ]}'],
    ['{"a":null}'],
    ['{"a":true}', '{"a":false}'],
    ['{"a":[null]}'],
    ['{"a":1,"b":2}'],
    ['{"a":1,"b":2.5}', '{"a":1 , "b":3.5}'],
    ['{"a":1.5,"b":2}'],
    ['{"a":[1,"x",2.5]}'],
    ['{"a":[1.5,"x",2.5]}'],
    ['{"a":[1,2.5,"x"]}'],
    ['{"a":[1.5,2.5,"x"]}'],
    ['[{"a":1},2]'],
    ['[{"a":1},2.5]'],
    ['[{"a":1.5},2]'],
    ['{"b64":"aGk="}', '{"b64":"aGhp"}'],
    ['{"a":{"b":1}}'],
    ['{"a":{"b":1.5}}'],
    ['["v",{"k":1}]'],
    ['{"v":{"k":1}}'],
    ['{",":1}'],
]


@pytest.mark.parametrize(("rows"), SIGNATURES, ids=lambda rows: rows[0])
def test_rows_of_one_signature_are_batched_together_and_with_no_other(rows):
    keys = {parse(of_rows(row)).key for row in rows}
    assert len(keys) == 1
    others = {parse(of_rows(row)).key for other in SIGNATURES if other is not rows for row in other}
    assert not keys & others


def test_long_signatures_are_distinguished():
    def image(side):
        return json.dumps({"instances": [[[0.5] * side] * side]})

    assert parse(image(64)).key == parse(image(64)).key
    assert parse(image(64)).key != parse(image(65)).key
    assert len(parse(image(64)).key) < 200


@pytest.mark.parametrize(
    ("rows", "alone"),
    [
        ("[1,2],[3,4]", None),
        ("[1,2.5],[3.5,4]", None),
        ("[1,2],[3,4.5]", "mixed-rows"),
        ("[1,2],[3]", "mixed-rows"),
        ("[1,2],[3,[4]]", "mixed-rows"),
        ("[],[]", None),
        ("[],[1]", "mixed-rows"),
        ("1,2,3", None),
        ("1,2.5", "mixed-rows"),
        ('"a","b"', None),
        ('"a",1', "mixed-rows"),
        ('{"a":1},{"a":2}', None),
        ('{"a":1},{"b":2}', "mixed-rows"),
        ("null,null", None),
        ("[[1],[2]],[[3],[4]]", None),
        ("[[1],[2]],[[3,4]]", "mixed-rows"),
    ],
)
def test_rows_that_differ_are_sent_alone(rows, alone):
    parsed = parse(of_rows(rows))
    assert parsed.alone == alone
    assert parsed.mergeable is (alone is None)
    assert parsed.rows == len(json.loads(f"[{rows}]"))


@pytest.mark.parametrize(
    ("rows", "alone"),
    [
        ("[9223372036854775807],[-9223372036854775808]", None),
        ("[9223372036854775808],[1]", "large-integers"),
        ("[1],[-9223372036854775809]", "large-integers"),
        ("1" + "0" * 5000, "large-integers"),
        ('{"id":12345678901234567890}', "large-integers"),
        ('{"id":"12345678901234567890"}', None),
        ("[12345678901234567890.5]", None),
        ("[0.12345678901234567890]", None),
        ("[1.5,12345678901234567890]", None),  # floats all of them
        ("[1e5,12345678901234567890e3]", None),
    ],
)
def test_whole_numbers_that_numpy_would_make_floats_of_go_alone(rows, alone):
    assert parse(of_rows(rows)).alone == alone


def test_inputs_are_merged_only_where_the_model_says_so():
    parsed = parse('{"inputs":[[1],[2]]}')
    assert (parsed.rows, parsed.mergeable, parsed.first_by_protocol) == (2, True, False)
    assert parsed.key != parse('{"instances":[[1],[2]]}').key
    assert parse('{"inputs":{"x":[1],"y":[2]}}').alone == "columns"


@pytest.mark.parametrize(
    ("body", "lines", "reason"),
    [
        (b"\x1f\x8b...", [(b"content-encoding", b"gzip")], "encoded"),
        (b"\xff\xd8", [(b"content-type", b"image/jpeg")], "content-type"),
        (b"{}", [(b"content-type", b"application/cloudevents+json")], "content-type"),
        (b'{"prompt":"x"}', [], "no-rows"),
        (b'{"instances":[1],"inputs":[1]}', [], "no-rows"),
        (b'{"instances":["\\ud800"]}', [], "surrogates"),
    ],
)
def test_bodies_that_are_not_understood_are_sent_alone(body, lines, reason):
    parsed = parse(body, lines)
    assert (parsed.alone, parsed.rows, parsed.size) == (reason, 1, len(body))


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/json",
        b"Application/JSON; charset=UTF-8",
        b"application/x-www-form-urlencoded",
        b"application/vnd.m+json",
    ],
)
def test_media_types_that_hold_json(content_type):
    assert parse('{"instances":[1]}', [(b"content-type", content_type)]).mergeable


def test_another_charset_is_forwarded():
    assert parse('{"instances":[1]}', [(b"content-type", b"application/json; charset=utf-16")]).alone == "content-type"


@pytest.mark.parametrize(
    ("body", "reason", "why"),
    [
        (b"", "malformed", "body: JSON is empty"),
        (b"[1]", "malformed", "body: expected object, got array"),
        (b'{"instances":[1]', "malformed", "body: JSON ends before it is complete"),
        (b'{"instances":[1]}}', "malformed", "trailing characters"),
        (b'{"instances":[1]}x}', "malformed", "trailing characters"),
        (b'{"instances":[1,]}', "malformed", "trailing comma in array"),
        (b'{"instances":[1}]}', "malformed", "expected ',' or ']'"),
        (b'{"instances":[NaN]}', "malformed", "body: JSON has no NaN (byte 14)"),
        (b'{"instances":[]}', "empty", ""),
        (b'{"inputs":[ ]}', "empty", ""),
        (b'{"instances":{"a":1}}', "no-rows", "instances is an object, not an array"),
        (b'{"instances":"a"}', "no-rows", "instances is a string, not an array"),
        (b'{"inputs":3}', "no-rows", "inputs is a number, not an array"),
        (b'{"instances":[1],"instances":[2]}', "malformed", 'member "instances" comes twice'),
        (b'{"instances":[1],"a":1,"a":2}', "malformed", 'member "a" comes twice'),
        (b'\xef\xbb\xbf{"instances":[1]}', "malformed", "byte order mark"),
        ('{"instances":[1]}'.encode("utf-16"), "malformed", "UTF-16"),
        (b'{"instances":["\xff"]}', "malformed", "not UTF-8"),
        (b'{"instances":' + b"[" * 65 + b"]" * 65 + b"}", "limits", "limits.maxDepth is 64"),
        (b'{"instances":' + b"[" * 100_000, "limits", "limits.maxArrays is 65536"),
        (b'{"instances":' + b"[" * 60_000, "limits", "limits.maxDepth is 64"),
        (b'{"instances":[' + b"1," * 8192 + b"1]}", "limits", "instances: over 8192; limits.maxRows is 8192"),
        (b'{"instances":[' + b"1," * 20000 + b"1]}", "limits", "instances: over 8192; limits.maxRows is 8192"),
        (b'{"instances":[1]}' + b" " * 2**21, "limits", "body: 2097169; limits.maxText is 2Mi"),
    ],
)
def test_what_cannot_be_read_is_forwarded_and_the_reason_kept(body, reason, why):
    parsed = parse(body)
    assert (parsed.alone, parsed.rows, parsed.size, parsed.state) == (reason, 1, len(body), None)
    assert why in parsed.why
    assert bool(why) is bool(parsed.why)


def test_explanations_are_short_whatever_the_caller_sends():
    name = "a" * 100_000
    parsed = parse(json.dumps({"instances": [1]})[:-1] + f', "{name}": 1, "{name}": 2}}')
    assert parsed.alone == "malformed"
    assert len(parsed.why) < 250


def test_a_header_that_says_two_things_is_forwarded():
    lines = [(b"content-type", b"application/json"), (b"content-type", b"text/json")]
    parsed = parse('{"instances":[1]}', lines)
    assert (parsed.alone, parsed.why) == ("malformed", "header content-type comes twice, with different values")


def test_what_is_held_beside_the_body_is_counted():
    one, many = parse('{"instances":[1]}'), parse(of_rows(",".join(["1"] * 8000)))
    assert one.expansion < 100
    assert 60 * 8000 < many.expansion < 80 * 8000
    assert parse(bytearray(b'{"instances":[1]}')).expansion == one.expansion + one.size


def test_any_buffer_will_do():
    text = b'{"instances":[1]}'
    assert parse(bytearray(text)).key == parse(memoryview(text)).key == parse(text).key


# --- merge, split, assemble


def test_merge_copies_no_large_rows():
    bodies = [of_rows(f"[{json.dumps('x' * JOINED)}]").encode() for _ in range(2)]
    message = v1.merge(whole(*map(parse, bodies)))
    assert [part.obj for part in message.parts if isinstance(part, memoryview)] == bodies
    assert json.loads(b"".join(message.parts)) == {"instances": [["x" * JOINED]] * 2}


def test_an_answer_beyond_the_limit_is_not_read():
    parsed = parse('{"instances":[1]}'), parse('{"instances":[2]}')
    answer = b'{"predictions":[1,2]}' + b" " * 100
    assert v1.split(whole(*parsed), [], answer)
    with pytest.raises(TooLarge, match=r"answer: 121; limits\.maxAnswerText is 100"):
        v1.split(whole(*parsed), [], answer, Limits(max_answer_text=100))
    with pytest.raises(TooLarge, match=f"{DEFAULT.max_answer_text + 1}; limits"):
        v1.split(whole(*parsed), [], b" " * (DEFAULT.max_answer_text + 1))


def test_far_more_predictions_than_rows_are_refused():
    answer = b'{"predictions":[' + b"1," * 50_000 + b"1]}"
    for text in (answer, answer[:-1] + b',"model":"m"}'):
        with pytest.raises(WrongRows, match="more predictions for 1 rows"):
            v1.split(whole(parse('{"instances":[1]}')), [], text)


def test_merge_keeps_the_digits():
    bodies = [of_rows(f"[{number}, 2.5 ]") for number in ("1.10", "1e5", "-0", "12345678901234567890123")]
    merged = v1.merge(whole(*map(parse, bodies)))
    assert body_of(merged) == b'{"instances":[[1.10, 2.5 ],[1e5, 2.5 ],[-0, 2.5 ],[12345678901234567890123, 2.5 ]]}'


def test_other_fields_are_sent_once():
    merged = v1.merge(whole(*[parse(f'{{"signature_name":"x","instances":[{row}]}}') for row in (1, 2)]))
    assert body_of(merged) == b'{"instances":[1,2],"signature_name":"x"}'


def test_split_keeps_the_digits_and_shares_what_is_about_the_batch():
    parsed = [parse('{"instances":[1,2]}'), parse('{"instances":[3]}')]
    answer = b'{"model":"m" , "predictions" : [ 1.10 ,{"a":-0}, "x" ], "took": {"ms": 3}}'
    pieces = v1.split(whole(*parsed), [], answer)
    assert (
        body_of(v1.assemble(parsed[0], pieces[:1])) == b'{"predictions":[1.10,{"a":-0}],"model":"m","took":{"ms": 3}}'
    )
    assert body_of(v1.assemble(parsed[1], pieces[1:])) == b'{"predictions":["x"],"model":"m","took":{"ms": 3}}'


def test_an_array_beside_the_predictions_reaches_no_other_caller():
    parsed = [parse('{"instances":[1]}'), parse('{"instances":[2]}')]
    answer = b'{"predictions":[1,2],"explanations":[["a"],["b"]]}'
    with pytest.raises(WrongRows, match="explanations"):
        v1.split(whole(*parsed), [], answer)
    # One caller alone gets it all, also when its rows travel as two portions.
    one = parse('{"instances":[1,2]}')
    pieces = v1.split([Portion(one, 0, 1), Portion(one, 1, 2)], [], answer)
    assert body_of(v1.assemble(one, pieces)) == answer


def test_inputs_may_be_answered_by_outputs():
    parsed = [parse('{"inputs":[1]}'), parse('{"inputs":[2]}')]
    pieces = v1.split(whole(*parsed), [], b'{"outputs": [7, 8]}')
    assert body_of(v1.assemble(parsed[1], pieces[1:])) == b'{"outputs":[8]}'
    with pytest.raises(WrongRows):
        v1.split(whole(parse('{"instances":[1]}')), [], b'{"outputs": [7]}')


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b"[1,2]",
        b'{"predictions":[1]}',
        b'{"predictions":[1,2,3]}',
        b'{"predictions":{"a":[1,2]}}',
        b'{"predictions":[1,2}',
        b'{"predictions":[1,NaN]}',
        b'{"predictions":[1,2],"predictions":[3,4]}',
        b'{"error":"no"}',
        b'{"predictions":["\xff",1]}',
        b'{"predictions":["\\ud800",1]}',
        b"<html>",
    ],
)
def test_an_answer_that_does_not_fit_is_refused(answer):
    with pytest.raises(WrongRows):
        v1.split(whole(parse('{"instances":[1]}'), parse('{"instances":[2]}')), [], answer)


def echo(message):
    """A model server that answers each instance with itself, digit for digit."""
    text = body_of(message)
    return b'{"predictions":' + text.removeprefix(b'{"instances":')


ROWS = st.sampled_from(
    [
        st.sampled_from(NUMBERS),
        st.lists(st.sampled_from(NUMBERS), min_size=3, max_size=3).map(lambda row: f"[{' , '.join(row)}]"),
        st.text().map(json.dumps),
        st.text().map(lambda text: json.dumps({"text": text, "k": [1, 2]}, ensure_ascii=False)),
        st.just("[[],[ ]]"),
        st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=2).map(
            lambda row: f'{{"x":[{",".join(row)}],"y":null}}'
        ),
    ]
)


@st.composite
def grouping(draw):
    """Requests of one kind of row, and a way to cut all their rows, in order, into batches."""
    rows = draw(ROWS)
    requests = draw(st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=30, max_size=30))
    return requests, sizes


@given(grouping())
def test_any_grouping_and_any_split_gives_every_caller_its_own_rows(grouping):
    requests, sizes = grouping
    parsed = [parse(of_rows(",".join(rows))) for rows in requests]
    groups = {}
    for index, one in enumerate(parsed):
        if one.mergeable:
            groups.setdefault(one.key, []).append(index)
    for indices in groups.values():
        rows = [(index, row) for index in indices for row in range(parsed[index].rows)]
        pieces = {index: [] for index in indices}
        cuts = iter(sizes)
        while rows:
            size = next(cuts)
            batch, rows = rows[:size], rows[size:]
            spans = {}
            for index, row in batch:
                spans.setdefault(index, []).append(row)
            portions = [Portion(parsed[index], span[0], span[-1] + 1) for index, span in spans.items()]
            answer = echo(v1.merge(portions))
            for index, piece in zip(spans, v1.split(portions, [], answer), strict=True):
                pieces[index].append(piece)
        for index in indices:
            expected = f'{{"predictions":[{",".join(requests[index])}]}}'
            assert body_of(v1.assemble(parsed[index], pieces[index])) == expected.encode()
