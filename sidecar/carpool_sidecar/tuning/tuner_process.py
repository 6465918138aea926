"""The tuner in its own process, where a search of a second of CPU can't stall the data path.

``python -m carpool_sidecar.tuning.tuner_process``: observations on standard input, decisions on standard output (see
``wire``). It ends with its input, so it does not outlive the sidecar.
"""

from __future__ import annotations

import os
import sys
import time
from math import inf
from typing import TYPE_CHECKING, BinaryIO

from carpool.learning.change_detection import has_changed
from carpool.policy.plain import from_plain
from carpool.policy.spec import BatchingPolicy, TuningMode
from carpool.tuning.tuner import Tuner
from carpool_sidecar.frames import LENGTH
from carpool_sidecar.tuning.messages import Answered, Decided, Measured, Setup, frame, read_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from carpool.learning.latency_model import ServiceTime
    from carpool_sidecar.tuning.messages import Observations, Reply

NICENESS = 5
"""The data path has priority when cores are few."""


AGAIN = 10.0
"""Least seconds between two searches of a model's capacity."""

FIRST = 15.0
"""Seconds from a model's first observation to its first search: until then each decision measures another size, and a
result is soon outdated."""

SHARE = 0.01
"""Share of one core for searches of capacities: this process shares the sidecar's CPU limit with the data path."""

ANOTHER_SPREAD = 1.25
"""Factor between dispersions of arrivals that counts as a change."""

OLDER = 1.5
"""A model observed for so many times as long has more evidence: its first capacity rests on a few large batches."""

OVERDRAFT = 500.0
"""An outdated capacity is searched even with so many seconds of rest left: 5 s of CPU in advance, and the mean stays.

A device that becomes 1.5 times slower has a new figure within 12 s. The rest of the last search may take 50 s, or 170 s
with bursts.
"""


class Tuners:
    """A tuner for every model that is observed, and another one for each of its generations."""

    def __init__(
        self, policy: BatchingPolicy, *, steered: bool = False, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._policy = policy
        self._cpu = cpu
        self._steered = steered
        self._models = {model.name: model for model in policy.models}
        self._tuners: dict[str, tuple[int, Tuner]] = {}
        """By model: its generation, and its tuner."""
        self._begun: dict[str, float] = {}
        """When each model was first observed, seconds of the sidecar's clock."""
        self._measured: dict[str, float] = {}
        """When each capacity was last searched, on that clock; a new model's is searched first after ``FIRST``."""
        self._searched: dict[str, tuple[ServiceTime, float]] = {}
        """The latency model of that search, and the dispersion of the arrivals, at least 1."""
        self._rests_until = -inf
        """When the next search is allowed, given the duration of the last one."""

    def step(self, observations: Observations) -> Iterator[Reply]:
        """Decide for each model, one after the other, then report the end: a search takes up to a second."""
        # A name that is no longer observed is dropped: names come from callers.
        self._tuners = {name: known for name, known in self._tuners.items() if name in observations.models}
        for name, observed in observations.models.items():
            generation, tuner = self._tuners.get(name, (-1, None))
            if tuner is None or generation != observed.generation:
                tuner = Tuner(self._policy, self._models.get(name), observed.parameters)
                self._tuners[name] = observed.generation, tuner
                self._searched.pop(name, None)
            elif self._policy.tuning.mode is not TuningMode.APPLY:
                tuner.adopt(observed.parameters)
            decision = tuner.step(observed.observation)
            # With Recommend and Hold, a model gets no request that no client sent.
            is_applied = self._steered or self._policy.tuning.mode is TuningMode.APPLY
            yield Decided(name, decision, observed.generation, tuner.plan.to_measure() if is_applied else ())
        yield Answered()
        yield from self._measure(observations)

    def _measure(self, observations: Observations) -> Iterator[Reply]:
        """Search the capacity of one model: this delays only the next observation.

        Models whose capacity is outdated come first, then those that wait longest.
        """
        self._begun = {name: self._begun.get(name, observations.models[name].observation.now) for name in self._tuners}
        self._measured = {name: self._measured.get(name, begun + FIRST - AGAIN) for name, begun in self._begun.items()}
        self._searched = {name: service for name, service in self._searched.items() if name in self._tuners}
        now = max((each.observation.now for each in observations.models.values()), default=-inf)
        # A model without a forecast has no capacity yet.
        due = [
            name for name, (_, tuner) in self._tuners.items()
            if now - self._measured[name] >= AGAIN and tuner.plan.forecaster is not None
        ]  # fmt: skip
        may = now >= self._rests_until - OVERDRAFT
        outdated = [name for name in due if may and self._is_outdated(name, now)]
        if not due or (not outdated and now < self._rests_until):
            return
        name = min(outdated or due, key=self._measured.__getitem__)
        generation, tuner = self._tuners[name]
        began = self._cpu()
        capacity = tuner.plan.capacity(tuner.parameters, best=self._steered)
        self._rests_until = max(self._rests_until, now) + (self._cpu() - began) / SHARE
        self._measured[name] = now
        if (found := _basis(tuner)) is not None:
            self._searched[name] = found
        if capacity is not None:
            yield Measured(name, capacity, generation)

    def _is_outdated(self, name: str, now: float) -> bool:
        """Whether more is known since the last search, or batch latency or bursts changed; True before the first."""
        found, searched = _basis(self._tuners[name][1]), self._searched.get(name)
        if found is None or searched is None:
            return found is not None
        spreads = found[1] / searched[1]
        return (
            now - self._begun[name] >= OLDER * (self._measured[name] - self._begun[name])
            or max(spreads, 1 / spreads) > ANOTHER_SPREAD
            or (found[0] is not searched[0] and has_changed(found[0], searched[0]))
        )


def _basis(tuner: Tuner) -> tuple[ServiceTime, float] | None:
    """Return the latency model and the dispersion of the arrivals, at least 1; None before both are known."""
    service, process = tuner.belief.in_force, tuner.belief.load.measured
    return None if service is None or process is None else (service, max(process.dispersion, 1.0))


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer every message until the source ends."""
    tuners: Tuners | None = None
    while len(length := source.read(LENGTH)) == LENGTH:
        message = read_message(source.read(int.from_bytes(length, "little")))
        if isinstance(message, Setup):
            tuners = Tuners(from_plain(message.policy, BatchingPolicy, what="policy"), steered=message.steered)
        elif tuners is not None:
            for reply in tuners.step(message):
                # At once, so that slow work does not look like a hung process.
                sink.write(frame(reply))
                sink.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(0)  # the sidecar has ended
