"""The engine's load: the request rate of the last seconds, relative to the capacity that the gate has learned."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool_sidecar.tuning.replica_load import LEAST, SPAN, STEP, StreamLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.generation.gate import Gate
    from carpool_sidecar.tuning.replica_load import ReplicaLoad


class Rate:
    """Counts events, and returns their rate over the last ``SPAN`` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.total = 0
        self._clock = clock
        self._marks = deque([(clock(), 0)])

    def count(self) -> None:
        """Count one."""
        self._look()
        self.total += 1

    def per_second(self) -> float:
        """Return the mean of the last seconds; 0 in the first of all."""
        self._look()
        at, total = self._marks[0]
        seconds = self._clock() - at
        return (self.total - total) / seconds if seconds >= LEAST else 0.0

    def _look(self) -> None:
        now = self._clock()
        if now - self._marks[-1][0] >= STEP:
            self._marks.append((now, self.total))
        # A mark stays while the next one is not old enough: the span is never shorter than ``SPAN``.
        while len(self._marks) > 1 and now - self._marks[1][0] >= SPAN:
            self._marks.popleft()


def with_streams(load: ReplicaLoad, gate: Gate | None, rate: float) -> ReplicaLoad:
    """Add the load of token streams, ``rate`` requests per second, to that of batched models.

    Without a target for TPOT an engine's capacity is undefined: then nothing is added.
    """
    if gate is None or gate.slo.tpot == inf:
        return load
    carries = gate.carries()
    if carries is None:
        own = StreamLoad(rate=rate, load=None if rate else 0.0)
    else:
        own = StreamLoad(
            rate=rate,
            capacity=carries.rate,
            capacity_tokens=carries.tokens,
            load=rate / carries.rate if carries.rate else inf,
        )
    both = None if load.load is None or own.load is None else load.load + own.load
    return replace(load, load=both, token_streams=own)
