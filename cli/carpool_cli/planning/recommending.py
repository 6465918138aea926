"""What to set for a known device, load and SLO, and why: the tuner's own search, on a certain latency model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import EXACT
from carpool.forecasting.forecaster import HEADROOM, Assessment, Forecaster, Situation
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.policy.spec import BatchingPolicy, Objective, PassThroughMode
from carpool.tuning import messages
from carpool.tuning.candidates import SIZES, WAITS, largest_reliable
from carpool.tuning.objective import Aim, Choice, choose, rank
from carpool_cli.live.figures import number
from carpool_cli.planning import replica
from carpool_cli.profiling.inflection import inflection

if TYPE_CHECKING:
    from collections.abc import Callable

TIGHT = 0.9
"""Share of the capacity from which small errors of batch latency decide."""

EFFICIENT = Aim()
"""The least device time at any load."""


class Recommendation(Struct, frozen=True, kw_only=True, rename="camel"):
    """What to set. Seconds, and requests per second; ``device_time`` is of one request.

    ``zero_wait`` and ``alone`` (no batching) are the alternatives, and ``*_holds`` is whether they meet the SLO at this
    load; ``highest_load`` is up to where some configuration does, as a sidecar's `/capacity`.
    """

    parameters: Parameters
    holds: bool
    """Whether it meets the SLO now."""
    holds_ahead: bool
    """Whether it meets the SLO at 1.25 times the load."""
    p50: float
    p99: float
    p99_ahead: float
    goodput: float
    miss_fraction: float
    device_time: float
    mean_batch: float
    utilization: float
    zero_wait: Parameters
    zero_wait_device_time: float
    zero_wait_p50: float
    zero_wait_p99: float
    zero_wait_utilization: float
    zero_wait_holds: bool
    alone_device_time: float
    alone_holds: bool
    highest_load: float
    unmeasured_beyond: int | None
    """Rows of the largest batch measured, where larger ones may serve more; ``highest_load`` counts none of these."""
    bounded_by: str
    reasons: list[str]
    doubts: list[str]

    @property
    def saving_over_zero_wait(self) -> float:
        """Share of device time."""
        return 1 - self.device_time / self.zero_wait_device_time

    @property
    def saving_over_alone(self) -> float:
        """Share of device time."""
        return 1 - self.device_time / self.alone_device_time


def recommend(
    situation: Situation,
    largest_safe: int | None = None,
    *,
    forecasting: Callable[[Situation], Forecaster] = Forecaster,
    passing_mode: PassThroughMode = PassThroughMode.AUTOMATIC,
    aim: Aim = EFFICIENT,
) -> Recommendation:
    """Choose; ``largest_safe`` is the memory's limit in rows, which the situation's limits already include.

    ``forecasting`` creates the forecaster of a situation; ``aim``: the policy's objective.
    """
    forecaster = forecasting(situation)
    service, limits = situation.service, situation.limits
    start = limits.clamp(Parameters(max_in_flight=service.executors))
    # By the tuner's own rule, so that it arrives at the same recommendation.
    choice = choose(forecaster, aim, start, passing_mode)
    best = choice.target
    # The alternatives
    greedy = [
        forecaster.assess(limits.clamp(replace(start, max_batch=size, max_wait=Duration(0.0))))
        for size in (limits.max_batch, inflection(service, limits.max_batch))
    ]
    zero_wait = min(greedy, key=rank)
    alone = forecaster.assess(replace(start, max_batch=situation.usual_rows, max_wait=Duration(0.0)))
    bounded_by = _fast_bound(aim, best) if choice.is_fast else _bound(forecaster, best, largest_safe)
    reasons = [*_rule(forecaster, choice, aim, passing_mode, zero_wait), *_reasons(forecaster, best), bounded_by]
    return Recommendation(
        parameters=best.parameters,
        holds=best.holds_now,
        holds_ahead=best.holds_ahead,
        p50=best.now.p50,
        p99=best.now.p99,
        p99_ahead=best.ahead.p99,
        goodput=best.now.goodput,
        miss_fraction=best.now.miss_fraction,
        device_time=best.now.device_time,
        mean_batch=best.now.mean_batch,
        utilization=aim.utilization(best),
        zero_wait=zero_wait.parameters,
        zero_wait_device_time=zero_wait.now.device_time,
        zero_wait_p50=zero_wait.now.p50,
        zero_wait_p99=zero_wait.now.p99,
        zero_wait_utilization=aim.utilization(zero_wait),
        zero_wait_holds=zero_wait.holds_now,
        alone_device_time=alone.now.device_time,
        alone_holds=alone.holds_now,
        highest_load=replica.carried(situation).rate,
        unmeasured_beyond=replica.unmeasured_beyond(situation),
        bounded_by=bounded_by,
        reasons=reasons,
        doubts=_doubts(situation, best),
    )


def best_for(policy: BatchingPolicy, forecaster: Forecaster) -> Assessment:
    """Return the best setting by a policy's objective."""
    situation = forecaster.situation
    start = situation.limits.clamp(Parameters(max_in_flight=situation.service.executors))
    return choose(forecaster, Aim.of(policy), start, policy.pass_through.mode).target


def highest_load(found: Recommendation) -> str:
    """Say which load one replica serves within the SLO, and what that leaves out.

    The search ends within 1 %, and the figure shown is that much lower: 2,385/s, where the SLO may just be missed, is
    shown as about 2,360.
    """
    rows = found.unmeasured_beyond
    beyond = "" if rows is None else f", in batches of up to {rows} rows; larger ones were not measured"
    rate = number(float(f"{(1 - EXACT) * found.highest_load:.3g}"))
    return f"highest load at which any configuration meets the SLO: about {rate} requests/s{beyond}"


def _rule(
    forecaster: Forecaster, choice: Choice, aim: Aim, passing_mode: PassThroughMode, zero_wait: Assessment
) -> list[str]:
    """Return which rule chose: the least latency, the policy, or that batching saves too little."""
    best, efficient = choice.target, choice.efficient
    if choice.is_fast:
        other = messages.alternative(aim, best, efficient, zero_wait)
        least = "the lowest p99" if aim.objective is Objective.LATENCY else "the least latency within the target"
        return [f"{messages.busy(aim, best)}: {least}", *([other] if other else [])]
    if passing_mode is PassThroughMode.ALWAYS:
        return ["the policy says so: requests pass through"]
    if best.parameters.pass_through:
        saving = max(forecaster.saving(efficient, best), 0)
        return [f"batching would save {saving:.1%} of the device time at this load: requests pass through"]
    return []


def _reasons(forecaster: Forecaster, best: Assessment) -> list[str]:
    """Return the influence of the load and the latency model."""
    service, parameters = forecaster.situation.service, best.parameters
    reasons = []
    reach = _beyond_reach(forecaster.situation)
    within = f" of up to {reach} rows, the largest reliable size," if reach else ""
    cheapest = inflection(service, forecaster.situation.limits.max_batch)
    if cheapest == 1:
        reasons.append("batching saves no device time per row on this device")
    else:
        gain = service.per_row(1) / service.per_row(cheapest)
        known = service.largest_measured
        guess = f" (extrapolated: measured up to {known} rows)" if cheapest > known else ""
        reasons.append(f"a row in a batch of {cheapest} costs {gain:.2g} times less than without batching{guess}")
    if not best.holds_now:
        most = "this one has the most goodput"
        reasons.append(f"{messages.shortfall(best, within)}; {most}")
    elif not best.holds_ahead:
        reasons.append(
            f"no configuration{within} meets the SLO at {HEADROOM:g}x the load: this one has the most margin now"
        )
    elif parameters.max_wait and not parameters.pass_through:
        reasons.append(
            f"waiting {format_seconds(parameters.max_wait)} gathers {best.now.mean_batch:.3g} rows per batch on average"
        )
    return reasons


def _beyond_reach(situation: Situation) -> int:
    """Return the largest measured size where larger ones are allowed and may serve more; else 0."""
    service, limits = situation.service, situation.limits
    most = largest_reliable(service, limits)
    return most if most < limits.max_batch and inflection(service, limits.max_batch) > most else 0


def _doubts(situation: Situation, best: Assessment) -> list[str]:
    """Return doubts about the data behind the forecast."""
    service, parameters = situation.service, best.parameters
    found = []
    if parameters.max_batch > service.largest_measured and not parameters.pass_through:
        found.append(f"batches beyond {service.largest_measured} rows were not measured: profile larger sizes")
    rows_per_second = situation.process.rate * situation.rows
    used = rows_per_second / service.capacity(parameters.max_batch, service.executors)
    if used > TIGHT:
        found.append(f"the load is {used:.0%} of what such batches can serve: small errors of batch latency decide")
    return found


def _fast_bound(aim: Aim, best: Assessment) -> str:
    """Return what limits the wait of a setting that was chosen for its latency."""
    if aim.objective is Objective.LATENCY:
        return "bounded by the objective: waiting for larger batches would only add latency"
    if best.parameters.pass_through or best.parameters.max_wait <= best.situation.limits.min_wait:
        return f"bounded by the load: the device is at most {aim.target:.0%} busy without any wait"
    return f"bounded by the utilization target: with a shorter wait the device would be more than {aim.target:.0%} busy"


def _bound(forecaster: Forecaster, best: Assessment, largest_safe: int | None) -> str:
    """Return what limits the batch size or the wait."""
    situation, parameters = forecaster.situation, best.parameters
    limits, size = situation.limits, parameters.max_batch
    alone = situation.service.time(situation.usual_rows)
    if alone >= situation.target:
        return (
            f"bounded by the device: a request takes {format_seconds(alone)} there without any other, "
            f"so no configuration meets {format_seconds(situation.target)} at any load"
        )
    reach = _beyond_reach(situation)
    if not best.holds_ahead and reach:
        return f"bounded by what was measured: sizes up to {reach} rows are reliable, and larger ones may serve more"
    if not best.holds_now:
        return "bounded by the device: this load is more than it can do within the SLO"
    if not best.holds_ahead and inflection(situation.service, limits.max_batch) > 1:
        p99 = format_seconds(best.ahead.p99)
        return f"bounded by the SLO at {HEADROOM:g}x the load, which nothing meets: p99 with this would be {p99}"
    larger = [step for step in SIZES if step > size and step <= limits.max_batch]
    if not larger and size == largest_safe:
        return f"bounded by memory: {largest_safe} rows is all that fits"
    if not larger and best.now.mean_batch > 0.9 * size:
        return f"bounded by the largest batch allowed: batches fill to {best.now.mean_batch:.3g} of {size}; raise it"
    longer = [whole_microseconds(share * limits.max_wait) for share in WAITS]
    neighbours = [(f"{rows} rows", replace(parameters, max_batch=rows)) for rows in larger[:1]]
    neighbours += [
        (f"a wait of {format_seconds(wait)}", replace(parameters, max_wait=Duration(wait)))
        for wait in longer
        if wait > parameters.max_wait and not parameters.pass_through
    ][:1]
    for name, neighbour in neighbours:
        there = forecaster.assess(neighbour)
        if not there.holds_now:
            return f"bounded by the SLO: p99 with {name} would be {format_seconds(there.now.p99)}"
        if best.holds_ahead and not there.holds_ahead:
            p99 = format_seconds(there.ahead.p99)
            return f"bounded by the SLO at {HEADROOM:g}x the load: p99 with {name} would be {p99}"
    if larger and situation.service.per_row(larger[0]) >= situation.service.per_row(size):
        return f"bounded by the device: a row in a batch of {larger[0]} costs no less than in one of {size}"
    if parameters.max_wait >= limits.max_wait and not parameters.pass_through:
        return (
            f"bounded by the longest wait allowed, {format_seconds(limits.max_wait)} (by default half the SLO): "
            f"batches fill to {best.now.mean_batch:.3g} rows"
        )
    return f"bounded by the load: batches fill to {best.now.mean_batch:.3g} rows, and a larger one would save no more"
