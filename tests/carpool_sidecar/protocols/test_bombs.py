"""Bodies made to be dear: time and memory grow with their size at most, and not at all beyond the limits.

CPU time of this thread, the least of several interleaved trials, and ratios with wide margins: linear work takes 4
times as long for 4 times as much, quadratic work 16 times.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from carpool.policy.spec import SequenceAxis
from carpool_sidecar.backends.arrays import Invalid, Spec, read_v1, read_v2
from carpool_sidecar.protocols import v1, v2
from carpool_sidecar.protocols.common import Portion
from carpool_sidecar.protocols.limits import DEFAULT, Limits
from carpool_sidecar.protocols.padding import NOT_PADDABLE, Sequence

_spec = importlib.util.spec_from_file_location("protocols_bombs", Path(__file__).with_name("bombs.py"))
assert _spec is not None
assert _spec.loader is not None
bombs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bombs)

TRIALS = 7, 200
"""Least and most trials: however busy the machine is, the least times fall towards those of the work itself."""
RATIO = 8.0
UNMEASURED = 50e-6
"""Seconds below which a time says nothing."""
SMALL = 64 * 2**10
"""Bytes below which a peak says nothing."""

WIDE = Limits(
    max_text=2**26, max_answer_text=2**26, max_tensors=16384, max_keys=65536, max_rows=16384, max_strings=2**20,
    max_escapes=2**20, max_arrays=2**20, max_elements=2**20, max_depth=512,
)  # fmt: skip
"""Limits that nothing here reaches."""


def grows_linearly(act, inputs):
    """Whether ``act`` of the last input, 4 times the first, takes 4 times the time and memory, more or less."""
    for one in inputs:
        act(one)  # what is made once is made now
    assert_growth(act, inputs, below=RATIO)
    peaks = [bombs.peak(lambda one=one: act(one)) for one in inputs]
    assert peaks[-1] < RATIO * max(peaks[0], SMALL), peaks


def assert_growth(act, inputs, *, below):
    """The last input takes less than ``below`` times the time of the first: the least of interleaved trials."""
    times = [float("inf")] * len(inputs)
    for trial in range(TRIALS[1]):
        for index, one in enumerate(inputs):
            times[index] = min(times[index], bombs.cost(lambda one=one: act(one), trials=1))
        if trial + 1 >= TRIALS[0] and times[-1] < below * max(times[0], UNMEASURED):
            return
    raise AssertionError(times)


@pytest.mark.parametrize("name", bombs.REQUESTS)
def test_parsing_is_linear(name):
    protocol, body_of = bombs.REQUESTS[name]
    bodies = [body_of(n) for n in (2000, 4000, 8000)]
    grows_linearly(lambda body: bombs.parse(protocol, body, limits=WIDE), bodies)


def test_parsing_binary_bytes_is_linear():
    def parse(sent):
        text, data = sent
        parsed = bombs.parse("v2", text + data, [(bombs.LENGTH, b"%d" % len(text))], WIDE)
        assert parsed.mergeable

    grows_linearly(parse, [bombs.binary_bytes(n) for n in (2000, 4000, 8000)])


def test_forty_thousand_inputs_are_not_read():
    """The defect that was found: each name was looked for among all before it. 15 s for these."""
    body = bombs.inputs(40_000)
    assert bombs.parse("v2", body).alone == "limits"
    assert bombs.peak(lambda: bombs.parse("v2", body)) < SMALL


@pytest.mark.parametrize("shape", ["1,0,2000000", "2,0,1000000000000", "2,0,0,2000000"])
def test_an_empty_array_costs_nothing_whatever_its_shape_promises(shape):
    rows = b",".join([b"[]"] * int(shape[0]))
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%b],"data":[%b]}]}' % (shape.encode(), rows)
    parsed = []
    assert bombs.peak(lambda: parsed.append(bombs.parse("v2", body))) < SMALL
    assert parsed[0].alone == "empty"


def test_a_padded_array_with_a_long_element_and_many_short_ones_is_not_built():
    many = b",".join([b"1"] * 8_000)
    parsed = bombs.parse("v1", b'{"instances":[{"ids":[[%b],%b]}]}' % (many, many), limits=WIDE)
    found = []
    assert bombs.peak(lambda: found.append(v1.fit(parsed, Sequence(SequenceAxis(pad={"ids": 0.0}))))) < 2**20
    assert found[0].why == NOT_PADDABLE


@pytest.mark.parametrize("name", bombs.REQUESTS)
def test_beyond_the_limits_the_cost_does_not_grow(name):
    """3 MiB, and four times as much: nothing of them is looked at."""
    protocol, body_of = bombs.REQUESTS[name]
    unit = (len(body_of(1001)) - len(body_of(1))) / 1000
    bodies = [body_of(int(mebi * 2**20 / unit)) for mebi in (3, 12)]
    for body in bodies:
        parsed = bombs.parse(protocol, body)
        assert (parsed.alone, parsed.size, parsed.expansion) == ("limits", len(body), 0)
        assert "limits.maxText is 2Mi" in parsed.why
        assert bombs.peak(lambda body=body: bombs.parse(protocol, body)) < SMALL
    assert_growth(lambda body: bombs.parse(protocol, body), bodies, below=3)


@pytest.mark.parametrize("name", bombs.REQUESTS)
def test_what_is_looked_at_takes_a_few_times_its_size_at_most(name):
    """A body as large as is looked at, whatever is in it."""
    protocol, body_of = bombs.REQUESTS[name]
    unit = (len(body_of(100_000)) - len(body_of(1))) / 99_999 or 10
    body = body_of(int(DEFAULT.max_text * 0.9 / unit))
    assert DEFAULT.max_text // 2 < len(body) <= DEFAULT.max_text
    assert bombs.peak(lambda: bombs.parse(protocol, body)) < 6 * DEFAULT.max_text
    body = body_of(bombs.largest(protocol, body_of))
    assert bombs.peak(lambda: bombs.parse(protocol, body)) < 7 * DEFAULT.max_text


ROWS = 16


def v1_answer(element, limits=WIDE):
    portions = [Portion(bombs.parse("v1", b'{"instances":[1]}'), 0, 1) for _ in range(ROWS)]

    def answer(n):
        row = b"[%b]" % b",".join([element] * n)
        return b'{"predictions":[%b]}' % b",".join([row] * ROWS)

    def share_out(body):
        for portion, piece in zip(portions, v1.split(portions, [], body, limits), strict=True):
            v1.assemble(portion.parsed, [piece])

    return answer, share_out


def v2_answer(datatype, element, *, nested=False):
    asked = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    portions = [Portion(bombs.parse("v2", asked), 0, 1) for _ in range(ROWS)]
    head = b'{"outputs":[{"name":"y","datatype":"%b","shape":[%d,%d],"data":[%b]}]}'

    def answer(n):
        row = b",".join([element] * n)
        rows = [b"[%b]" % row if nested else row] * ROWS
        return head % (datatype.encode(), ROWS, n, b",".join(rows))

    def share_out(body):
        for portion, piece in zip(portions, v2.split(portions, [], body, WIDE), strict=True):
            v2.assemble(portion.parsed, [piece])

    return answer, share_out


@pytest.mark.parametrize(
    "kind",
    [
        v1_answer(b"1"),
        v1_answer(b'""'),
        v1_answer(b"[]"),
        v1_answer(b'{"a":[1]}'),
        v2_answer("INT64", b"1"),
        v2_answer("FP32", b"0.123456"),
        v2_answer("FP32", b"0.123456", nested=True),
        v2_answer("BYTES", b'"\\n"'),
    ],
)
def test_sharing_out_an_answer_is_linear(kind):
    answer, share_out = kind
    grows_linearly(share_out, [answer(n) for n in (300, 600, 1200)])


def test_rows_far_beyond_those_of_the_batch_are_not_made():
    """A million predictions for 16 rows: the answer is refused, and no million objects come of it."""
    _, share_out = v1_answer(b"1", DEFAULT)
    body = b'{"predictions":[%b]}' % b",".join([b"1"] * 10**6)

    def refuse():
        with pytest.raises(v1.WrongRows, match="more predictions for 16 rows"):
            share_out(body)

    refuse()
    assert bombs.peak(refuse) < len(body) // 2


@pytest.mark.parametrize("form", ["v1", "v1 text", "v2", "v2 BYTES", "v2 binary BYTES", "v2 inputs"])
def test_reading_into_arrays_is_linear(form):
    """The backend in this process makes objects of all elements, on a thread: no worse than linear."""
    x, t = Spec("x", "FP32", (-1,)), Spec("x", "BYTES", (-1,))

    def read(n):
        match form:
            case "v1":
                read_v1(b'{"instances":[%b]}' % b",".join([b"1"] * n), [x])
            case "v1 text":
                read_v1(b'{"instances":[%b]}' % b",".join([b'"\\n"'] * n), [t])
            case "v2":
                read_v2(None, bombs.tensor("FP32", b"1")(n), [x], [x])
            case "v2 BYTES":
                read_v2(None, bombs.tensor("BYTES", b'""')(n), [t], [t])
            case "v2 binary BYTES":
                text, data = bombs.binary_bytes(n)
                read_v2(b"%d" % len(text), text + data, [t], [t])
            case _:
                with pytest.raises(Invalid, match="the model has no input"):
                    read_v2(None, bombs.inputs(n), [x], [x])

    grows_linearly(read, (2000, 4000, 8000))


def test_a_request_of_the_worst_kinds_at_once_is_no_more_than_their_sum():
    """Within every limit, and near several: nothing multiplies."""
    tensors = [
        {"name": f"x{index}", "datatype": "BYTES", "shape": [24], "data": ["\n"] * 24, "parameters": {"a": [[1]] * 9}}
        for index in range(250)
    ]
    body = json.dumps({"inputs": tensors}).encode()
    parsed = bombs.parse("v2", body)
    assert parsed.alone is None
    assert bombs.peak(lambda: bombs.parse("v2", body)) < 4 * DEFAULT.max_text
