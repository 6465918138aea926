"""Online search: configurations are tested on live traffic, one window each, and the best is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.counters import combine
from proof.rivals.settings import half_slo_batch, setting

if TYPE_CHECKING:
    from random import Random

    import optuna

    from carpool.batching.counters import Stats
    from carpool.simulation.outcome import Setting
    from carpool.simulation.simulator import Dispatcher
    from proof.world import Knowledge

TRIALS = 12
WINDOW = 10.0
"""Seconds that a configuration is tried for, at least."""

REQUESTS = 300
"""Requests that it is tried on, at least: three may miss."""

HOPELESS = 3 * 0.01 * REQUESTS
"""Misses at which a trial is given up: three times what all of its window may have."""

TOLERATED = 0.01
MOVED = 0.3
"""Change of the load, as a share, at which what was found is forgotten."""


class Point(NamedTuple):
    """A configuration."""

    batch: int
    wait: float
    in_flight: int


class Searcher(ABC):
    """Tries ``TRIALS`` points and keeps the best until the load has moved.

    The objective is device time per answer, in units of what a request alone takes; a point that misses more than one
    request in a hundred is worse than any that does not, and the worse the more it misses.

    In its favour: the first point tried is the half-SLO rule's, and after the load has moved the best so far; what a
    second's queue of the point before left behind is not counted; a hopeless point is given up before its window is
    over; the load has moved when two windows in a row say so.
    """

    interval = 1.0

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        first = setting(knowledge, half_slo_batch(knowledge), knowledge.slo / 2).parameters
        self._point = Point(first.max_batch, float(first.max_wait), first.max_in_flight)
        self._trials: list[tuple[float, Point]] = []
        self._begun: list[Stats] | None = None
        self._settling = False
        self._rate = 0.0
        """Requests per second of the window that the search began with; 0: not known yet."""
        self._moved = 0

    @abstractmethod
    def propose(self) -> Point:
        """Return what to try next."""

    @abstractmethod
    def learn(self, value: float) -> None:
        """Take in what the point proposed last came to, or the one begun with; less is better."""

    @abstractmethod
    def begin(self, point: Point) -> None:
        """Forget what was taken in, and begin with a point."""

    def start(self) -> Setting:
        """Return the first point's setting."""
        self.begin(self._point)
        return self._setting()

    def dispatcher(self) -> Dispatcher | None:
        """Run on Carpool's Batcher."""
        return None

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Judge the point under trial when its window is over, and go on to the next."""
        if self._begun is None or self._settling:
            self._begun, self._settling = stats, False
            return None
        begun = self._begun
        since = [after.since(before) for after, before in zip(stats, begun, strict=True)]
        counted = combine([part.models[""] for part in since if "" in part.models])
        seconds = now - begun[0].at
        over = seconds >= WINDOW and counted.arrivals >= REQUESTS
        searching = len(self._trials) < TRIALS
        if not over and not (searching and counted.missed >= HOPELESS):
            return None
        self._begun = stats
        if over and self._load_moved(counted.arrivals / seconds):
            self._point = self._best()
            self._trials.clear()
            self.begin(self._point)
            self._settling = True
            return [self._setting()]
        if not searching:
            return None
        busy = sum(part.device_busy for part in since)
        value = self._value(counted.hits, counted.missed, counted.served, busy)
        self._trials.append((value, self._point))
        self.learn(value)
        self._point = self.propose() if len(self._trials) < TRIALS else self._best()
        self._settling = True
        return [self._setting()]

    def _value(self, hits: int, missed: int, served: int, busy: float) -> float:
        misses = missed / (hits + missed)
        if misses > TOLERATED or not served:
            return 1 + misses
        # Alone, a request costs what a batch of one takes: nothing within the SLO is worth more than that.
        return min(busy / served / self._knowledge.service.time(1), 1.0)

    def _load_moved(self, rate: float) -> bool:
        if not self._rate:
            self._rate = rate
        self._moved = self._moved + 1 if abs(rate / self._rate - 1) > MOVED else 0
        if self._moved < 2:
            return False
        self._rate, self._moved = rate, 0
        return True

    def _best(self) -> Point:
        return min(self._trials)[1] if self._trials else self._point

    def _setting(self) -> Setting:
        return setting(self._knowledge, self._point.batch, self._point.wait, in_flight=self._point.in_flight)


class RandomSearch(Searcher):
    """Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 2012: independent points.

    Sizes evenly by their logarithm, waits and batches in flight evenly.
    """

    def __init__(self, knowledge: Knowledge, rng: Random) -> None:
        super().__init__(knowledge)
        self._rng = rng

    def propose(self) -> Point:
        """Draw a point."""
        limits, rng = self._knowledge.limits, self._rng
        low, high = log(limits.min_batch), log(limits.max_batch + 1)
        return Point(
            batch=min(int(exp(rng.uniform(low, high))), limits.max_batch),
            wait=rng.uniform(limits.min_wait, limits.max_wait),
            in_flight=rng.randint(limits.min_in_flight, limits.max_in_flight),
        )

    def learn(self, value: float) -> None:
        """Nothing is learned from one for the next."""

    def begin(self, point: Point) -> None:
        """Nothing was learned."""


class TreeParzen(Searcher):
    """Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011: TPE, by Optuna's ``TPESampler``.

    In its favour: of ten random points to begin with, its default, only five, since there are ``TRIALS`` in all.
    """

    def __init__(self, knowledge: Knowledge, rng: Random) -> None:
        super().__init__(knowledge)
        self._rng = rng
        self._study: optuna.Study
        self._trial: optuna.Trial

    def propose(self) -> Point:
        """Ask the sampler."""
        limits = self._knowledge.limits
        trial = self._trial = self._study.ask()
        return Point(
            batch=trial.suggest_int("batch", limits.min_batch, limits.max_batch, log=True),
            wait=trial.suggest_float("wait", limits.min_wait, limits.max_wait),
            in_flight=trial.suggest_int("in_flight", limits.min_in_flight, limits.max_in_flight),
        )

    def learn(self, value: float) -> None:
        """Report the value to the sampler."""
        self._study.tell(self._trial, value)

    def begin(self, point: Point) -> None:
        """Begin another study."""
        import optuna  # noqa: PLC0415 - takes a second, and only this rival needs it

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=self._rng.getrandbits(32), n_startup_trials=5)
        self._study = optuna.create_study(sampler=sampler)
        self._study.enqueue_trial(point._asdict())
        self.propose()


def random_search(knowledge: Knowledge, rng: Random) -> RandomSearch:
    """Independent points."""
    return RandomSearch(knowledge, rng)


def tpe(knowledge: Knowledge, rng: Random) -> TreeParzen:
    """Optuna's TPE."""
    return TreeParzen(knowledge, rng)
