from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.capture.main import main
from carpool_sidecar.capture.nftables import Redirection, Refused, answers, batch, expected

PORTS = st.integers(1, 65535)


def messages(data):
    """Split a batch: (kind, number, body) of each message."""
    found = []
    while data:
        length, kind, _, number, _ = struct.unpack_from("=IHHII", data)
        assert length % 4 == 0
        assert length <= len(data)
        found.append((kind, number, data[20:length]))
        data = data[length:]
    return found


@given(st.lists(st.builds(Redirection, PORTS, PORTS), max_size=5))
def test_a_batch_is_whole_and_each_of_its_messages_has_a_number(redirections):
    begin, *inner, end = messages(batch(redirections))

    assert (begin[0], end[0]) == (0x10, 0x11)
    assert {kind >> 8 for kind, _, _ in inner} == {10}
    assert [number for _, number, _ in inner] == list(range(1, expected(redirections) + 1))


def test_ports_are_where_the_kernel_looks_for_them():
    *_, rule, _ = messages(batch([Redirection(8000, 14080)]))

    assert rule[2].count(struct.pack(">H", 8000)) == 1
    assert rule[2].count(struct.pack(">H", 14080)) == 1


def answer(code, length=36):
    return struct.pack("=IHHIIi", length, 2, 0, 1, 0, code).ljust(length, b"\0")


def test_answers_say_what_was_done_and_what_was_not():
    assert list(answers(answer(0) + answer(-1))) == [None, Refused(1)]
    assert str(Refused(1)) == "EPERM: Operation not permitted"
    assert list(answers(b"")) == []


@given(st.binary(max_size=200))
def test_whatever_comes_reading_ends(data):
    assert len(list(answers(data))) <= len(data) // 20


@pytest.mark.parametrize("text", ["8000", "8000=", "=1", "0=1", "1=65536", "a=b", "8000:14080", "8000=-1"])
def test_what_is_no_redirection_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main([text])
    assert "8000=14080" in capsys.readouterr().err
