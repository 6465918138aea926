"""The safety rule for parameters from outside: those that miss the SLO are rolled back."""

from __future__ import annotations

from collections import Counter
from time import time
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.counters import FAILED
from carpool.exchange.report import RolledBack
from carpool.tuning.guards import TOO_LATE
from carpool_sidecar.models import OTHER
from carpool_sidecar.tuning.probation import Probation

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.batching.batcher import Batcher
    from carpool.batching.model_state import ModelState
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy


class _Counted(NamedTuple):
    """The counters of a model that show whether its parameters are good."""

    rows: int
    hits: int
    late: int
    failed: int

    @classmethod
    def of(cls, state: ModelState) -> _Counted:
        counters = state.counters
        misses = counters.misses
        late = sum(misses.get(reason, 0) for reason in TOO_LATE)
        return cls(counters.rows, counters.hits, late, misses.get(FAILED, 0))


class _Watched(NamedTuple):
    state: ModelState
    probation: Probation
    before: _Counted


class Rollback:
    """Every model's probation. ``go_back`` is called with a model and its previous parameters."""

    def __init__(self, batcher: Batcher, go_back: Callable[[str, Parameters], None], log: logging.Logger) -> None:
        self.rolled_back: dict[str, RolledBack] = {}
        """By model, for as long as changes name the parameters that were rolled back."""
        self.counts: Counter[str] = Counter()
        """Roll-backs by model."""
        self._batcher = batcher
        self._go_back = go_back
        self._log = log
        self._policy: BatchingPolicy | None = None
        self._generation = 0
        self._watched: dict[str, _Watched] = {}
        self._at = 0.0

    @property
    def running(self) -> int:
        """The oldest change still partly in force."""
        return min([self._generation, *(each.back_to_generation for each in self.rolled_back.values())])

    def begin(self, policy: BatchingPolicy, generation: int) -> None:
        """Put a change that is about to be applied on probation.

        Under another policy no parameters are known to be good: the SLO, or the rest of the policy, has changed.
        """
        if policy != self._policy:
            self.end()
        self._policy, self._generation = policy, generation
        for state, probation, _ in self._watched.values():
            if state.first_calls is not None:
                probation.lead_to(state.in_force)

    def end(self) -> None:
        """End the probation: parameters are the file's, or this sidecar tunes itself."""
        self._policy = None
        self._watched = {}
        self.rolled_back = {}

    def allowed(self, model: str, parameters: Parameters) -> Parameters:
        """Return a model's parameters for a change that names ``parameters``: not those that were rolled back."""
        known = self.rolled_back.get(model)
        if known is None:
            return parameters
        if known.rejected == parameters:
            return known.back_to
        del self.rolled_back[model]
        return parameters

    def applied(self, now: float) -> None:
        """Note that the change was applied: later counts are about it."""
        for name, (state, probation, _) in self._watched.items():
            if name not in self.rolled_back:
                probation.change(state.in_force, self._generation)
            self._watched[name] = _Watched(state, probation, _Counted.of(state))
        self._at = now

    def forget(self, model: str | None = None) -> None:
        """Forget the good parameters of a model, or of all: it or its server was replaced."""
        for name, watched in self._watched.items():
            if model in {None, name}:
                watched.probation.forget()

    def observe(self, now: float, *, stalled: bool) -> None:
        """Judge the counts since the last time, unless the host was ``stalled``; roll back if necessary."""
        seconds, self._at = now - self._at, now
        if self._policy is None:
            return
        watched = {}
        for state in self._batcher.models():
            if state.name == OTHER:
                continue
            counted = _Counted.of(state)
            known = self._watched.get(state.name)
            if known is None or known.state is not state:
                quantile, _ = self._policy.slo.percentiles[-1]
                watched[state.name] = _Watched(state, Probation(quantile, state.in_force, self._generation), counted)
                continue
            watched[state.name] = known._replace(before=counted)
            if stalled:
                continue
            verdict = known.probation.observe(
                seconds, *(after - before for after, before in zip(counted, known.before, strict=True))
            )
            if verdict is None:
                continue
            self.counts[state.name] += 1
            self.rolled_back[state.name] = RolledBack(model=state.name, at=time(), **verdict._asdict())
            self._log.warning(
                "parameters undone",
                extra={
                    "model": state.name,
                    "generation": verdict.generation,
                    "rejected": verdict.rejected.describe(),
                    "back_to": verdict.back_to.describe(),
                    "detail": verdict.reason,
                },
            )
            self._go_back(state.name, verdict.back_to)
        self._watched = watched
