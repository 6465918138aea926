"""Room in the KV cache: the most tokens that the admitted streams will hold at once, forecast from output lengths.

A stream grows by a token per step and frees everything when it ends. After t more steps a stream of h tokens has
h + t, if it lasts that long; the lengths of earlier answers give the probability. The peak is the maximum over t of
the mean plus two standard deviations. (Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA
Guarantees", section 4, assumes one length for each stream, which overestimates: some end early.)
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from carpool.generation.lengths import OutputLengths
from carpool.generation.requests import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from carpool.generation.meter import Meter
    from carpool.generation.requests import Request

SMALLEST_SHARE = 0.05
"""Share of the cache in use from which the engine's report gives the size of the cache."""

STALE_STEPS = 80.0
"""Decode steps over which small shares must be reported before they count: SGLang's gauge is up to 40 steps old."""

AHEAD = (32, 96, 192, 384, 768, 1536, 3072)
"""Steps ahead at which the cache is forecast."""

DEVIATIONS = 2.0


class KvBudget:
    """Whether another request fits.

    ``tokens`` is the size of the cache; if it is None, it is learned from the engine's reports. A configured size
    is never changed by reports of a use below ``SMALLEST_SHARE``.
    """

    def __init__(self, percent: float, tokens: float | None = None) -> None:
        self.lengths = OutputLengths()
        self.tokens = tokens
        self._set = tokens is not None
        self._share = percent / 100
        self._small: float | None = None
        """Decode steps at the first of the small shares in a row that contradict the size."""
        self._refused: tuple[int, int] | None = None
        """The request that did not fit, and the number of ended streams then: it can't fit before another ends."""

    def configure(self, percent: float, tokens: float | None) -> None:
        """Set another budget; None: the known size of the cache stays."""
        self._set = tokens is not None
        self._share = percent / 100
        self.tokens = self.tokens if tokens is None else tokens

    def guess(self, tokens: float) -> None:
        """Take the size that the engine reports as a first guess.

        Blocks of several layer groups overstate it, and shared prefixes understate it. Reports of the use correct both:
        at once from ``SMALLEST_SHARE`` on, and below it a too small one only, in doublings.
        """
        if self.tokens is None:
            self.tokens = tokens

    def report(self, share: float, held: float, steps: float) -> None:
        """Take the engine's report of the share of its cache in use, while streams hold ``held`` tokens.

        ``steps``: decode steps so far.
        """
        if share < SMALLEST_SHARE:
            self._look_closer(share, held, steps)
            return
        self._small = None
        size = held / share
        # Half-computed prompts are in the share but not in `held`: the largest size seen is closest.
        self.tokens = size if self.tokens is None else max(size, self.tokens + 0.02 * (size - self.tokens))

    def _look_closer(self, share: float, held: float, steps: float) -> None:
        """Double a size that small shares contradict for long enough.

        They are too coarse for a size, but bound it: 200,000 tokens in less than 5 % are a cache of 4,000,000 or more.
        Without this, a size that is ten times too small would refuse the requests that could disprove it.
        """
        if self._set or self.tokens is None or share <= 0 or held < 2 * self.tokens * SMALLEST_SHARE:
            self._small = None
            return
        if self._small is None:
            self._small = steps
        elif steps - self._small >= STALE_STEPS:
            self.tokens *= 2
            self._small = self._refused = None

    def too_small(self, request: Request) -> bool:
        """Whether a prompt alone exceeds the budget, so that only an empty engine takes it.

        While it waits for that, all others would wait behind it.
        """
        return self.tokens is not None and request.prompt_tokens > self._share * self.tokens

    def fits(self, request: Request, meter: Meter) -> bool:
        """Whether the streams and this request stay within the budget until they end."""
        if self.tokens is None or not meter.streams:
            return True
        budget = self._share * self.tokens
        held = meter.kv + meter.backlog + request.prompt_tokens
        if held + sum(s.cost for s in meter.streams.values()) + request.cost < budget:
            return True
        if held > budget or self._refused == (request.key, meter.ends):
            return False
        if peak(self._streams(request, meter), self.lengths.survival, budget) <= budget:
            return True
        self._refused = (request.key, meter.ends)
        return False

    def ends(self, meter: Meter, steps: float) -> tuple[float, float]:
        """Return how many sequences end within ``steps`` decode steps: the mean, and the standard deviation."""
        mean = variance = 0.0
        for stream in meter.streams.values():
            generated = meter.generated(stream) if stream.state is State.DECODING else 0.0
            ended = 1 - self.lengths.survival(stream, generated, steps)
            mean += stream.sequences * ended
            variance += stream.sequences * ended * (1 - ended)
        return mean, sqrt(variance)

    def _streams(self, request: Request, meter: Meter) -> list[tuple[Request, float]]:
        streams = [
            (stream, meter.generated(stream) if stream.state is State.DECODING else 0.0)
            for stream in meter.streams.values()
        ]
        return [(request, 0.0), *streams]


def peak(
    streams: Iterable[tuple[Request, float]], survival: Callable[[Request, float, float], float], enough: float
) -> float:
    """Return the most tokens that streams of (request, tokens so far) will hold.

    Choices of one request are assumed to end together: the last one keeps the prompt.
    The search ends at a value that exceeds ``enough``.
    """
    listed = list(streams)
    most = 0.0
    for ahead in AHEAD:
        mean = variance = 0.0
        for request, generated in listed:
            alive = survival(request, generated, ahead)
            tokens = request.prompt_tokens + request.sequences * (generated + ahead)
            mean += alive * tokens
            variance += alive * (1 - alive) * tokens * tokens
        most = max(most, mean + DEVIATIONS * sqrt(variance))
        if most > enough:
            break
    return most
