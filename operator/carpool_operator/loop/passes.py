"""The leader's loop: read the state, decide, do what is missing, repeat.

It goes by state, not by events. The next pass sees what a missed event would have reported, and repeats a failed write.
So it may be killed between any two writes, and events may arrive twice or not at all.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool_operator.api.spec import PLURAL, MetricsSource
from carpool_operator.cluster.annotated_policies import AnnotatedPolicies, drop, keep
from carpool_operator.cluster.kinds import POLICIES
from carpool_operator.delivery.publishing import config_map
from carpool_operator.loop.actions import Actions, Releasing
from carpool_operator.loop.parts import Parts, Tasks
from carpool_operator.loop.scene import Scene, look
from carpool_operator.reporting.events import LASTING, About
from carpool_operator.tuning.assignment import assign, select
from carpool_operator.workloads.metadata import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_operator.api.model import Event, Outcome, Policy, Target, View
    from carpool_operator.cluster.annotated_policies import Keep
    from carpool_operator.controller import Controller

AT_ONCE = 16
"""Policies whose pods are read at a time: the pods' reports stay in memory until the decision."""

PATIENCE = 30.0
"""Seconds that a pass waits for its last policies; slower ones are left out of the next passes."""

BUDGET = 10.0
"""CPU seconds after which a pass starts no more policies; the next pass begins with those left out. Searching a
thousand models for the first time takes a minute: no other policy should wait for that."""

RESTS, HURRIES = 2.0, 1.1
"""Least duration of a pass, as a multiple of its CPU seconds: half a core, and nearly a whole one while policies are
left out."""


@dataclass
class _Held:
    """One policy's controller and its state between passes."""

    uid: str
    controller: Controller
    begun: float = -inf
    """When it was last evaluated."""
    targets: frozenset[Target] = frozenset()
    """Targets whose published configuration it has restored."""
    decided: tuple[object, ...] = ()
    acknowledged: int = 0
    missed: int = 0


class Budget:
    """The CPU seconds of a pass, and whether they sufficed for all policies."""

    def __init__(self) -> None:
        self.left_out = False
        """Whether the pass had no time for some policies."""
        self.hurried = False
        """Whether the pass before had none."""
        self._spent_at = inf

    def begin(self, cpu: float) -> None:
        """Begin a pass; ``cpu``: CPU seconds of this process until now."""
        self._spent_at, self.hurried, self.left_out = cpu + BUDGET, self.left_out, False

    def is_spent(self, cpu: float) -> bool:
        """Whether there is no time for another policy, which is left out then."""
        self.left_out |= cpu > self._spent_at
        return cpu > self._spent_at


class Loop:
    """Passes over all policies."""

    def __init__(self, parts: Parts) -> None:
        self.progress = parts.clock()
        """Time of the last decision, or when none was waited for: only decisions have no timeout of their own."""
        self._undecided = 0
        self._p = parts
        self._budget = Budget()
        self.tasks = Tasks(parts)
        self._annotated = AnnotatedPolicies(parts.defaults)
        self._actions = Actions(parts)
        self._releasing = Releasing(parts, self.tasks)
        self._held: dict[Key, _Held] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, interval: float) -> None:
        """Run passes until cancelled, ``interval`` seconds apart, or as far apart that they take half a core.

        While policies are left out, as when many are learned at once, they take nearly a whole core.
        """
        clock, spent = self._p.clock, self._p.cpu
        while True:
            begun, cpu = clock(), spent()
            await self.once()
            lasted = clock() - begun
            # Evaluated again: tasks that a pass left running go on, and count.
            while (left := apart(interval, spent() - cpu, left_out=self._budget.left_out) - (clock() - begun)) > 0:  # noqa: ASYNC110 - CPU time has no event
                await asyncio.sleep(left)
            self._p.metrics.observe("pass_seconds", lasted)
            self._p.metrics.count("pass_cpu_seconds", by=spent() - cpu)

    async def once(self) -> None:
        """Make one pass."""
        p = self._p
        self._budget.begin(p.cpu())
        if not self._undecided:
            self.progress = p.clock()
        # 1. Policies for annotated workloads
        pods = p.fleet.pods_by_target()
        selected = select(p.fleet.policies, p.fleet.workloads(), pods)
        by_hand = assign((each for each in p.fleet.policies if not each.annotated), selected)
        plan = self._annotated.plan(
            p.fleet.workloads(), p.fleet.policies, p.fleet.namespaces, by_hand, p.fleet.coverage.lists_workloads
        )
        for wish in plan.keep:
            self.tasks.start(("policy", wish.workload.target), self._keep(wish))
        for policy in plan.drop:
            self.tasks.start(("policy", policy.uid), self._drop(policy))
        for workload, event in plan.events:
            p.recorder.record(About.of(workload), event, p.wall(), LASTING)
        # 2. The owner of each workload, and objects without an owner
        policies = {Key(each.namespace, each.name): each for each in p.fleet.policies}
        events: dict[Target, list[Event]] = {}
        for workload, event in plan.events:
            events.setdefault(workload.target, []).append(event)
        owners = assign(policies.values(), selected)
        owned: dict[str, list[Target]] = {}
        for target, owner in owners.items():
            owned.setdefault(owner.uid, []).append(target)
        scene = Scene(owners, owned, selected, pods, len(p.fleet.pods), events, p.fleet.autoscalers())
        self._forget(policies, scene)
        self._releasing.start(policies.values(), scene)
        # 3. Every policy, those that waited longest first
        waiting_since = {key: held.begun for key, held in self._held.items()}
        order = sorted(policies, key=lambda key: waiting_since.get(key, -inf))
        tasks = [self.tasks.start(key, self._policy(key, policies[key], scene)) for key in order]
        tasks.append(self.tasks.start("events", p.recorder.flush(p.wall())))
        waiting = [task for task in tasks if task is not None]
        await asyncio.wait(waiting, timeout=PATIENCE) if waiting else None
        p.metrics.set("pods_acknowledged", sum(each.acknowledged for each in self._held.values()))
        p.metrics.set("pods_missed", sum(each.missed for each in self._held.values()))

    def _forget(self, policies: Mapping[Key, Policy], scene: Scene) -> None:
        """Forget everything that is not there any more."""
        p = self._p
        uids = {policy.uid for policy in policies.values()}
        pods = {pod.uid for pod in p.fleet.pods}
        self._held = {key: held for key, held in self._held.items() if held.uid in uids}
        self._actions.forget(uids, scene.owners, pods)
        p.sources.forget(pods, uids)
        p.inspector.forget(set(scene.owners))
        wanted = {config_map(target) for target in scene.owners}
        # A policy whose targets can't be read claims nothing, but its published configuration stays. So does one of a
        # namespace that can't be read.
        unread = {policy.uid for policy in policies.values() if not self._knows_targets(policy)}
        for key in p.maps.keys():  # noqa: SIM118 - no mapping
            known = p.fleet.coverage.is_listed(POLICIES, key.namespace) and p.maps.owner(key) not in unread
            if key not in wanted and known:
                removed = p.write(("configmap", key), "configmaps", partial(p.maps.remove, key))
                self.tasks.start(("configmap", key), removed)
        p.backoff.rest(p.clock())

    def _knows_targets(self, policy: Policy) -> bool:
        """Whether all targets of a policy are known: it can be read, and the kind that it selects can be listed."""
        if policy.spec is None:
            return False
        selector = policy.spec.target_selector
        return selector is None or self._p.fleet.coverage.lists_workloads(str(selector.kind), policy.namespace)

    async def _keep(self, wish: Keep) -> None:
        async def write() -> None:
            self._annotated.kept(wish, self._p.fleet.took(await keep(self._p.writer, wish)).policy())

        await self._p.write(("policy", wish.workload.target), PLURAL, write)

    async def _drop(self, policy: Policy) -> None:
        key, there = Key(policy.namespace, policy.name), self._p.fleet.policies
        if await self._p.write(("policy", policy.uid), PLURAL, lambda: drop(self._p.writer, policy)):
            now = there.get(key)
            if now is not None and now.uid == policy.uid:
                there.drop(key, there.version(key))

    async def _policy(self, key: Key, policy: Policy, scene: Scene) -> None:
        """Read, decide and act, for one policy."""
        # Prometheus' answers are cached anyway, and a server that hangs delays no other policy.
        asks = policy.spec is not None and policy.spec.metrics.source is MetricsSource.PROMETHEUS
        async with nullcontext() if asks else self._slots:
            if self.tasks.ending or self._budget.is_spent(self._p.cpu()):
                return
            targets = scene.owned.get(policy.uid, ())
            held = self._begin(key, policy, frozenset(targets))
            view = await look(self._p, policy, scene, self._actions.refused)
            if self.tasks.ending:
                return
            pods = view.pods
            outcome = await self._decided(held, replace(view, hurried=self._budget.hurried))
            del view  # the readings
        await self._actions.do(policy, held.controller, outcome, targets, pods)

    def _begin(self, key: Key, policy: Policy, targets: frozenset[Target]) -> _Held:
        """Return a policy's state, with the published configurations of targets that are new."""
        p = self._p
        held = self._held.get(key)
        if held is None or held.uid != policy.uid:
            held = self._held[key] = _Held(policy.uid, p.controller())
        held.begun = p.clock()
        for target in targets - held.targets:
            change = p.maps.change(target, p.wall())
            if change is not None:
                held.controller.restore(target, change)
        held.targets = targets
        return held

    async def _decided(self, held: _Held, view: View) -> Outcome:
        """Let the controller decide, in the one thread for decisions."""
        self._undecided += 1
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._p.steps, held.controller.step, view)
        finally:
            self._undecided -= 1
            self.progress = self._p.clock()
        self._counted(held, outcome)
        return outcome

    def _counted(self, held: _Held, outcome: Outcome) -> None:
        last = outcome.status.get("lastDecision") or {}
        decided = (last.get("action"), last.get("reason"), last.get("at"))
        if last and decided != held.decided:
            self._p.metrics.count("decisions", decided[0], decided[1])
        held.decided = decided
        held.acknowledged = sum(each.get("acknowledged", 0) for each in outcome.status.get("targets", ()))
        held.missed = sum(len(each.get("missed", ())) for each in outcome.status.get("targets", ()))


def apart(interval: float, cpu: float, *, left_out: bool) -> float:
    """Return the seconds between the starts of two passes, from the CPU seconds that the first took."""
    return max(interval, (HURRIES if left_out else RESTS) * cpu)
