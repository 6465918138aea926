"""The control loop: twice a second, counts go to the tuner, and its decisions to the Batcher."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from time import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import STALLED_SHARE
from carpool.policy.plain import to_plain
from carpool.policy.spec import TuningMode
from carpool.tuning.tuner import INTERVAL
from carpool_sidecar.tuning.busy import BusyMinutes
from carpool_sidecar.tuning.decisions import Decisions
from carpool_sidecar.tuning.in_force import ParametersInForce
from carpool_sidecar.tuning.messages import Decided, Measured, Setup
from carpool_sidecar.tuning.observer import Observer
from carpool_sidecar.tuning.replica_load import LoadWatch, ReplicaLoad
from carpool_sidecar.tuning.tuner_link import TunerLink

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator

    from carpool.exchange.decision import Decision
    from carpool_sidecar.config.settings import SidecarConfig
    from carpool_sidecar.dispatch.driver import Driver
    from carpool_sidecar.tuning.stalls import StallWatcher


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
        self.decisions = Decisions(log)
        self.errors = 0
        """Observations and decisions lost to the sidecar's own errors."""
        self.link = TunerLink(self._heard, self._introduce, log)
        self.in_force = ParametersInForce(driver.batcher, driver.do, clock, log)
        began = driver.batcher.stats(clock())
        self.busy = BusyMinutes(began.at)
        self._load = LoadWatch(began)
        self.observer = Observer(driver.batcher, stalls, began)
        self._driver = driver
        self._config = config
        self._stalls = stalls
        self._clock = clock
        self._log = log
        self.in_force.apply(config)
        self._introduce()

    @property
    def tunes(self) -> bool:
        """Whether parameters are tuned here."""
        return not self._config.parameters and self._config.policy.tuning.mode is not TuningMode.HOLD

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.link.run())
            paused = self._stalls.total
            while True:
                await asyncio.sleep(INTERVAL)
                before, paused = paused, self._stalls.total
                with self._surviving():
                    stalled = paused - before > STALLED_SHARE * INTERVAL
                    self.in_force.rollback.observe(self._clock(), stalled=stalled)
                with self._surviving():
                    self.observe()

    def configure(self, config: SidecarConfig, change: int | None = None) -> None:
        """Apply a new configuration; under another policy, everything is learned again.

        ``change``: its generation, if it came from outside and is on probation.
        """
        before, tuned = self._config, self.tunes
        self._config = config
        rollback = self.in_force.rollback
        if change is None:
            rollback.end()
        else:
            rollback.begin(config.policy, change)
        same = self.tunes == tuned and config.policy == before.policy
        if not same or config.parameters != before.parameters:
            self.in_force.apply(config, keep=tuned and self.tunes)
            # An operator changes fixed parameters every minute: batch latency does not depend on them.
            if not same or self.tunes:
                self._introduce()
        rollback.applied(self._clock())

    def forget(self, model: str | None = None) -> None:
        """Forget what was learned of a model that was replaced, or of all: the upstream was replaced or restarted."""
        self._driver.do(self._driver.batcher.restarted(self._clock(), model=model))
        self.in_force.forget(model)
        self._load.forget(model)
        self.decisions.forget(model)
        self.observer.forget(self._clock(), model)
        if model is None:
            self._introduce()

    def load(self) -> ReplicaLoad:
        """Return this replica's load."""
        estimates = {state.name: state.belief.estimate for state in self._driver.batcher.models()}
        executors = {name: each.executors for name, each in estimates.items() if each is not None}
        return self._load.now(self.decisions.utilization, executors)

    def observe(self) -> None:
        """Send the tuner the counts since the last time."""
        stats = self._driver.batcher.stats(self._clock())
        self.busy.look(stats, time(), self.decisions.predicted)
        self._load.look(stats)
        applies = self.tunes and self._config.policy.tuning.mode is TuningMode.APPLY
        if self.link.send(self.observer.observations(stats, applies=applies)):
            self.observer.taken(stats)  # otherwise the next interval is longer

    def _introduce(self) -> None:
        """Send a new tuner the policy; outstanding replies of the previous one are void."""
        policy = self._config.policy
        self.observer.begin()
        self.decisions.forget()
        if not self.tunes:
            policy = replace(policy, tuning=replace(policy.tuning, mode=TuningMode.HOLD))
        steered = bool(self._config.target) and self._config.policy.tuning.mode is TuningMode.APPLY
        self.link.send(Setup(to_plain(policy), steered=steered))

    def _heard(self, reply: Decided | Measured) -> None:
        # A decision that was under way while the policy or the model changed is outdated.
        if reply.generation != self.observer.generation(reply.model):
            return
        with self._surviving():
            if isinstance(reply, Measured):
                self._load.measured(reply.model, reply.capacity)
            else:
                self._decided(reply.model, reply.decision)
                self._driver.verifier.trials.measure(reply.model, reply.measure)

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
        batcher = self._driver.batcher
        if not any(state.name == model for state in batcher.models()):
            return  # forgotten meanwhile
        first = batcher.model(model).first_calls
        # Calls that wait for one another show the server's concurrency: without this condition, first calls could
        # end with one at a time.
        if decision.change or (decision.decided and first is not None and first.merges):
            self.in_force.put(model, decision.parameters)
        self._driver.do(batcher.learn(model, decision.estimate, self._clock(), shed_slo=decision.shed_slo))
        self.decisions.add(model, decision)
