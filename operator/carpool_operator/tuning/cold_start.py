"""How long pods of a target take from creation until they serve: scheduling, pulling images, loading the model."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from carpool_operator.api.model import Pod

REMEMBERED = 9
"""Starts that count, the last ones."""


class ColdStarts:
    """Remembers the last starts that were seen.

    A pod that is ready again after a failed probe has the time of that in its condition. So only pods count that came
    after the first look, and that were seen before they were ready.
    """

    def __init__(self) -> None:
        self._looked = False
        self._starting: set[str] = set()
        """UIDs of pods that were never seen ready."""
        self._known: set[str] = set()
        """UIDs of pods whose start can't be seen any more: they served, or were there at the first look."""
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, pods: Collection[Pod]) -> None:
        """Look at the pods that there are."""
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
        """The median; ``None``: no start was seen."""
        return median(self._took) if self._took else None
