"""The control loop: twice a second, counts go to the tuner, and its decisions to the Batcher."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import contextmanager
from time import time
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from carpool.exchange.decision import Decision, Observation
from carpool.policy.plain import to_plain
from carpool.policy.spec import TuningMode
from carpool.tuning.tuner import INTERVAL
from carpool_sidecar.config.settings import EVERY_MODEL
from carpool_sidecar.models import OTHER
from carpool_sidecar.tuning.busy import BusyMinutes
from carpool_sidecar.tuning.messages import Decided, Measured, Observations, Observed, Setup
from carpool_sidecar.tuning.replica_load import LoadWatch, ReplicaLoad, Utilization
from carpool_sidecar.tuning.rollback import Rollback
from carpool_sidecar.tuning.tuner_link import TunerLink

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator

    from carpool.batching.batcher import Batcher
    from carpool.batching.counters import ModelStats, Stats
    from carpool.exchange.decision import Forecasted
    from carpool.policy.parameters import Parameters
    from carpool_sidecar.config.settings import SidecarConfig
    from carpool_sidecar.dispatch.driver import Driver
    from carpool_sidecar.tuning.stalls import StallWatcher

STALLED_SHARE = 0.25
"""Share of an interval that this host may pause before the whole interval is void."""

KEPT = 50
"""Decisions that are remembered."""


class Explained(msgspec.Struct):
    """A decision for display. ``times``: how often in a row it was taken, with the same reason."""

    model: str
    at: float
    """Seconds since the epoch, of the latest."""
    decision: Decision
    times: int = 1


class Control:
    """The loop around the tuner.

    With fixed parameters nothing is tuned, but the tuner still learns batch latency and whether the SLO is met: the
    Batcher needs both for holding and shedding.
    """

    def __init__(
        self,
        driver: Driver,
        config: SidecarConfig,
        stalls: StallWatcher,
        clock: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        self.decisions: deque[Explained] = deque(maxlen=KEPT)
        self.counts: dict[tuple[str, str], int] = {}
        """Decisions by action and reason."""
        self.errors = 0
        """Observations and decisions lost to the sidecar's own errors."""
        self.alarms: dict[str, str] = {}
        """By model: how answers differ from the forecast, while they do."""
        self.utilization: dict[str, Utilization] = {}
        """By model, from its last forecast."""
        self.link = TunerLink(self._heard, self._introduce, log)
        self._driver = driver
        self._batcher: Batcher = driver.batcher
        self._config = config
        self._stalls = stalls
        self._clock = clock
        self._log = log
        self.rollback = Rollback(driver.batcher, self._put_in_force, log)
        self._generation = 0
        """How often everything was forgotten and learned again."""
        self._restarts = 0
        """How often the upstream was replaced or restarted."""
        self._replaced: Counter[str] = Counter()
        """In addition, how often one model was replaced."""
        self._led_to: dict[str, Parameters] = {}
        """By model: the parameters in force when an operator's decision ended its first calls."""
        self._mixed: set[str] = set()
        """Models replaced since they were last observed: part of their service times is the old model's."""
        self._before: Stats = driver.batcher.stats(clock())
        self.busy = BusyMinutes(self._before.at)
        self._load = LoadWatch(self._before)
        self._stalled_before = self._stalled_looked = stalls.total
        self._apply()
        self._introduce()

    @property
    def tunes(self) -> bool:
        """Whether parameters are tuned here."""
        return not self._config.parameters and self._config.policy.tuning.mode is not TuningMode.HOLD

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.link.run())
            while True:
                await asyncio.sleep(INTERVAL)
                with self._surviving():
                    self.look()
                with self._surviving():
                    self.observe()

    def configure(self, config: SidecarConfig, change: int | None = None) -> None:
        """Apply a new configuration; under another policy, everything is learned again.

        ``change``: its generation, if it came from outside and is on probation.
        """
        before, tuned = self._config, self.tunes
        self._config = config
        if change is None:
            self.rollback.end()
        else:
            self.rollback.begin(config.policy, change)
        same = self.tunes == tuned and config.policy == before.policy
        if not same or config.parameters != before.parameters:
            self._apply(keep=tuned and self.tunes)
            # An operator changes fixed parameters every minute: batch latency does not depend on them.
            if not same or self.tunes:
                self._introduce()
        self.rollback.applied(self._clock())

    def forget(self) -> None:
        """Forget what was learned: the upstream was replaced or restarted."""
        self._driver.do(self._batcher.restarted(self._clock()))
        self.rollback.forget()
        self._led_to.clear()
        self._restarts += 1
        self._load.forget()
        self._before = self._batcher.stats(self._clock())
        self._introduce()

    def forget_model(self, model: str) -> None:
        """Forget what was learned of one model: the upstream serves another under its name."""
        self._driver.do(self._batcher.restarted(self._clock(), model=model))
        self.rollback.forget(model)
        self._led_to.pop(model, None)
        self._replaced[model] += 1
        self._mixed.add(model)
        self._load.forget(model)
        self.alarms.pop(model, None)
        self.utilization.pop(model, None)

    def replaced(self, model: str) -> int:
        """Return how often the model, or its server, was replaced."""
        return self._restarts + self._replaced[model]

    def load(self) -> ReplicaLoad:
        """Return this replica's load."""
        estimates = {state.name: state.belief.estimate for state in self._batcher.models()}
        executors = {name: each.executors for name, each in estimates.items() if each is not None}
        return self._load.now(self.utilization, executors)

    def look(self) -> None:
        """Test whether parameters from outside meet the SLO."""
        paused, self._stalled_looked = self._stalls.total - self._stalled_looked, self._stalls.total
        self.rollback.observe(self._clock(), stalled=paused > STALLED_SHARE * INTERVAL)

    def observe(self) -> None:
        """Send the tuner the counts since the last time."""
        now = self._clock()
        stats = self._batcher.stats(now)
        self.busy.look(stats, time(), self._predicted)
        self._load.look(stats)
        since = stats.since(self._before)
        seconds = now - self._before.at
        paused = self._stalls.total - self._stalled_before
        applies = self.tunes and self._config.policy.tuning.mode is TuningMode.APPLY
        observations = Observations(
            {
                state.name: Observed(
                    Observation(
                        now=now,
                        seconds=seconds,
                        stats=self._measured(state.name, since.models[state.name]),
                        passing=state.passing,
                        growing=self._driver.batcher.grows(state.name),
                        stalled=paused > STALLED_SHARE * seconds,
                        paused=paused,
                        queued_rows=stats.queued_rows,
                        others=since.others(state.name),
                    ),
                    # A tuner that decides gets the parameters it has set; one that only observes, those in force.
                    state.parameters if applies else state.in_force,
                    self._generation_of(state.name),
                )
                for state in self._batcher.models()
                if state.name != OTHER
            }
        )
        if not self.link.send(observations):
            return  # not accepted: the next interval is longer
        self._before = stats
        self._stalled_before = self._stalls.total
        self._mixed.clear()

    def _predicted(self, model: str) -> Forecasted | None:
        """Return the forecast of the last decision on a model."""
        last = next((each.decision for each in reversed(self.decisions) if each.model == model), None)
        return None if last is None else last.predicted

    def _measured(self, model: str, stats: ModelStats) -> ModelStats:
        """Return an interval's counts; without service times for a model replaced in it."""
        return replace(stats, cells=[]) if model in self._mixed else stats

    def _generation_of(self, model: str) -> int:
        """Return how often a model was learned again: replies with another number are outdated."""
        return self._generation + self._replaced[model]

    def _apply(self, *, keep: bool = False) -> None:
        """Set every model's parameters: fixed ones, the initial ones, or (``keep``) its own within new limits."""
        config, batcher, now = self._config, self._batcher, self._clock()
        states = {state.name: state for state in batcher.models()}
        running = {name: state.parameters for name, state in states.items()}
        first = {name: state.in_force for name, state in states.items() if state.first_calls is not None}
        models = {model.name: model for model in config.policy.models}
        self._driver.do(batcher.configure(config.parameters_of(EVERY_MODEL), now, undecided=config.undecided))
        for name in {*running, *models, *config.parameters} - {EVERY_MODEL}:
            parameters, limits = config.parameters_of(name), config.policy.limits(models.get(name))
            if keep and name in running:
                parameters = limits.clamp(running[name])
            # An operator names a model once it has decided on it.
            undecided = 0 if name in config.parameters else min(config.undecided, limits.max_in_flight)
            if undecided and name in self._led_to and name not in first:
                # A model that it no longer names returns to what was in force: the baseline never was.
                parameters, undecided = limits.clamp(self._led_to[name]), 0
            parameters = self.rollback.allowed(name, parameters)
            self._driver.do(batcher.configure(parameters, now, model=name, undecided=undecided))
        ended = {name: ran for name, ran in first.items() if states[name].first_calls is None}
        self._led_to |= ended if config.target else {}

    def _put_in_force(self, model: str, parameters: Parameters) -> None:
        self._driver.do(self._batcher.configure(parameters, self._clock(), model=model))

    def _introduce(self) -> None:
        """Send a new tuner the policy; outstanding replies of the previous one are void."""
        policy = self._config.policy
        self._generation += 1
        self.alarms.clear()
        self.utilization.clear()
        if not self.tunes:
            policy = replace(policy, tuning=replace(policy.tuning, mode=TuningMode.HOLD))
        steered = bool(self._config.target) and self._config.policy.tuning.mode is TuningMode.APPLY
        self.link.send(Setup(to_plain(policy), steered=steered))

    def _heard(self, reply: Decided | Measured) -> None:
        # A decision that was under way while the policy or the model changed is outdated.
        if reply.generation != self._generation_of(reply.model):
            return
        with self._surviving():
            if isinstance(reply, Measured):
                self._load.measured(reply.model, reply.capacity)
            else:
                self._decided(reply.model, reply.decision)
                self._driver.verifier.measure(reply.model, reply.measure)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Continue after an error in the sidecar: it costs one interval, not all later tuning."""
        try:
            yield
        except Exception:  # noqa: BLE001 - after any error, requests are served best with a tuner
            self.errors += 1
            if self.errors.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: a lasting one comes twice a second
                self._log.exception("an error in tuning; it continues", extra={"count": self.errors})

    def _decided(self, model: str, decision: Decision) -> None:
        if not any(state.name == model for state in self._batcher.models()):
            return  # forgotten meanwhile
        now = self._clock()
        first = self._batcher.model(model).first_calls
        # Calls that wait for one another show the server's concurrency: without this condition, first calls could
        # end with one at a time.
        if decision.change or (decision.decided and first is not None and first.merges):
            self._driver.do(self._batcher.configure(decision.parameters, now, model=model))
        if decision.change:
            self._log.info(
                "parameters changed",
                extra={"model": model, "reason": decision.reason.value, "detail": decision.message},
            )
        self._driver.do(self._batcher.learn(model, decision.estimate, now, shed_slo=decision.shed_slo))
        if decision.predicted is not None:
            expected, target = decision.predicted, decision.target_utilization
            self.utilization[model] = Utilization(expected.utilization, target, expected.lowest_utilization)
        self._compare(model, decision)
        self._remember(model, decision)

    def _compare(self, model: str, decision: Decision) -> None:
        """Log when the forecast begins to be off, and when it is right again."""
        before = self.alarms.pop(model, None)
        if decision.alarm:
            self.alarms[model] = decision.alarm
        if decision.alarm and before is None:
            self._log.warning("the forecast differs from the answers", extra={"model": model, "detail": decision.alarm})
        elif before is not None and not decision.alarm:
            self._log.info("the forecast matches the answers again", extra={"model": model})

    def _remember(self, model: str, decision: Decision) -> None:
        key = ("Change" if decision.change else "Keep", decision.reason.value)
        self.counts[key] = self.counts.get(key, 0) + 1
        last = next((one for one in reversed(self.decisions) if one.model == model), None)
        if (
            last is not None
            and not decision.change
            and not last.decision.change
            and last.decision.reason is decision.reason
        ):
            last.decision, last.at = decision, time()
            last.times += 1
        else:
            self.decisions.append(Explained(model, time(), decision))
