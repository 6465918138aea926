"""What was decided for one target in a pass, as events and the status report it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool_operator.tuning.learning import predicted

if TYPE_CHECKING:
    from collections.abc import Container

    from carpool.exchange.decision import Decision
    from carpool.policy.parameters import Parameters
    from carpool_operator.api.status import Figures
    from carpool_operator.tuning.learning import Learned

RECOMMEND_AGAIN = 60.0
"""Seconds between two recommendations, and without one after which the same is one again. The status drops it then."""


class Happening(NamedTuple):
    """A decision for one model of the target."""

    action: str
    """Applied, Recommended, Trying, Promoted, Measured, RolledBack, FellBack or Recovered."""
    model: str
    reason: str
    message: str
    parameters: Parameters | None = None
    """Parameters that are applied, stay, or are tried; ``None`` where the models differ."""
    observed: Figures | None = None
    predicted: Figures | None = None
    alternative: str = ""
    """Forecast for another objective."""
    generation: int = 0
    """Generation of its document; 0: there is none."""


class _Recommended(NamedTuple):
    parameters: Parameters
    at: float
    """When it was noted."""
    seen: float
    """When it was decided last."""


class Happenings:
    """Collects what happens in a pass; the generations are known once the documents are published."""

    def __init__(self) -> None:
        self._noted: list[Happening] = []
        self._recommended: dict[str, _Recommended] = {}
        """By model: the last recommendation."""

    def begin(self) -> None:
        """Begin a pass, with nothing noted."""
        self._noted = []

    def forget(self, models: Container[str]) -> None:
        """Forget what was recommended for other models than these: if one returns, that is an event again."""
        self._recommended = {name: each for name, each in self._recommended.items() if name in models}

    def note(
        self,
        action: str,
        model: str,
        reason: str,
        message: str,
        learned: Learned | None,
        decision: Decision | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        """Note a decision; without ``parameters``, it is about those of ``learned``."""
        if parameters is None and learned is not None:
            parameters = learned.parameters
        self._noted.append(
            Happening(
                action=action,
                model=model,
                reason=str(reason),
                message=message,
                parameters=parameters,
                observed=None if learned is None else learned.observed(),
                predicted=None if decision is None else predicted(decision.recommended or decision.predicted),
                alternative="" if decision is None else decision.alternative,
            )
        )

    def recommend(self, now: float, model: str, learned: Learned, decision: Decision) -> None:
        """Note a recommendation, if it is another one or was gone for a while, and not too soon after the last."""
        wanted, last = decision.parameters, self._recommended.get(model)
        if last is not None and last.parameters == wanted and now - last.seen < RECOMMEND_AGAIN:
            self._recommended[model] = last._replace(seen=now)
        elif last is None or now - last.at >= RECOMMEND_AGAIN:
            self._recommended[model] = _Recommended(wanted, now, now)
            self.note("Recommended", model, decision.reason, decision.message, learned, decision, wanted)

    def published(self, generation: int, tried: int) -> list[Happening]:
        """Return the pass's, with the generations of their documents; ``tried``: of the canaries' document."""
        return [each._replace(generation=tried if each.action == "Trying" else generation) for each in self._noted]
