"""The objective: which setting is chosen among those that meet the SLO now and at 1.25x the load.

- *Balanced*: the lowest mean latency that keeps utilization at or below the target. If no setting keeps it, the least
  device time (``search``).
- *Efficiency*: the least device time at any load.
- *Latency*: the lowest p99.

Utilization is the share of its time for which the device computes; where it computes several batches at once, of its
executors' time. Other models behind the same sidecar count, and so does what others take of a shared device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Objective, PassThroughMode
from carpool.tuning.assessment import KEPT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Self

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Limits
    from carpool.policy.spec import BatchingPolicy
    from carpool.tuning.assessment import Assessment, Assessor
    from carpool.tuning.search import Choice

SLACK = 0.02
"""Utilization beyond the target that the setting in force may have: entering and leaving differ, so that a load at the
edge turns nothing back and forth."""

FASTER = 0.05
"""Relative gain of latency for which settings are changed."""

ALIKE = 0.02
"""Relative difference of latency below which pass-through is preferred: it merges and copies nothing."""

PASSING_IN_FLIGHT = 4
"""Requests passed through at once when the device's executors are fewer: it has a queue of its own."""

PASSING_LOAD = 0.7
"""Share of the executors' time up to which requests may pass one by one: above it they mostly meet a backlog."""

OCTAVES, STEPS = 8, 4
"""Waits are tried down to the longest over 2**8, with 4 steps an octave: neighbours differ by 19 %."""


class Aim(Struct, frozen=True):
    """What a policy asks for, and what others take of the device."""

    objective: Objective = Objective.EFFICIENCY
    target: float = 1.0
    """Utilization, 0 to 1, up to which latency comes first."""
    share: float = 1.0
    """Share of the device that is there for the models behind this sidecar."""
    others: float = 0.0
    """Share of time in which only other models behind this sidecar use the device."""

    @classmethod
    def of(cls, policy: BatchingPolicy, others: float = 0.0) -> Self:
        """Return what a policy asks for."""
        target = policy.target_utilization_percent / 100 if policy.objective is Objective.BALANCED else 1.0
        return cls(policy.objective, target, policy.device_share_percent / 100, others)

    @property
    def is_for_latency(self) -> bool:
        """Whether latency comes first while the target is kept."""
        return self.objective is not Objective.EFFICIENCY

    def utilization(self, one: Assessment) -> float:
        """Return the share of its time, 0 to 1, for which the device is busy under a setting, others included."""
        return min((one.utilization + self.others) / self.share, 1.0)

    def latency(self, one: Assessment) -> float:
        """Return the latency (seconds) that is to be low: the mean, or the p99."""
        return one.now.p99 if self.objective is Objective.LATENCY else one.mean

    def keeps_target(self, one: Assessment, slack: float = 0.0) -> bool:
        """Whether utilization is at or below the target."""
        return self.objective is Objective.LATENCY or self.utilization(one) <= self.target + slack


SMALLEST = 5
"""Sizes looked at, of those that can keep the target, besides the largest and the one in force."""


def passing(parameters: Parameters, service: ServiceTime, limits: Limits) -> Parameters:
    """Return what passes requests through where ``parameters`` would batch them."""
    flights = max(service.executors, min(limits.max_in_flight, PASSING_IN_FLIGHT))
    return replace(parameters, max_wait=Duration(0.0), max_in_flight=flights, pass_through=True)


def fastest(
    assessor: Assessor,
    aim: Aim,
    choice: Choice,
    mode: PassThroughMode,
    avoid: Collection[Parameters] = (),
) -> Assessment | None:
    """Return the setting with the least latency that keeps the utilization target and the SLO, now and at 1.25x.

    ``choice``: the setting in force, and that with the least device time; ``avoid``: what is not to be chosen.
    ``None``: the objective is device time, or no setting keeps both.
    """
    if not aim.is_for_latency or mode is PassThroughMode.ALWAYS or not choice.best.holds_ahead:
        return None
    present = choice.current.parameters
    best = _fastest_batching(assessor, aim, choice, avoid)
    if mode is PassThroughMode.NEVER or assessor.passing_load() > PASSING_LOAD:
        return best
    situation = assessor.situation
    leniency = KEPT if present.pass_through else 1.0
    merging = (best or choice.current).parameters
    through = assessor.assess(passing(merging, situation.service, situation.limits), leniency)
    # Forecast as merging what a backlog brings; how it serves those who come meanwhile, single requests tell.
    alone = assessor.assess(Parameters(situation.rows, Duration(0.0), _known(assessor)), leniency)
    if alone.holds_ahead and aim.keeps_target(alone):
        limit = 1 + (FASTER if present.pass_through else ALIKE)
        if situation.service.largest_measured <= situation.rows:
            # Nothing tells what merging would take. Where requests seldom meet it hardly matters; where they do, the
            # few that meet are merged without a wait, and tell.
            meet = alone.mean > limit * situation.service.time(situation.rows)
            return _pairs(assessor, present) if meet else through
        if best is None or (
            aim.latency(alone) <= limit * aim.latency(best) and alone.now.p99 <= (1 + FASTER) * limit * best.now.p99
        ):
            return through
    return best


def _pairs(assessor: Assessor, present: Parameters) -> Assessment:
    """Return what merges requests that meet, without a wait."""
    rows = assessor.situation.rows
    size = present.max_batch if present.max_batch > rows and not present.pass_through else 2 * rows
    return assessor.assess(assessor.situation.limits.clamp(Parameters(size, Duration(0.0), _known(assessor))))


def _fastest_batching(assessor: Assessor, aim: Aim, choice: Choice, avoid: Collection[Parameters]) -> Assessment | None:
    """Return the setting with the least latency that keeps the target, of those that batch requests."""
    flights = {choice.best.parameters.max_in_flight, _known(assessor)}
    found = [
        one for number in flights for one in _least_waits(assessor, aim, choice, number) if one.parameters not in avoid
    ]
    found.sort(key=aim.latency)
    best = next((one for one in found if one.holds_now and one.holds_ahead), None)
    if best is None:
        return None
    # Of equals the size in force stays: at low load no size differs from another.
    present = choice.current.parameters
    alike = sorted(
        (one for one in found if aim.latency(one) <= (1 + ALIKE / 2) * aim.latency(best)),
        key=lambda one: (
            one.parameters.max_batch != present.max_batch,
            one.parameters.max_in_flight != present.max_in_flight,
            round(one.device_time, 6),
            -one.parameters.max_batch,
        ),
    )
    return next(one for one in alike if one.holds_now and one.holds_ahead)


def _known(assessor: Assessor) -> int:
    limits, service = assessor.situation.limits, assessor.situation.service
    return min(max(service.executors, limits.min_in_flight), limits.max_in_flight)


def _least_waits(assessor: Assessor, aim: Aim, choice: Choice, flights: int) -> list[Assessment]:
    """Return of each size worth it the setting with the shortest wait that keeps the target.

    From the largest size downwards: in smaller batches fewer requests gather, so they need no shorter a wait.
    """
    found: list[Assessment] = []
    waits, low = _waits(assessor), 0
    for size in reversed(_sizes(assessor, aim, choice, flights)):

        def at(index: int, size: int = size) -> Assessment:
            return assessor.assess(Parameters(size, Duration(waits[index]), flights))

        if not aim.keeps_target(one := at(low)):
            too_short, high = low, len(waits) - 1
            if size == 1 or not aim.keeps_target(one := at(high)):
                continue
            while high - too_short > 1:
                middle = (too_short + high) // 2
                if aim.keeps_target(nearer := at(middle)):
                    high, one = middle, nearer
                else:
                    too_short = middle
            low = high
        found.append(one)
    return found


def _sizes(assessor: Assessor, aim: Aim, choice: Choice, flights: int) -> list[int]:
    """List the sizes worth a forecast, ascending.

    Were all batches as large as pays, the device would be busy for rate x batch latency / rows of the time: a size at
    which even that is too much is none. Of the others the smallest few differ, since batches seldom get larger.
    """
    situation = assessor.situation
    service, rows = situation.service, situation.process.rate * situation.rows
    executors = max(min(service.executors_for(flights), flights), service.executors)
    room = (aim.share * aim.target - aim.others) if aim.objective is Objective.BALANCED else 1.0
    enough: list[int] = []
    cheapest = math.inf
    for size in choice.sizes:
        cheapest = min(cheapest, service.per_row(size))
        if rows * cheapest <= room * executors:
            enough.append(size)
    return sorted({*enough[:SMALLEST], *enough[-1:], *({choice.current.parameters.max_batch} & {*enough})})


def _waits(assessor: Assessor) -> Sequence[float]:
    limits = assessor.situation.limits
    steps = (limits.max_wait * 2 ** (-step / STEPS) for step in range(OCTAVES * STEPS + 1))
    return sorted({limits.min_wait, *(whole_microseconds(max(wait, limits.min_wait)) for wait in steps)})


def is_gain(aim: Aim, target: Assessment, current: Assessment) -> bool:
    """Whether a setting chosen for its latency is worth a change."""
    if current.parameters.pass_through != target.parameters.pass_through:
        return True
    if not current.holds_ahead or not aim.keeps_target(current, SLACK):
        return True
    return aim.latency(target) < (1 - FASTER) * aim.latency(current)


def why(aim: Aim, current: Assessment, target: Assessment) -> tuple[Reason, str]:
    """Say what a move to a setting chosen for its latency is for."""
    before, after = (format_seconds(_rounded(aim.latency(one))) for one in (current, target))
    what = "p99" if aim.objective is Objective.LATENCY else "mean latency"
    if target.parameters.pass_through:
        return Reason.PASSES_THROUGH, f"{explained(aim, target)}: requests pass through, {what} {before} to {after}"
    if not current.holds_ahead:
        ahead = f"p99 forecast {format_seconds(_rounded(target.now.p99))} now"
        return Reason.RESTORES_SLO, f"{ahead}, {format_seconds(_rounded(target.ahead.p99))} at 1.25x the load"
    if not aim.keeps_target(current):
        fall = f"device {aim.utilization(current):.0%} to {aim.utilization(target):.0%} busy (target {aim.target:.0%})"
        return Reason.LOWERS_UTILIZATION, f"{fall}, {what} {before} to {after}"
    return Reason.LOWERS_LATENCY, f"{what} {before} to {after}, {explained(aim, target)}"


def explained(aim: Aim, one: Assessment) -> str:
    """Say how busy the device is under a setting: ``device 57% busy (target 60%)``."""
    text = f"device {aim.utilization(one):.0%} busy"
    return f"{text} (target {aim.target:.0%})" if aim.objective is Objective.BALANCED else text


def alternative(aim: Aim, current: Assessment, efficient: Assessment, fast: Assessment) -> str:
    """Say what another objective would do; ``""``: nothing that is worth a word.

    ``efficient``: the setting with the least device time; ``fast``: one without a wait.
    """
    if aim.is_for_latency:
        freed = aim.utilization(current) - aim.utilization(efficient)
        if not efficient.holds_ahead or freed < 0.01:
            return ""
        change = format_seconds(_rounded(efficient.now.p50 - current.now.p50))
        return f"Efficiency would free {freed:.0%} of the device for {change} more p50"
    gained = current.now.p50 - fast.now.p50
    if not fast.holds_ahead or gained < FASTER * current.now.p50:
        return ""
    more = aim.utilization(fast) - aim.utilization(current)
    return f"without a wait p50 would be {format_seconds(_rounded(gained))} lower, with {more:.0%} more of the device"


def _rounded(seconds: float) -> float:
    return max(round(seconds, 4), 0.0)
