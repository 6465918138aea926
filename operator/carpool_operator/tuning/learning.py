"""One model of one target: its tuner, its parameters, whether its SLO is met, and its recent figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.batching.counters import ModelStats, combine
from carpool.exchange.decision import Observation
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.spec import TuningMode
from carpool.tuning.exploration import batches_needed, below
from carpool.tuning.tuner import Tuner
from carpool_operator.api.status import Figures, duration, figure
from carpool_operator.tuning.slo_status import SloStatus

if TYPE_CHECKING:
    from carpool.exchange.decision import Decision, Forecasted
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy, Model
    from carpool_operator.tuning.evidence import Sum

SELDOM = 120.0
"""Seconds between refinements of a forecast while other decisions wait: each takes 6 ms of CPU, for each of a thousand
models."""

LATELY = 15.0
"""Seconds over which observed figures are taken; between this and twice as long."""


class Counted(NamedTuple):
    """Counts over some time; seconds are the sum of all pods'."""

    stats: ModelStats
    seconds: float = 0.0
    busy: float = 0.0

    def plus(self, other: Counted) -> Counted:
        """Add counts of more time."""
        return Counted(combine([self.stats, other.stats]), self.seconds + other.seconds, self.busy + other.busy)


class Lately:
    """Counts of the last ``LATELY`` seconds, and of as many before these."""

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
            rate=figure(stats.arrivals / seconds),
            p50=duration(stats.quantile(0.5)),
            p99=duration(stats.quantile(0.99)),
            miss_fraction=figure(stats.missed / ended),
            goodput=figure(stats.hits / seconds),
            utilization=figure(busy / seconds),
        )


class Learned:
    """The operator's knowledge of one model of one target."""

    def __init__(
        self, now: float, policy: BatchingPolicy, model: Model | None, parameters: Parameters, *, met: bool | None
    ) -> None:
        self.tuner = Tuner(policy, model, parameters)
        self.parameters = self.tuner.parameters
        """Used by all pods except canaries."""
        self.generation = 0
        """Generation that introduced them; 0: not published yet."""
        self.slo_status = SloStatus(policy.slo.percentiles[-1][0], met)
        self.seen_at = now
        self.decision: Decision | None = None
        self.decided = False
        """Whether its parameters were chosen: then a document names the model, and that ends first calls."""
        self._led_to: Parameters | None = None
        """Parameters that first calls led to on most pods except canaries, as last read."""
        self._policy = policy
        self._model = model
        self._refined_at = now
        self._lately = Lately(now)

    @property
    def in_force(self) -> Parameters:
        """Parameters of most pods; they differ from ``parameters`` while nothing is decided and first calls go on."""
        return self.tuner.parameters

    @property
    def rate(self) -> float:
        """Requests per second and replica, as the tuner estimates them."""
        return 0.0 if self.decision is None else self.decision.rate

    def follow(self, policy: BatchingPolicy, model: Model | None) -> None:
        """Use another policy; what was learned of the model stays."""
        if (policy, model) == (self._policy, self._model):
            return
        if policy.slo != self._policy.slo:
            self.slo_status = SloStatus(policy.slo.percentiles[-1][0])
        self.tuner.adopt(self.parameters)  # the result of first calls was not a decision
        self._policy, self._model = policy, model
        self.tuner.follow(policy, model)
        self.parameters = self.tuner.parameters

    def forget(self) -> None:
        """Learn anew, from the present parameters, because the model was replaced."""
        self.tuner = Tuner(self._policy, self._model, self.parameters)

    def adopt(self, parameters: Parameters) -> None:
        """Set the parameters."""
        self.tuner.adopt(parameters)
        self.parameters = self.tuner.parameters

    def go_back(self, rejected: Parameters | None = None) -> None:
        """Continue from what all pods except canaries ran, after a failed trial of ``rejected``, if that is at fault.

        Before the first decision, that is the result of first calls; the baseline never ran.
        """
        ran = self.parameters if self.decided or self._led_to is None else self._led_to
        if rejected is None:
            self.tuner.adopt(ran)
        else:
            self.tuner.rejected(rejected, ran)
        self.parameters = self.tuner.parameters

    def has_measured(self, parameters: Parameters, beyond: int) -> bool:
        """Whether the latency of batches under explored parameters is known: batches larger than ``beyond``."""
        service, most = self.tuner.belief.service, parameters.max_batch
        if service is None:
            return False
        if parameters.max_in_flight > self.parameters.max_in_flight:
            return service.largest_in_flight >= parameters.max_in_flight
        larger = zip(service.sizes, service.counts, strict=True) if service.counts else ()
        return sum(count for size, count in larger if beyond < size <= most) >= batches_needed(service)

    def measured_below(self, rows: int) -> int:
        """Return the largest well measured size below ``rows``; 0: none."""
        service = self.tuner.belief.service
        return 0 if service is None else below(service, rows)

    def step(
        self,
        now: float,
        total: Sum,
        learned_from: ModelStats,
        *,
        canaries: int = 0,
        hurried: bool = False,
        is_judged: bool = True,
    ) -> Decision:
        """Observe pods that run the present parameters, and decide; ``learned_from`` may have more service times.

        ``canaries``: how many pods run riskier parameters, or explore; 0: all. ``hurried``: other decisions wait. Then
        forecasts are refined less often. ``is_judged``: whether the sidecars counted misses by the present SLO.
        """
        self.seen_at = now
        self._lately.add(now, total)
        if is_judged:
            self.slo_status.observe(now, total.stats.hits, total.stats.missed)
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
                paused=total.paused,
                queued_rows=total.queued_rows,
                others=total.others,
                replicas=total.pods,
                explorers=canaries or total.pods,
            ),
            refine=refine,
        )
        # A change counts as chosen once it is applied, because canaries may have to try it first. Keeping the
        # parameters is not a choice while requests pass through one by one, and no call has waited for another.
        kept = self.decision.decided and not self.decision.change and not total.passing
        self.decided = self.decided or kept
        return self.decision

    @property
    def too_slow_alone(self) -> Duration | None:
        """How long one request alone takes, if that is longer than the SLO; ``None``: it is not, or unknown."""
        current = self.tuner.plan.assess(self.parameters)
        if current is None or not (situation := current.situation).is_out_of_reach:
            return None
        # Two digits: a status changes with this text.
        return Duration(whole_microseconds(float(f"{situation.alone:.2g}")))

    def observed(self) -> Figures | None:
        """Return the recent figures; ``None`` without requests."""
        return self._lately.figures()


def alone_too_slow(alone: Duration) -> str:
    """Return why no number of replicas meets an SLO; ``alone``: how long one request takes."""
    return f"one request alone takes {format_seconds(alone)}, longer than the SLO"


def predicted(forecast: Forecasted | None) -> Figures | None:
    """Convert a forecast to a status's figures."""
    if forecast is None:
        return None
    return Figures(
        p50=duration(forecast.p50),
        p99=duration(forecast.p99),
        miss_fraction=figure(forecast.miss_fraction),
        goodput=figure(forecast.goodput),
        mean_batch=figure(forecast.mean_batch),
        device_time=duration(forecast.device_time),
        utilization=figure(forecast.utilization),
    )
