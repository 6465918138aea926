"""The tuner, in a process of its own: a search of a second of CPU can't stall the data path there.

``python -m carpool_sidecar.tuning.tuner_process``: observations on standard input, decisions on standard output (see
``wire``). It ends with its input, so it does not outlive the sidecar.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO

from carpool.policy.plain import from_plain
from carpool.policy.spec import BatchingPolicy, TuningMode
from carpool.tuning.tuner import Tuner
from carpool_sidecar.tuning.messages import LENGTH, Answered, Decided, Setup, frame, read_message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_sidecar.tuning.messages import Observations, Reply

NICENESS = 5
"""The data path goes first where cores are few."""


class Tuners:
    """A tuner for every model that is observed, and another one for each of its generations."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._models = {model.name: model for model in policy.models}
        self._tuners: dict[str, tuple[int, Tuner]] = {}
        """With the generations that they are of."""

    def step(self, observations: Observations) -> Iterator[Reply]:
        """Decide for each model, one after the other, and say so at the end: a search takes up to a second."""
        # Who is not observed any more is no model: names come from callers.
        self._tuners = {name: known for name, known in self._tuners.items() if name in observations.models}
        for name, observed in observations.models.items():
            generation, tuner = self._tuners.get(name, (-1, None))
            if tuner is None or generation != observed.generation:
                tuner = Tuner(self._policy, self._models.get(name), observed.parameters)
                self._tuners[name] = observed.generation, tuner
            elif self._policy.tuning.mode is TuningMode.HOLD:
                tuner.adopt(observed.parameters)
            yield Decided(name, tuner.step(observed.observation), observed.generation)
        yield Answered()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer every message until the source ends."""
    tuners: Tuners | None = None
    while len(length := source.read(LENGTH)) == LENGTH:
        message = read_message(source.read(int.from_bytes(length, "little")))
        if isinstance(message, Setup):
            tuners = Tuners(from_plain(message.policy, BatchingPolicy, what="policy"))
        elif tuners is not None:
            for reply in tuners.step(message):
                # At once: what takes long is not to look like silence.
                sink.write(frame(reply))
                sink.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(0)  # the terminal's interrupt is for the sidecar, which then closes the pipe
