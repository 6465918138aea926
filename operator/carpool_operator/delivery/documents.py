"""The numbered documents that a target's sidecars should run: when to publish, renew and resend them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from carpool.exchange.change import Change
from carpool.policy.spec import BatchingPolicy, PassThrough, PassThroughMode, Tuning, TuningMode
from carpool_operator.api.model import Document, Target

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from carpool.policy.parameters import Parameters
    from carpool_operator.api.model import Pod, Policy

VALID = 7 * 86400.0
"""Seconds that a document is valid; it is signed anew after half of them, so that the steady state writes nothing."""

FIRST_REPEAT = 10.0
LAST_REPEAT = 300.0
"""Seconds after which a document is resent to a pod that is behind; doubled each time, up to the latter."""

RECLAIM = 60.0
"""Seconds between documents that are published only because pods run something newer."""

EVERY = "*"
"""In a document's parameters: every model that is not named."""


class LastReading(Protocol):
    """The last good reading of a pod."""

    generation: int
    at: float
    """Seconds of the operator's clock."""


def sidecar_policy(policy: BatchingPolicy) -> BatchingPolicy:
    """Return the part of a policy that sidecars need: the SLO, but not how the fleet is tuned to meet it.

    Its modes are included: Hold ends first calls, and so does a mode without pass-through, before a model is named.
    """
    return BatchingPolicy(
        slo=policy.slo,
        objective=policy.objective,
        target_utilization_percent=policy.target_utilization_percent,
        device_share_percent=policy.device_share_percent,
        models=policy.models,
        bounds=policy.bounds,
        tuning=Tuning(mode=policy.tuning.mode),
        pass_through=policy.pass_through,
        # Sidecars report the baseline's forecast beside the best. The parameters in use are in the document's
        # parameters.
        baseline=policy.baseline,
        admission=policy.admission,
    )


class Upgrade:
    """What sidecars get of a policy over an upgrade of the operator, which must change nothing that runs.

    First calls go on under documents without modes. passThrough: Never would end them, at one call at a time; in older
    sidecars Hold would, too. So Never is left out until all models are named, Hold until all sidecars are current.
    Editing the policy includes both at once.
    """

    def __init__(self, restored: Change | None = None) -> None:
        self._restored = restored
        """The ConfigMap's content, until it was compared with the policy."""
        self._unsaid: int | None = None
        """Generation of the policy whose modes an older operator's documents lack, while the documents continue to
        leave them out."""

    def part(
        self, wanted: BatchingPolicy, policy: Policy, change: Change | None, pods: Sequence[Pod], *, named: bool
    ) -> BatchingPolicy:
        """Return the part of the ``wanted`` policy that sidecars get.

        ``change``: what is published. ``named``: whether it names all models.
        """
        part, generation = sidecar_policy(wanted), policy.generation
        before, self._restored = self._restored, None
        unedited = policy.status.get("observedGeneration") == generation
        if before is not None and unedited and _leaves_unsaid(before.policy, part):
            self._unsaid = generation
        if named or self._unsaid != generation:
            self._unsaid = None
            return part
        of_today = bool(pods) and all(pod.current for pod in pods)
        said = change is not None and change.policy is not None and change.policy.tuning == part.tuning
        return _without_modes(part, hold=not (of_today or said))


def _without_modes(policy: BatchingPolicy, *, hold: bool) -> BatchingPolicy:
    """Return the policy without modes that may end first calls; ``hold``: whether Hold ends them in these sidecars."""
    tuning, passing = policy.tuning, policy.pass_through
    return replace(
        policy,
        tuning=Tuning() if hold and tuning.mode is TuningMode.HOLD else tuning,
        pass_through=PassThrough() if passing.mode is PassThroughMode.NEVER else passing,
    )


def _leaves_unsaid(said: BatchingPolicy | None, policy: BatchingPolicy) -> bool:
    """Whether a document's policy equals this one except for modes that it lacks.

    Operators before decision 52 wrote such documents, and so did later ones that continued from them.
    """
    bare = replace(policy, tuning=Tuning(), pass_through=PassThrough())
    return (
        said is not None
        and said != policy
        and replace(said, tuning=Tuning(), pass_through=PassThrough()) == bare
        and said.tuning in {bare.tuning, policy.tuning}
        and said.pass_through in {bare.pass_through, policy.pass_through}
    )


class Publisher:
    """Numbers a target's documents, and tracks the pods that do not have them.

    A generation is the time in whole milliseconds since the epoch, but always greater than any seen before. So
    documents of a deleted and recreated workload are older than its new ones, and no counter has to be stored.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.keys: tuple[str, ...] = ()
        """Public keys that sidecars should accept from now on; empty: those that they have."""
        self.change: Change | None = None
        """For all pods; what the ConfigMap holds."""
        self.trial: Change | None = None
        """For canaries."""
        self.changed_at = 0.0
        """When either was last published, on the operator's clock."""
        self._newest = 0
        self.owed = False
        """Whether one for all pods is needed even without new content: some run something else."""
        self._reclaimed_at: float | None = None
        self._repeats: dict[str, tuple[int, float, float]] = {}
        """By pod UID: the generation it should have, when the document is sent again, and how long that delay is."""

    def restore(self, change: Change) -> None:
        """Continue from the ConfigMap's content; that alone publishes nothing."""
        self.change = change
        self._newest = max(self._newest, change.generation)

    def notice(self, generation: int) -> None:
        """Record a generation that a pod has: the next one is greater."""
        self._newest = max(self._newest, generation)

    def is_due(self, now: float, wall: float) -> bool:
        """Whether a document is needed even without new parameters.

        Reasons: it is owed, half of its time is over, the accepted keys changed, or pods run something newer. The last
        are canaries of a dead operator, or pods of a ConfigMap that was restored to an old state.
        """
        change = self.change
        if change is None:
            return False
        if wall >= change.expires - VALID / 2 or change.keys != self.keys:
            return True
        known = max(change.generation, self.trial.generation if self.trial is not None else 0)
        if self._newest <= known or (self._reclaimed_at is not None and now - self._reclaimed_at < RECLAIM):
            return self.owed
        self._reclaimed_at = now
        return True

    def says(self, policy: BatchingPolicy, parameters: Mapping[str, Parameters], named: Collection[str] = ()) -> bool:
        """Whether the published document already has this; a model that is not ``named`` may use those of all."""
        change = self.change
        if change is None or change.policy != policy or EVERY not in change.parameters:
            return False
        rest = change.parameters[EVERY]
        return change.parameters.keys() >= set(named) and all(
            change.parameters.get(name, rest) == wanted for name, wanted in parameters.items()
        )

    def publish(
        self, now: float, wall: float, policy: BatchingPolicy, parameters: Mapping[str, Parameters]
    ) -> Document:
        """Make the document for all pods; it ends any trial."""
        self.trial, self.owed = None, False
        self.change = self._make(now, wall, policy, parameters)
        return Document(self._target, self.change, None)

    def publish_trial(
        self,
        now: float,
        wall: float,
        policy: BatchingPolicy,
        parameters: Mapping[str, Parameters],
        pods: Collection[str],
    ) -> Document:
        """Make a document for some pods, newer than the one for all."""
        self.trial = self._make(now, wall, policy, parameters)
        return Document(self._target, self.trial, tuple(sorted(pods)))

    def _make(self, now: float, wall: float, policy: BatchingPolicy, parameters: Mapping[str, Parameters]) -> Change:
        self._newest = max(self._newest + 1, int(wall * 1000))
        self.changed_at = now
        self._repeats.clear()
        return Change(
            target=str(self._target),
            generation=self._newest,
            expires=wall + VALID,
            policy=policy,
            parameters=dict(parameters),
            keys=self.keys,
        )

    def wanted(self, uid: str, canaries: Collection[str]) -> Change | None:
        """Return the change that a pod should run."""
        return self.trial if self.trial is not None and uid in canaries else self.change

    def repeats(self, now: float, seen: Mapping[str, LastReading], canaries: Collection[str]) -> list[Document]:
        """Return the documents to resend to pods that are known to be behind."""
        behind: dict[bool, list[str]] = {}
        repeats = {}
        for uid, pod in seen.items():
            wanted = self.wanted(uid, canaries)
            if wanted is None or pod.generation >= wanted.generation or pod.at < self.changed_at:
                continue
            _, at, delay = self._repeats.get(uid, (0, self.changed_at + FIRST_REPEAT, FIRST_REPEAT))
            if now >= at and pod.at > at - delay:
                behind.setdefault(wanted is self.trial, []).append(uid)
                delay = min(2 * delay, LAST_REPEAT)
                at = now + delay
            repeats[uid] = (wanted.generation, at, delay)
        self._repeats = repeats
        changes = {True: self.trial, False: self.change}
        return [
            Document(self._target, change, tuple(sorted(uids)))
            for is_trial, uids in behind.items()
            if (change := changes[is_trial]) is not None
        ]
