from __future__ import annotations

import pytest

from carpool_sidecar.http1.client.heads import ResponseHeadReader
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.parsing import HttpError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"


def test_a_head_in_two_pieces_is_joined():
    heads = ResponseHeadReader(ClientLimits())
    assert heads.read(HEAD[:20], 0, b"") == (None, 0)
    data = heads.joined(HEAD[20:] + b"hello")
    head, end = heads.read(data, 0, b"")
    assert (head.status, head.length, data[end:]) == (200, 5, b"hello")


def test_the_next_answer_begins_without_what_is_left_of_this_one():
    heads = ResponseHeadReader(ClientLimits())
    heads.read(HEAD[:20], 0, b"")
    heads.reset()
    assert heads.joined(HEAD) == HEAD


def test_a_repeated_head_is_the_same_object_but_never_for_head():
    heads = ResponseHeadReader(ClientLimits())
    first, _ = heads.read(HEAD, 0, b"")
    again, end = heads.read(HEAD + b"hello", 0, b"")
    assert again is first
    assert end == len(HEAD)
    bodiless, _ = heads.read(HEAD, 0, b"HEAD")
    assert bodiless.length == 0
    assert heads.read(HEAD, 0, b"")[0] is first


def test_interim_responses_are_read_one_by_one_and_counted():
    heads = ResponseHeadReader(ClientLimits(max_interim=2))
    data = INTERIM * 3
    position = 0
    for _ in range(2):
        head, position = heads.read(data, position, b"")
        assert head.status == 103
    with pytest.raises(HttpError, match="over 2 interim responses"):
        heads.read(data, position, b"")


def test_a_head_over_the_limit_is_refused_before_it_ends():
    heads = ResponseHeadReader(ClientLimits(max_head_bytes=50))
    with pytest.raises(HttpError, match="over 50 bytes"):
        heads.read(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 50, 0, b"")
