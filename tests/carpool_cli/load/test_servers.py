from __future__ import annotations

from random import Random

import pytest

from carpool_cli.load.servers import InputSpec, Request, is_echo, nested, random_tensor, request_from, request_of
from carpool_cli.load.tensors import HEADER_LENGTH, Malformed


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16", "FP32", "FP64", "INT8", "UINT64"])
@pytest.mark.parametrize("protocol", ["v2", "v2-binary"])
def test_an_echo_of_made_up_values_is_one(datatype, protocol):
    request = request_of(protocol, [random_tensor(InputSpec("x", datatype, (2, 3)), 4, Random(1))])
    length = dict(request.headers).get(HEADER_LENGTH)
    answer = request.body.replace(b'"inputs"', b'"outputs"')
    assert is_echo(protocol, request, length and b"%d" % (int(length) + 1), answer)
    assert not is_echo(protocol, request, length, b"{}")


def test_rows_in_another_order_are_no_echo():
    request = Request(b'{"instances": [1, 2]}', [])
    assert is_echo("v1", request, None, b'{"predictions": [1, 2]}')
    assert not is_echo("v1", request, None, b'{"predictions": [2, 1]}')
    assert not is_echo("v1", request, None, b"oops")


def test_values_nest_as_the_shape_says():
    assert nested([1, 2, 3, 4], (2, 2)) == [[1, 2], [3, 4]]
    assert nested([1, 2], (2,)) == [1, 2]
    assert nested([], (2, 0)) == [[], []]


@pytest.mark.parametrize(("protocol", "body"), [("v1", b"[1]"), ("v2", b"{}"), ("v2-binary", b"abc"), ("v1", b"{")])
def test_a_body_of_another_protocol_is_refused(protocol, body):
    with pytest.raises(Malformed):
        request_from(protocol, body)
