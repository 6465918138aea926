"""Throw damaged bodies at the parsers: ``python fuzz.py [iterations] [seed]``; a failure prints what replays it.

Valid requests and answers are damaged at random. What a parser can't read is to be forwarded, with a reason; an answer
may be refused (WrongRows). What is to be batched has to be sound: the batch made of it is JSON by the standard library,
is read again with the same key and all its rows, and an echo of it is shared out to the last byte.
"""

from __future__ import annotations

import json
import random
import sys

from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, models
from carpool_sidecar.protocols.common import Portion, WrongRows

LENGTH = b"inference-header-content-length"
TOKENS = [
    *(
        b'[ ] { } , : " \\ 0 -1 1.5 1e400 9223372036854775808 true false null NaN Infinity [] {} [[]] [0] "" "a" \xff '
        b'\\u0000 \\ud800 \\ud83d\\ude00 \x00 \xef\xbb\xbf "data": "shape": "inputs": "instances": "datatype": "id": '
        b'"binary_data_size": "BYTES" "FP32" "BOOL" "parameters": "predictions": "outputs": [1,[2]]'
    ).split(b" "),
    b" ",
    b"\n",
    b"[" * 70,
    b'{"a":' * 70,
]

V1 = [
    b'{"instances":[[1.5,2,3e5],[4,5.25,-6]]}',
    b'{"instances":[{"text":"caf\xc3\xa9 \\" [","n":[1,2]},{"text":"","n":[3,4]}],"signature_name":"s"}',
    b'{ "instances" : [ 1 , 2 , 3 ] }',
    b'{"instances":[[[1],[2]],[[3],[4]]],"parameters":{"top_k":3}}',
    b'{"instances":[[],[ ]]}',
    b'{"instances":["a","b",""]}',
    b'{"inputs":[[1,2],[3,4]]}',
    b'{"inputs":{"x":[1,2],"y":[3,4]}}',
    b'{"instances":[{"b64":"aGVsbG8="}]}',
    b'{"instances":[[true,null,"x",1.5]]}',
]
WANTED = b',"outputs":[{"name":"o","parameters":{"binary_data":true}}]'
V2 = [
    (b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1.10,2,3,4]}]}', b""),
    (b'{"id":"7","inputs":[{"name":"x","shape":[2,2],"datatype":"INT64","data":[[1,2],[3,4]]}]}', b""),
    (
        (
            b'{"inputs":[{"name":"x","shape":[2,1],"datatype":"BYTES","parameters":{"binary_data_size":11}},{"name":"y",'
            b'"shape":[2],"datatype":"BOOL","data":[true,false]}],"parameters":{"timeout":5,"binary_data_output":true}}'
        ),
        b"\x03\x00\x00\x00abc\x00\x00\x00\x00",
    ),
    (
        b'{"inputs":[{"name":"x","shape":[3,2],"datatype":"FP16","parameters":{"binary_data_size":12}}]%b}' % WANTED,
        bytes(range(12)),
    ),
    (b'{"inputs":[{"name":"x","shape":[2],"datatype":"BYTES","data":["a,b]","\\""]}],"parameters":{"p":[1]}}', b""),
    (b'{"inputs":[{"name":"x","shape":[2],"datatype":"UINT8","data":[0,255]}],"parameters":{"sequence_id":1}}', b""),
]
LINES = [
    (b"grpc-timeout", b"100m"),
    (b"content-type", b"application/json; charset=utf-8"),
    (b"content-encoding", b"identity"),
    (b"x-request-timeout-ms", b"20"),
]


def damage(dice: random.Random, text: bytes) -> bytes:
    """A copy with a few bytes lost, doubled, moved, changed or replaced by a token of the grammar."""
    out = bytearray(text)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 8))):
        a, b = sorted((dice.randint(0, len(out)), dice.randint(0, len(out))))
        b = min(b, a + dice.choice((1, 2, 8, 1000)))
        match dice.randrange(6):
            case 0:
                del out[a:b]
            case 1:
                out[a:a] = out[a:b]
            case 2:
                out[a:b] = dice.choice(TOKENS)
            case 3:
                out[a:a] = dice.choice(TOKENS)
            case 4:
                out[a:b] = bytes(dice.randrange(256) for _ in range(b - a))
            case _:
                del out[a:]
    return bytes(out)


def cuts(dice: random.Random, parsed):
    """The portions of two requests in a random number of batches, in order."""
    ends = [(one, row) for one in parsed for row in range(one.rows)]
    batches = []
    while ends:
        size = dice.randint(1, len(ends))
        batch, ends = ends[:size], ends[size:]
        portions = []
        for one in parsed:
            rows = [row for owner, row in batch if owner is one]
            if rows:
                portions.append(Portion(one, rows[0], rows[-1] + 1))
        batches.append(portions)
    return batches


def echo(protocol: str, message):
    """Answer a batch with its own rows; ids, parameters and other fields come back too."""
    body = b"".join(message.parts)
    if protocol == "v1":
        text = body.replace(b'{"instances":', b'{"predictions":', 1).replace(b'{"inputs":', b'{"outputs":', 1)
        return [], text
    length = headers.find(message.headers, LENGTH)
    at = len(body) if length is None else int(length)
    text = body[:at].replace(WANTED, b"").replace(b'{"inputs":', b'{"outputs":', 1)
    return ([] if length is None else [(LENGTH, b"%d" % len(text))]), text + body[at:]


def request(dice: random.Random):
    """The protocol, headers and body of a request that is damaged, mostly."""
    if dice.random() < 0.5:
        return "v1", [], damage(dice, dice.choice(V1))
    text, data = dice.choice(V2)
    text, data = damage(dice, text), data if dice.random() < 0.7 else damage(dice, data)
    length = len(text) if dice.random() < 0.9 else dice.randint(-1, len(text) + len(data) + 1)
    lines = [(LENGTH, b"%d" % length)] if data or dice.random() < 0.2 else []
    return "v2", lines, text + data


def payload(lines, body: bytes):
    """Rows, or tensors, as the standard library reads them, with the digits of numbers; and the binary data."""
    length = headers.find(lines, LENGTH)
    at = len(body) if length is None else int(length)
    fields = json.loads(body[:at], parse_int=str, parse_float=str)
    rows = next(fields[name] for name in ("instances", "predictions", "inputs", "outputs") if name in fields)
    tensors = [(row["name"], row["shape"], row.get("data")) if at < len(body) else row for row in rows]
    return tensors, body[at:]


def one_round(dice: random.Random) -> str:
    """Parse, merge, split and assemble once; what became of it."""
    protocol, lines, body = request(dice)
    endpoint = protocols.route(b"/%b/models/m%b" % (protocol.encode(), b":predict" if protocol == "v1" else b"/infer"))
    assert endpoint is not None
    codec = protocols.CODECS[protocol]
    if dice.random() < 0.1:
        name, value = dice.choice(LINES)
        lines = [*lines, (damage(dice, name), damage(dice, value))]
    facts = headers.read(lines)
    one, two = (codec.parse(endpoint, facts, body) for _ in range(2))
    assert one.key == two.key
    one.why.encode()
    if one.alone == "malformed":
        assert one.why
        return "unread"
    if not one.mergeable:
        return "alone"
    assert one.rows > 0
    # 1. A batch is sound, and as good a request as those in it.
    message = codec.merge([Portion(one, 0, one.rows), Portion(two, 0, two.rows)])
    text = b"".join(message.parts)
    length = headers.find(message.headers, LENGTH)
    json.loads(text if length is None else text[: int(length)])
    kept = [line for line in lines if line[0] != LENGTH]
    again = codec.parse(endpoint, headers.read([*kept, *message.headers]), text)
    assert again.mergeable
    assert (again.rows, again.key) == (one.rows + two.rows, one.key)
    # 2. An echo, in however many batches, gives both callers the same rows, in sound bodies.
    pieces = {id(one): [], id(two): []}
    for portions in cuts(dice, (one, two)):
        found, answer = echo(protocol, codec.merge(portions))
        try:
            shares = codec.split(portions, found, answer)
        except WrongRows as error:
            # An array beside the rows, or requested outputs that the echo did not know to leave out.
            assert error.reason == "fields" or answer.count(b'"outputs"') > 1, error  # noqa: PT017 - else the echo fits
            return "unshareable"
        for portion, piece in zip(portions, shares, strict=True):
            pieces[id(portion.parsed)].append(piece)
        # 3. A damaged answer is shared out or refused.
        try:
            damaged = codec.split(portions, found, damage(dice, answer))
            codec.assemble(portions[0].parsed, damaged[:1])
        except WrongRows:
            pass
    answers = [codec.assemble(parsed, pieces[id(parsed)]) for parsed in (one, two)]
    for one_answer in answers:
        assert payload(one_answer.headers, b"".join(one_answer.parts)) == payload(lines, body)
    return "shared"


def main(iterations: int = 100_000, seed: int = 0) -> dict[str, int]:
    """Run that many rounds, each with its own seed; how often what happened."""
    outcomes: dict[str, int] = {}
    for index in range(iterations):
        try:
            outcome = one_round(random.Random(f"{seed}:{index}"))
        except Exception:
            print(f"replay: one_round(random.Random('{seed}:{index}'))", file=sys.stderr)  # noqa: T201 - a script prints
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if index % 10 == 0:
            text = damage(
                random.Random(f"{seed}:{index}"), b'{"name":"m","max_batch_size":4,"inputs":[{"shape":[-1]}]}'
            )
            models.axis_from_config(text)
            models.axis_from_metadata(text)
            protocols.route(text)
    return outcomes


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))  # noqa: T201 - a script prints
