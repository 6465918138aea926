from __future__ import annotations

import string

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_sidecar.http1.messages import encode_request_head, encode_response_head
from carpool_sidecar.http1.parsing import (
    IN_CHUNKS,
    UNTIL_CLOSE,
    HeadCheck,
    HttpError,
    parse_request_head,
    parse_response_head,
)

GOOD = b"POST /p HTTP/1.1\r\nHost: h\r\n"


def test_a_request_head():
    head = parse_request_head(b"POST /a?b HTTP/1.1\r\nHost: h:1\r\nX-Y:  v w \t\r\ncontent-LENGTH: 007\r\n\r\n")
    assert head.method == b"POST"
    assert head.target == b"/a?b"
    assert head.headers[0] == (b"Host", b"h:1")
    assert head.headers[1][0] == b"X-Y"
    assert head.length == 7
    assert head.keep_alive
    assert not head.expects_continue


@pytest.mark.parametrize("name", [b"content-type", b"Content-Type"])
def test_heads_that_are_kept_share_the_usual_names_as_they_were_spelt(name):
    one, other = (parse_request_head(GOOD + name + b": a/%d\r\n\r\n" % number).headers for number in range(2))
    assert one[1] == (name, b"a/0")
    assert one[1][0] is other[1][0]


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: foo, Close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", True),
    ],
)
def test_keep_alive(head, keep_alive):
    assert parse_request_head(head).keep_alive is keep_alive


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        # Two readings of where the body ends
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        (b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
        (b"Content-Length: +5\r\n", 400),
        (b"Content-Length: -5\r\n", 400),
        (b"Content-Length: 5,5\r\n", 400),
        (b"Content-Length:  5 \r\n", 400),
        (b"Content-Length: 0x5\r\n", 400),
        (b"Content-Length: 5_0\r\n", 400),
        (b"Content-Length: \xd9\xa5\r\n", 400),
        (b"Content-Length:\r\n", 400),
        (b"Content-Length: 99999999999999999999999999\r\n", 400),
        (b"Content-Length: 9999999999999999999\r\n", 400),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 400),
        (b"Transfer-Encoding: identity\r\n", 400),
        (b"Transfer-Encoding: xchunked\r\n", 400),
        (b"Transfer-Encoding: \x0bchunked\r\n", 400),
        (b"Transfer-Encoding:\r\n", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", 400),
        # Two readings of where a line ends
        (b"X: a\r\n b\r\n", 400),
        (b" X: a\r\n", 400),
        (b"X: a\nY: b\r\n", 400),
        (b"X: a\rY: b\r\n", 400),
        (b"X: a\r\r\n", 400),
        (b"X : a\r\n", 400),
        (b"X\t: a\r\n", 400),
        (b": a\r\n", 400),
        (b"X\r\n", 400),
        (b"X(: a\r\n", 400),
        (b"X\xe9: a\r\n", 400),
        (b"X: a\0\r\n", 400),
        (b"X: a\x01\r\n", 400),
        (b"X: a\x7f\r\n", 400),
        # The host, and what the client expects
        (b"Host: h\r\n", 400),
        (b"Host: other\r\n", 400),
        (b"Expect: 200-ok\r\n", 417),
        (b"Expect: 100-continue, x\r\n", 417),
    ],
)
def test_ambiguous_and_malformed_fields_are_refused(lines, status):
    with pytest.raises(HttpError) as refusal:
        parse_request_head(GOOD + lines + b"\r\n")
    assert refusal.value.status == status, refusal.value


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /  HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1 \r\nHost: h\r\n\r\n", 400),
        (b"GET\t/ HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"GET /\x01 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\r\n\r\n", 400),
        (b"GET / HTTP/1.2\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET / http/1.1\r\nHost: h\r\n\r\n", 400),
        (b"OPTIONS / RTSP/1.0\r\nHost: h\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"FROB / HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ],
)
def test_first_lines_and_hosts_that_are_refused(head, status):
    with pytest.raises(HttpError) as refusal:
        parse_request_head(head)
    assert refusal.value.status == status, refusal.value


@pytest.mark.parametrize("host", [b"", b"h", b"h:80", b"127.0.0.1:8080", b"[::1]:80", b"a_b.c~d", b"a%20b"])
def test_hosts_that_are_taken(host):
    parse_request_head(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")


def test_expect_continue_in_any_case_and_only_in_1_1():
    assert parse_request_head(GOOD + b"Expect: 100-Continue\r\n\r\n").expects_continue
    assert not parse_request_head(b"GET / HTTP/1.0\r\nExpect: 100-continue\r\n\r\n").expects_continue


@pytest.mark.parametrize(
    ("head", "method", "length", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"GET", 3, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"HEAD", 0, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", b"GET", IN_CHUNKS, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"GET", UNTIL_CLOSE, False),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"HEAD", 0, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"GET", 0, True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"GET", 0, False),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b"GET", 0, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", b"GET", 1, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\n", b"GET", 1, True),
    ],
)
def test_response_heads(head, method, length, keep_alive):
    response = parse_response_head(head, method)
    assert (response.length, response.keep_alive) == (length, keep_alive)


@pytest.mark.parametrize(
    ("line", "target", "host"),
    [
        (b"POST http://model:80/v2/models/m/infer", b"/v2/models/m/infer", b"model:80"),
        (b"GET HTTPS://model", b"/", b"model"),
        (b"GET http://model?a=b", b"/?a=b", b"model"),
        (b"GET http://[::1]:8080/a?b", b"/a?b", b"[::1]:8080"),
        (b"GET http://h/http://other/", b"/http://other/", b"h"),
        (b"OPTIONS http://model", b"*", b"model"),
        (b"OPTIONS http://model/", b"/", b"model"),
        (b"OPTIONS *", b"*", b"other"),
        (b"GET /http://model/", b"/http://model/", b"other"),
        (b"GET ftp://model/x", b"ftp://model/x", b"other"),  # not ours to read: as it came
    ],
)
def test_an_absolute_target_is_read_as_the_origins_and_its_host(line, target, host):
    head = parse_request_head(line + b" HTTP/1.1\r\nA: 1\r\nhOST: other\r\nB: 2\r\n\r\n")
    assert head.target == target
    assert [value for name, value in head.headers if name.lower() == b"host"] == [host]
    assert [field for field in head.headers if field[0] in {b"A", b"B"}] == [(b"A", b"1"), (b"B", b"2")]


def test_an_absolute_target_names_the_host_that_http_1_0_left_out():
    assert parse_request_head(b"GET http://model/x HTTP/1.0\r\n\r\n").headers == [(b"Host", b"model")]


@pytest.mark.parametrize(
    "head",
    [
        b"GET http:///x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET http://user@model/x HTTP/1.1\r\nHost: model\r\n\r\n",
        b"GET http://user:secret@model/x HTTP/1.1\r\nHost: model\r\n\r\n",
        b"GET http://mo\\del/x HTTP/1.1\r\nHost: model\r\n\r\n",
        b"GET http://model:x/y HTTP/1.1\r\nHost: model\r\n\r\n",
        b"GET http://model/x HTTP/1.1\r\n\r\n",
        b"GET http://model/x HTTP/1.1\r\nHost: model\r\nHost: model\r\n\r\n",
    ],
)
def test_absolute_targets_that_are_refused(head):
    with pytest.raises(HttpError) as refusal:
        parse_request_head(head)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("fields", "offer"),
    [
        (b"Connection: upgrade\r\nUpgrade: websocket", b"websocket"),
        (b"Connection: Upgrade\r\nUpgrade: a/1\r\nUpgrade: b,, c", b"a/1, b, c"),
        (b"Connection: Upgrade\r\nUpgrade: h2c, H2, HTTP/2.0", b""),
        (b"Connection: Upgrade", b""),
        (b"Upgrade: websocket", b""),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 1", b""),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0", b"websocket"),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked", b""),
    ],
)
def test_what_is_offered_to_switch_to(fields, offer):
    assert parse_request_head(b"GET / HTTP/1.1\r\nHost: h\r\n" + fields + b"\r\n\r\n").upgrade == offer


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 99 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\nX: a\r\n\r\n",
    ],
)
def test_response_heads_that_are_refused(head):
    with pytest.raises(HttpError):
        parse_response_head(head, b"GET")


def test_a_head_in_pieces_is_refused_at_its_first_wrong_byte():
    check = HeadCheck(httptools.HttpRequestParser)
    check.feed(b"GET / HT")
    check.feed(b"GET / HTTP/1.1\r\nHost")
    with pytest.raises(HttpError):
        check.feed(b"GET / HTTP/1.1\r\nHost: h\nX")
    with pytest.raises(HttpError) as refusal:
        HeadCheck(httptools.HttpRequestParser).feed(b"\x16\x03\x01")
    assert refusal.value.status == 501


TOKEN_CHARACTERS = "!#$%&'*+-.^_`|~" + string.digits + string.ascii_letters
VALUE_CHARACTERS = "\t" + "".join(map(chr, [*range(0x20, 0x7F), *range(0x80, 0x100)]))
NAMES = st.text(TOKEN_CHARACTERS, max_size=12).map(lambda name: b"X-" + name.encode())
VALUES = st.text(VALUE_CHARACTERS, max_size=20).map(lambda value: value.encode("latin-1").strip(b" \t"))
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@settings(deadline=None)
@given(fields=FIELDS)
def test_what_is_written_is_read_the_same(fields):
    head = parse_request_head(encode_request_head(b"GET", b"/x", [(b"Host", b"h"), *fields]))
    assert head.headers == [(b"Host", b"h"), *fields]
    assert parse_response_head(encode_response_head(200, fields), b"GET").headers == fields


@settings(deadline=None)
@given(junk=st.binary(max_size=60), at=st.integers(0, 60))
def test_junk_in_a_head_is_refused_or_read_but_nothing_else(junk, at):
    head = GOOD + b"Content-Length: 5\r\n"
    try:
        request = parse_request_head(head[:at] + junk + head[at:] + b"\r\n")
    except HttpError:
        return
    # What was taken is what we would write, except for whitespace around values: no second reading exists.
    again = parse_request_head(encode_request_head(request.method, request.target, request.headers))
    assert (again.method, again.target, again.headers) == (request.method, request.target, request.headers)
