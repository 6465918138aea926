"""The tuner, in a process of its own: a search of a second of CPU can't stall the data path there.

``python -m carpool_sidecar.tuner_process``: observations on standard input, decisions on standard output (see
``wire``). It ends with its input, so it does not outlive the sidecar.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO

from carpool.policy import BatchingPolicy, from_plain
from carpool.tuner import Tuner
from carpool_sidecar.wire import LENGTH, Decisions, Setup, frame, read_message

if TYPE_CHECKING:
    from carpool.tuner import Decision
    from carpool_sidecar.wire import Observations

NICENESS = 5
"""The data path goes first where cores are few."""


class Tuners:
    """A tuner for every model that is observed; all that they decide is of one ``generation``."""

    def __init__(self, policy: BatchingPolicy, generation: int) -> None:
        self._policy = policy
        self._generation = generation
        self._models = {model.name: model for model in policy.models}
        self._tuners: dict[str, Tuner] = {}

    def step(self, observations: Observations) -> Decisions:
        """Decide for each model."""
        # Who is not observed any more is no model: names come from callers.
        self._tuners = {name: tuner for name, tuner in self._tuners.items() if name in observations.models}
        decisions: dict[str, Decision] = {}
        for name, observed in observations.models.items():
            tuner = self._tuners.get(name)
            if tuner is None:
                tuner = self._tuners[name] = Tuner(self._policy, self._models.get(name), observed.parameters)
            decisions[name] = tuner.step(observed.observation)
        return Decisions(decisions, self._generation)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer every message until the source ends."""
    tuners: Tuners | None = None
    while len(length := source.read(LENGTH)) == LENGTH:
        message = read_message(source.read(int.from_bytes(length, "little")))
        if isinstance(message, Setup):
            tuners = Tuners(from_plain(message.policy, BatchingPolicy, what="policy"), message.generation)
        elif tuners is not None:
            sink.write(frame(tuners.step(message)))
            sink.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(0)  # the terminal's interrupt is for the sidecar, which then closes the pipe
