"""The tuner in the loop with the simulator: Carpool's effect on a load and a device that are both simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.batching.counters import Stats, combine
from carpool.exchange.decision import Decision, Observation
from carpool.policy.parameters import Parameters
from carpool.policy.spec import BatchingPolicy, TuningMode, VerificationMode
from carpool.simulation.outcome import Outcome, Setting
from carpool.simulation.simulator import Device, Dispatcher, Simulation
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning.sidecar_batcher import SidecarBatcher
from carpool_sidecar.config.settings import EVERY_MODEL, SidecarConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Pilot:
    """One tuner for a simulation's replicas, which it treats as one; ``observe`` is the hook."""

    def __init__(self, tuner: Tuner, *, interval: float = INTERVAL, replicas: int = 1) -> None:
        self.tuner = tuner
        self.decisions: list[Decision] = []
        self._decided = False
        self._interval = interval
        self._last = [Stats(at=0.0)] * replicas

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Pass the counts since the last call to the tuner, and return its decision for every replica."""
        deltas = [after.since(before) for after, before in zip(stats, self._last, strict=True)]
        self._last = stats
        parts = [delta.models[""] for delta in deltas if "" in delta.models]
        if not parts:
            return None
        observation = Observation(
            now=now,
            seconds=self._interval * len(stats),
            stats=combine(parts),
            growing=self._grows(),
            queued_rows=round(sum(delta.queued_rows for delta in deltas) / len(stats)),
            replicas=len(stats),
            explorers=len(stats),
        )
        decision = self.tuner.step(observation)
        self.decisions.append(decision)
        self._decided = self._decided or decision.decided
        return [Setting(decision.parameters, decision.estimate, decision.shed_slo, self._decided)]

    def _grows(self) -> bool:
        return False


class Sidecars(Pilot):
    """What a policy starts: a tuner, and sidecars that begin with first calls and measure sizes with copies.

    ``dispatcher`` makes each replica's Batcher. ``tuner``: another than the policy's own.
    """

    def __init__(
        self, policy: BatchingPolicy, tuner: Tuner | None = None, *, interval: float = INTERVAL, replicas: int = 1
    ) -> None:
        super().__init__(tuner or Tuner(policy), interval=interval, replicas=replicas)
        self._policy = policy
        # The default baseline inside narrow bounds is nobody's choice.
        is_default = policy.baseline == policy.limits().clamp(Parameters())
        config = SidecarConfig(policy=replace(policy, baseline=Parameters()) if is_default else policy)
        # Parameters that somebody chose are in force from the start.
        begins = policy.limits().clamp(self.tuner.parameters) == config.parameters_of(EVERY_MODEL)
        self._undecided = config.undecided if begins else 0
        self._measures = (
            policy.tuning.mode is TuningMode.APPLY
            and policy.idempotent
            and policy.verification.mode is not VerificationMode.NEVER
        )
        self._batchers: list[SidecarBatcher] = []

    def dispatcher(self) -> SidecarBatcher:
        """Return the Batcher of one more replica."""
        policy, parameters = self._policy, self.tuner.parameters
        self._batchers.append(SidecarBatcher(parameters, undecided=self._undecided, admission=policy.admission))
        return self._batchers[-1]

    def _grows(self) -> bool:
        return any(batcher.grows("") for batcher in self._batchers)

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Do as a ``Pilot``, and have the size measured that the tuner names."""
        settings = super().observe(now, stats)
        wanted = self.tuner.plan.to_measure() if self._measures else ()
        for batcher in self._batchers:
            batcher.wanted = wanted
        return settings


class Tuned(NamedTuple):
    """The results of the load, and every decision on the way."""

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
    dispatcher: Callable[[], Dispatcher] | None = None,
    as_sidecars: bool = False,
) -> Tuned:
    """Play a load on a device with a tuner that knows only the policy.

    ``parameters`` to start from (default: the policy's baseline); observations go on for ``seconds``, at least until
    the last arrival. ``replicas`` have a device each, and one tuner that sees them as one.
    ``dispatcher``: as the Simulation's. ``as_sidecars``: with that of ``Sidecars``, not the tuner alone.
    """
    tuner = Tuner(policy, parameters=parameters)
    pilot = (
        Sidecars(policy, tuner, interval=interval, replicas=replicas)
        if as_sidecars
        else Pilot(tuner, interval=interval, replicas=replicas)
    )
    simulation = Simulation(
        arrivals,
        device,
        slo=policy.slo.due,
        parameters=pilot.tuner.parameters,
        admission=policy.admission,
        replicas=replicas,
        seconds=seconds,
        seed=seed,
        dispatcher=pilot.dispatcher if isinstance(pilot, Sidecars) else dispatcher,
    )
    return Tuned(simulation.every(interval, pilot.observe).run(), pilot.decisions)


def flips(decisions: list[Decision], start: float = 0.0) -> int:
    """Count returns to a configuration that was just left: A, B, A."""
    path: list[Parameters] = []
    for decision in decisions:
        if decision.at >= start and (not path or decision.parameters != path[-1]):
            path.append(decision.parameters)
    return sum(before == after for before, after in zip(path, path[2:], strict=False))
