"""One model of one target: its tuner, what all its pods run, whether its promise is kept, how it was served lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.batching.counters import ModelStats, combine
from carpool.exchange.decision import Observation
from carpool.policy.durations import Duration, whole_microseconds
from carpool.policy.spec import TuningMode
from carpool.tuning.exploration import batches_needed, below
from carpool.tuning.tuner import Tuner
from carpool_operator.api.status import Figures
from carpool_operator.tuning.promise import Promise

if TYPE_CHECKING:
    from carpool.exchange.decision import Decision, Forecasted
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy, Model
    from carpool_operator.tuning.evidence import Sum

SELDOM = 120.0
"""Seconds between refinements of a forecast while others wait for their decisions: 6 ms of CPU each, of a thousand."""

LATELY = 15.0
"""Seconds over which what is observed is shown; between this and twice as long."""


class Counted(NamedTuple):
    """What was counted over some time; seconds are the sum of all pods'."""

    stats: ModelStats
    seconds: float = 0.0
    busy: float = 0.0

    def plus(self, other: Counted) -> Counted:
        """Add what was counted over more time."""
        return Counted(combine([self.stats, other.stats]), self.seconds + other.seconds, self.busy + other.busy)


class Lately:
    """What was counted in the last ``LATELY`` seconds, and in as many before these."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._now = self._before = Counted(ModelStats())

    def add(self, now: float, total: Sum) -> None:
        """Add an interval."""
        if now - self._since >= LATELY:
            self._since = now
            self._now, self._before = Counted(ModelStats()), self._now
        self._now = self._now.plus(Counted(replace(total.stats, cells=[]), total.seconds, total.device_busy))

    def figures(self) -> Figures | None:
        """Return how requests were served; ``None`` without requests."""
        stats, seconds, busy = self._before.plus(self._now)
        ended = stats.hits + stats.missed
        if not ended or not seconds:
            return None
        return Figures(
            rate=_figure(stats.arrivals / seconds),
            p50=_time(stats.quantile(0.5)),
            p99=_time(stats.quantile(0.99)),
            miss_fraction=_figure(stats.missed / ended),
            goodput=_figure(stats.hits / seconds),
            utilization=_figure(busy / seconds),
        )


class Learned:
    """What the operator knows of one model behind one target."""

    def __init__(
        self, now: float, policy: BatchingPolicy, model: Model | None, parameters: Parameters, *, kept: bool | None
    ) -> None:
        self.tuner = Tuner(policy, model, parameters)
        self.parameters = self.tuner.parameters
        """On all pods but canaries."""
        self.generation = 0
        """That brought them; 0: not published yet."""
        self.promise = Promise(policy.slo.percentiles[-1][0], kept)
        self.seen_at = now
        self.decision: Decision | None = None
        self.decided = False
        """Whether what it runs was chosen: its name in a document says so, and first calls end with that."""
        self.replaced: set[str] = set()
        """UIDs of the pods that said that this became another model, since the last time that was believed."""
        self._led_to: Parameters | None = None
        """What first calls led to on most pods but canaries, when last seen."""
        self._policy = policy
        self._model = model
        self._refined_at = now
        self._lately = Lately(now)

    @property
    def in_force(self) -> Parameters:
        """What most pods run; it differs from ``parameters`` while nobody decides and first calls go on."""
        return self.tuner.parameters

    @property
    def rate(self) -> float:
        """Requests per second and replica, as the tuner believes."""
        return 0.0 if self.decision is None else self.decision.rate

    def follow(self, policy: BatchingPolicy, model: Model | None) -> None:
        """Go by another policy; what was learned of the model stays."""
        if (policy, model) == (self._policy, self._model):
            return
        if policy.slo != self._policy.slo:
            self.promise = Promise(policy.slo.percentiles[-1][0])
        self.tuner.adopt(self.parameters)  # what first calls led to was nobody's choice
        self._policy, self._model = policy, model
        self.tuner.follow(policy, model)
        self.parameters = self.tuner.parameters

    def forget(self) -> None:
        """Learn anew, from the present parameters: it is another model now."""
        self.tuner = Tuner(self._policy, self._model, self.parameters)
        self.replaced.clear()

    def adopt(self, parameters: Parameters) -> None:
        """Put others in force."""
        self.tuner.adopt(parameters)
        self.parameters = self.tuner.parameters

    def go_back(self, rejected: Parameters | None = None) -> None:
        """Go on from what all pods but canaries ran, after a trial that failed; ``rejected``: for what was tried.

        While nobody had decided, that is what first calls led to, and the baseline never ran.
        """
        ran = self.parameters if self.decided or self._led_to is None else self._led_to
        if rejected is None:
            self.tuner.adopt(ran)
        else:
            self.tuner.rejected(rejected, ran)
        self.parameters = self.tuner.parameters

    def has_measured(self, parameters: Parameters, beyond: int) -> bool:
        """Whether it is known what batches take under parameters that were explored: ones larger than ``beyond``."""
        service, most = self.tuner.belief.service, parameters.max_batch
        if service is None:
            return False
        if parameters.max_in_flight > self.parameters.max_in_flight:
            return service.largest_in_flight >= parameters.max_in_flight
        larger = zip(service.sizes, service.counts, strict=True) if service.counts else ()
        return sum(count for size, count in larger if beyond < size <= most) >= batches_needed(service)

    def measured_below(self, rows: int) -> int:
        """Return the largest size below ``rows`` that was measured well; 0: none."""
        service = self.tuner.belief.service
        return 0 if service is None else below(service, rows)

    def step(
        self, now: float, total: Sum, learned_from: ModelStats, *, canaries: int = 0, hurried: bool = False
    ) -> Decision:
        """Observe pods that run what is in force, and decide; service times may be of ``learned_from`` more.

        ``canaries``: how many pods try what is riskier, or is explored; 0: all. ``hurried``: others wait for their
        decisions. What only makes a forecast surer is done seldom then.
        """
        self.seen_at = now
        self._lately.add(now, total)
        self.promise.observe(now, total.stats.hits, total.stats.missed)
        if total.in_force is not None and self._policy.tuning.mode is not TuningMode.APPLY:
            self.tuner.adopt(total.in_force)
        self._led_to = total.in_force
        refine = not hurried or now - self._refined_at >= SELDOM
        if refine:
            self._refined_at = now
        self.decision = self.tuner.step(
            Observation(
                now=now,
                seconds=total.seconds,
                stats=replace(total.stats, cells=learned_from.cells),
                passing=total.passing,
                paused=total.paused,
                queued_rows=total.queued_rows,
                others_busy=total.others_busy,
                replicas=total.pods,
                explorers=canaries or total.pods,
            ),
            refine=refine,
        )
        # A change is chosen once it is put in force: canaries may have to try it first. To keep what is in force is no
        # choice while requests pass one by one, and no call has waited for another.
        kept = self.decision.decided and not self.decision.change and not total.passing
        self.decided = self.decided or kept
        return self.decision

    def observed(self) -> Figures | None:
        """Return how it was served lately; ``None`` without requests."""
        return self._lately.figures()


def predicted(forecast: Forecasted | None) -> Figures | None:
    """Write a forecast down as a status does."""
    if forecast is None:
        return None
    return Figures(
        p50=_time(forecast.p50),
        p99=_time(forecast.p99),
        miss_fraction=_figure(forecast.miss_fraction),
        goodput=_figure(forecast.goodput),
        mean_batch=_figure(forecast.mean_batch),
        device_time=_time(forecast.device_time),
        utilization=_figure(forecast.utilization),
    )


LONGEST = 99999 * 3600.0
"""Seconds beyond which a duration cannot be written: forecasts of an overload are infinite."""


def _figure(value: float) -> float:
    """Round to what a person reads: three digits."""
    return float(f"{value:.3g}")


def _time(seconds: float | None) -> Duration | None:
    if seconds is None or seconds > LONGEST:
        return None
    return Duration(whole_microseconds(float(f"{seconds:.3g}")))
