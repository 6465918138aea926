from __future__ import annotations

import pytest

from carpool_sidecar.http1.messages import (
    CHUNKED,
    chunk_of,
    content_length,
    encode_request_head,
    encode_response_head,
    find,
    forwardable,
    gather,
    has_body,
)


def test_find_ignores_case_and_returns_the_first():
    headers = [(b"X-A", b"1"), (b"x-a", b"2")]
    assert find(headers, b"x-a") == b"1"
    assert find(headers, b"x-b") is None


def test_forwardable_drops_one_hop_and_framing_and_what_connection_names():
    headers = [
        (b"Host", b"h"),
        (b"Connection", b"close, X-Hop ,host"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Hop", b"1"),
        (b"x-hop", b"2"),
        (b"TE", b"trailers"),
        (b"Upgrade", b"h2c"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"5"),
        (b"Trailer", b"X"),
        (b"Proxy-Connection", b"x"),
        (b"Accept", b"*/*"),
        (b"accept", b"a"),
    ]
    assert forwardable(headers) == [(b"Host", b"h"), (b"Accept", b"*/*"), (b"accept", b"a")]


def test_heads_are_written_as_given():
    assert (
        encode_request_head(b"POST", b"/p?q", [(b"Host", b"h"), content_length(5)])
        == b"POST /p?q HTTP/1.1\r\nHost: h\r\ncontent-length: 5\r\n\r\n"
    )
    assert encode_response_head(200, [CHUNKED]) == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert encode_response_head(299, []) == b"HTTP/1.1 299 \r\n\r\n"


@pytest.mark.parametrize("bad", [b"a\r\nX:1", b"a\n", b"a\r", b"\0", b"\r\n\r\n"])
def test_no_header_can_break_out_of_its_line(bad):
    for field in ((b"X-A", bad), (b"X" + bad, b"1")):
        with pytest.raises(ValueError, match="line break or NUL"):
            encode_response_head(200, [field])
        with pytest.raises(ValueError, match="line break or NUL"):
            encode_request_head(b"GET", b"/", [field])
        with pytest.raises(ValueError, match="line break or NUL"):
            encode_response_head(200, [], (field,))
    with pytest.raises(ValueError, match="line break or NUL"):
        encode_request_head(b"GET", b"/" + bad, [])


@pytest.mark.parametrize(("method", "target"), [(b"GET /x", b"/"), (b"GET", b"/ HTTP/1.1")])
def test_no_space_gets_into_the_request_line(method, target):
    with pytest.raises(ValueError, match="space"):
        encode_request_head(method, target, [])


def test_gather_joins_small_neighbours_and_keeps_large_parts():
    large = bytes(20_000)
    writes = gather([b"a", b"b", large, memoryview(b"c"), b"d", large])
    assert [bytes(write) for write in writes] == [b"ab", large, b"cd", large]
    assert writes[1] is large
    assert writes[3] is large
    assert gather([b"a", b"b"]) == [b"ab"]


def test_an_empty_piece_makes_no_chunk():
    assert chunk_of(b"") == ()
    assert b"".join(chunk_of(b"x" * 26)) == b"1a\r\n" + b"x" * 26 + b"\r\n"


def test_which_responses_have_a_body():
    assert has_body(b"GET", 200)
    assert not has_body(b"HEAD", 200)
    assert not has_body(b"GET", 204)
    assert not has_body(b"GET", 304)
    assert not has_body(b"GET", 100)
