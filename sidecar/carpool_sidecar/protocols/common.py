"""The protocol-independent form of requests and answers, for the driver and the Batcher.

A codec is five pure functions of bytes: ``parse`` a request, ``fit`` it into a length bucket if its model has a
sequence axis, ``merge`` requests into one, ``split`` the answer into pieces, ``assemble`` a request's pieces into its
own answer. Nothing here reads a clock or a socket, and nothing takes more than a few milliseconds
(:mod:`carpool_sidecar.protocols.limits`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from carpool_sidecar.protocols import json_scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.protocols.headers import Facts, Headers
    from carpool_sidecar.protocols.limits import Limits
    from carpool_sidecar.protocols.padding import Fit
    from carpool_sidecar.protocols.padding import Sequence as SequenceAxis

Buffer: TypeAlias = bytes | bytearray | memoryview
State = TypeVar("State")

LONGEST_WHY = 240
"""Characters of an explanation: parts of it are the caller's."""

JOINED: Final = 2**16
"""Bytes up to which a text is joined: copying 64 KiB takes about 5 us, as long as sending another part."""

# Longer parts of keys are kept as their digest: a 224x224 image has 150 kB of commas.
_LONGEST_IN_KEY: Final = 256


UNREADABLE = "malformed"
"""The reason of a ``WrongRows`` about the answer's text, not its number of rows."""

PARTS = "parts"
"""The reason of a ``WrongRows`` about answers to the parts of one large request: together they make no answer."""


class WrongRows(Exception):  # noqa: N818 - the field's word for it
    """The upstream's answer cannot be split by rows: 502, and the model is quarantined from batching."""

    status: ClassVar[int] = 502

    def __init__(self, message: str, *, reason: str = "wrong-rows") -> None:
        super().__init__(message)
        self.reason = reason


class TooLarge(WrongRows):
    """The answer is larger than the limit for reading: a smaller batch's answer may be split."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="limits")


class Endpoint(NamedTuple):
    """The endpoint of an inference request. ``target`` is the unchanged request target, query included."""

    protocol: Literal["v1", "v2"]
    model: str
    version: str
    target: bytes


class Parsed(Generic[State]):
    """One inference request, as far as it can be read.

    ``key``: equal for requests that may share a batch, and for no others.
    ``rows``: size along the batch axis.
    ``tokens``: payload elements, for token budgets (V1: leaves; V2: elements of the largest input).
    ``alone``: why it is not batched but forwarded unchanged (a reason code), or None. ``why``: details in a sentence,
    if the code leaves something open.
    ``expansion``: bytes held in addition to the body.
    ``form``: what a model may treat differently: the key without headers, target and shapes. Requests of one form
    are verified together, see :mod:`carpool_sidecar.axis_verification`.
    ``first_by_protocol``: True if the protocol itself defines dim 0 as the batch (V1 ``instances``). Otherwise the
    model's batch axis has to be known before merging, see :mod:`carpool_sidecar.protocols.models`.
    ``fit``: its length bucket, for a model with a sequence axis; None before it was computed, and for all others.
    ``timeout_s``, ``priority``: Triton's request parameters, as the caller gave them (1 is the most urgent; 0 and None
    are the default).
    """

    __slots__ = (
        "alone", "endpoint", "expansion", "first_by_protocol", "fit", "form", "key", "priority", "rows", "size",
        "state", "timeout_s", "tokens", "why",
    )  # fmt: skip

    def __init__(
        self,
        endpoint: Endpoint,
        key: bytes,
        rows: int,
        size: int,
        tokens: int,
        state: State,
        alone: str | None = None,
        why: str = "",
        *,
        expansion: int = 0,
        form: bytes = b"",
        first_by_protocol: bool = False,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.key = key
        self.rows = rows
        self.size = size
        self.tokens = tokens
        self.state = state
        self.alone = alone
        self.why = why
        self.expansion = expansion
        self.form = form
        self.first_by_protocol = first_by_protocol
        self.fit: Fit | None = None
        self.timeout_s = timeout_s
        self.priority = priority

    @property
    def mergeable(self) -> bool:
        """Whether it may share a batch with requests of the same key, or be split into spans."""
        return self.alone is None


# One of each is made for every request: a class with slots takes a third of the time of a named tuple.


class Portion:
    """Rows ``start`` to ``stop`` of one request; a request larger than a batch has several portions."""

    __slots__ = ("parsed", "start", "stop")

    def __init__(self, parsed: Parsed[Any], start: int, stop: int) -> None:
        self.parsed = parsed
        self.start = start
        self.stop = stop


class Piece:
    """Rows ``start`` to ``stop`` of a batch's answer: one portion's part. ``answer`` belongs to the codec."""

    __slots__ = ("answer", "start", "stop")

    def __init__(self, answer: Any, start: int, stop: int) -> None:  # noqa: ANN401 - the codec's own
        self.answer = answer
        self.start = start
        self.stop = stop


class Message:
    """A body to send, in parts to write in order, with the headers that the codec sets.

    These headers replace any of the same name (``inference-header-content-length``).
    """

    __slots__ = ("headers", "parts")

    def __init__(self, headers: list[tuple[bytes, bytes]], parts: list[Buffer]) -> None:
        self.headers = headers
        self.parts = parts


class Codec(Protocol):
    """The six functions of a protocol."""

    def parse(self, endpoint: Endpoint, facts: Facts, body: Buffer, limits: Limits) -> Parsed[Any]:
        """Read a request. Never refuses: a request that can't be read, or is too large, is ``alone``."""

    def fit(self, parsed: Parsed[Any], sequence: SequenceAxis) -> Fit:
        """Find the length of a request that may be batched, and the key of requests that it may be padded with."""

    def merge(self, portions: Sequence[Portion]) -> Message:
        """Merge portions with equal keys into one request, rows in the order of the portions.

        If their keys are those of ``Fit``, rows are padded to the longest.
        """

    def split(self, portions: Sequence[Portion], headers: Headers, body: Buffer, limits: Limits) -> list[Piece]:
        """Split the answer to ``merge(portions)`` into one piece per portion; :class:`WrongRows` if it does not fit.

        Outputs that have the padded length are cut back to each portion's own.
        """

    def agree(self, one: Piece, other: Piece) -> bool:
        """Whether both can be pieces of one answer."""

    def assemble(self, parsed: Parsed[Any], pieces: Sequence[Piece]) -> Message:
        """Assemble the answer to one request from its pieces, in the order of its rows."""


def alone(endpoint: Endpoint, facts: Facts, body: Buffer, reason: str, why: str = "") -> Parsed[None]:
    """Describe a request that is forwarded unchanged, counted as one row."""
    key = b"\x00".join((endpoint.protocol.encode(), endpoint.target, facts.key, b"alone"))
    return Parsed(endpoint, key, 1, len(body), 1, None, reason, why[:LONGEST_WHY])


def joined(parts: list[Buffer]) -> list[Buffer]:
    """Join the parts of a text, unless it is so long that sending them one by one is faster."""
    return [b"".join(parts)] if sum(map(len, parts)) <= JOINED else parts


def short(text: bytes) -> bytes:
    """Return a part of a key: the text itself, or its digest if that is shorter."""
    return text if len(text) <= _LONGEST_IN_KEY else b"#" + blake2b(text, digest_size=32).hexdigest().encode()


def total_rows(portions: Sequence[Portion]) -> int:
    """Rows in a batch."""
    return sum([portion.stop - portion.start for portion in portions])


def longest(portions: Sequence[Portion]) -> int:
    """Return the length that the rows of a batch are padded to; 0: they are sent unchanged."""
    first = portions[0].parsed
    if first.fit is None or all(portion.parsed.key == first.key for portion in portions):
        return 0
    return max([portion.parsed.fit.length for portion in portions if portion.parsed.fit is not None])


def last_padded(portions: Sequence[Portion]) -> tuple[int, bool]:
    """Return the portion of a batch that is best to verify, and whether its rows were padded.

    It is the last one, which must not depend on those before it; in a padded batch the last padded one.
    """
    length = longest(portions)
    if length:
        for at in range(len(portions) - 1, -1, -1):
            fit = portions[at].parsed.fit
            if fit is not None and fit.length < length:
                return at, True
    return len(portions) - 1, False


def pieces_of(answer: object, portions: Sequence[Portion]) -> list[Piece]:
    """Split an answer whose rows are in the order of the portions."""
    pieces, at = [], 0
    for portion in portions:
        end = at + portion.stop - portion.start
        pieces.append(Piece(answer, at, end))
        at = end
    return pieces


def check_shareable(fields: dict[str, bytes], rows: int) -> None:
    """Refuse an answer's fields that can't be sent to every caller: an array may hold one row of each caller."""
    for name, value in fields.items():
        if not json_scan.without_arrays(value):
            counted = "holds an array"
            if value.startswith(b"["):
                entries = json_scan.elements(value, name, (0, len(value)), len(value)) or []
                counted = f"has {len(entries)} entries, the batch {rows} rows"
            raise WrongRows(
                f"answer's `{name}` {counted}: an array beside the rows may hold other callers' rows", reason="fields"
            )
