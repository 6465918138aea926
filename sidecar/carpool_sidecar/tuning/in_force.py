"""Puts parameters in force: those of the configuration, of decisions, and the earlier ones after a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.config.settings import EVERY_MODEL
from carpool_sidecar.tuning.rollback import Rollback

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable

    from carpool.batching.batcher import Batcher
    from carpool.batching.requests import Action
    from carpool.policy.parameters import Parameters
    from carpool_sidecar.config.settings import SidecarConfig


class ParametersInForce:
    """Sets the Batcher's parameters. Those that an operator sends are on probation.

    ``do`` executes the Batcher's actions.
    """

    def __init__(
        self, batcher: Batcher, do: Callable[[Iterable[Action]], None], clock: Callable[[], float], log: logging.Logger
    ) -> None:
        self.rollback = Rollback(batcher, self.put, log)
        self._batcher = batcher
        self._do = do
        self._clock = clock
        self._led_to: dict[str, Parameters] = {}
        """By model: the parameters in force when an operator's decision ended its first calls."""

    def put(self, model: str, parameters: Parameters) -> None:
        """Replace a model's parameters; its first calls end."""
        self._do(self._batcher.configure(parameters, self._clock(), model=model))

    def apply(self, config: SidecarConfig, *, keep: bool = False) -> None:
        """Set every model's parameters: fixed ones, the initial ones, or (``keep``) its own within new limits."""
        batcher, now = self._batcher, self._clock()
        states = {state.name: state for state in batcher.models()}
        running = {name: state.parameters for name, state in states.items()}
        first = {name: state.in_force for name, state in states.items() if state.first_calls is not None}
        models = {model.name: model for model in config.policy.models}
        self._do(batcher.configure(config.parameters_of(EVERY_MODEL), now, undecided=config.undecided))
        for name in {*running, *models, *config.parameters} - {EVERY_MODEL}:
            parameters, limits = config.parameters_of(name), config.policy.limits(models.get(name))
            if keep and name in running:
                parameters = limits.clamp(running[name])
            # An operator names a model once it has decided on it.
            undecided = 0 if name in config.parameters else min(config.undecided, limits.max_in_flight)
            if undecided and name in self._led_to and name not in first:
                # A model that it no longer names returns to what was in force: the baseline never was.
                parameters, undecided = limits.clamp(self._led_to[name]), 0
            parameters = self.rollback.allowed(name, parameters)
            self._do(batcher.configure(parameters, now, model=name, undecided=undecided))
        ended = {name: ran for name, ran in first.items() if states[name].first_calls is None}
        self._led_to |= ended if config.target else {}

    def forget(self, model: str | None = None) -> None:
        """Forget which parameters were good for a model, or for all: it or its server was replaced."""
        self.rollback.forget(model)
        self._led_to = {} if model is None else {name: ran for name, ran in self._led_to.items() if name != model}
