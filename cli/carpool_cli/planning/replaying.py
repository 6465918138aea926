"""Replays arrivals that a sidecar recorded: as they came, repeated, or by a process that fits them."""

from __future__ import annotations

from enum import StrEnum
from itertools import count
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec.structs import replace

from carpool.batching.counters import RECENT_ARRIVALS
from carpool.forecasting import sampling
from carpool.forecasting.forecast import Load as Played
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Fitted, Gamma, Poisson, until
from carpool_cli.live.figures import duration, number
from carpool_cli.planning import assumptions
from carpool_cli.planning.traces import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAYED = 2 * RECENT_ARRIVALS
"""Most arrivals in a forecast's replay: twice all that a sidecar remembers. A search and a map have hundreds of
forecasts, and more repetitions add no information; the simulation plays all."""

TELLS_BURSTS = 1.0
"""Least seconds of arrivals for estimating their burstiness: ten windows."""


class How(StrEnum):
    """How recorded arrivals are played."""

    ONCE = "once"
    REPEATED = "repeated"
    FITTED = "fitted"


class Load(NamedTuple):
    """The played load."""

    times: list[float]
    """Seconds from 0."""
    rows: list[int] | None
    """By request; ``None`` if every request has one row."""
    process: Fitted
    """The simplest process that fits, at its exact rate."""
    mean_rows: float
    how: How
    recorded: int
    """Number of recorded arrivals behind it."""
    span: float
    """Duration of these in seconds, as played."""

    @property
    def described(self) -> str:
        """Describe it in a line."""
        process, lasts = self.process, duration(self.span)
        kind = "gamma" if isinstance(process, Gamma) else "bursts that last"
        kind = "Poisson" if isinstance(process, Poisson) else f"{kind}, cv {process.cv:.2g}"
        said = f"{number(self.recorded)} arrivals over {lasts}, {number(process.rate)}/s ({kind})"
        if self.rows is not None:
            said += f", {self.mean_rows:.3g} rows each on average"
        match self.how:
            case How.ONCE:
                return f"{said}, played once"
            case How.REPEATED:
                over = self.times[-1] / self.span
                return f"{said}, played " + ("once" if over <= 1 else f"{over:.2g} times over")
            case _:
                return f"{number(len(self.times))} drawn of what {said} look like"

    @property
    def arrivals(self) -> Sequence[float | tuple[float, ...]]:
        """In the simulation's format."""
        return self.times if self.rows is None else list(zip(self.times, self.rows, strict=True))

    def forecaster(self, situation: Situation) -> Forecaster:
        """Return a forecaster of a situation with these arrivals, at the situation's rate."""
        if self.how is How.FITTED:
            return Forecaster(situation)
        return Replay(situation, self.times[:PLAYED], self.rows and self.rows[:PLAYED], self.process.rate)


def load(
    recorded: Sequence[tuple[float, int]],
    how: How = How.ONCE,
    *,
    factor: float = 1.0,
    seconds: float = 60.0,
    seed: int = 0,
) -> Load:
    """Make a load from recorded (seconds, rows), ascending and not all at once, ``factor`` times as fast.

    ``REPEATED`` and ``FITTED`` loads last ``seconds``; their rows are then the recorded ones, in turn.

    Raises ``click.ClickException`` if that would be too many to play.
    """
    times = scaled([time for time, _ in recorded], 1.0)
    rows = [each for _, each in recorded]
    rate = (len(times) - 1) / times[-1]
    seen: Fitted = assumptions.burstiness(times) if times[-1] >= TELLS_BURSTS else Poisson(rate)
    process = replace(seen, rate=rate * factor)
    times = [time / factor for time in times]
    span = times[-1]
    if how is not How.ONCE and process.rate * seconds > assumptions.MOST_REQUESTS:
        raise click.ClickException(f"that is over {assumptions.MOST_REQUESTS} requests: lower --load or --for")
    if how is How.REPEATED:
        times = _repeated(times, seconds)
    elif how is How.FITTED:
        times = until(process, seconds, Random(seed)) or [0.0]  # noqa: S311 - load, not secrets
    played = [rows[index % len(rows)] for index in range(len(times))]
    return Load(
        times=times,
        rows=played if any(each > 1 for each in rows) else None,
        process=process,
        mean_rows=max(sum(rows) / len(rows), 1.0),
        how=how,
        recorded=len(rows),
        span=span,
    )


def _repeated(times: list[float], seconds: float) -> list[float]:
    """Repeat the times, with a mean gap between end and beginning, until ``seconds``; at least once."""
    period = times[-1] * len(times) / (len(times) - 1)
    played = list(times)
    for turn in count(1):
        start = turn * period
        if start + times[0] >= seconds:
            break
        played += [start + time for time in times if start + time < seconds]
    return played


class Replay(Forecaster):
    """Forecasts with given arrivals instead of drawn ones: ``times`` at ``rate``, compressed for a higher one."""

    samples = 1

    def __init__(self, situation: Situation, times: Sequence[float], rows: Sequence[int] | None, rate: float) -> None:
        super().__init__(situation)
        self._slower = rate / situation.process.rate
        self._times = times
        self._rows = rows

    def load(self, factor: float = 1.0, sample: int = 0, count: int = 0) -> Played:  # noqa: ARG002 - there is one sample
        """Return the recorded arrivals at ``factor`` times the load."""
        key = factor, 0, 0
        if key not in self._loads:
            times = [time * self._slower / factor for time in self._times]
            rows = self.situation.usual_rows if self._rows is None else list(self._rows)
            self._loads[key] = Played(times, rows, self._groups, sampling.draws(self.situation.service.noise))
        return self._loads[key]
