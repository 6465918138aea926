"""The time from a pod's creation until it serves: scheduling, pulling images, loading the model."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from carpool_operator.api.model import Pod

REMEMBERED = 9
"""Number of last starts that are kept."""


class ColdStarts:
    """Remembers the last observed starts.

    If a pod is ready again after a failed probe, its condition has the later time. So only pods count that appeared
    after the first observation, and that were observed before they were ready.
    """

    def __init__(self) -> None:
        self._looked = False
        self._starting: set[str] = set()
        """UIDs of pods never observed ready."""
        self._known: set[str] = set()
        """UIDs of pods whose start can't be observed any more: they served, or existed at the first observation."""
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, pods: Collection[Pod]) -> None:
        """Record the present pods."""
        there = {pod.uid for pod in pods}
        if not self._looked:
            self._looked, self._known = True, there
        for pod in pods:
            if not pod.ready:
                if pod.uid not in self._known:
                    self._starting.add(pod.uid)
                continue
            if pod.uid in self._starting and pod.ready_after > 0:
                self._took.append(pod.ready_after)
            self._starting.discard(pod.uid)
            self._known.add(pod.uid)
        self._starting &= there
        self._known &= there

    @property
    def seconds(self) -> float | None:
        """Return the median; ``None``: no start was observed."""
        return median(self._took) if self._took else None
