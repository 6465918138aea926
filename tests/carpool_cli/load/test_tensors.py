from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_cli.load.tensors import CODES, HEADER_LENGTH, Malformed, Tensor, decode_answer, decode_request, encode

FINITE = {"allow_nan": False, "allow_infinity": False}
KINDS = {
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=5),
    "FP16": st.floats(width=16, **FINITE),
    "FP32": st.floats(width=32, **FINITE),
    "FP64": st.floats(**FINITE),
}


@st.composite
def given_tensors(draw):
    kind = draw(st.sampled_from([*CODES, "BYTES"]))
    values = draw(st.lists(KINDS.get(kind, st.integers(0, 100)), min_size=2, max_size=6))
    return Tensor("x", kind, (len(values), 1), json=msgspec.json.encode(values))


@given(given_tensors(), st.booleans())
def test_what_is_encoded_decodes_to_the_same_values(tensor, binary):
    body, length = encode({"id": "a"}, "inputs", [(tensor, binary)])
    message = decode_request(body, None if length is None else b"%d" % length)
    (back,) = message.tensors
    assert (message.id, back.values()) == ("a", tensor.values())
    assert back.as_binary() == tensor.as_binary()
    assert (length is None) is not binary


def test_outputs_wanted_carry_their_form():
    body = msgspec.json.encode(
        {
            "inputs": [],
            "outputs": [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}],
            "parameters": {"binary_data_output": True},
        }
    )
    assert decode_request(body, None).wanted == (("a", True), ("b", True))


@pytest.mark.parametrize(
    ("tail", "size", "says"),
    [
        (b"\1\0\0\0", 4, "cut short"),
        (b"\1\0\0\0ab", 6, "cut short"),
        (b"\1\0\0\0a", 4, "cut short"),
        (b"", 4, "announced 4"),
    ],
)
def test_binary_that_does_not_fit_is_named(tail, size, says):
    described = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
    header = msgspec.json.encode({"outputs": [described]})
    with pytest.raises(Malformed, match=re.escape(says)):
        decode_answer(header + tail, b"%d" % len(header))


def test_a_wrong_header_length_is_named():
    with pytest.raises(Malformed, match="Length"):
        decode_request(b"{}", b"3")
    assert HEADER_LENGTH.islower()


def test_values_that_the_type_can_not_hold_are_named():
    with pytest.raises(Malformed, match=r"x\.data"):
        Tensor("x", "UINT8", (1,), json=b"[300]").as_binary()
    with pytest.raises(Malformed, match="BF16"):
        Tensor("x", "BF16", (1,), binary=b"ab").as_json()
