"""Duties of an HTTP intermediary beyond forwarding: hop counts, and offers to switch protocols. Pure functions."""

from __future__ import annotations

from carpool_sidecar.http1.messages import Added, Headers, find, tokens

COUNTED = frozenset({b"TRACE", b"OPTIONS"})
"""Methods whose hops may be limited."""
_MOST_DIGITS = 9
# The fields that TRACE is for: they show the hops of a request. Any other field may contain a secret.
_TRACED = frozenset(
    {
        b"accept", b"accept-encoding", b"accept-language", b"connection", b"content-length", b"forwarded", b"host",
        b"max-forwards", b"user-agent", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto",
    }
)  # fmt: skip
_METHODS = (b"allow", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, TRACE")


def hops_left(headers: Headers) -> int | None:
    """Return how many more intermediaries may pass on a TRACE or OPTIONS (RFC 9110, 7.6.2); None: no limit."""
    values = [value for name, value in headers if name.lower() == b"max-forwards"]
    if len(values) != 1 or not values[0].isdigit() or len(values[0]) > _MOST_DIGITS:
        return None
    return int(values[0])


def final_answer(method: bytes, target: bytes, headers: Headers) -> tuple[Headers, bytes]:
    """Return headers and body of a 200 to a TRACE or OPTIONS that ends here.

    A TRACE is answered with the request as received (RFC 9110, 9.3.8), without fields that may contain secrets.
    """
    if method == b"OPTIONS":
        return [_METHODS], b""
    shown = [b"%b: %b\r\n" % field for field in headers if field[0].lower() in _TRACED]
    return [(b"content-type", b"message/http")], b"TRACE %b HTTP/1.1\r\n%b\r\n" % (target, b"".join(shown))


def one_hop_less(headers: Headers, left: int) -> Headers:
    """Return the headers with Max-Forwards counted down."""
    count = b"%d" % (left - 1)
    return [(name, count if name.lower() == b"max-forwards" else value) for name, value in headers]


def upgrade_fields(headers: Headers) -> Added:
    """Return the fields that pass on the Upgrade of an answer (101 or 426), if it has one."""
    protocols = find(headers, b"upgrade")
    named = (value for name, value in headers if name.lower() == b"connection")
    if protocols is None or b"upgrade" not in tokens(b",".join(named)):
        return ()
    return offer(protocols)


def offer(protocols: bytes) -> Added:
    """Return the fields that name protocols to switch to."""
    return ((b"connection", b"Upgrade"), (b"upgrade", protocols))
