"""Texts about decisions: what a change gains and risks, what another objective would do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import Decision, Reason
from carpool.learning import batchable_share
from carpool.policy.durations import format_seconds
from carpool.policy.spec import Objective
from carpool.tuning.objective import FASTER, LEAST, Aim, Choice

if TYPE_CHECKING:
    from carpool.forecasting.forecaster import Assessment


def why(aim: Aim, choice: Choice, current: Assessment, target: Assessment) -> tuple[Reason, str]:
    """Return the reason for the move to ``target``."""
    if choice.takes_all:
        return Reason.MORE_GOODPUT, "no measured setting meets the SLO beside other models: batches are all that waits"
    if choice.is_fast:
        return _why_faster(aim, current, target)
    if target.parameters.pass_through:
        saving = max(1 - choice.efficient.device_time / target.device_time, 0.0)
        return (
            Reason.PASSES_THROUGH,
            f"requests pass one by one; batching would save {saving:.1%} of the device time at this load",
        )
    saving = 1 - target.now.device_time / current.now.device_time if current.now.device_time else 0.0
    times = f"{format_seconds(current.now.device_time)} to {format_seconds(target.now.device_time)} per request"
    ahead = f"p99 forecast {format_seconds(target.now.p99)} now, {format_seconds(target.ahead.p99)} at 1.25x the load"
    if target.holds_now and not current.holds_now:
        return Reason.RESTORES_SLO, f"the present configuration is forecast to miss the SLO; {ahead}"
    if target.holds_ahead and not current.holds_ahead:
        return Reason.MORE_MARGIN, f"meets the SLO at 1.25x the load too; {ahead}"
    if target.holds_ahead:
        # Less of the device's capacity may be used while it is busy all the time.
        falls = f"falls {saving:.{0 if saving >= 0.01 else 1}%}, " if saving >= LEAST else ""
        return Reason.SAVES_DEVICE_TIME, f"device time {falls}{times}; {ahead}"
    if target.holds_now:
        return (
            Reason.MORE_MARGIN,
            f"no configuration meets the SLO at 1.25x the load; this one leaves the most room; {ahead}",
        )
    if says := out_of_reach(target):
        return Reason.MORE_GOODPUT, says
    if not target.now.goodput:
        return Reason.EXPLORES, "nothing measured so far is forecast to meet the SLO; a smaller batch may"
    good = f"{current.now.goodput:.0f} to {target.now.goodput:.0f} answers in time per second"
    return Reason.MORE_GOODPUT, f"{shortfall(target)}; {good}, late requests are refused"


def _why_faster(aim: Aim, current: Assessment, target: Assessment) -> tuple[Reason, str]:
    before, after = (_rounded(aim.latency(one)) for one in (current, target))
    what = "p99" if aim.objective is Objective.LATENCY else "mean latency"
    if target.parameters.pass_through:
        return Reason.PASSES_THROUGH, f"{busy(aim, target)}: requests pass through, {what} {before} to {after}"
    if not current.holds_ahead:
        forecast = f"{_rounded(target.now.p99)} now, {_rounded(target.ahead.p99)} at 1.25x the load"
        return Reason.RESTORES_SLO, f"p99 forecast {forecast}"
    if not aim.keeps_target(current):
        fall = f"device {aim.utilization(current):.0%} to {aim.utilization(target):.0%} busy (target {aim.target:.0%})"
        return Reason.LOWERS_UTILIZATION, f"{fall}, {what} {before} to {after}"
    if aim.latency(target) > (1 - FASTER) * aim.latency(current):
        what = "p99"
        before, after = (_rounded(one.now.p99) for one in (current, target))
    return Reason.LOWERS_LATENCY, f"{what} {before} to {after}, {busy(aim, target)}"


def busy(aim: Aim, one: Assessment) -> str:
    """Return how busy the device is under a setting: ``device 57% busy (target 60%)``."""
    text = f"device {aim.utilization(one):.0%} busy"
    return f"{text} (target {aim.target:.0%})" if aim.objective is Objective.BALANCED else text


def alternative(aim: Aim, current: Assessment, efficient: Assessment, fast: Assessment) -> str:
    """Return what another objective would do; ``""``: nothing worth mentioning.

    ``efficient``: the setting with the least device time; ``fast``: one without a wait.
    """
    gained, parts = current.now.p50 - fast.now.p50, []
    waits = current.parameters.max_wait > fast.parameters.max_wait
    if waits and fast.holds_ahead and gained >= FASTER * current.now.p50:
        more = aim.utilization(fast) - aim.utilization(current)
        parts = [f"without a wait p50 would be {_rounded(gained)} lower, with {more:.0%} more of the device"]
    freed = aim.utilization(current) - aim.utilization(efficient)
    if aim.is_for_latency and efficient.holds_ahead and freed >= 0.01:
        change = _rounded(efficient.now.p50 - current.now.p50)
        parts.append(f"Efficiency would free {freed:.0%} of the device for {change} more p50")
    return "; ".join(parts)


def shortfall(best: Assessment, among: str = "") -> str:
    """Return by how much the best configuration, ``among`` some, misses the SLO.

    Its p99 counts only answered requests, and may be inside the SLO while many are refused. The bound is the
    planning budget: half of the misses that the SLO allows.
    """
    share, budget = best.now.miss_fraction, best.situation.budget
    if share <= budget:
        return f"no configuration{among} meets the SLO at this load without refusals: {share:.1%} late or refused"
    late = f"{share:.1%} late or refused, {budget:.1%} is the most planned for"
    return f"no configuration{among} meets the SLO at this load: {late}"


def out_of_reach(one: Assessment) -> str:
    """Return why no request can be in time; ``""``: it can."""
    if one.holds_now or not one.situation.is_out_of_reach:
        return ""
    alone = _rounded(one.situation.alone)
    return f"one request alone takes {alone}, longer than the SLO: raise it; until then no request waits for others"


def explained(decision: Decision, alarm: str, *, holds: bool) -> Decision:
    """Add why requests are not batched, and whether the forecast is wrong; ``holds``: whether any are held."""
    decision = replace(decision, alarm=alarm)
    if alarm and decision.reason in {Reason.CONVERGED, Reason.FORECAST_OFF, Reason.HELD}:
        return replace(decision, reason=Reason.FORECAST_OFF, message=f"{decision.message}; {alarm}")
    plain = decision.reason in {Reason.CONVERGED, Reason.PASSES_THROUGH, Reason.SAVES_DEVICE_TIME}
    if plain and not holds:
        message = f"{decision.message}; {batchable_share.explained(decision.share)}"
        return replace(decision, reason=Reason.NOTHING_BATCHABLE, message=message)
    return decision


def _rounded(seconds: float) -> str:
    return format_seconds(max(round(seconds, 4), 0.0))
