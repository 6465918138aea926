"""Room in the KV cache: the most tokens that the admitted streams will hold at once, forecast from output lengths.

Streams grow by one token per step and free everything when they end. So the peak lies where one of them ends: with r(i)
left to the i-th of those with the most left, it is max over i of (held by the first i) + i r(i) (Gong et al. 2025,
"Past-Future Scheduler for LLM Serving under SLA Guarantees", section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.generation.lengths import OutputLengths

if TYPE_CHECKING:
    from carpool.generation.meter import Meter
    from carpool.generation.requests import Request

SMALLEST_SHARE = 0.05
"""Of the cache in use, from which the engine's report gives the size of the cache."""


class KvBudget:
    """Whether another request fits.

    ``tokens`` is the size of the cache; where it is None, it is learned from the engine's reports.
    """

    def __init__(self, percent: float, tokens: float | None = None) -> None:
        self.lengths = OutputLengths()
        self.tokens = tokens
        self._share = percent / 100
        self._refused: tuple[int, int] | None = None
        """The request that did not fit, and how many streams had ended then: until another ends it still doesn't."""

    def report(self, share: float, held: float) -> None:
        """Take the engine's word for the share of its cache in use, when streams are known to hold ``held`` tokens."""
        if share < SMALLEST_SHARE:
            return
        size = held / share
        # Prompts that are half computed are in the share but not in `held`: the largest of the sizes seen is closest.
        self.tokens = size if self.tokens is None else max(size, self.tokens + 0.02 * (size - self.tokens))

    def fits(self, request: Request, meter: Meter) -> bool:
        """Say whether the streams and this request stay within the budget until they end."""
        if self.tokens is None or not meter.streams:
            return True
        budget = self._share * self.tokens
        held = meter.kv + meter.backlog + request.prompt_tokens
        if held + sum(s.cost for s in meter.streams.values()) + request.cost < budget:
            return True
        if self._refused == (request.key, meter.ends):
            return False
        if peak(self._remaining(request, meter)) <= budget:
            return True
        self._refused = (request.key, meter.ends)
        return False

    def _remaining(self, request: Request, meter: Meter) -> list[tuple[float, float]]:
        remaining = self.lengths.remaining
        pairs = [(remaining(request, 0.0), float(request.prompt_tokens))]
        for stream in meter.streams.values():
            generated = meter.generated(stream) if stream.first_at is not None else 0.0
            pairs.append((remaining(stream, generated), stream.prompt_tokens + generated))
        return pairs


def peak(streams: list[tuple[float, float]]) -> float:
    """Return the most tokens held at once by streams of (tokens left, tokens held)."""
    most = held = 0.0
    for i, (left, tokens) in enumerate(sorted(streams, reverse=True), 1):
        held += tokens
        most = max(most, held + i * left)
    return most
