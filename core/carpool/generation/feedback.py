"""By how much forecasts are exceeded: the ratio of what was observed to what was forecast, and its quantiles."""

from __future__ import annotations

from collections import deque

ENOUGH = 10


class Ratios:
    """The last ratios of observed to forecast. A margin is what makes ``quantile`` of them keep a target."""

    def __init__(self, quantile: float, *, start: float, lowest: float, highest: float, memory: int = 200) -> None:
        self._quantile = quantile
        self._value = start
        self._lowest, self._highest = lowest, highest
        self._ratios: deque[float] = deque(maxlen=memory)

    @property
    def value(self) -> float:
        """The ratio that ``quantile`` of the requests stay below."""
        return self._value

    def add(self, observed: float, forecast: float) -> None:
        """Compare one request with its forecast."""
        self._ratios.append(observed / forecast if forecast > 0 else self._highest)
        if len(self._ratios) < ENOUGH:
            return
        ordered = sorted(self._ratios)
        value = ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]
        self._value = min(self._highest, max(self._lowest, value))
