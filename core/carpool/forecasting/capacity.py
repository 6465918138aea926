"""The capacity of one replica within the SLO, and how many replicas a load needs.

Capacity is a rate, not a utilization. A device that is 98 % busy at 1,200 requests/s without waiting carries 2,200 in
larger batches, so its utilization shows nothing that an autoscaler could use. The load as a share of the capacity grows
with the load, has no upper end, and adds up over replicas and over the models behind one sidecar.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.forecast import TOGETHER
from carpool.forecasting.forecaster import DECIDES, Forecaster, Situation
from carpool.learning.arrivals import Poisson
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


EXACT = 0.01
"""Relative width of the interval at which the search for the capacity ends."""

SIZES = 2
"""Sizes compared: those with most rows per second, if two batches fit into the SLO, all larger ones, one request's."""

SAMPLES = 4
"""Most samples of arrivals played when misses are near the SLO's limit."""

WAITS = (0.0, 1 / 4, 1 / 2)
"""Waits compared, as shares of the longest allowed."""

FULL = 0.9
"""Share of the capacity up to which replicas are planned: 10 % are left for a rise while another replica starts."""


class Capacity(Struct, frozen=True, rename="camel"):
    """Capacity of one replica for one model that has the whole device. Requests per second."""

    rate: float
    """The highest rate at which no more requests miss the SLO than it allows; late ones are refused."""
    lower: float
    """The same at the upper confidence of batch latency."""
    parameters: Parameters
    """The setting with that rate."""
    zero_wait: float = 0.0
    """The highest rate with batching but without a wait: the gain of batching without tuning the wait."""
    alone: float = 0.0
    """The highest rate without batching."""
    by_hand: float = 0.0
    """The highest rate with a setting chosen by hand; 0: there is none."""


def replicas(load: float, full: float = FULL) -> int:
    """Return how many replicas serve ``load`` (in capacities of one) if each is used up to a share ``full``."""
    return max(math.ceil(load / full - 1e-9), 0)


def capacity(situation: Situation, settings: Sequence[Parameters], by_hand: Parameters | None = None) -> Capacity:
    """Search the setting with the highest rate, independent of the present rate. ``by_hand`` is only reported.

    The first setting is searched by bisection. Each further one is played once, at the best rate so far; searched only
    if it meets the SLO there: some 20 forecasts in all, 30 with several batches in flight.
    """
    service, usual = situation.service, situation.usual_rows
    most = max(service.capacity(each.max_batch, each.max_in_flight) for each in settings) / situation.rows
    # The number of arrivals is chosen for the highest rate, and is enough for lower ones.
    process = replace(situation.process, rate=most)
    forecaster = Forecaster(replace(situation, process=process), parts=0 if isinstance(process, Poisson) else SAMPLES)
    best, found = _search(forecaster, settings)
    unheld = [replace(each, max_wait=Duration(situation.limits.min_wait)) for each in settings]
    without = found if best in unheld else _search(forecaster, dict.fromkeys(unheld))[1]
    alone = _highest(forecaster, replace(best, max_batch=usual, max_wait=Duration(situation.limits.min_wait)), 0.0, 1.0)
    lower = found if _holds(forecaster, best, found, upper=True) else _highest(forecaster, best, 0.0, found, upper=True)
    hand = 0.0 if by_hand is None else found if by_hand == best else _highest(forecaster, by_hand, 0.0, 1.0)
    return Capacity(found * most, lower * most, best, without * most, alone * most, hand * most)


def _search(forecaster: Forecaster, settings: Iterable[Parameters]) -> tuple[Parameters, float]:
    """Return the setting that serves most, and the share of the forecaster's load that it serves."""
    best, *others = settings
    found = _highest(forecaster, best, 0.0, 1.0)
    for setting in others:
        if found + EXACT <= 1 and _holds(forecaster, setting, found + EXACT):
            best, found = setting, _highest(forecaster, setting, found + EXACT, 1.0)
    return best, found


def candidates(situation: Situation, sizes: Sequence[int], flights: int) -> list[Parameters]:
    """List the settings of ``sizes``, ascending, that may serve most, those that carry most in full batches first.

    With one batch in flight no wait adds to the capacity: requests that come during a batch form the next one.
    """
    # Larger batches than were measured may carry more, and replicas are not taken away on a guess.
    service, limits, target = situation.service, situation.limits, situation.target
    measured = min(max(service.largest_measured, sizes[0]), sizes[-1])
    sizes = [*(size for size in sizes if size < measured), measured]
    waits = limits.waits(WAITS if flights > 1 else WAITS[:1])
    # A request may have to wait for the batch before its own. If both take about the SLO, only playing it decides.
    able = [size for size in sizes if 2 * service.time(size) <= target] or [min(sizes)]
    best = sorted(able, key=lambda size: -service.capacity(size, flights))[:SIZES]
    slower = [size for size in sizes if size > max(able) and service.time(size) <= target]
    single = max(min(situation.usual_rows, limits.max_batch), sizes[0])  # without batching, and no request is cut
    return [Parameters(size, wait, flights) for size in dict.fromkeys((*best, *slower, single)) for wait in waits]


def _highest(forecaster: Forecaster, setting: Parameters, low: float, high: float, *, upper: bool = False) -> float:
    """Return the highest factor on the load, from ``low``, which the SLO allows, to ``high``."""
    while high - low > EXACT * max(low, EXACT):
        middle = (low + high) / 2
        low, high = (middle, high) if _holds(forecaster, setting, middle, upper=upper) else (low, middle)
    return low


def _holds(forecaster: Forecaster, setting: Parameters, factor: float, *, upper: bool = False) -> bool:
    """Whether the SLO is met at ``factor`` times the load, where late requests are refused."""
    situation = forecaster.situation
    if factor <= 0:
        return True
    setting, allowed = forecaster.effective(setting), 2 * situation.budget
    if factor * forecaster.load_share(setting, upper=upper) > 1:
        return False  # an SLO of many seconds allows a backlog that outlasts the forecast
    misses, samples, doubt = 0.0, 0, 0.0
    # The parts of a long run have the exact rate only together.
    while samples < SAMPLES and (samples < max(forecaster.parts, 1) or abs(misses / samples - allowed) < doubt):
        found = forecaster.forecast(setting, factor, sample=samples, shed=True, upper=upper)
        if any(getattr(found, PERCENTILES[q]) > seconds for q, seconds in situation.quantiles):
            return False
        misses, samples = misses + found.miss_fraction, samples + 1
        together = TOGETHER * max(situation.process.dispersion, 1.0)
        doubt = DECIDES * math.sqrt(allowed * together / (samples * forecaster.requests))
    forecaster.rest()
    return misses <= samples * allowed
