"""The tuner in the loop with the simulator: what Carpool would do to a load on a device, without either."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool.outcome import Outcome, Setting
from carpool.simulation import Device, Simulation
from carpool.statistics import Stats, combine
from carpool.tuner import INTERVAL, Decision, Observation, Tuner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool.policy import BatchingPolicy, Parameters


class Tuned(NamedTuple):
    """What became of the load, and every decision on the way."""

    outcome: Outcome
    decisions: list[Decision]


def tuned(
    arrivals: Iterable[float | tuple[float, ...]],
    device: Device,
    policy: BatchingPolicy,
    *,
    parameters: Parameters | None = None,
    seconds: float = 0.0,
    interval: float = INTERVAL,
    replicas: int = 1,
    seed: int = 0,
) -> Tuned:
    """Play a load against a device with a tuner that knows nothing but the policy.

    ``parameters`` to start from (default: the policy's baseline); observations go on for ``seconds``, at least until
    the last arrival. ``replicas`` have a device each, and one tuner that sees them as one.
    """
    tuner = Tuner(policy, parameters=parameters)
    decisions: list[Decision] = []
    last = [Stats(at=0.0)] * replicas

    def observe(now: float, stats: list[Stats]) -> list[Setting] | None:
        nonlocal last
        deltas, last = [after.since(before) for after, before in zip(stats, last, strict=True)], stats
        parts = [delta.models[""] for delta in deltas if "" in delta.models]
        if not parts:
            return None
        observation = Observation(
            now=now,
            seconds=interval * replicas,
            stats=combine(parts),
            passing=tuner.parameters.pass_through,
            queued_rows=round(sum(delta.queued_rows for delta in deltas) / replicas),
            replicas=replicas,
        )
        decision = tuner.step(observation)
        decisions.append(decision)
        return [Setting(decision.parameters, decision.estimate, decision.shed_slo)]

    simulation = Simulation(
        arrivals,
        device,
        slo=policy.slo.due,
        parameters=tuner.parameters,
        admission=policy.admission,
        replicas=replicas,
        seconds=seconds,
        seed=seed,
    )
    return Tuned(simulation.every(interval, observe).run(), decisions)


def flips(decisions: list[Decision], start: float = 0.0) -> int:
    """Count returns to a configuration that was just left: A, B, A."""
    path: list[Parameters] = []
    for decision in decisions:
        if decision.at >= start and (not path or decision.parameters != path[-1]):
            path.append(decision.parameters)
    return sum(before == after for before, after in zip(path, path[2:], strict=False))
