"""The figures of a run: pure functions of an outcome, the same ones for every contender."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import astuple

from carpool.learning.smoothing import isotonic
from carpool.simulation.outcome import End

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.policy.parameters import Parameters
    from carpool.simulation.outcome import Outcome, Setting, Summary

TOLERATED = 0.01
"""Share of requests that a p99 allows to miss."""

WORTH = 0.05
"""Saving of device time, by the oracle against zero-wait, from which it is worth comparing who gets how much of it."""

ENOUGH = 0.9
"""Share of the oracle's saving from which a stretch counts as good."""

LOOK = 5
"""Seconds over which a stretch is judged. At 100 requests/s these are 500 requests, and five may miss."""


class Tally(Struct, frozen=True, array_like=True):
    """The outcome of the requests of one stretch."""

    seconds: float
    stayed: int
    """Requests whose callers did not leave."""
    hits: int
    answers: int
    """Good ones, in time or late."""
    busy: float
    """Device seconds taken by the batches dispatched in it, over all replicas."""

    @property
    def misses(self) -> float:
        """Share of the requests that were not answered in time; 0 where there were none."""
        return (self.stayed - self.hits) / self.stayed if self.stayed else 0.0

    @property
    def goodput(self) -> float:
        """Answers in time per second."""
        return self.hits / self.seconds

    @property
    def device_time(self) -> float:
        """Device seconds per answer; ``inf`` where there were none."""
        return self.busy / self.answers if self.answers else float("inf")


def tally(summary: Summary) -> Tally:
    """Keep of a summary what the figures are made of."""
    return Tally(
        seconds=round(summary.stop - summary.start, 6),
        stayed=summary.arrivals - summary.ends.get(End.CANCELLED, 0),
        hits=summary.hits,
        answers=summary.answers,
        busy=round(summary.device_busy, 6),
    )


def add(tallies: Sequence[Tally]) -> Tally:
    """Sum up stretches, at least one."""
    return Tally(*(sum(column) for column in zip(*map(astuple, tallies), strict=True)))


# ------------------------------------------------------------------------------------------------- the two shares


def highest(steps: Sequence[tuple[float, Tally]]) -> float:
    """Return the highest load that meets the SLO, of (load, outcome) in ascending order; 0: not even the lowest.

    At most ``TOLERATED`` may miss. At 1 % of a few thousand requests chance makes one step look better than
    the one before it, so misses are made to rise with the load (isotonic regression) before the curve is cut at
    ``TOLERATED``, linear between two steps.
    """
    loads = [load for load, _ in steps]
    missed = rising([step for _, step in steps])
    held = sum(each <= TOLERATED for each in missed)
    if held in {0, len(steps)}:
        return loads[-1] if held else 0.0
    (low, high), (under, over) = loads[held - 1 : held + 1], missed[held - 1 : held + 1]
    return low + (high - low) * (TOLERATED - under) / (over - under)


def rising(steps: Sequence[Tally]) -> list[float]:
    """Return shares of misses, of ascending loads, made to rise: those that fall are put at their common average."""
    return isotonic([step.misses for step in steps], [max(step.stayed, 1) for step in steps])[0]


class Saving(NamedTuple):
    """Device time saved against zero-wait at the largest batch, at one load."""

    available: float
    """The oracle's saving, as a share of zero-wait's device time."""
    share: float
    """The contender's saving, as a share of that; 0 if it misses more than ``TOLERATED``."""


def saving(mine: Tally, best: Tally, lazy: Tally) -> Saving | None:
    """Compare device time per request with the oracle's (``best``) and with zero-wait's (``lazy``).

    ``None`` where there is nothing to compare: the oracle saves less than ``WORTH``, or misses itself.
    """
    available = 1 - best.device_time / lazy.device_time
    if available < WORTH or best.misses > TOLERATED:
        return None
    if mine.misses > TOLERATED:
        return Saving(available, 0.0)
    return Saving(available, (lazy.device_time - mine.device_time) / (lazy.device_time - best.device_time))


# ------------------------------------------------------------------------------------------------- convergence


def seconds_of(outcome: Outcome) -> list[Tally]:
    """Tally every second by itself; the last may be shorter."""
    starts = range(math.ceil(outcome.seconds - 1e-9))
    return [tally(outcome.summary(start, min(start + 1.0, outcome.seconds))) for start in starts]


def converged(mine: Sequence[Tally], best: Sequence[Tally], lazy: Sequence[Tally], start: int, stop: int) -> int | None:
    """Return after how many seconds from ``start`` the first good ``LOOK`` seconds began; ``None``: none did.

    Good: at most ``TOLERATED`` more of the requests miss than under the oracle, in these seconds and from there to
    ``stop``, and where the oracle saves ``WORTH`` in [start, stop), at least ``ENOUGH`` of that is saved. Effects are
    judged, not settings: a backlog must be gone, and rules that decide anew for each batch are judged alike. All of
    them met the same arrivals.
    """
    worth = saving(add(best[start:stop]), add(best[start:stop]), add(lazy[start:stop])) is not None
    for second in range(start, stop - LOOK + 1):
        here = slice(second, second + LOOK)
        now, ideal, zero = add(mine[here]), add(best[here]), add(lazy[here])
        if now.misses > ideal.misses + TOLERATED:
            continue
        if add(mine[second:stop]).misses > add(best[second:stop]).misses + TOLERATED:
            continue
        gain = zero.device_time - ideal.device_time
        if not worth or zero.device_time - now.device_time >= ENOUGH * gain:
            return second - start
    return None


# ------------------------------------------------------------------------------------------------- flips


def settings(changes: Iterable[tuple[float, int, Setting]], start: float, stop: float) -> list[Parameters]:
    """Return what the first replica ran with in [start, stop), one after the other, what was in force at first."""
    path: list[Parameters] = []
    for at, replica, setting in changes:
        if replica or at >= stop:
            continue
        if at <= start:
            path = [setting.parameters]
        elif setting.parameters != path[-1]:
            path.append(setting.parameters)
    return path


def flips(path: Sequence[Parameters]) -> int:
    """Count returns to what was just left: A, B, A."""
    return sum(before == after for before, after in zip(path, path[2:], strict=False))


# ------------------------------------------------------------------------------------------------- the rest


def overload(peak: Iterable[Tally], beyond: Tally) -> float:
    """Return the goodput under overload as a share of the highest that any load got; 1 where that is nothing."""
    highest_goodput = max(step.goodput for step in peak)
    return beyond.goodput / highest_goodput if highest_goodput else 1.0
