"""The models of one target that are tuned: found in traffic or in another operator's work, and forgotten."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING

from carpool_operator.delivery.documents import EVERY
from carpool_operator.tuning.learning import Learned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool.exchange.change import Change
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy
    from carpool_operator.api.status import TargetModel
    from carpool_operator.tuning.evidence import Evidence, Gathered

OTHER = "<other>"
"""Name under which a sidecar counts models beyond those it distinguishes: not a model, so not tuned."""

MOST_MODELS = 64
"""Models of a target that are tuned: callers choose the names. Models beyond that use the parameters of ``*``."""

FORGOTTEN_AFTER = 600.0
"""Seconds after which a model that no pod reports any more is forgotten."""


class Models(UserDict[str, Learned]):
    """What is known of each model, by its name. Those that a document does not name share the parameters of ``*``."""

    def __init__(self) -> None:
        super().__init__()
        self.every_since = 0
        """Generation that introduced the parameters of models that are not named."""
        self.restored: Change | None = None
        """What another operator published last."""
        self._recalled: dict[str, int] = {}
        """Models in a status, and the generations that introduced their parameters."""
        self._replaced: dict[str, set[str]] = {}
        """By model: UIDs of the pods that reported a replaced model, since it was last learned anew."""

    def restore(self, change: Change) -> None:
        """Continue from the ConfigMap's content."""
        self.restored, self.every_since = change, change.generation

    def recall(self, models: Iterable[TargetModel]) -> None:
        """Continue with the models of a status: documents don't name those that use the parameters of all."""
        self._recalled = {model.name: model.generation for model in models}

    @property
    def are_named(self) -> bool:
        """Whether documents name all models, because the parameters of each were chosen."""
        return bool(self) and all(learned.decided for learned in self.values())

    def named(self, every: Parameters) -> dict[str, Parameters]:
        """Return the parameters of the models that a document has to name; ``every``: those of all others."""
        chosen = {name: each.parameters for name, each in self.items() if each.decided or each.parameters != every}
        return {EVERY: every, **chosen}

    def meet(
        self, now: float, policy: BatchingPolicy, name: str, met: bool | None, parameters: Parameters | None = None
    ) -> Learned:
        """Begin to tune a model, with what the policy starts it with if it has no ``parameters`` yet."""
        known = next((model for model in policy.models if model.name == name), None)
        learned = self[name] = Learned(now, policy, known, parameters or policy.start(known), met=met)
        return learned

    def follow(self, now: float, policy: BatchingPolicy, met: bool | None, evidence: Evidence) -> list[str]:
        """Use the policy; returns the names of models whose parameters it moved.

        ``met``: the SLO's last reported state, for models that another operator tuned.
        """
        if self.restored is not None and not evidence.heard and not self:
            restored = self.restored.parameters
            for name in {**restored, **self._recalled}:
                generation = self._recalled.get(name, self.restored.generation)
                if name == EVERY:
                    self.every_since = generation
                else:
                    learned = self.meet(now, policy, name, met, restored.get(name, restored.get(EVERY)))
                    learned.generation, learned.decided = generation, name in restored
        # By the pods' readings, not by the clock: while no pod exists or can be read, nothing is forgotten.
        newest = evidence.newest
        for name in [name for name, each in self.items() if newest - each.seen_at > FORGOTTEN_AFTER]:
            del self[name]
            self._replaced.pop(name, None)
        known = {model.name: model for model in policy.models}
        moved = []
        for name, learned in self.items():
            before = learned.parameters
            learned.follow(policy, known.get(name))
            if learned.parameters != before:
                moved.append(name)
        return moved

    def learn_anew(self) -> None:
        """Learn all models anew: the pods are from another template."""
        self._replaced.clear()
        for learned in self.values():
            learned.forget()

    def learn_replaced(self, gathered: Gathered, pods: Iterable[str]) -> None:
        """Learn a model anew once most pods report that it was replaced; one restarted model server is not enough.

        ``pods``: UIDs of all pods.
        """
        there = set(pods)
        for uid, name in gathered.replaced:
            learned = self.get(name)
            if learned is not None:
                reporting = self._replaced.setdefault(name, set())
                reporting.add(uid)
                if 2 * len(reporting & there) > gathered.expected:
                    learned.forget()
                    del self._replaced[name]

    def published(self, before: Change | None, change: Change) -> None:
        """Record the generations that introduced parameters; ``change`` is published now, after ``before``."""
        if before is None or before.parameters.get(EVERY) != change.parameters.get(EVERY):
            self.every_since = change.generation
        for name, learned in self.items():
            if before is not None and before.parameters.get(name, before.parameters.get(EVERY)) != learned.parameters:
                learned.generation = change.generation
            learned.generation = learned.generation or self.every_since
