"""Port numbers in texts that people write."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"0*([0-9]{1,5})")
# ASCII digits, and few of them: int() refuses "²", and more than 4,300 digits.


def port_number(text: str) -> int | None:
    """Read a port: ``8080``, and ``08080`` likewise; ``None`` where a text is no number from 0 to 99,999."""
    found = _DIGITS.fullmatch(text)
    return None if found is None else int(found[1])
