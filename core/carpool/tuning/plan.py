"""What is best in the present situation: made anew when something changed, and kept until then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from carpool.exchange.decision import Forecasted
from carpool.forecasting.capacity import Capacity, candidates, capacity
from carpool.forecasting.forecaster import HEADROOM, Forecaster, Situation
from carpool.learning.arrivals import Gamma, Modulated, Poisson
from carpool.learning.batchable_share import NONE
from carpool.policy.durations import Duration
from carpool.tuning import messages
from carpool.tuning.candidates import known_flights, productive_sizes, to_measure
from carpool.tuning.moves import is_gain
from carpool.tuning.objective import Aim, Choice, choose

if TYPE_CHECKING:
    from collections.abc import Collection

    from carpool.forecasting.forecaster import Assessment
    from carpool.learning.arrivals import Fitted
    from carpool.learning.load import Load
    from carpool.policy.parameters import Parameters
    from carpool.tuning.belief import Belief
    from carpool.tuning.exploration import Exploration
    from carpool.tuning.guards import Guards
    from carpool.tuning.requirements import Requirements


BURSTIER = 0.02
"""Change of the burstiness, relative, that is worth another search of the capacity."""

SCARCE = 0.3
"""Utilization from which requests that would be late are refused: below it, few others come while one is served late,
and a burst is over soon."""


class Plan:
    """The situation, and what was chosen for it."""

    def __init__(self, requirements: Requirements) -> None:
        """Begin without a choice."""
        self._requirements = requirements
        self.aim = Aim.of(requirements.policy)
        self.forecaster: Forecaster | None = None
        self.choice: Choice | None = None
        """``None``: to be made."""
        self._load: Load | None = None
        self._made_from: Parameters | None = None
        """What was in force when it was."""
        self._capacity: tuple[object, Capacity] | None = None
        """What it was searched for, and the answer."""

    def adopted(self, parameters: Parameters, *, explored: bool) -> None:
        """Choose anew, unless these are in force again and were left for what was chosen, not to be ``explored``."""
        if explored or parameters != self._made_from:
            self.choice = None

    def is_outdated(self, belief: Belief) -> bool:
        """Whether there is no choice, or it is for another load."""
        forecaster = self.forecaster
        return self.choice is None or forecaster is None or belief.load.process != forecaster.situation.process

    def assess(self, parameters: Parameters) -> Assessment | None:
        """Return the forecasts of what is in force; ``None`` before the first choice."""
        return self.forecaster.assess(parameters) if self.forecaster is not None else None

    def promised(self, parameters: Parameters) -> tuple[float, float]:
        """Return the share of the target that answers were forecast to keep, and what they would without a wait."""
        forecaster, target, wait = self.forecaster, self._requirements.target, self._requirements.limits.min_wait
        if forecaster is None:
            return 1.0, 1.0
        unheld = forecaster.forecast(replace(parameters, max_wait=Duration(wait)), HEADROOM).p999 / target
        return forecaster.forecast(parameters).p99 / target if parameters.max_wait > wait else 1.0, unheld

    def holds(self, wait: float) -> bool:
        """Whether the Batcher holds requests for so many seconds."""
        return self.forecaster is None or self.forecaster.holds(wait)

    def is_scarce(self, parameters: Parameters) -> bool:
        """Whether device time is: a request that is answered late makes others late.

        Where it is not, refusing the last requests of a burst would help no other.
        """
        current = self.assess(parameters)
        return current is not None and (not current.holds_ahead or self.aim.utilization(current) > SCARCE)

    def rest(self, parameters: Parameters, *, refine: bool) -> None:
        """Forecast what is in force more surely, with every decision that needs no choice; let go of what is large."""
        if self.forecaster is not None:
            if refine:
                self.forecaster.assess(parameters).refine()
            self.forecaster.rest()

    def make(
        self,
        belief: Belief,
        guards: Guards,
        exploration: Exploration,
        parameters: Parameters,
        left: Collection[Parameters],
        now: float,
    ) -> None:
        """Choose anew, from what is in force."""
        situation = self._situation(belief, guards)
        if situation is None:
            return
        self.forecaster = forecaster = Forecaster(situation)
        self._load = belief.load
        self._made_from = parameters
        current = forecaster.assess(parameters)
        if self._requirements.held:
            self.choice = Choice(current, current)
            return
        # Where batches can't be larger now, nothing is to be gained by another maximum, nor to be learned.
        limited = belief.sharing.share <= NONE or (situation.largest or parameters.max_batch) < parameters.max_batch
        sizes = (parameters.max_batch,) if limited else None
        # A setting that misses the SLO is left, and what was left before is no answer.
        avoid = () if current.holds_now else left
        choice = choose(forecaster, self.aim, parameters, self._requirements.passing, avoid, sizes)
        if not choice.efficient.holds_now and avoid:
            # Beyond the capacity requests are late whatever is set: that speaks against nothing that was in force.
            choice = choose(forecaster, self.aim, parameters, self._requirements.passing, (), sizes)
        self.choice = choice
        leaves = choice.target.parameters != parameters and is_gain(self.aim, choice, current)
        # What was worth exploring on the way, and had to wait, still is.
        moving = exploration.is_due(belief.load.rate, leaves=leaves) or exploration.candidate is not None
        self.explore(belief, guards, exploration, parameters, now, moving=moving)

    def explore(
        self,
        belief: Belief,
        guards: Guards,
        exploration: Exploration,
        parameters: Parameters,
        now: float,
        *,
        moving: bool,
    ) -> None:
        """Look for what is worth exploring."""
        forecaster, choice, requirements = self.forecaster, self.choice, self._requirements
        exploration.candidate = None
        if forecaster is None or choice is None or guards.check.alarm:
            return
        if requirements.held or requirements.recommends or exploration.is_under_way:
            return
        if belief.size_limit.largest is not None or belief.sharing.share <= NONE:
            return
        # After misses that were not forecast no forecast says what harm would be done.
        is_sure = guards.margin.factor == 1
        # While the device has room, another size has nothing to save that anybody needs.
        if not choice.is_fast and (is_sure or not choice.efficient.holds_now):
            exploration.look(forecaster, choice.efficient, forecaster.assess(parameters), moving=moving, now=now)

    def _situation(self, belief: Belief, guards: Guards) -> Situation | None:
        requirements = self._requirements
        process, service, limits = belief.load.process, belief.learner.mixed(), requirements.limits
        if process is None or service is None:
            return None
        if guards.check.alarm:
            limits = replace(limits, max_wait=limits.min_wait)
        return Situation(
            process=process,
            service=service,
            target=requirements.target,
            margin=guards.margin.factor,
            budget=requirements.budget,
            limits=limits,
            rows=max(1, round(belief.load.rows)),
            row_shares=belief.row_shares,
            quantiles=requirements.quantiles,
            share=belief.sharing.share,
            largest=belief.size_limit.largest,
        )

    def forecasted(self, step: Assessment) -> Forecasted:
        """Return what is expected of a setting."""
        refined = step.refined
        return Forecasted(
            p50=refined.p50,
            p99=refined.p99,
            p99_ahead=step.ahead.p99,
            miss_fraction=refined.miss_fraction,
            goodput=refined.goodput,
            device_time=refined.device_time,
            mean_batch=refined.mean_batch,
            mean=refined.mean,
            utilization=self.aim.utilization(step),
            lowest_utilization=0.0 if self.choice is None else self.aim.utilization(self.choice.efficient),
        )

    def capacity(self, parameters: Parameters, *, best: bool = False) -> Capacity | None:
        """Search what a replica can serve within the SLO; ``None`` while nothing is known of load or device.

        Where ``parameters`` are held, it is by these; ``best``: by the best all the same. Not for every decision: it
        takes up to half a second of CPU, for bursts two. The last answer stands until anything but the rate changed.
        """
        process = self._load.measured if self._load is not None else None
        if self.forecaster is None or process is None:
            return None
        situation = replace(self.forecaster.situation, process=_rounded(process))
        settings = [parameters]
        if best or not self._requirements.held:
            sizes = productive_sizes(situation.service, situation.limits, also=parameters.max_batch)
            settings = candidates(situation, sizes, known_flights(situation.service, situation.limits))
        by_hand = self._requirements.by_hand(max(situation.service.largest_measured, situation.rows))
        asked = situation, settings
        if self._capacity is None or self._capacity[0] != asked:
            found = capacity(situation, settings, by_hand)
            # Of a shared device, the part that is there for this sidecar.
            rates = {name: self.aim.share * each for name, each in asdict(found).items() if name != "parameters"}
            self._capacity = asked, replace(found, **rates)
        return self._capacity[1]

    def to_measure(self) -> int | None:
        """Return the rows of a batch that shows the capacity; ``None``: it is known, or the device has no room."""
        forecaster, choice = self.forecaster, self.choice
        if forecaster is None or choice is None or not choice.efficient.holds_ahead:
            return None
        situation = forecaster.situation
        if situation.share <= NONE or situation.largest is not None:
            return None
        return to_measure(situation.service, situation.limits, situation.target)

    def alternative(self, parameters: Parameters) -> str:
        """Say what another objective than the one ``parameters`` were chosen for would do at this load."""
        forecaster, choice = self.forecaster, self.choice
        if forecaster is None or choice is None:
            return ""
        current = forecaster.assess(parameters)
        shortest = Duration(self._requirements.limits.min_wait)
        unheld = replace(choice.efficient.parameters, max_wait=shortest, pass_through=False)
        return messages.alternative(self.aim, current, choice.efficient, forecaster.assess(unheld))


def _rounded(process: Fitted) -> Fitted:
    """Return arrivals of the same burstiness, in steps of 2 %, at one a second: what a capacity depends on."""

    def stepped(value: float) -> float:
        return math.exp(round(math.log(value) / BURSTIER) * BURSTIER)

    if isinstance(process, Poisson):
        return Poisson(1.0)
    if isinstance(process, Gamma):
        return Gamma(1.0, stepped(process.cv))
    return Modulated(1.0, stepped(process.cv), stepped(process.lasting))
