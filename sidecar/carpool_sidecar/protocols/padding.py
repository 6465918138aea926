"""Requests of different lengths in one batch: the length bucket of each, and how far its rows are padded.

The rows of a batch are padded to its longest request, not to the upper end of the bucket. So a server sees only
lengths that callers sent, and a batch of equal lengths is sent without padding. The policy states which inputs may be
padded, and with what (``models[].sequence``); the codecs pad and cut, in their protocol's data format.
"""

from __future__ import annotations

import struct
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.policy.spec import SequenceAxis

LARGEST_ROW = 2**17
"""Most bytes of an input's row at the upper end of its bucket: 64 rows of 128 KiB are padded in 1 to 6 ms,
in up to 25 ms if JSON has to be split along a later axis than 1."""

_INT64 = range(-(2**63), 2**63)
"""Whole numbers of V1: with a larger one in the array, numpy reads all of them as floats."""

TOO_LONG = "too-long"
"""The reason of a request that is longer than the last bucket."""

TOO_LARGE = "too-large"
"""The reason of a request whose rows would exceed ``LARGEST_ROW``, or that there is no room for."""

NOT_PADDABLE = "not-paddable"
"""The reason of a request that can't be padded: its form, inputs of different lengths, a value that does not fit."""

WRONG_LENGTH = "wrong-length"
"""The reason of a ``WrongRows``: an output to be cut back does not have the batch's padded length."""

_FORMATS = {
    "BOOL": "<?", "UINT8": "<B", "UINT16": "<H", "UINT32": "<I", "UINT64": "<Q", "INT8": "<b", "INT16": "<h",
    "INT32": "<i", "INT64": "<q", "FP16": "<e", "FP32": "<f", "FP64": "<d",
}  # fmt: skip
_REAL = frozenset({"FP16", "BF16", "FP32", "FP64"})


class Sequence:
    """A model's sequence axis from the policy. ``lengths`` ascend; ``mark`` distinguishes it from others in keys."""

    __slots__ = ("axis", "lengths", "mark", "outputs", "pad", "policy")

    def __init__(self, policy: SequenceAxis) -> None:
        self.policy = policy
        self.axis = policy.axis
        self.lengths = sorted(set(policy.lengths))
        self.outputs = frozenset(policy.outputs)
        self.pad = {name: float(value) for name, value in policy.pad.items()}
        self.mark = repr((policy.axis, sorted(self.pad.items()), sorted(policy.outputs))).encode()

    def bucket(self, length: int) -> int:
        """Return the upper end of a length's bucket; beyond the last one the next power of two."""
        return next((end for end in self.lengths if length <= end), 1 << (length - 1).bit_length())

    def fits(self, length: int) -> bool:
        """Whether a request of such a length may be padded."""
        return length <= self.lengths[-1]


class Fit:
    """A request's place in its model's length buckets.

    ``key``: its batch key if padding is allowed, else None; ``why``: the reason if not. ``bucket`` and ``length``: 0
    without a length. ``units``: one position of padding for each input, as the codec writes it. ``growth``: most bytes
    that padding may add. ``form``: an addition to the request's own form (see ``Parsed``) for verification:
    rows with and without a mask have to be verified separately.
    """

    __slots__ = ("bucket", "form", "growth", "key", "length", "sequence", "units", "why")

    def __init__(
        self,
        sequence: Sequence,
        *,
        length: int = 0,
        key: bytes | None = None,
        units: dict[str, bytes] | None = None,
        growth: int = 0,
        form: bytes = b"",
        why: str = "",
    ) -> None:
        self.sequence = sequence
        self.form = form
        self.length = length
        self.bucket = sequence.bucket(length) if length else 0
        self.key = key
        self.units: dict[str, bytes] = units or {}
        self.growth = growth
        self.why = why

    def refuse(self, why: str) -> None:
        """Batch the request only with others of its length."""
        self.key = None
        self.why = why


def element(datatype: str, value: float) -> bytes | None:
    """Write a value as a binary element of a V2 datatype; None: it is no value of that type."""
    form = _FORMATS.get(datatype)
    try:
        if datatype == "BF16":
            return struct.pack("<f", value)[2:]
        if form is None:
            return None
        return struct.pack(form, value if datatype in _REAL else _whole(value, datatype == "BOOL"))
    except (struct.error, OverflowError, ValueError):
        return None


def text(datatype: str, value: float) -> bytes | None:
    """Write a value as an element of a V2 datatype in JSON; None: it is no value of that type."""
    if not isfinite(value) or element(datatype, value) is None:
        return None
    if datatype == "BOOL":
        return b"true" if value else b"false"
    return repr(value).encode() if datatype in _REAL else b"%d" % int(value)


def number(value: float, *, whole: bool) -> bytes | None:
    """Write a value in JSON, with a fraction unless it must be a whole number of 64 bits; None: it is not one."""
    if not isfinite(value):
        return None
    if not whole:
        return repr(value).encode()
    return b"%d" % int(value) if value.is_integer() and int(value) in _INT64 else None


def _whole(value: float, boolean: bool) -> int:
    """Return a whole number. Raises ``ValueError`` for others."""
    if not value.is_integer() or (boolean and value not in {0.0, 1.0}):
        raise ValueError
    return int(value)
