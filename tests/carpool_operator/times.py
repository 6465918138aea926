"""Time and chance that stand still, for the operator's tests."""

from __future__ import annotations

from random import Random


class Clock:
    """Shows what it is set to."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Quick(Random):
    """Retries come at once."""

    def uniform(self, a, b):
        return 0.0
