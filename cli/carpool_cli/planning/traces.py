"""Recorded arrivals, played at any rate, and the Azure LLM inference trace of 2023."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from random import Random


class Trace(Struct, frozen=True):
    """Recorded arrivals, played once. ``factor`` stretches their time: below 1 is faster than recorded."""

    recorded: tuple[float, ...]
    factor: float = 1.0

    @classmethod
    def at_rate(cls, times: Sequence[float], rate: float) -> Trace:
        """Rescale recorded times (seconds, ascending, at least two, not all equal) to a mean rate.

        Burstiness relative to the mean gap is kept; all slower changes (a day, a deployment) are compressed with it.
        """
        factor = (len(times) - 1) / (times[-1] - times[0]) / rate
        return cls(tuple(scaled(times, factor)), factor)

    @property
    def rate(self) -> float:
        """Mean arrivals per second of the rescaled recording."""
        return (len(self.recorded) - 1) / (self.recorded[-1] - self.recorded[0])

    def times(self, rng: Random) -> Iterator[float]:  # noqa: ARG002 - a recording is no matter of chance
        """Play the recording."""
        return iter(self.recorded)


def scaled(times: Sequence[float], factor: float) -> list[float]:
    """Stretch times by ``factor`` relative to the first one, which becomes 0."""
    first = times[0]
    return [(time - first) * factor for time in times]


def lasts(times: Sequence[float]) -> float:
    """Return a recording's duration in seconds, including the gap after the last arrival; ``inf`` without arrivals."""
    span = times[-1] - times[0]
    return span * len(times) / (len(times) - 1) if span else inf


class TokenTrace(Struct, frozen=True):
    """A recorded trace of text requests: seconds from the first arrival, tokens in, tokens out; of equal length."""

    times: tuple[float, ...]
    context: tuple[int, ...]
    generated: tuple[int, ...]


def azure_llm_2023(lines: Iterable[str]) -> TokenTrace:
    """Read the Azure LLM inference trace of 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Timestamps are ``2023-11-16 18:15:46.6805900``, or seconds.

    Raises ``ValueError`` naming the invalid line.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("TIMESTAMP"):
            continue
        try:
            stamp, context, generated = text.split(",")
            rows.append((_seconds(stamp), _tokens(context), _tokens(generated)))
        except ValueError:
            raise ValueError(
                f"line {number}: {text[:80]!r} is not 'seconds,prompt tokens,output tokens' (seconds, or "
                "YYYY-MM-DD HH:MM:SS.fff)"
            ) from None
    rows.sort()
    start = rows[0][0] if rows else 0.0
    return TokenTrace(
        tuple(row[0] - start for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows)
    )


def _tokens(text: str) -> int:
    if (count := int(text)) < 0:
        raise ValueError
    return count


def _seconds(stamp: str) -> float:
    """Seconds from the epoch of the civil calendar (days since March of year 0, Hinnant's algorithm)."""
    if " " not in stamp.strip():
        return float(stamp)
    date, clock = stamp.split(" ")
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second = clock.split(":")
    # Starting with March: the leap day then ends the year, and 153 days per five-month cycle count the rest.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1
    return days * 86_400.0 + int(hour) * 3600 + int(minute) * 60 + float(second)
