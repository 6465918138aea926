"""The bodies are what they are called, and fit the limit that they are to get past."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from neighbours import hostile
from neighbours.catalogue import NEIGHBOURS

from carpool_sidecar.config.settings import Bodies

BOMBS = {
    "escapes": hostile.escapes,
    "empty": hostile.empty_strings,
    "flat": hostile.flat,
    "keys": hostile.keys,
    "bytes": hostile.json_bytes,
}


def body(message):
    return message.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_fill_the_limit_of_a_body_and_do_not_exceed_it(name):
    message = BOMBS[name]()
    assert 0.98 * hostile.BOMB < len(body(message)) <= int(Bodies().max_request)
    assert b"Content-Length: %d\r\n" % len(body(message)) in message[:300]


def small(name, monkeypatch):
    monkeypatch.setattr(hostile, "BOMB", 24_000)
    return json.loads(body(BOMBS[name]()))


def test_bombs_are_well_formed(monkeypatch):
    assert small("escapes", monkeypatch) == {"instances": [["\u00e9" * 4000]]}
    assert small("empty", monkeypatch) == {"instances": [[""] * 8002]}
    assert small("flat", monkeypatch) == {"instances": [1] * 12002}
    assert len(small("keys", monkeypatch)) == 2001
    (tensor,) = small("bytes", monkeypatch)["inputs"]
    assert tensor["shape"] == [1, len(tensor["data"])]
    assert len(tensor["data"]) == 6000


def test_inputs_are_as_many_as_asked_for_and_all_have_names_of_their_own():
    inputs = json.loads(body(hostile.inputs(40)))["inputs"]
    assert len({each["name"] for each in inputs}) == 40


def test_names_are_unique_and_nobody_comes_first():
    counted = Counter(neighbour.name for neighbour in NEIGHBOURS)
    assert set(counted.values()) == {1}
    assert NEIGHBOURS[0].name == "none"
