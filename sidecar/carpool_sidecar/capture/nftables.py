"""Redirections of ports as nftables messages: bytes for the kernel, and its answers decoded. Nothing is sent here.

One batch replaces the whole table or changes nothing (linux/netfilter/nf_tables.h, linux/netfilter/nfnetlink.h). It
is equivalent to this, for IPv4 and IPv6:

    table inet carpool {
      chain prerouting {
        type nat hook prerouting priority dstnat
        iif != lo meta l4proto tcp tcp dport 8000 redirect to :14080
      }
    }

Only connections from outside the pod are redirected. The sidecar's own connections to the model go over ``lo``.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TABLE, CHAIN = b"carpool", b"prerouting"

# Kinds of messages
_BATCH_BEGIN, _BATCH_END, _ERROR = 0x10, 0x11, 0x02
_NFTABLES = 10
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6

_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_INET = 1
"""Family: IPv4 and IPv6 in one table, since Linux 5.2."""
_NESTED = 0x8000
_DSTNAT = -100
"""Priority at which destinations are changed."""

_LO = 1
"""Index of the loopback device, in every network namespace."""
_REGISTER = 1
_META_IIF, _META_L4PROTO = 4, 16
_EQUAL, _NOT_EQUAL = 0, 1
_TRANSPORT, _DPORT_AT, _PORT_BYTES = 2, 2, 2
_TCP = 6


class Redirection(NamedTuple):
    """TCP connections to one port of the pod that end at another."""

    port: int
    to: int


class Refused(NamedTuple):
    """The kernel's answer to one message, if it is not "done"."""

    code: int

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, str(self.code))
        return f"{name}: {os.strerror(self.code)}"


def batch(redirections: Iterable[Redirection]) -> bytes:
    """Return the messages that put these redirections in force, and remove all others of this table."""
    table = _string(1, TABLE)
    hook = _nest(4, _number(1, 0) + _number(2, _DSTNAT))
    messages = [
        # Made first, so that there is one to delete.
        (_NEW_TABLE, _CREATE, table),
        (_DELETE_TABLE, 0, table),
        (_NEW_TABLE, _CREATE, table),
        (_NEW_CHAIN, _CREATE, table + _string(3, CHAIN) + hook + _string(7, b"nat")),
        *((_NEW_RULE, _CREATE | _APPEND, table + _string(2, CHAIN) + _rule(each)) for each in redirections),
    ]
    parts = [_message(_BATCH_BEGIN, _REQUEST, 0, 0, _NFTABLES, b"")]
    for number, (kind, flags, body) in enumerate(messages, 1):
        parts.append(_message(_NFTABLES << 8 | kind, _REQUEST | _ACK | flags, number, _INET, 0, body))
    parts.append(_message(_BATCH_END, _REQUEST, len(messages) + 1, 0, _NFTABLES, b""))
    return b"".join(parts)


def expected(redirections: Iterable[Redirection]) -> int:
    """Return how many answers the kernel gives to a batch that it accepts."""
    return 4 + sum(1 for _ in redirections)


def answers(data: bytes) -> Iterator[Refused | None]:
    """Yield the result of each message in an answer: ``None`` for "done"."""
    while len(data) >= 20:
        length, kind = struct.unpack_from("=IH", data)
        if kind == _ERROR:
            code = -struct.unpack_from("=i", data, 16)[0]
            yield Refused(code) if code else None
        data = data[max(_padded(length), 20) :]


def _rule(redirection: Redirection) -> bytes:
    expressions = (
        (b"meta", _number(1, _REGISTER) + _number(2, _META_IIF)),
        (b"cmp", _compared(_NOT_EQUAL, struct.pack("=I", _LO))),
        (b"meta", _number(1, _REGISTER) + _number(2, _META_L4PROTO)),
        (b"cmp", _compared(_EQUAL, bytes([_TCP]))),
        (b"payload", _number(1, _REGISTER) + _number(2, _TRANSPORT) + _number(3, _DPORT_AT) + _number(4, _PORT_BYTES)),
        (b"cmp", _compared(_EQUAL, struct.pack(">H", redirection.port))),
        (b"immediate", _number(1, _REGISTER) + _nest(2, _attribute(1, struct.pack(">H", redirection.to)))),
        (b"redir", _number(1, _REGISTER)),
    )
    return _nest(4, b"".join(_nest(1, _string(1, name) + _nest(2, data)) for name, data in expressions))


def _compared(how: int, value: bytes) -> bytes:
    return _number(1, _REGISTER) + _number(2, how) + _nest(3, _attribute(1, value))


def _message(kind: int, flags: int, number: int, family: int, resource: int, body: bytes) -> bytes:
    head = struct.pack("=IHHII", 20 + len(body), kind, flags, number, 0)
    return head + struct.pack(">BBH", family, 0, resource) + body


def _attribute(kind: int, value: bytes) -> bytes:
    data = struct.pack("=HH", 4 + len(value), kind) + value
    return data.ljust(_padded(len(data)), b"\0")


def _nest(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">i", value))


def _string(kind: int, value: bytes) -> bytes:
    return _attribute(kind, value + b"\0")


def _padded(length: int) -> int:
    return (length + 3) & ~3
