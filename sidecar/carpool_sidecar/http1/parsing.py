"""Reading HTTP/1.1 heads, strictly.

llhttp (through httptools) reads the heads. It only ever sees one head, never the body behind it, for three reasons:
httptools copies each piece of a body, it can't stop between pipelined messages, and it does not say where a message
ended. This module also refuses what llhttp accepts but a proxy must not (see `_framing` and the first line's checks).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import httptools

from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.http1.messages import Headers, has_body, tokens

IN_CHUNKS = -1
"""Instead of a length: the body is in the chunked coding."""
UNTIL_CLOSE = -2
"""Instead of a length: the body ends with the connection."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
"""A method or field name, as a pattern (RFC 9110, 5.6.2)."""
FIELD_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
"""A field value, as a pattern; bytes beyond ASCII are opaque (RFC 9110, 5.5)."""

# RFC 9110, 7.2 and RFC 3986, 3.2.2: a name, an address or a bracketed address, and maybe a port. Empty is legal.
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%!$&'()*+,;=\-]*|\[[0-9A-Fa-f:.vV]+\])(?::[0-9]*)?")

# The fields that determine how a message is read.
_OURS = frozenset({b"content-length", b"host", b"connection", b"transfer-encoding", b"expect", b"upgrade"})
# RFC 9112, 3.2.2: scheme, authority, and the rest, which is the origin-form. A fragment is never sent.
_ABSOLUTE = re.compile(rb"https?://([^/?]*)([/?].*)?", re.IGNORECASE | re.DOTALL)
# Requests inside HTTP/2 could not be read here, and RFC 9113 has dropped the upgrade to it.
_NOT_OFFERED = frozenset({b"h2c", b"h2", b"http/2", b"http/2.0"})
# One object for all connections that keep a head: half a KiB less for each open stream.
_USUAL = {
    spelt: spelt
    for name in (
        b"accept", b"accept-encoding", b"authorization", b"cache-control", b"connection", b"content-length",
        b"content-type", b"date", b"host", b"server", b"traceparent", b"transfer-encoding", b"user-agent",
        b"x-request-id",
    )
    for spelt in (name, name.title())
}  # fmt: skip
LONGEST_KEPT = 4096
"""Bytes up to which a connection keeps a head in case it is repeated. Thousands of connections may each keep one."""
_MOST_DIGITS = 18  # of a Content-Length: the largest 64-bit number has 19


class HttpError(Exception):
    """A message that is not accepted.

    `status` is the status of the answer, `reason` its machine-readable reason. The text says what is wrong and, for a
    limit, how to raise it. `headers` are added to the answer.
    """

    def __init__(self, status: int, reason: str, text: str, headers: Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.headers = headers


class RequestHead:
    """The head of a request.

    `target` is in origin-form. If it came in absolute-form, Host is the authority named there. `path` is the target up
    to the question mark, `query` what follows it; neither is decoded. `length` is the body's length in bytes, or
    `IN_CHUNKS`. `upgrade`: protocols that may replace HTTP, as the field names them.
    """

    __slots__ = (
        "expects_continue", "headers", "keep_alive", "length", "method", "minor_version", "path", "query", "target",
        "upgrade",
    )  # fmt: skip

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: FieldLines,
        minor_version: int,
        keep_alive: bool,
        length: int,
        expects_continue: bool,
        upgrade: bytes = b"",
    ) -> None:
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.minor_version = minor_version
        self.keep_alive = keep_alive
        self.length = length
        self.expects_continue = expects_continue
        self.upgrade = upgrade


class ResponseHead(NamedTuple):
    """The head of a response. `length` is the body's length in bytes, `IN_CHUNKS` or `UNTIL_CLOSE`.

    `keep_alive`: the connection may serve another call.
    """

    status: int
    headers: FieldLines
    keep_alive: bool
    length: int


class _Collector:
    """Receives the callbacks of httptools."""

    __slots__ = ("headers", "target")

    def __init__(self) -> None:
        self.headers = FieldLines()
        self.target = b""

    def on_url(self, url: bytes) -> None:
        self.target = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((_USUAL.get(name, name), value))


def parse_request_head(head: bytes) -> RequestHead:
    """Read a request's head, from its first byte to its blank line, both included.

    Raises HttpError: 400 for what is malformed or ambiguous, 417 for an unknown expectation, 501 for an unknown method
    or transfer coding, 505 for another version.
    """
    method, target, headers = _parse_request(head)
    minor_version = _request_version(head, method, target)

    lengths: list[bytes] = []
    codings: list[bytes] = []
    hosts: list[bytes] = []
    connection: list[bytes] = []
    offers: list[bytes] = []
    expects_continue = False
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            continue
        if lowered == b"content-length":
            lengths.append(value)
        elif lowered == b"host":
            hosts.append(value)
        elif lowered == b"connection":
            connection += tokens(value)
        elif lowered == b"transfer-encoding":
            codings.append(value)
        elif lowered == b"upgrade":
            offers += value.split(b",")
        elif lowered == b"expect" and minor_version:
            if value.lower() != b"100-continue":
                raise HttpError(417, "unknown-expectation", "the only expectation met here is 100-continue")
            expects_continue = True
    if len(hosts) != 1 and (minor_version or hosts):
        raise HttpError(400, "bad-host", f"a request has one Host header; this has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HttpError(400, "bad-host", "the Host header is not a host and maybe a port")
    if not target.startswith((b"/", b"*")) and (absolute := _ABSOLUTE.fullmatch(target)) is not None:
        target, headers = _origin_form(method, absolute[1], absolute[2] or b"", headers)
    length = _framing(lengths, codings, minor_version) or 0
    upgrade = b""
    if offers and b"upgrade" in connection and minor_version and not length:
        upgrade = b", ".join(one for offer in offers if (one := offer.strip()) and one.lower() not in _NOT_OFFERED)
    return RequestHead(
        method,
        target,
        headers,
        minor_version,
        b"close" not in connection and (minor_version == 1 or b"keep-alive" in connection),
        length,
        expects_continue,
        upgrade,
    )


def parse_response_head(head: bytes, method: bytes) -> ResponseHead:
    """Read the head of a response to `method`, from its first byte to its blank line, both included.

    Raises HttpError (502) for what is malformed or ambiguous.
    """
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # the caller decides whether a 101 is right
    except httptools.HttpParserError as error:
        raise HttpError(502, "malformed-head", f"malformed response head: {error}") from None
    if head[:9] not in {b"HTTP/1.1 ", b"HTTP/1.0 "} or not head[9:12].isdigit() or head[12:13] not in {b" ", b"\r"}:
        raise HttpError(502, "malformed-head", "malformed status line: want HTTP/1.1 and a status of three digits")
    minor_version = head[7] - ord("0")
    status = int(head[9:12])
    if status < 100:
        raise HttpError(502, "malformed-head", f"no such status: {status:03}")
    headers = collector.headers

    lengths: list[bytes] = []
    codings: list[bytes] = []
    connection: list[bytes] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            continue
        if lowered == b"content-length":
            lengths.append(value)
        elif lowered == b"connection":
            connection += tokens(value)
        elif lowered == b"transfer-encoding":
            codings.append(value)
    keep_alive = b"close" not in connection and (minor_version == 1 or b"keep-alive" in connection)
    length = _framing(lengths, codings, minor_version)
    if not has_body(method, status):
        # Some servers do send the body that such an answer only announces, maybe during the next call.
        keep_alive = keep_alive and not length
        length = 0
    elif length is None:
        length, keep_alive = UNTIL_CLOSE, False
    return ResponseHead(status, headers, keep_alive, length)


def _parse_request(head: bytes) -> tuple[bytes, bytes, FieldLines]:
    """Return the method, the target and the field lines, as llhttp reads them. Raises HttpError (400, 501)."""
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # the protocol stays HTTP/1.1: an Upgrade is an offer that a server may ignore
    except httptools.HttpParserInvalidMethodError:
        raise _unknown_method() from None
    except httptools.HttpParserError as error:
        raise HttpError(400, "malformed-head", f"malformed request head: {error}") from None
    return parser.get_method(), collector.target, collector.headers


def _request_version(head: bytes, method: bytes, target: bytes) -> int:
    """Check the request line; return the minor version of HTTP/1. Raises HttpError (400, 501, 505)."""
    # llhttp also accepts HTTP/0.9, HTTP/2.0, RTSP and several spaces. So the first line is compared with our own form.
    line = b"%b %b HTTP/" % (method, target)
    if not head.startswith(line):
        raise HttpError(400, "malformed-head", "malformed request line: want METHOD target HTTP/1.1")
    if head[len(line) : len(line) + 5] not in {b"1.1\r\n", b"1.0\r\n"}:
        raise HttpError(505, "unknown-version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if method == b"CONNECT":
        raise HttpError(501, "unknown-method", "no tunnels: CONNECT is not served")
    return head[len(line) + 2] - ord("0")


def _origin_form(method: bytes, authority: bytes, rest: bytes, headers: FieldLines) -> tuple[bytes, FieldLines]:
    """Return the target and the headers of a request whose target was absolute (RFC 9112, 3.2.2).

    The target's authority replaces Host. If the two differed, servers could route the request differently.
    """
    if not authority or not _HOST.fullmatch(authority):
        # This also refuses b"user@" (RFC 9110, 4.2.4).
        raise HttpError(400, "bad-host", "the target does not name a host and maybe a port")
    if not rest.startswith(b"/"):
        rest = b"*" if method == b"OPTIONS" and not rest else b"/" + rest
    others = [field for field in headers if field[0].lower() != b"host"]
    return rest, FieldLines([(b"Host", authority), *others])


def _unknown_method() -> HttpError:
    return HttpError(501, "unknown-method", "this is no HTTP, or a method that is not known")


def _framing(lengths: list[bytes], codings: list[bytes], minor_version: int) -> int | None:
    """Return the body's length or `IN_CHUNKS`; None if the head does not state it.

    Two parties that disagree on where a body ends read different requests in the same bytes (RFC 9112, 11.2). So
    ambiguous framing is refused instead of repaired.
    """
    if codings:
        if lengths:
            raise HttpError(400, "ambiguous-length", "both Content-Length and Transfer-Encoding")
        if not minor_version:
            raise HttpError(400, "ambiguous-length", "Transfer-Encoding in an HTTP/1.0 message")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise HttpError(501, "unknown-coding", "the only transfer coding known here is chunked")
        return IN_CHUNKS
    if not lengths:
        return None
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > _MOST_DIGITS:
        raise HttpError(400, "bad-length", "Content-Length is not one decimal number")
    return int(lengths[0])


class HeadCheck:
    """Checks a head that arrives in pieces, so that an invalid one is refused before its blank line."""

    __slots__ = ("_fed", "_parser")

    def __init__(self, parser: type[httptools.HttpRequestParser | httptools.HttpResponseParser]) -> None:
        self._parser = parser(None)
        self._fed = 0

    def feed(self, beginning: bytes) -> None:
        """Take all of the head received so far. Raises HttpError (400) at the first byte that is wrong."""
        try:
            self._parser.feed_data(beginning[self._fed :])
        except httptools.HttpParserInvalidMethodError:
            raise _unknown_method() from None
        except httptools.HttpParserError as error:
            raise HttpError(400, "malformed-head", f"malformed head: {error}") from None
        self._fed = len(beginning)
