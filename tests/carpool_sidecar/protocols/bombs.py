"""Bodies that are dear to look at, of any size: name -> function of the number of elements.

``python bombs.py`` prints what each kind costs: the worst body within the default limits, and one of 62 MB. Minima of
many short trials of this thread's CPU time, and the peak of what is allocated.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING

from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, json_scan, v1, v2
from carpool_sidecar.protocols.common import Portion
from carpool_sidecar.protocols.limits import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable

V1 = protocols.route(b"/v1/models/m:predict")
V2 = protocols.route(b"/v2/models/m/infer")
LENGTH = b"inference-header-content-length"


def rows(element: bytes) -> Callable[[int], bytes]:
    return lambda n: b'{"instances":[%b]}' % b",".join([element] * n)


def one_row(element: bytes) -> Callable[[int], bytes]:
    return lambda n: b'{"instances":[[%b]]}' % b",".join([element] * n)


def tensor(datatype: str, element: bytes) -> Callable[[int], bytes]:
    head = b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d],"data":[%b]}]}'
    return lambda n: head % (datatype.encode(), n, b",".join([element] * n))


def inputs(n: int) -> bytes:
    each = b'{"name":"x%d","datatype":"FP32","shape":[1],"data":[1]}'
    return b'{"inputs":[%b]}' % b",".join([each % index for index in range(n)])


def tensor_keys(n: int) -> bytes:
    extra = b",".join([b'"k%d":0' % index for index in range(n)])
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1],"parameters":{%b}}]}' % extra


def keys(rows: bytes) -> Callable[[int], bytes]:
    return lambda n: b"{%b,%b}" % (b",".join([b'"k%d":0' % index for index in range(n)]), rows)


def shapes(n: int) -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%b],"data":[1]}]}' % b",".join([b"1"] * n)


def long_id(n: int) -> bytes:
    return b'{"id":"%b","inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}' % (b"\\n" * n)


def nested(depth: int) -> Callable[[int], bytes]:
    unit = b"[" * depth + b"1" + b"]" * depth
    return lambda n: b'{"instances":[%b]}' % b",".join([unit] * max(1, n // depth))


REQUESTS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "V1 rows 1,1": ("v1", rows(b"1")),
    "V1 rows 1.5,1.5": ("v1", rows(b"1.5")),
    "V1 rows [1]": ("v1", rows(b"[1]")),
    "V1 rows true": ("v1", rows(b"true")),
    'V1 rows ""': ("v1", rows(b'""')),
    'V1 rows {"a":1}': ("v1", rows(b'{"a": 1}')),
    "V1 one row of 1,1": ("v1", one_row(b"1")),
    "V1 one row of 0.123456": ("v1", one_row(b"0.123456")),
    'V1 one row of ""': ("v1", one_row(b'""')),
    'V1 one row of 1,"",1': ("v1", one_row(b'1,"",1')),
    "V1 one row of true,1": ("v1", one_row(b"true,1")),
    "V1 escapes": ("v1", lambda n: b'{"instances":["%b"]}' % (b"\\n" * n)),
    "V1 a long text": ("v1", lambda n: b'{"instances":["%b"]}' % (b"a" * n)),
    "V1 a long text, not ASCII": ("v1", lambda n: b'{"instances":["%b"]}' % ("\u00e9".encode() * n)),
    "V1 a long row and many short ones": (
        "v1",
        lambda n: b'{"instances":[[%b],%b]}' % (b",".join([b"1"] * (n // 2)), b",".join([b"1"] * (n // 2))),
    ),
    "V1 a long object and many short ones": (
        "v1",
        lambda n: b'{"instances":[{"a":[%b]},%b]}' % (b",".join([b"true"] * (n // 2)), b",".join([b"1"] * (n // 2))),
    ),
    "V1 keys": ("v1", keys(b'"instances":[1]')),
    "V1 spaces": ("v1", lambda n: b'{"instances":[1%b]%b}' % (b" " * n, b" " * n)),
    "V1 open brackets": ("v1", lambda n: b'{"instances":' + b"[" * n),
    "V1 brackets 60 deep": ("v1", nested(60)),
    "V1 no JSON": ("v1", lambda n: b"{" * n),
    "V2 inputs": ("v2", inputs),
    "V2 inputs {}": ("v2", lambda n: b'{"inputs":[%b]}' % b",".join([b"{}"] * n)),
    "V2 inputs 1": ("v2", lambda n: b'{"inputs":[%b]}' % b",".join([b"1"] * n)),
    "V2 data 1,1": ("v2", tensor("INT64", b"1")),
    "V2 data 0.123456": ("v2", tensor("FP32", b"0.123456")),
    "V2 data, nested": (
        "v2",
        lambda n: (
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d,1],"data":[%b]}]}' % (n, b",".join([b"[1]"] * n))
        ),
    ),
    'V2 BYTES ""': ("v2", tensor("BYTES", b'""')),
    "V2 keys": ("v2", keys(b'"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]')),
    "V2 a tensor's keys": ("v2", tensor_keys),
    "V2 a long shape": ("v2", shapes),
    "V2 a long id": ("v2", long_id),
}
"""Requests in JSON: protocol and body."""


def binary_bytes(n: int) -> tuple[bytes, bytes]:
    """A V2 request of BYTES elements in binary: JSON and data."""
    head = {
        "name": "x",
        "datatype": "BYTES",
        "shape": [n],
        "parameters": {"binary_data_size": 4 * n},
    }
    return json.dumps({"inputs": [head]}).encode(), bytes(4 * n)


def parse(protocol: str, body: bytes, lines=(), limits=DEFAULT):
    return protocols.CODECS[protocol].parse(V1 if protocol == "v1" else V2, headers.read(lines), body, limits)


def cost(act: Callable[[], object], *, trials: int, budget: float = 0.3) -> float:
    """CPU seconds of this thread: the least of several trials, which are fewer where one takes long."""
    best, spent = float("inf"), 0.0
    for _ in range(trials):
        start = time.thread_time()
        act()
        took = time.thread_time() - start
        best, spent = min(best, took), spent + took
        if spent > budget:
            break
    return best


def peak(act: Callable[[], object]) -> int:
    """Bytes allocated at most while something is done, beyond what was there."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def largest(protocol: str, body_of: Callable[[int], bytes]) -> int:
    """The most elements with which a body isn't beyond the limits, nearly."""
    low, high = 1, 2
    while high < 2**22 and parse(protocol, body_of(high)).alone != "limits":
        low, high = high, 2 * high
    while high - low > low // 64 + 1:
        middle = (low + high) // 2
        if parse(protocol, body_of(middle)).alone != "limits":
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Print the tables of docs/decisions/0019-bounded-parsing.md."""
    json_scan.prepare(DEFAULT)
    write = sys.stdout.write
    write("| request | elements | bytes | CPU | allocated | 62 MB: CPU | allocated |\n|---|---|---|---|---|---|---|\n")
    for name, (protocol, body_of) in REQUESTS.items():
        n = largest(protocol, body_of)
        body = body_of(n)
        huge = body_of(62_000_000 * n // len(body) if n > 1 else 31_000_000)
        took, held = cost(partial(parse, protocol, body), trials=40), peak(partial(parse, protocol, body))
        much, more = cost(partial(parse, protocol, huge), trials=5), peak(partial(parse, protocol, huge))
        write(
            f"| {name} | {n:,} | {len(body):,} | {took * 1e3:.1f} ms | {held / 2**20:.1f} MiB "
            f"| {much * 1e3:.2f} ms | {more / 2**20:.2f} MiB |\n"
        )
    text, data = binary_bytes(DEFAULT.max_strings)
    took = cost(partial(parse, "v2", text + data, [(LENGTH, b"%d" % len(text))]), trials=40)
    write(f"| V2 BYTES, binary | {DEFAULT.max_strings:,} | {len(text + data):,} | {took * 1e3:.1f} ms | | | |\n")
    write("\n| answer to 64 rows | bytes | CPU |\n|---|---|---|\n")
    for name, codec, asked, body in answers():
        portions = [Portion(parse(asked[0], asked[1]), 0, 1) for _ in range(64)]
        took = cost(partial(codec.split, portions, [], body), trials=40, budget=1)
        write(f"| {name} | {len(body):,} | {took * 1e3:.1f} ms |\n")


def answers():
    """Answers to 64 rows, of nearly as much text as is looked at."""
    room = DEFAULT.max_answer_text * 15 // 16
    for name, element in (("1,1", b"1"), ("0.123456", b"0.123456"), ('""', b'""'), ("[1]", b"[1]")):
        n = room // 64 // (len(element) + 1)
        row = b"[%b]" % b",".join([element] * n)
        yield f"V1 rows of {name}", v1, ("v1", b'{"instances":[1]}'), b'{"predictions":[%b]}' % b",".join([row] * 64)
    asked = ("v2", b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}')
    for name, element in (("1,1", b"1"), ("0.123456", b"0.123456")):
        n = min(room // 64 // (len(element) + 1), DEFAULT.max_elements // 64 - 1)
        head = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[64,%d],"data":[%b]}]}'
        yield f"V2 rows of {name}", v2, asked, head % (n, b",".join([element] * n * 64))
    n = DEFAULT.max_strings // 64 - 1
    head = b'{"outputs":[{"name":"y","datatype":"BYTES","shape":[64,%d],"data":[%b]}]}'
    yield 'V2 rows of ""', v2, asked, head % (n, b",".join([b'""'] * n * 64))


if __name__ == "__main__":
    main()
