"""The sidecar's end of the pipe to its tuner process: never waits for it, restarts it when it ends or hangs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from carpool_sidecar.child_process import ChildProcess
from carpool_sidecar.tuning.messages import Answered, Decided, Measured, Message, Observations, frame, read_reply

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

COMMAND = (sys.executable, "-m", "carpool_sidecar.tuning.tuner_process")

SILENCE = 60.0
"""Seconds without a reply after which a process counts as hung. It gets observations twice a second, and may take a
second of CPU per model."""


class TunerLink(ChildProcess):
    """Keeps one tuner process running. ``started`` is called for each new one, to send it its setup."""

    name = "the tuner process"
    longest_message = 1 << 24

    def __init__(
        self,
        heard: Callable[[Decided | Measured], None],
        started: Callable[[], None],
        log: logging.Logger,
        command: Sequence[str] = COMMAND,
    ) -> None:
        super().__init__(command, log)
        self._heard = heard
        self._started = started
        self._answered = True
        """Whether the process has decided on all observations sent."""

    @property
    def _silence(self) -> float:
        return SILENCE

    def _began(self) -> None:
        self._answered = True
        self._started()

    def _take(self, body: bytes) -> None:
        reply = read_reply(body)
        if isinstance(reply, Answered):
            self._answered = True
        else:
            self._heard(reply)

    def send(self, message: Message) -> bool:
        """Send a message if the process can take it; returns whether it was sent.

        Observations are not sent before the decisions on the previous ones, so that none is outdated; the next
        interval is then longer. A setup is always sent if a process runs.
        """
        waits = isinstance(message, Observations)
        if (waits and not self._answered) or not self._write(frame(message)):
            return False
        if waits:
            self._answered = False
        return True
