"""What batching saves: the device time, replicas and money of one load, by each way to batch it.

Device time alone saves no money: an idle GPU costs as much as a busy one. So money is computed for replicas, from the
number that each way needs within the SLO. The relevant saving is relative to zero wait, which needs no tuning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import FULL
from carpool.forecasting.forecaster import Situation
from carpool.policy.durations import format_seconds
from carpool.policy.spec import BatchingPolicy, Objective
from carpool.tuning.objective import Aim
from carpool_cli.planning import assumptions, replica
from carpool_cli.planning.money import Price, written
from carpool_cli.planning.traces import lasts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool.policy.parameters import Parameters
    from carpool_cli.live.running import Running
    from carpool_cli.planning.replica import Replica

COUNTED = "as counted"
AS_IT_RUNS = "the pods that run"
ZERO_WAIT = "zero wait"
IN_FORCE = "in force now"
RETUNED = "Carpool, retuned"
"""The setting that ``Apply`` has on fewer or more replicas than now, where that is another one than now."""
BEST = "Carpool at best"

WINDOW = 60.0
"""Seconds of a trace that count as one load, about: the time it takes to start a replica."""


class Stretch(Struct, frozen=True):
    """A time of steady load, over all replicas."""

    seconds: float
    rate: float
    least: int = 1
    """Replicas that exist without any load; 0: the workload did not exist."""


class Counted(Struct, frozen=True):
    """The sidecars' counts, over all replicas."""

    device_seconds: float
    """Per hour: wall time with a batch in flight."""
    replicas: float
    """Serving replicas, on average."""
    most_replicas: int


class Way(Struct, frozen=True, kw_only=True, rename="camel"):
    """The needs of one way to batch."""

    name: str
    setting: str
    """At the mean load."""
    capacity: float
    """Requests per second that one replica serves within the SLO."""
    device_seconds: float
    """Per hour, over all replicas."""
    replicas: float
    """On average over the time."""
    most_replicas: int
    """Most at once. In a sum: each workload's own maximum, at whatever time."""
    money: float | None
    """Per month."""
    device_gain: float
    """Share of zero wait's device seconds that is saved; below 0: it takes more."""
    replicas_gain: float
    """Replicas saved relative to zero wait."""
    money_gain: float | None


class Workload(Struct, frozen=True, kw_only=True, rename="camel"):
    """One load on one kind of device."""

    name: str
    rate: float
    """Mean requests per second, over all replicas."""
    ways: list[Way]
    note: str
    """A summary of the figures, in a sentence."""
    beware: tuple[str, ...] = ()
    """What they leave out."""


def stretches(times: Sequence[float], mean: float | None = None) -> list[Stretch]:
    """Return the load of a trace (seconds, ascending from 0) by windows; ``mean``: scaled to this rate, at its pace.

    The windows are of equal length, as near to ``WINDOW`` as divides the trace: 119 s have two of 59.5 s.
    """
    end = lasts(times)
    count = max(round(end / WINDOW), 1)
    window = end / count
    counts = [0] * count
    for time in times:
        counts[int(time / window)] += 1
    factor = 1.0 if mean is None else mean * end / len(times)
    return [Stretch(window, factor * each / window) for each in counts]


def situation_of(found: Running) -> Situation:
    """Return the last load of a sidecar, and its measurements."""
    times = [at - found.arrivals[0][0] for at, _ in found.arrivals]
    rate = (len(times) - 1) / times[-1]
    return Situation(
        process=replace(assumptions.burstiness(times), rate=rate),
        service=found.service,
        target=found.policy.slo.due,
        budget=assumptions.budget(found.policy),
        limits=found.limits,
        rows=max(sum(rows for _, rows in found.arrivals) / len(found.arrivals), 1.0),
        quantiles=found.policy.slo.percentiles[:-1],
    )


def savings(
    name: str,
    situation: Situation,
    policy: BatchingPolicy,
    load: Sequence[Stretch],
    *,
    by_hand: Parameters | None = None,
    now: Parameters | None = None,
    retunes: bool = False,
    pods: int | None = None,
    counted: Counted | None = None,
    price: Price | None = None,
    beware: Sequence[str] = (),
) -> Workload:
    """Compare the ways to batch one load; ``now``: in force in a running sidecar, else what the policy chooses.

    ``retunes``: whether ``now`` would follow another load per replica. ``pods``: how many run with ``now``; they get a
    way of their own. ``counted``: counts that replace a forecast.
    ``beware``: what the forecasts leave out.

    Raises ``click.ClickException`` where ``by_hand`` waits for the SLO or longer, or nothing meets the SLO.
    """
    if by_hand is not None and by_hand.max_wait >= situation.target:
        raise click.ClickException(
            f"a wait of {by_hand.max_wait} set by hand is not below the SLO of {format_seconds(situation.target)}: "
            "every request that waits for it is late; lower --max-wait"
        )
    rates = {each.rate for each in load}
    aim = Aim.of(policy)
    ways: list[tuple[str, Replica]] = [
        ("no batching", replica.unbatched(situation, rates)),
        (ZERO_WAIT, replica.zero_wait(situation, rates)),
    ]
    if by_hand is not None:
        ways.append(("by hand", replica.fixed(situation, by_hand, rates)))
    if now is not None and retunes:
        ways.append((IN_FORCE, replica.tuned(situation, aim, policy.pass_through.mode, load=rates, now=now)))
    elif now is not None:
        ways.append((IN_FORCE, replica.fixed(situation, now, rates)))
    elif policy.objective is not Objective.EFFICIENCY:
        ways.append((f"Carpool, {policy.objective}", replica.tuned(situation, aim, load=rates)))
    ways.append((BEST, replica.tuned(situation, Aim(), load=rates)))
    zero = _way(ZERO_WAIT, ways[1][1], load, price, None)
    found = [_way(each, table, load, price, zero) for each, table in ways]
    if now is not None:
        found = [_retuned(way, now) if way.name == IN_FORCE else way for way in found]
    if now is not None and pods is not None:
        one, each_has = replica.fixed(situation, now, rates), _mean(load) / pods
        running = Counted(3600 * pods * one.utilization(each_has), pods, pods)
        found.insert(0, _gained(AS_IT_RUNS, now.describe(), one.capacity, running, price, zero))
        beware = [*beware, *_too_few(each_has, one.capacity)]
    if counted is not None:
        found.insert(0, _gained(COUNTED, "", 0.0, counted, price, zero))
    asked = [each for each in (by_hand, now) if each is not None and not (each is now and retunes)]
    beware = [*beware, *_beyond(situation), *(note for each in asked if (note := _unmeasured(situation, each)))]
    return Workload(name=name, rate=_mean(load), ways=found, note=_note(found[-1], zero), beware=tuple(beware))


def _retuned(way: Way, now: Parameters) -> Way:
    """Return what ``Apply`` makes of the setting in force, with the name of what it is there."""
    return way if way.setting == now.describe() else replace(way, name=RETUNED)


def _beyond(situation: Situation) -> Iterator[str]:
    rows = replica.unmeasured_beyond(situation)
    if rows is not None:
        yield f"batches above {rows} rows were not measured: requests/s and replicas count none, and may be better"


def _too_few(rate: float, capacity: float) -> Iterator[str]:
    if rate > capacity:
        yield (
            f"the pods that run are too few for the SLO: {rate:,.0f} requests/s each, and one serves {capacity:,.0f} "
            "within it"
        )


def _unmeasured(situation: Situation, parameters: Parameters) -> str:
    rows = replica.reliable(situation, parameters)
    if parameters.pass_through or rows == parameters.max_batch:
        return ""
    return (
        f"{parameters.describe()}: the device seconds are of batches of up to {rows} rows, twice the largest measured"
    )


def total(workloads: Sequence[Workload]) -> list[Way]:
    """Add up the ways that all workloads have; what is in force adds to what is retuned elsewhere."""
    sums = []
    every = [{way.name: way for way in one.ways} for one in workloads]
    if any(RETUNED in ways for ways in every):
        every = [{RETUNED if name == IN_FORCE else name: way for name, way in ways.items()} for ways in every]
    for name in (each for each in every[0] if all(each in ways for ways in every)):
        ways = [each[name] for each in every]
        zeros = [each[ZERO_WAIT] for each in every]
        device, of_zero = (sum(way.device_seconds for way in each) for each in (ways, zeros))
        moneys = [way.money for way in ways if way.money is not None]
        gains = [way.money_gain for way in ways if way.money_gain is not None]
        sums.append(
            Way(
                name=name,
                setting="",
                capacity=0.0,
                device_seconds=device,
                replicas=sum(way.replicas for way in ways),
                most_replicas=sum(way.most_replicas for way in ways),
                money=sum(moneys) if moneys else None,
                device_gain=1 - device / of_zero if of_zero else 0.0,
                replicas_gain=sum(way.replicas_gain for way in ways),
                money_gain=sum(gains) if gains else None,
            )
        )
    return sums


def _mean(load: Sequence[Stretch]) -> float:
    return sum(each.rate * each.seconds for each in load) / sum(each.seconds for each in load)


def _way(name: str, table: Replica, load: Sequence[Stretch], price: Price | None, zero: Way | None) -> Way:
    seconds = sum(each.seconds for each in load)
    counts = [replica.needed(each.rate, table.capacity, each.least) for each in load]
    busy = sum(
        each.seconds * count * table.utilization(each.rate / count)
        for each, count in zip(load, counts, strict=True)
        if count
    )
    mean = sum(count * each.seconds for each, count in zip(load, counts, strict=True)) / seconds
    spent = Counted(3600 * busy / seconds, mean, max(counts))
    return _gained(name, table.setting(_mean(load) / mean).describe(), table.capacity, spent, price, zero)


def _gained(name: str, setting: str, capacity: float, spent: Counted, price: Price | None, zero: Way | None) -> Way:
    device, money = spent.device_seconds, None if price is None else price.month(spent.replicas)
    return Way(
        name=name,
        setting=setting,
        capacity=capacity,
        device_seconds=device,
        replicas=spent.replicas,
        most_replicas=spent.most_replicas,
        money=money,
        device_gain=1 - device / zero.device_seconds if zero is not None and zero.device_seconds else 0.0,
        replicas_gain=zero.replicas - spent.replicas if zero is not None else 0.0,
        money_gain=zero.money - money if zero is not None and zero.money is not None and money is not None else None,
    )


def _note(best: Way, zero: Way) -> str:
    """Return the gain beyond zero wait; it may be ``nothing``."""
    if best.replicas_gain >= 0.05:
        money = "" if best.money_gain is None else f", {written(best.money_gain)} a month"
        return f"beyond zero wait it saves {best.replicas_gain:.1f} of {zero.replicas:.1f} replicas{money}"
    if best.device_gain >= 0.01:
        return (
            f"beyond zero wait it saves no replica, but {best.device_gain:.0%} of the device time that zero wait "
            "takes: worth it where other models run on the same device"
        )
    return "beyond zero wait it saves nothing at this load"


def table(workload: Workload | Sequence[Way]) -> list[tuple[str, ...]]:
    """Return rows for users, a header first; ``replicas`` are planned up to ``FULL`` of their capacity."""
    ways = workload.ways if isinstance(workload, Workload) else workload
    priced = any(way.money is not None for way in ways)
    head = ("", "requests/s a replica", "device s/h", "replicas", *(("a month",) if priced else ()), "beyond zero wait")
    rows = [head]
    for way in ways:
        if way.name == ZERO_WAIT:
            gain = "-"
        else:
            gain = f"{way.device_gain:+.0%} device, {way.replicas_gain:+.1f} replicas"
            gain += "" if way.money_gain is None else f", {way.money_gain:+,.2f}"
        rows.append(
            (
                f"{way.name}: {way.setting}" if way.setting else way.name,
                f"{way.capacity:,.0f}" if way.capacity else "",
                f"{way.device_seconds:,.0f}",
                f"{way.replicas:.1f}",
                *((written(way.money or 0.0),) if priced else ()),
                gain,
            )
        )
    return rows


PLANNED = f"replicas: up to {FULL:.0%} of what one serves within the SLO"
"""A line below a table."""

FOLLOWS = (
    "requests/s a replica: the most within the SLO; a setting that Carpool chose is for this load, and changes with it"
)
"""Another line: a batch of 3 rows that was chosen at 250/s does not serve the 1,500/s beside it."""
