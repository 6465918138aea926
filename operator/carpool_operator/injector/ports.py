"""Port numbers in texts written by users."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"0*([0-9]{1,5})")
# Few ASCII digits only: int() rejects "²", and more than 4,300 digits.


def port_number(text: str) -> int | None:
    """Parse a port: ``8080``, and also ``08080``; ``None`` if the text is not a number from 0 to 99,999."""
    found = _DIGITS.fullmatch(text)
    return None if found is None else int(found[1])
