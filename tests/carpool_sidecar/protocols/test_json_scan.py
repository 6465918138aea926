from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool_sidecar.protocols import json_scan
from carpool_sidecar.protocols.json_scan import Beyond, Malformed, Surrogates
from carpool_sidecar.protocols.limits import DEFAULT, FREE, Limits, setting


def elements(text, where="x", most=DEFAULT.max_rows):
    return json_scan.elements(text, where, (0, len(text)), most)


def members(text, where="x", limits=DEFAULT):
    return {name: text[start:stop] for name, (start, stop) in json_scan.members(text, where, limits).items()}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")])


def accepted_by_json(text: bytes) -> bool:
    """Strictly RFC 8259: the standard library, without its leniency for NaN and lone surrogates."""

    def refuse(literal: str) -> None:
        raise ValueError(literal)

    try:
        value = json.loads(text.decode(), parse_constant=refuse, parse_int=str)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


@given(st.lists(VALUES), SPACES, st.booleans())
def test_elements_are_the_text_of_each_value(values, spaces, ascii_only):
    text = json.dumps(values, separators=spaces, ensure_ascii=ascii_only).encode()
    parts = [bytes(element) for element in elements(text)]
    assert [json.loads(part) for part in parts] == values
    assert all(part in text for part in parts)


@given(st.dictionaries(st.text(), VALUES), SPACES, st.booleans())
def test_members_are_the_text_of_each_value(fields, spaces, ascii_only):
    text = json.dumps(fields, separators=spaces, ensure_ascii=ascii_only).encode()
    found = members(text, "x")
    assert {name: json.loads(value) for name, value in found.items()} == fields
    assert list(found) == list(fields)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "\u00e9", "}"]), VALUES), max_size=5), SPACES, st.booleans())
@example([("a", 1), ("a", '..."}')], (",", ":"), True)
@example([("a", 1), ("b", 2), ("b", 2), ("c", 2)], (",", ":"), True)
@example([("a", 1), ("a", 12)], (",", ":"), True)
def test_a_member_that_comes_twice_is_refused_and_no_other(pairs, spaces, ascii_only):
    comma, colon = spaces
    dump = [
        json.dumps(name, ensure_ascii=ascii_only) + colon + json.dumps(value, ensure_ascii=ascii_only)
        for name, value in pairs
    ]
    text = ("{" + comma.join(dump) + "}").encode()
    names = [name for name, _ in pairs]
    if len(set(names)) == len(names):
        assert list(members(text, "x")) == names
    else:
        with pytest.raises(Malformed, match="comes twice"):
            members(text, "x")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"a":1,"a":1}', "a"),
        (b'{"a":1,"b":2,"b":2,"c":2}', "b"),
        (b'{"a":1,"\\u0061":1}', r"\u0061"),
        (b'{"x":0,"a":1,"a":2}', "a"),
    ],
)
def test_the_member_that_comes_twice_is_named(text, name):
    with pytest.raises(Malformed) as error:
        members(text, "body")
    assert str(error.value) == f'body: member "{name}" comes twice'


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "b", "}", '{"', "\u00e9"]), VALUES), max_size=4),
        min_size=1,
        max_size=4,
    ),
    SPACES,
    st.booleans(),
)
@example([[("a", 1)], [("a", 1), ("a", '..."},{"b":1}')]], (",", ":"), True)
def test_objects_are_taken_apart_where_they_stand(rows, spaces, ascii_only):
    comma, colon = spaces
    dumps = []
    for pairs in rows:
        dump = [json.dumps(name) + colon + json.dumps(value, ensure_ascii=ascii_only) for name, value in pairs]
        dumps.append("{" + comma.join(dump) + "}")
    text = b'{"before":[{"a":0}],"rows":%b}' % f"[{comma.join(dumps)}]".encode()
    span = (text.index(b'"rows":') + 7, len(text) - 1)
    if any(len({name for name, _ in pairs}) < len(pairs) for pairs in rows):
        with pytest.raises(Malformed, match="comes twice"):
            json_scan.objects(text, "x", DEFAULT, span)
        return
    found = json_scan.objects(text, "x", DEFAULT, span)
    assert [{name: json.loads(text[a:b]) for name, (a, b) in fields.items()} for fields in found] == [
        dict(pairs) for pairs in rows
    ]


def test_at_the_first_element_that_is_no_object_it_gives_up():
    text = b"[{}," + b"1," * 2000 + b"1]"
    with pytest.raises(Malformed, match=r"x: expected object, got int - at \$\[1\]"):
        json_scan.objects(text, "x", DEFAULT, (0, len(text)))


SMALL = Limits(max_tensors=3, max_keys=20, max_rows=5, max_depth=8)


@pytest.mark.parametrize("padding", [b"", b" " * FREE])
def test_more_than_the_limits_is_beyond_them(padding):
    for count in (3, 4, 2000):
        text = b"[" + padding + b",".join([b"{}"] * count) + b"]"
        if count > 3:
            with pytest.raises(Beyond, match=r"x: .*; limits.maxTensors is 3"):
                json_scan.objects(text, "x", SMALL, (0, len(text)))
        else:
            assert len(json_scan.objects(text, "x", SMALL, (0, len(text)))) == count
    for count in (20, 21):
        text = b"{" + padding + b",".join([b'"%d":0' % index for index in range(count)]) + b"}"
        if count > 20:
            with pytest.raises(Beyond, match=r"x: 21; limits.maxKeys is 20"):
                members(text, limits=SMALL)
            with pytest.raises(Beyond, match=r"x: 21; limits.maxKeys is 20"):
                json_scan.objects(b"[%b]" % text, "x", SMALL, (0, len(text) + 2))
        else:
            assert len(members(text, limits=SMALL)) == count


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
def test_far_more_elements_than_wanted_are_not_made(count):
    text = b"[" + b",".join([b"1"] * count) + b"]" + b" " * 3000
    found = elements(text, most=1000)
    if count > 1024:
        assert found is None
    else:
        assert list(map(bytes, found)) == [b"1"] * count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'"a",' * 8193, "max_strings"),
        (b'"' + b"\\n" * 32769 + b'"', "max_escapes"),
        (b"[]," * 32769 + b"{}," * 32769, "max_arrays"),
        (b"1," * 262145, "max_elements"),
    ],
)
def test_what_is_counted_is_limited(text, name):
    with pytest.raises(Beyond, match=rf"x: \d+; {setting(name)} is {getattr(DEFAULT, name)}"):
        json_scan.check(text, "x", DEFAULT)


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=40))
@example([[[[[[]]]]]])
@example([[], [[]], [[[]], []]])
def test_depth_is_that_of_the_value(value):
    def depth(value):
        return 1 + max(map(depth, value), default=0)

    brackets = json.dumps(value, separators=(",", ":")).replace(",", "").encode()
    assert json_scan._depth(brackets) == depth(value)


@given(VALUES, st.booleans())
def test_strings_are_replaced_by_a_letter(value, ascii_only):
    text = json.dumps([value], ensure_ascii=ascii_only).encode()
    assert json_scan.outside(text) == re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"s", text)


def test_an_escaped_name_is_its_name():
    assert members(b'{"\\u0061" : 1, "b":2}', "x") == {"a": b"1", "b": b"2"}


FRAGMENTS = st.sampled_from(
    [
        *(b"[ ] { } , : 0 1 - + . e E 10 -0 01 1.5 1e5 1e400 .5 5. true false null nul NaN Infinity -Infinity".split()),
        b'"a"',
        b'"',
        b"\\",
        b'"\\n"',
        b'"\\x"',
        b'"\\u00e9"',
        b'"\\ud83d\\ude00"',
        b'"\\ud800"',
        b"\xc3\xa9",
        b"\xff",
        b" ",
        b"\t",
        b"\x00",
        b"\x0b",
        b'"\xc3\xa9"',
        b"\xed\xa0\x80",
    ]
)


@given(st.lists(FRAGMENTS, max_size=12).map(b"".join))
@example(b'"\xff"')
@example(b"12345678901234567890123")
@example(b'"\\ud83d\\ude00"')
def test_agrees_with_the_standard_library_on_what_is_json(fragment):
    text = b"[" + fragment + b"]"
    try:
        json_scan.check(text, "x", DEFAULT)
        elements(text)
    except Malformed:
        ours = False
    else:
        ours = True
    assert ours == accepted_by_json(text)


@given(VALUES, st.data())
def test_agrees_with_the_standard_library_after_one_changed_byte(value, data):
    text = bytearray(json.dumps([value]).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    try:
        json_scan.check(bytes(text), "x", DEFAULT)
        elements(bytes(text))
    except Malformed:
        ours = False
    else:
        ours = True
    assert ours == (accepted_by_json(bytes(text)) and text.strip().startswith(b"["))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, NaN]", "x: JSON has no NaN (byte 4)"),
        (b"[Infinity]", "x: JSON has no Infinity (byte 1)"),
        (b"[1.5,-Infinity]", "x: JSON has no -Infinity (byte 5)"),
        (b"", "x: JSON is empty"),
        (b" \n", "x: JSON is empty"),
        (b"[1", "x: JSON ends before it is complete"),
        (b'{"a":1}', "x: expected array, got object"),
        (b'"a"', "x: expected array, got str"),
        (b" null", "x: expected array, got null"),
        (b"7", "x: expected array, got int"),
        (b"[01]", "x: JSON is malformed: invalid number (byte 2)"),
        (b"[" * 5_000_000, "x: JSON is nested too deep to be read"),
    ],
)
def test_says_what_is_wrong_and_where(text, message):
    with pytest.raises(Malformed) as error:
        elements(text)
    assert str(error.value) == message


def test_a_member_is_not_an_element():
    with pytest.raises(Malformed, match="x: expected object, got array"):
        members(b"[]", "x")


def test_half_a_surrogate_pair_is_distinguished_from_a_pair():
    with pytest.raises(Surrogates):
        elements(b'["\\ud800"]')
    assert [bytes(element) for element in elements(b'["\\ud83d\\ude00"]')] == [b'"\\ud83d\\ude00"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xef\xbb\xbf[1]", "byte order mark"),
        ("[1]".encode("utf-16"), "UTF-16"),
        (b'["\xff"]', "not UTF-8"),
        (b'["\xed\xa0\x80"]', "not UTF-8"),
        (b'["\xc0\x80"]', "not UTF-8"),
    ],
)
def test_only_utf8_is_text(text, message):
    with pytest.raises(Malformed, match=message):
        json_scan.check(text, "x", DEFAULT)


@pytest.mark.parametrize(
    ("opening", "closing", "times"), [(b"[", b"]", 64), (b'{"a":', b"}", 64), (b'[{"a":', b"}]", 32)]
)
def test_depth_is_bounded(opening, closing, times):
    fits = opening * times + b"1" + closing * times
    json_scan.check(fits, "x", DEFAULT)
    json_scan.check(b"[" + b",".join([b"[[1],{}]"] * 100) + b"]", "x", DEFAULT)
    with pytest.raises(Beyond, match=r"x: over 64; limits\.maxDepth is 64"):
        json_scan.check(b"[" + fits + b"]", "x", DEFAULT)


def test_brackets_in_strings_have_no_depth():
    json_scan.check(b'["' + b"[" * 1000 + b'\\"[[{"]', "x", DEFAULT)


@pytest.mark.parametrize(
    ("value", "expected"), [(b'{"a":1}', True), (b'"[["', True), (b'{"a":[1]}', False), (b'{"[":"\\"[","b":[]}', False)]
)
def test_arrays_are_found_outside_strings(value, expected):
    assert json_scan.without_arrays(value) is expected


def test_a_string_is_decoded():
    assert json_scan.string(b'"\\u0061b"', "x") == "ab"
    with pytest.raises(Malformed, match="id: expected a string, got a number"):
        json_scan.string(b"7", "id")
