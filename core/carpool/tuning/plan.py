"""The best setting in the present situation: chosen again when something changed, and kept until then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from carpool.exchange.decision import Forecasted
from carpool.forecasting.capacity import Capacity, candidates, capacity
from carpool.forecasting.forecaster import HEADROOM, Assessment, Forecaster, Situation
from carpool.learning.batchable_share import NONE
from carpool.policy.durations import Duration
from carpool.policy.spec import PassThroughMode
from carpool.tuning import messages
from carpool.tuning.candidates import known_flights, productive_sizes
from carpool.tuning.exploration import Exploration, to_measure
from carpool.tuning.moves import is_gain, is_worth
from carpool.tuning.objective import Aim, Choice, choose

if TYPE_CHECKING:
    from collections.abc import Collection

    from carpool.policy.parameters import Parameters
    from carpool.tuning.belief import Belief
    from carpool.tuning.guards import Guards
    from carpool.tuning.requirements import Requirements


BURSTIER = 0.02
"""Relative change of the burstiness that needs another search of the capacity."""

OTHERS_CHANGE = 0.05
"""Change of the share of the device that other models use, after which settings are compared again."""

LARGER = 1.2
"""Factor on the rows of a request, up or down, after which settings are compared again."""

SCARCE = 0.3
"""Utilization from which requests that would be late are refused: below it, a late request delays few others, and a
burst is over soon."""


class Plan:
    """The situation, and the choice for it."""

    def __init__(self, requirements: Requirements, belief: Belief, guards: Guards, exploration: Exploration) -> None:
        self._requirements = requirements
        self._passes = requirements.policy.pass_through.mode is PassThroughMode.ALWAYS
        self._belief = belief
        self._guards = guards
        self._exploration = exploration
        self.aim = Aim.of(requirements.policy)
        self.forecaster: Forecaster | None = None
        self.choice: Choice | None = None
        """``None``: not made yet."""
        self._made_from: Parameters | None = None
        """The parameters in force when it was made."""
        self._capacity: tuple[object, Capacity] | None = None
        """The key of the last search, and its result."""

    def adopted(self, parameters: Parameters, *, explored: bool) -> None:
        """Drop the choice, unless it was made from these parameters and they are back without being ``explored``."""
        if explored or parameters != self._made_from:
            self.choice = None

    @property
    def is_outdated(self) -> bool:
        """Whether there is no choice, or it is for another load of this model, other requests, or others' load."""
        belief, situation = self._belief, None if self.forecaster is None else self.forecaster.situation
        if self.choice is None or situation is None or belief.load.process != situation.process:
            return True
        rows = max(belief.load.rows, 1.0) / situation.rows
        return abs(belief.rest - situation.rest) > OTHERS_CHANGE or not 1 / LARGER < rows < LARGER

    def assess(self, parameters: Parameters) -> Assessment | None:
        """Return the forecasts of the parameters in force; ``None`` before the first choice."""
        return self.forecaster.assess(parameters) if self.forecaster is not None else None

    def promised(self, parameters: Parameters) -> tuple[float, float]:
        """Return the forecast of answers as a share of the target, with and without a wait."""
        forecaster, target, wait = self.forecaster, self._requirements.target, self._requirements.limits.min_wait
        if forecaster is None:
            return 1.0, 1.0
        unheld = forecaster.forecast(replace(parameters, max_wait=Duration(wait)), HEADROOM).p999 / target
        return forecaster.forecast(parameters).p99 / target if parameters.max_wait > wait else 1.0, unheld

    def holds(self, wait: float) -> bool:
        """Whether the Batcher holds requests for so many seconds."""
        return self.forecaster is None or self.forecaster.holds(wait)

    def is_scarce(self, parameters: Parameters) -> bool:
        """Whether device time is scarce: if it is not, refusing the last requests of a burst would help no other."""
        current = self.assess(parameters)
        return current is not None and (not current.holds_ahead or self.aim.utilization(current) > SCARCE)

    def rest(self, parameters: Parameters, *, refine: bool) -> None:
        """Refine the forecast of the parameters in force after a decision without a choice; drop large data."""
        if self.forecaster is not None:
            if refine:
                self.forecaster.assess(parameters).refine()
            self.forecaster.rest()

    def make(self, parameters: Parameters, left: Collection[Parameters], now: float) -> None:
        """Choose again, from the parameters in force."""
        belief, exploration, situation = self._belief, self._exploration, self._situation()
        if situation is None:
            return
        self.forecaster = forecaster = Forecaster(situation)
        self._made_from = parameters
        current = forecaster.assess(parameters)
        if self._requirements.held:
            self.choice = Choice(current, current)
            return
        # If batches can't be larger now, another maximum gains nothing and shows nothing.
        limited = belief.sharing.share <= NONE or (situation.largest or parameters.max_batch) < parameters.max_batch
        sizes = (parameters.max_batch,) if limited else None
        # A setting that misses the SLO is left, but not for one that was left before.
        avoid = () if current.holds_now else left
        choice = choose(forecaster, self.aim, parameters, self._requirements.policy.pass_through.mode, avoid, sizes)
        if not choice.efficient.holds_now and avoid:
            # Beyond the capacity requests are late with any setting: that is no evidence against earlier settings.
            choice = choose(forecaster, self.aim, parameters, self._requirements.policy.pass_through.mode, (), sizes)
        guesses = parameters.max_batch > situation.usual_rows >= situation.service.largest_measured
        decides = choice.efficient.holds_now or choice.takes_all or parameters.pass_through
        if guesses and exploration.spare > 0 and not decides:
            # Only single requests were measured, and they were in time. Those that overlap show what batches take.
            self.choice = None
            return
        self.choice = choice
        leaves = choice.target.parameters != parameters and is_gain(self.aim, choice, current)
        # A candidate found on the way that had to wait is still worth exploring.
        moving = exploration.is_due(belief.load.rate, leaves=leaves) or exploration.candidate is not None
        self._explore(parameters, now, moving=moving)

    def _explore(self, parameters: Parameters, now: float, *, moving: bool) -> None:
        """Look for a setting worth exploring."""
        belief, guards, exploration = self._belief, self._guards, self._exploration
        forecaster, choice, requirements = self.forecaster, self.choice, self._requirements
        exploration.candidate = None
        if forecaster is None or choice is None or (guards.check.alarm and choice.efficient.holds_now):
            return
        is_limited = self._passes or belief.size_limit.largest is not None or belief.sharing.share <= NONE
        if is_limited or requirements.held or requirements.recommends or exploration.is_under_way:
            return
        # After misses that were not forecast, forecasts of exploration's cost are not reliable.
        is_sure = guards.margin.factor == 1
        # While the device has room, saving its time is not needed.
        if not choice.is_fast and (is_sure or not choice.efficient.holds_now):
            best, current = choice.efficient, forecaster.assess(parameters)
            # An exploration has to gain on what will be in force.
            stays = not best.holds_now and not is_worth(best, current)
            exploration.look(forecaster, current if stays else best, current, moving=moving, now=now)

    def _situation(self) -> Situation | None:
        belief, guards, requirements = self._belief, self._guards, self._requirements
        process, service, limits = belief.load.process, belief.learner.mixed(), requirements.limits
        if process is None or service is None:
            return None
        if guards.check.alarm:
            limits = replace(limits, max_wait=limits.min_wait)
        return Situation(
            process=process,
            service=service.scaled(1 / belief.rest),
            target=requirements.target,
            margin=guards.margin.factor,
            budget=requirements.budget,
            limits=limits,
            rows=max(belief.load.rows, 1.0),
            row_shares=belief.row_shares,
            quantiles=requirements.quantiles,
            share=belief.sharing.share,
            largest=belief.size_limit.largest,
            rest=belief.rest,
        )

    def forecasted(self, step: Assessment) -> Forecasted:
        """Return the forecast figures of a setting."""
        refined = step.refined
        return Forecasted(
            p50=refined.p50,
            p99=refined.p99,
            p99_ahead=step.ahead.p99,
            miss_fraction=refined.miss_fraction,
            goodput=refined.goodput,
            device_time=refined.device_time * step.situation.rest,
            mean_batch=refined.mean_batch,
            mean=refined.mean,
            utilization=self.aim.utilization(step),
            lowest_utilization=0.0 if self.choice is None else self.aim.utilization(self.choice.efficient),
        )

    def capacity(self, parameters: Parameters, *, best: bool = False) -> Capacity | None:
        """Search the capacity of a replica within the SLO; ``None`` while load or device is unknown.

        With held ``parameters``, it is their capacity; ``best``: that of the best ones nevertheless. Not for every
        decision: it takes up to 0.5 s of CPU, 2 s with bursts. The result is kept until more than the rate changes.
        """
        process = self._belief.load.measured
        if self.forecaster is None or process is None:
            return None
        situation = self.forecaster.situation.with_the_whole_device()
        # A capacity depends on burstiness, in steps of 2 %, and not on the rate.
        shape = {name: _stepped(value) for name, value in asdict(process).items() if name != "rate"}
        situation = replace(situation, process=type(process)(1.0, **shape), rows=_stepped(situation.rows))
        settings = [parameters]
        if best or not self._requirements.held:
            sizes = productive_sizes(situation.service, situation.limits, also=parameters.max_batch)
            settings = candidates(situation, sizes, known_flights(situation.service, situation.limits))
        by_hand = self._requirements.by_hand(max(situation.service.largest_measured, situation.usual_rows))
        asked = situation, settings
        if self._capacity is None or self._capacity[0] != asked:
            found = capacity(situation, settings, by_hand)
            # Only this sidecar's part of a shared device.
            rates = {name: self.aim.share * each for name, each in asdict(found).items() if name != "parameters"}
            self._capacity = asked, replace(found, **rates)
        return self._capacity[1]

    def to_measure(self) -> tuple[int, ...]:
        """Return the rows of batches to measure for the capacity; none: it is known, or the device has no room."""
        if self.forecaster is None or self.choice is None or not self.choice.efficient.holds_ahead:
            return ()
        situation = self.forecaster.situation.with_the_whole_device()
        is_possible = not self._passes and situation.share > NONE and situation.largest is None
        return to_measure(situation.service, situation.limits, situation.target) if is_possible else ()

    def alternative(self, parameters: Parameters) -> str:
        """Return what another objective would do at this load than the one ``parameters`` were chosen for."""
        forecaster, choice = self.forecaster, self.choice
        if forecaster is None or choice is None:
            return ""
        current = forecaster.assess(parameters)
        shortest = Duration(self._requirements.limits.min_wait)
        unheld = replace(choice.efficient.parameters, max_wait=shortest, pass_through=False)
        return messages.alternative(self.aim, current, choice.efficient, forecaster.assess(unheld))


def _stepped(value: float) -> float:
    return math.exp(round(math.log(value) / BURSTIER) * BURSTIER)
