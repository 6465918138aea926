"""Durations and sizes, as Kubernetes writes them: ``50ms`` held as float seconds, ``256Mi`` held as bytes."""

from __future__ import annotations

import re

DURATION_PATTERN = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"

QUANTITY_PATTERN = r"^[0-9]{1,15}(Ki|Mi|Gi|Ti|k|M|G|T)?$"

# Applied waits are whole microseconds, so what the tuner writes may name them; the CRD's pattern stops at ms.
_DURATION = re.compile(r"([0-9]{1,5})(ms|us|h|m|s)")

_MICROSECONDS = {"h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1000, "us": 1}

_QUANTITY = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


class Duration(float):
    """Seconds, written ``50ms`` or ``1m30s``."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read a duration; raises ``ValueError`` naming the accepted form."""
        if not re.fullmatch(rf"({_DURATION.pattern}){{1,5}}", text):
            raise ValueError(
                f"{text!r} is not a duration: write e.g. 50ms, 2s, 1m30s (h, m, s, ms, us; whole numbers up to 99999)"
            )
        # Summed in whole microseconds, so that 1s50ms is exactly 1.05.
        return cls(sum(int(number) * _MICROSECONDS[unit] for number, unit in _DURATION.findall(text)) / 1e6)

    def __str__(self) -> str:
        """Write it as ``parse`` reads it: ``1s50ms``, rounded to whole microseconds."""
        rest = round(self * 1e6)
        parts = []
        for unit, size in _MICROSECONDS.items():
            count, rest = divmod(rest, size)
            if count:
                parts.append(f"{count}{unit}")
        return "".join(parts) or "0s"


class Quantity(int):
    """Bytes, written ``256Mi``."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Read a size in bytes; raises ``ValueError`` naming the accepted form."""
        if not re.fullmatch(QUANTITY_PATTERN, text):
            raise ValueError(f"{text!r} is not a size: write e.g. 256Mi, 1Gi or a number of bytes")
        number = text.rstrip("KMGTki")
        return cls(int(number) * _QUANTITY[text[len(number) :]])

    def __str__(self) -> str:
        for unit in ("Ti", "Gi", "Mi", "Ki"):
            if self and self % _QUANTITY[unit] == 0:
                return f"{int(self) // _QUANTITY[unit]}{unit}"
        return str(int(self))


def format_seconds(seconds: float) -> str:
    """Seconds as a person reads them: ``2ms``, ``1.25ms``, ``350us``, ``12s``."""
    if seconds == 0:
        return "0s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor * 0.9995:
            return f"{seconds / factor:.4g}{unit}"
    return f"{seconds / 1e-6:.3g}us"


def whole_microseconds(seconds: float) -> float:
    """Round to whole microseconds, the resolution at which waits are applied and compared."""
    return round(seconds * 1e6) / 1e6
