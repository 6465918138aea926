"""How much of a request, or of a batch's answer, is looked at. What exceeds a limit is forwarded alone, not refused.

Each limit bounds one kind of work on the event loop. The defaults keep the worst text of each kind near 5 ms of CPU
time; docs/decisions/0019-bounded-parsing.md has the measurements.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from carpool.policy.durations import Quantity
from carpool.policy.plain import Camel

FREE: Final = 4096
"""Bytes up to which a text can't exceed the limits that are counted in it: none of these may be set lower."""


class Limits(Camel, frozen=True):
    """What a request may hold and still share a batch. Beyond that it is forwarded alone, as it came."""

    max_text: Quantity = Quantity(2 * 2**20)
    """JSON text of one request. Binary tensors are not read, so their size doesn't count."""
    max_answer_text: Quantity = Quantity(2 * 2**20)
    """JSON text of a batch's answer. A larger answer halves the batch and lowers the model's largest batch."""
    max_tensors: Annotated[int, Meta(ge=1, le=16384)] = 256
    """V2: inputs, and outputs asked for or answered."""
    max_keys: Annotated[int, Meta(ge=16, le=65536)] = 2048
    """Names of fields that are read: V1 those beside the rows, V2 all but those inside data."""
    max_rows: Annotated[int, Meta(ge=1, le=65536)] = 8192
    """Rows of one request."""
    max_strings: Annotated[int, Meta(ge=FREE, le=2**24)] = 8192
    """Strings in JSON, names of fields included; elements of a binary BYTES tensor."""
    max_escapes: Annotated[int, Meta(ge=FREE, le=2**24)] = 32768
    """Backslashes in JSON."""
    max_arrays: Annotated[int, Meta(ge=FREE, le=2**24)] = 65536
    """Arrays and objects in JSON. An image of 224 x 224 pixels, nested, has 50,401."""
    max_elements: Annotated[int, Meta(ge=FREE, le=2**24)] = 262144
    """Commas in JSON. An image of 224 x 224 x 3 numbers has 150,527."""
    max_depth: Annotated[int, Meta(ge=8, le=512)] = 64
    """Levels of arrays and objects in each other."""


DEFAULT = Limits()
"""The limits where nothing is configured."""


def setting(name: str) -> str:
    """Return the configuration's name of a limit, for messages: ``limits.maxText``."""
    return "limits." + Limits.__struct_encode_fields__[Limits.__struct_fields__.index(name)]
