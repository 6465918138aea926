"""Request headers, read in one pass: which are part of the batch key, and what the others mean.

All headers belong to the batch key except those in ``IGNORED``, those with an ``IGNORED_PREFIXES`` prefix, those that
Connection names, and those that the policy names in ``batchAcross``. Ignored ones are not sent with a batch, since its
requests may differ in them. The key's headers are equal for all requests and are sent. Those of ``batchAcross`` are
sent with the values of the batch's first request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from carpool.policy.spec import NEVER_ACROSS
from carpool_sidecar.http1.messages import named_by

if TYPE_CHECKING:
    from collections.abc import Iterable

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
    }
)

DEBUG = b"x-carpool-debug"
"""The answer to a request with this header reports its batch's size and its time in the queue."""

PRIORITY = b"x-carpool-priority"
"""With the value ``batch``, a request uses capacity that interactive ones leave; so does OpenAI's ``service_tier:
flex``. Any other value names a class of the policy's SLO for token streams."""

DEADLINES = frozenset({b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms", b"x-request-timeout-ms"})

IGNORED = (
    HOP_BY_HOP
    | DEADLINES
    | {
        # lengths and form of this one body: a batch has its own. Its answer has to be read, so it is never compressed
        b"content-length",
        b"inference-header-content-length",
        b"accept-encoding",
        # traces
        b"traceparent",
        b"tracestate",
        b"baggage",
        b"b3",
        b"uber-trace-id",
        b"sentry-trace",
        b"newrelic",
        b"elastic-apm-traceparent",
        b"grpc-trace-bin",
        b"x-amzn-trace-id",
        b"x-cloud-trace-context",
        b"x-client-trace-id",
        b"x-ot-span-context",
        # which request this is
        b"request-id",
        b"x-request-id",
        b"x-correlation-id",
        b"x-request-start",
        # who forwarded it (x-forwarded-user and the like say who asks, and stay in the key)
        b"x-forwarded-by",
        b"x-forwarded-client-cert",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-forwarded-scheme",
        b"x-forwarded-server",
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"true-client-ip",
        b"cf-connecting-ip",
        b"cf-ray",
        b"x-envoy-attempt-count",
        b"x-envoy-decorator-operation",
        b"x-envoy-external-address",
        b"x-envoy-internal",
        b"x-envoy-original-path",
        b"x-envoy-peer-metadata",
        b"x-envoy-peer-metadata-id",
        b"k-proxy-request",
        # who asked, and when
        b"user-agent",
        b"date",
    }
)
IGNORED_PREFIXES = (b"x-b3-", b"x-datadog-", b"x-carpool-")

WINDOW = 64
"""Requests of a model between two looks at whether a header separates them."""

OWN = 0.9
"""Share of them from which a header counts as different in every request."""

# Header names as received, with their lower case and what is done with them. Clients use a few dozen names; the limit
# is for clients that invent them.
_MAX_NAMES = 1024
_IGNORE, _KEEP, _READ, _KEEP_AND_READ = range(4)
_READ_NAMES = DEADLINES | {b"inference-header-content-length", b"connection", DEBUG, PRIORITY}
_KEPT_AND_READ = frozenset({b"content-type", b"content-encoding"})

_PAIR, _FIELD = b"\x1e", b"\x1f"
_GRPC_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_GRPC_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MILLISECONDS = re.compile(rb"\d{1,12}(?:\.\d{1,9})?")


class Facts:
    """The information in a request's headers.

    ``key``: equal for headers that may share a batch. ``shared``: the headers of the merged request,
    names in lower case. ``deadline_s``: the least of the deadline headers, seconds from arrival; values that are no
    time are ignored. ``debug``: whether ``DEBUG`` is among them; ``batch``: whether ``PRIORITY`` has that value.
    ``clash``: a header that comes twice with two values, so that it is unclear how to read the body; or empty.
    ``reader``: the rules that they were read by. The others as sent, or empty.
    """

    __slots__ = (
        "batch", "clash", "content_encoding", "content_type", "deadline_s", "debug", "header_length", "key", "reader",
        "shared",
    )  # fmt: skip

    def __init__(
        self,
        key: bytes,
        shared: list[tuple[bytes, bytes]],
        deadline_s: float | None,
        content_type: bytes,
        content_encoding: bytes,
        header_length: bytes,
        debug: bool,
        batch: bool,
        clash: str,
        reader: Reader,
    ) -> None:
        self.key = key
        self.shared = shared
        self.deadline_s = deadline_s
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.header_length = header_length
        self.debug = debug
        self.batch = batch
        self.clash = clash
        self.reader = reader


class Reader:
    """Reads headers. ``across``: names (lower case) in which the requests of a batch may differ.

    One reader is one set of rules: headers read by another have to be read again. ``generation`` makes the keys of
    readers differ: requests that wait under earlier rules may have credentials that are not in their keys, and must
    share no batch with later ones.
    """

    __slots__ = ("_generation", "_names", "across")

    def __init__(self, across: Iterable[str] = (), generation: int = 0) -> None:
        self.across = frozenset(name.encode() for name in across)
        self._generation = b"%d" % generation + _PAIR if generation else b""
        self._names: dict[bytes, tuple[bytes, int]] = {}

    def read(self, headers: Headers) -> Facts:
        """Read a request's headers: about 2 µs for ten."""
        shared: list[tuple[bytes, bytes]] = []
        deadline: float | None = None
        found: dict[bytes, bytes] = {}
        hop: set[bytes] = set()
        debug = batch = False
        clash = ""
        names = self._names
        for raw_name, value in headers:
            name, role = names.get(raw_name) or self._learn(raw_name)
            if role == _IGNORE:
                continue
            if role != _READ:
                shared.append((name, value))
            if role > _KEEP:
                if name == DEBUG:
                    debug = True
                elif name == PRIORITY:
                    batch = value == b"batch"
                elif name == b"connection":
                    hop |= named_by(value)
                elif name in DEADLINES:
                    seconds = _seconds(name, value)
                    if seconds is not None:
                        deadline = seconds if deadline is None else min(deadline, seconds)
                elif found.setdefault(name, value) != value:
                    clash = f"header {name.decode('latin-1')} comes twice, with different values"
        # Stable: lines of one name keep their order, which matters; the order of different names does not.
        shared.sort(key=itemgetter(0))
        if hop:
            shared = [field for field in shared if field[0] not in hop]
        across = self.across
        return Facts(
            self._generation
            + _PAIR.join([name + _FIELD + value for name, value in shared if not across or name not in across]),
            shared,
            deadline,
            found.get(b"content-type", b""),
            found.get(b"content-encoding", b""),
            found.get(b"inference-header-content-length", b""),
            debug,
            batch,
            clash,
            self,
        )

    def _learn(self, raw_name: bytes) -> tuple[bytes, int]:
        name = raw_name.lower()
        if name in _READ_NAMES:
            role = _READ
        elif name in IGNORED or name.startswith(IGNORED_PREFIXES):
            role = _IGNORE
        else:
            role = _KEEP_AND_READ if name in _KEPT_AND_READ else _KEEP
        if len(self._names) < _MAX_NAMES:
            self._names[raw_name] = (name, role)
        return name, role


read = Reader().read
"""Reads headers without any to batch across."""


def find(headers: Headers, name: bytes) -> bytes | None:
    """Find the first value of a header, named in lower case."""
    return next((value for key, value in headers if key.lower() == name), None)


def differing(a: bytes, b: bytes) -> list[str]:
    """Return the names of the headers in which two keys differ, sorted: these prevent a common batch."""
    lines_a, lines_b = (key.split(_PAIR) if key else [] for key in (a, b))
    differing_lines = [line for line in lines_a if line not in lines_b] + [
        line for line in lines_b if line not in lines_a
    ]
    return sorted({line.partition(_FIELD)[0].decode("latin-1") for line in differing_lines if _FIELD in line})


class Separation:
    """Which headers have another value in almost every request of one model, so that no two share a batch.

    ``key``: the header part of the last request's key. ``requests``: those since the last look, counted by the caller.
    """

    __slots__ = ("_keys", "_names", "_own", "key", "reported", "requests")

    def __init__(self) -> None:
        self.key: bytes | None = None
        self.requests = 0
        self.reported = False
        """Whether a log line was written about it."""
        self._keys = set[int]()
        """Hashes of the different keys since the last look."""
        self._names: dict[str, int] = {}
        """How often a request differed from the one before it, by header."""
        self._own: list[str] = []

    def note(self, key: bytes) -> list[str]:
        """Note a request whose key differs from the last one; return the headers in which the two differ."""
        names = [] if self.key is None else differing(self.key, key)
        self.key = key
        if self.requests >= WINDOW:
            self._look()
        self._keys.add(hash(key))
        for name in names:
            self._names[name] = self._names.get(name, 0) + 1
        return names

    @property
    def own(self) -> list[str]:
        """The headers that have another value in almost every request, except those that the policy can't ignore."""
        if self.requests >= 2 * WINDOW:  # requests with equal keys are not noted: there were many
            self._look()
        return self._own

    def _look(self) -> None:
        least = OWN * self.requests
        own = [name for name, count in self._names.items() if count >= least and name not in NEVER_ACROSS]
        self._own = sorted(own) if len(self._keys) >= least else []
        self.requests = 0
        self._keys.clear()
        self._names.clear()


def advice(own: Sequence[str]) -> str:
    """Return a sentence on headers that separate all requests, with the fix; "" without any."""
    if not own:
        return ""
    named = " and ".join(f"`{name}`" for name in own)
    ignores = "it" if len(own) == 1 else "them"
    return (
        f"almost every request has its own {named}, so they share no batches; "
        f"if the model ignores {ignores}: batchAcross: [{', '.join(own)}]"
    )


def _seconds(name: bytes, value: bytes) -> float | None:
    """Read a deadline header, in seconds. grpc-timeout: at most 8 digits and a unit (gRPC over HTTP/2, "Timeout")."""
    if name == b"grpc-timeout":
        timeout = _GRPC_TIMEOUT.fullmatch(value)
        return None if timeout is None else int(timeout[1]) * _GRPC_UNITS[timeout[2]]
    return float(value) / 1e3 if _MILLISECONDS.fullmatch(value) else None
