"""The simulations of `simulate`: one load on one device, with one configuration after the other, and their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import Struct

from carpool.batching.requests import Estimate
from carpool.exchange.decision import Decision, Reason
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import End, Summary
from carpool.simulation.simulator import Device, Simulation
from carpool_cli.planning import assumptions
from carpool_cli.planning.twin import Tuned, tuned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.spec import BatchingPolicy

TYPICAL = Parameters(max_batch=8, max_wait=Duration(0.005), max_in_flight=1)
"""Common manual settings, for comparison."""


class Step(Struct, frozen=True, rename="camel"):
    """A change by the tuner; ``at`` in seconds."""

    at: float
    reason: Reason
    message: str
    parameters: Parameters
    capped_by: str


class Figures(Struct, frozen=True, kw_only=True, rename="camel"):
    """The results of one configuration. Seconds, ``None`` without an answer; requests per second; shares of all."""

    name: str
    parameters: Parameters
    """At the end."""
    p50: float | None
    p99: float | None
    goodput: float
    miss_share: float
    misses: dict[str, int]
    device_seconds_per_request: float | None
    mean_batch: float
    steps: list[Step] = []


class Twin:
    """One load on one device, to be run with different configurations.

    ``arrivals`` in seconds from 0: times, or (time, rows). The tuner observes for ``seconds``.
    """

    def __init__(
        self,
        device: Device,
        policy: BatchingPolicy,
        arrivals: Sequence[float | tuple[float, ...]],
        *,
        seconds: float,
        seed: int,
    ) -> None:
        self.policy = policy
        self._device = device
        self._arrivals = arrivals
        self._seconds = seconds
        self._seed = seed

    def fixed(self, name: str, parameters: Parameters) -> Figures:
        """Run a fixed configuration: like a sidecar with fixed parameters, it learns batch latency and sheds by it."""
        outcome, _ = self._run(assumptions.held(self.policy, parameters), parameters)
        return _figures(name, parameters, outcome.summary(), [])

    def known(self, name: str, parameters: Parameters, service: ServiceTime, *, shed_slo: bool) -> Figures:
        """Run a fixed configuration of a sidecar that learned batch latency long before."""
        largest = max(parameters.max_batch, self.policy.limits().max_batch)
        estimate = Estimate(
            times=service.table(largest),
            upper=tuple(service.slow(rows) for rows in range(largest + 1)),
            executors=service.executors_for(parameters.max_in_flight),
            noise=service.noise,
        )
        simulation = Simulation(
            self._arrivals,
            self._device,
            slo=self.policy.slo.due,
            parameters=parameters,
            estimate=estimate,
            shed_slo=shed_slo,
            admission=self.policy.admission,
            seed=self._seed,
        )
        return _figures(name, parameters, simulation.run().summary(), [])

    def tuned(self, name: str, start: Parameters) -> Figures:
        """Run the tuner, which starts with only the policy and the initial parameters."""
        outcome, decisions = self._run(self.policy, start)
        last = next((each.parameters for each in reversed(decisions) if each.change), start)
        return _figures(name, last, outcome.summary(), decisions)

    def _run(self, policy: BatchingPolicy, start: Parameters) -> Tuned:
        return tuned(
            self._arrivals,
            self._device,
            policy,
            parameters=start,
            seconds=self._seconds,
            seed=self._seed,
            as_sidecars=True,
        )


def alternatives(rows: int, largest_batch: int, executors: int) -> list[tuple[str, Parameters]]:
    """Return what is compared with for requests of ``rows``: no batching, zero wait, and a common manual setting."""
    return [
        ("no batching", Parameters(max_batch=rows, max_in_flight=executors)),
        ("zero wait", Parameters(max_batch=largest_batch, max_in_flight=executors)),
        ("by hand", TYPICAL),
    ]


def distinct(named: Iterable[tuple[str, Parameters]]) -> list[tuple[str, Parameters]]:
    """Return the configurations, each once, by the first of its names."""
    seen: dict[Parameters, str] = {}
    for name, parameters in named:
        seen.setdefault(parameters, name)
    return [(name, parameters) for parameters, name in seen.items()]


def _figures(name: str, parameters: Parameters, summary: Summary, decisions: list[Decision]) -> Figures:
    return Figures(
        name=name,
        parameters=parameters,
        p50=summary.p50 if summary.answers else None,
        p99=summary.p99 if summary.answers else None,
        goodput=summary.goodput,
        miss_share=summary.miss_fraction,
        misses={end.value: count for end, count in summary.misses.items() if end is not End.PENDING},
        device_seconds_per_request=summary.device_time if summary.answers else None,
        mean_batch=summary.mean_batch,
        steps=[
            Step(decision.at, decision.reason, decision.message, decision.parameters, decision.capped_by)
            for decision in decisions
            if decision.change
        ],
    )


def show(found: Sequence[Figures], slo: float, tolerated: float) -> None:
    """Print the results of each, what was missed and why, and the tuner's steps.

    A `!` marks results that miss the SLO: ``slo`` seconds for all but a share ``tolerated``.
    """
    rows = [("", "p50", "p99", "goodput", "misses", "device time per request", "mean batch")]
    rows += [
        (
            f"{figures.name}: {figures.parameters.describe()}",
            _seconds(figures.p50),
            _seconds(figures.p99) + ("" if figures.p99 is None or figures.p99 <= slo else " !"),
            f"{figures.goodput:.1f}/s",
            assumptions.percent(figures.miss_share) + ("" if figures.miss_share <= tolerated else " !"),
            _seconds(figures.device_seconds_per_request),
            f"{figures.mean_batch:.1f}",
        )
        for figures in found
    ]
    click.echo(assumptions.lines(rows))
    for figures in found:
        if figures.misses:
            reasons = ", ".join(f"{reason} {count}" for reason, count in figures.misses.items())
            click.echo(f"misses, {figures.name}: {reasons}")
    for figures in found:
        for step in figures.steps:
            click.echo(f"{step.at:7.1f}s {step.reason}: {step.message}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
