"""A load of token streams on an engine's twin, with one rule after the other before it, and the results."""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.generation.engine import Engine
from carpool.generation.gate import Gate
from carpool.generation.simulation import Admission, Outcome, Simulation
from carpool.policy.durations import format_seconds
from carpool_cli.planning import assumptions
from carpool_cli.streams import loads
from carpool_cli.streams.rules import Cap, Nothing, QueuedTokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.generation.profiles import EngineProfile
    from carpool.generation.requests import Slo
    from carpool_cli.streams.options import Asked

NOISE = 0.05
"""Relative spread of steps."""

WRONG = 2.0
"""Error of the gate's first estimate of the step times, as a factor."""

DRAIN = 120.0
"""Seconds after the last arrival in which answers may end."""


class Figures(Struct, frozen=True, kw_only=True, rename="camel"):
    """The results of one rule. Seconds, and requests per second; shares of all requests.

    Quantiles are of the answered requests; None where nothing was answered.
    """

    name: str
    goodput: float
    """Of requests that met both targets."""
    good_share: float
    refused_share: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    preemptions: int


class StreamTwin:
    """One load on one engine; ``rate`` in requests per second, None for a trace at its own pace."""

    def __init__(self, asked: Asked, rate: float | None) -> None:
        self.profile = asked.profile
        self.slo = asked.slo
        self.times = asked.load.times(rate)
        self._lengths = asked.load.lengths.draw(0, len(self.times))
        self._seconds = asked.load.seconds
        self._seed = asked.load.seed

    @property
    def offered(self) -> float:
        """Requests per second."""
        return len(self.times) / self._seconds

    def gate(self) -> Figures:
        """Play the gate, which knows only the SLO, with initial step times that are off by `WRONG`."""
        return self._play("gate", Gate(self.slo, loads.guess(self.profile, WRONG)), self.profile)

    def no_gate(self) -> Figures:
        """Play the engine without a gate: it gets every request at once."""
        return self._play("no gate", Nothing(self.slo, self.profile), self.profile)

    def cap(self, most: int) -> Figures:
        """Play a cap with a queue that drops requests which would miss TTFT."""
        return self._play(f"cap {most}", Cap(most, self.slo, self.profile), self.profile)

    def limited(self, sequences: int, queued_tokens: int, batched_tokens: int) -> Figures:
        """Play the engine with its own limits, and nothing before it."""
        profile = replace(self.profile, max_running=sequences, max_batched_tokens=batched_tokens)
        return self._play("limits", QueuedTokens(self.slo, profile, queued_tokens), profile)

    def _play(self, name: str, rule: Admission, profile: EngineProfile) -> Figures:
        engine = Engine(profile, Random(self._seed), noise=NOISE)  # noqa: S311 - simulated time
        arrivals = loads.arrivals(self.times, self._lengths)
        outcome = Simulation(arrivals, engine, rule, until=self._seconds + DRAIN).run()
        return _figures(name, outcome, self.slo, self._seconds)


def _figures(name: str, outcome: Outcome, slo: Slo, seconds: float) -> Figures:
    served = outcome.served
    good = sum(each.good(slo) for each in served)
    answered = [each for each in served if each.end < inf]

    def quantile(values: Iterable[float], share: float) -> float | None:
        return loads.quantile(list(values), share) if answered else None

    return Figures(
        name=name,
        goodput=good / seconds,
        good_share=good / len(served),
        refused_share=sum(each.refused for each in served) / len(served),
        ttft_p50=quantile((each.ttft for each in answered), 0.5),
        ttft_p99=quantile((each.ttft for each in answered), 0.99),
        tpot_p50=quantile((each.tpot for each in answered), 0.5),
        tpot_p99=quantile((each.tpot for each in answered), 0.99),
        preemptions=outcome.preemptions,
    )


def show(found: Sequence[Figures], slo: Slo) -> None:
    """Print a line for each rule; a `!` marks a p99 beyond its target."""
    rows = [("", "goodput", "good", "refused", "TTFT p50", "p99", "TPOT p50", "p99", "preempted")]
    rows += [
        (
            each.name,
            f"{each.goodput:.2f}/s",
            assumptions.percent(each.good_share),
            assumptions.percent(each.refused_share),
            _time(each.ttft_p50, inf),
            _time(each.ttft_p99, slo.ttft),
            _time(each.tpot_p50, inf),
            _time(each.tpot_p99, slo.tpot),
            str(each.preemptions),
        )
        for each in found
    ]
    click.echo(assumptions.lines(rows))


def _time(seconds: float | None, target: float) -> str:
    if seconds is None:
        return "-"
    return format_seconds(float(f"{seconds:.3g}")) + ("" if seconds <= target else " !")
