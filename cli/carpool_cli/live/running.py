"""What a forecast needs from a running sidecar about one model: load, batch latency, policy and parameters."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.batching.counters import ModelStats
from carpool.learning.latency_model import LatencyLearner, ServiceTime
from carpool.policy.spec import BatchingPolicy, TuningMode
from carpool_cli.live.admin_client import AdminClient, AdminError, Explained
from carpool_cli.live.figures import duration, number
from carpool_cli.live.streams import only_streams
from carpool_cli.printable import printable

if TYPE_CHECKING:
    from carpool.exchange.report import Lane, Report, Stalls
    from carpool.policy.parameters import Limits, Parameters

LONG_AGO = 30.0
"""Seconds since the last request from which a note reports it: the tuner assumes no load then."""

NOTABLE = 0.01
"""Share of the requests, or of the device's time, from which a note reports that a forecast ignores it."""


class Running(NamedTuple):
    """One model behind one sidecar."""

    address: str
    model: str
    policy: BatchingPolicy
    limits: Limits
    """The policy's limits for this model, below batch sizes that failed."""
    largest_safe: int | None
    """Rows beyond which a batch failed for its size, if observed."""
    parameters: Parameters
    """The parameters in use."""
    service: ServiceTime
    arrivals: list[tuple[float, int]]
    """The last arrivals, oldest first: seconds of the sidecar's clock, and rows."""
    p50: float | None
    p99: float | None
    """Of all answers since the sidecar's start, in seconds, to 19 %."""
    stalls: Stalls
    """Pauses of its host."""
    decision: Explained | None
    """The last one."""
    notes: list[str]
    """What a forecast from all this can't include."""
    since_last: float = 0.0
    """Seconds since the last request."""
    retunes: bool = False
    """Whether a tuner, this one or the operator's, adjusts parameters to the load."""

    @property
    def stopped(self) -> bool:
        """Whether the load has ended: the parameters in use are then not for the load of ``arrivals``."""
        return self.since_last > LONG_AGO

    @property
    def name(self) -> str:
        """The model's name for users."""
        return printable(self.model) or "model"


def read(client: AdminClient, model: str | None) -> Running:
    """Query a sidecar about one model; its name is only needed if there are several.

    Raises ``AdminError`` with the fix.
    """
    report, policy, explained = client.report(arrivals=True), client.policy(), client.explanation()
    address = str(client.address)
    name = _chosen(report, model, client)
    lane, stats = report.lanes[name], report.stats.models[name]
    if not lane.arrivals:
        raise AdminError(
            f"{address} counted {number(stats.arrivals)} requests to {name or 'the model'} but does not say when they "
            "came: it is an older sidecar's, update it"
        )
    if lane.arrivals[-1][0] <= lane.arrivals[0][0]:
        raise AdminError(f"a single request to {name or 'the model'} is no load: send more, e.g. {_send(client)}")
    service = learned(stats, lane)
    if service is None:
        raise AdminError(
            f"batch latency of {name or 'the model'} is unknown: no batch was measured yet (the first of each size is "
            f"not); wait, or send requests, e.g. {_send(client)}"
        )
    limits, largest_safe, notes = _limits(report, name, policy)
    if service.executors >= service.largest_in_flight:
        most = service.largest_in_flight
        notes.append(
            f"no more than {most} in flight {'was' if most == 1 else 'were'} seen there: the forecast assumes that "
            "the device computes no more at once"
        )
        service = replace(service, largest_in_flight=service.executors + 1)
    decisions = [each for each in explained.decisions if each.model == name]
    return Running(
        address=address,
        model=name,
        policy=policy,
        limits=limits,
        largest_safe=largest_safe,
        parameters=lane.parameters,
        service=service,
        arrivals=lane.arrivals,
        p50=stats.quantile(0.5),
        p99=stats.quantile(0.99),
        stalls=report.stalls,
        decision=decisions[-1] if decisions else None,
        notes=[*notes, *_notes(report, name, service)],
        since_last=report.stats.at - lane.arrivals[-1][0],
        retunes=policy.tuning.mode is TuningMode.APPLY and (explained.tuned or bool(report.target)),
    )


def _send(client: AdminClient) -> str:
    """Return a command that sends requests to a sidecar."""
    return f"carpool bench {client.data_address()} --model NAME --rate 100"


def learned(stats: ModelStats, lane: Lane) -> ServiceTime | None:
    """Return the sidecar's estimate of batch latency, ``None`` if nothing was measured.

    The counters show which sizes were measured, how sure that is and how many are computed at once; they sum up all
    since the sidecar began. The sidecar's own tuner forgets what is old and leaves out pauses of the host, so that the
    level of each size and the spread of single batches are its.
    """
    learner = LatencyLearner()
    learner.observe(0.0, stats.samples())
    counted = learner.estimate()
    times = lane.service_seconds
    if counted is None or times is None:
        return counted
    end = len(times) - 1
    ratios = []
    for size, mean in zip(counted.sizes, counted.means, strict=True):
        # A request larger than a batch may be sent alone: beyond the table the level is that of its end.
        ratios.append(times[size] / mean if size <= end else times[end] / counted.time(end))
    first, last = counted.sizes[0], counted.sizes[-1]
    head, tail = counted.head_slope * ratios[0], counted.tail_slope * ratios[-1]
    if 1 < first <= end:
        head = (times[first] - times[1]) / (first - 1)
    if last < end:
        tail = (times[end] - times[last]) / (end - last)
    return replace(
        counted,
        means=_times(counted.means, ratios),
        lowers=_times(counted.lowers, ratios),
        uppers=_times(counted.uppers, ratios),
        head_slope=head,
        tail_slope=tail,
        tail_error=counted.tail_error * ratios[-1],
        noise=counted.noise if lane.service_noise is None else lane.service_noise,
    )


def _times(values: tuple[float, ...], ratios: list[float]) -> tuple[float, ...]:
    """Scale each, and keep them ascending: equal values, divided and multiplied again, may differ in the last digit."""
    return tuple(accumulate((value * ratio for value, ratio in zip(values, ratios, strict=True)), max))


def asked_for(report: Report) -> list[str]:
    """Return the models with requests."""
    return sorted(name for name in report.lanes if report.stats.models.get(name, ModelStats()).arrivals)


def _chosen(report: Report, model: str | None, client: AdminClient) -> str:
    """Return the name of the requested model, or of the only one with requests."""
    address = str(client.address)
    asked = asked_for(report)
    if not asked and only_streams(report):
        raise AdminError(
            f"{address} serves token streams, which their engine batches: what batching saves can't be forecast for "
            f"them. carpool explain {address} shows them; carpool simulate --generative forecasts a gate"
        )
    if not asked:
        others = sum(each.requests for each in report.forwarded if each.method == "POST")
        passed = f", but {number(others)} to other paths (carpool explain {address} names them)" if others else ""
        raise AdminError(
            f"no request that could be batched has come to {address} yet{passed}: send inference requests of V1 or V2, "
            f"e.g. {_send(client)}"
        )
    names = ", ".join(name or '""' for name in asked)
    if model is None:
        if len(asked) > 1:
            raise AdminError(f"{address} serves {len(asked)} models: name one with --model, of {names}")
        return asked[0]
    if model not in asked:
        raise AdminError(f"no request for a model {model!r} has come to {address}: there were some for {names}")
    return model


def _limits(report: Report, name: str, policy: BatchingPolicy) -> tuple[Limits, int | None, list[str]]:
    """Return the tuner's range, as far as batches are possible."""
    limits = policy.limits(next((each for each in policy.models if each.name == name), None))
    entries = [each for each in report.models if each.lane == name]
    ceiling = report.lanes[name].ceiling
    safe = None if ceiling is None else ceiling - 1
    largest = min(
        [limits.max_batch, *(each.max_batch for each in entries if each.max_batch), *([safe] if safe else [])]
    )
    notes = []
    if entries and not any(each.merges for each in entries):
        largest = 1
        notes.append(f"its requests are not merged ({entries[0].axis}): no configuration changes that")
    return replace(limits, max_batch=largest, min_batch=min(limits.min_batch, largest)), safe, notes


def _notes(report: Report, name: str, service: ServiceTime) -> list[str]:
    """Return notes on what was observed there and a forecast leaves out."""
    lane, stats = report.lanes[name], report.stats.models[name]
    notes = []
    ago = report.stats.at - lane.arrivals[-1][0]
    if ago > LONG_AGO:
        stepped = "; without requests it passes through since" if lane.parameters.pass_through else ""
        notes.append(f"the last request came {duration(ago)} ago: this is the load of that time{stepped}")
    alone = sum(each.requests for each in report.alone if each.model == name)
    if NOTABLE * stats.arrivals < alone:
        why = ", ".join(sorted({each.reason for each in report.alone if each.model == name}))
        notes.append(f"{alone / stats.arrivals:.0%} of its requests can't be merged ({why}); the forecast merges all")
    busy = {each: _busy(found) for each, found in report.stats.models.items()}
    others = sum(busy.values()) - busy[name]
    if others > NOTABLE * sum(busy.values()):
        notes.append(
            f"other models took {others / sum(busy.values()):.0%} of the batches' seconds there: the forecast gives "
            "this one all of the device"
        )
    if lane.replaced:
        notes.append(
            "the model was replaced since the sidecar began: the counts behind the latency model include all of them"
        )
    if lane.service_seconds is None:
        notes.append("its tuner reports no batch latency, so this is the mean since the sidecar began")
    if service.samples < 20:
        notes.append(f"batch latency is from {service.samples:.0f} batches only")
    return notes


def _busy(stats: ModelStats) -> float:
    return sum(busy for _, _, _, executors, _, busy, _ in stats.cells if not executors)
