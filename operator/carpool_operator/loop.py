"""The leader's loop: read the state, decide, do what is missing, repeat.

It goes by state, not by events. The next pass sees what a missed event would have reported, and repeats a failed write.
So it may be killed between any two writes, and events may arrive twice or not at all.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool_operator.api.model import Event, View
from carpool_operator.api.spec import API_VERSION, KIND, PLURAL, MetricsSource
from carpool_operator.cluster.annotated_policies import AnnotatedPolicies, drop, keep
from carpool_operator.cluster.autoscalers import followed
from carpool_operator.cluster.fleet import KINDS, POLICIES
from carpool_operator.cluster.kube import MERGE, ApiError, path_of
from carpool_operator.cluster.merge_patch import difference, without_nulls
from carpool_operator.cluster.writing import NotLeading
from carpool_operator.delivery.publishing import Published, config_map
from carpool_operator.delivery.releases import Releases, is_standby, release
from carpool_operator.reporting.conditions import asks
from carpool_operator.reporting.events import LASTING, About
from carpool_operator.tuning.assignment import assign, select, targets_of
from carpool_operator.tuning.engines import watches_engines
from carpool_operator.workloads.metadata import Key
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import Any

    from carpool.exchange.change import Change
    from carpool.generation.observed import Counters
    from carpool_operator.api.model import Document, Missed, Outcome, Pod, Policy, Target, Workload
    from carpool_operator.cluster.annotated_policies import Keep
    from carpool_operator.cluster.autoscalers import Autoscaler
    from carpool_operator.cluster.fleet import Fleet
    from carpool_operator.cluster.objects import RawPolicy
    from carpool_operator.cluster.writing import Backoff, Writer
    from carpool_operator.controller import Controller
    from carpool_operator.delivery.publishing import ConfigMaps, Pusher
    from carpool_operator.delivery.signing import Signer
    from carpool_operator.reporting.events import Recorder
    from carpool_operator.reporting.inspection import Inspector
    from carpool_operator.reporting.metrics import Metrics
    from carpool_operator.tuning.sources.choice import Sources

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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The loop's dependencies."""

    controller: Callable[[], Controller]
    """Creates the controller of a policy."""
    fleet: Fleet
    writer: Writer
    signer: Signer
    maps: ConfigMaps
    sources: Sources
    pusher: Pusher
    recorder: Recorder
    inspector: Inspector
    metrics: Metrics
    backoff: Backoff
    steps: Executor
    """One thread, so that decisions delay neither the lease nor the probes."""
    clock: Callable[[], float]
    wall: Callable[[], float]
    cpu: Callable[[], float]
    """CPU seconds of this process."""
    log: logging.Logger
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Default annotations of workloads, for the whole cluster."""


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
    unwritable: tuple[Any, Any] | None = None
    """The wanted status and the server's version of it: an older CRD drops fields that it doesn't know."""
    acknowledged: int = 0
    missed: int = 0


@dataclass(frozen=True)
class _Scene:
    """The cluster at the beginning of a pass."""

    owners: Mapping[Target, Policy]
    owned: Mapping[str, Sequence[Target]]
    """By UID of the policy that they belong to."""
    selected: Mapping[str, Sequence[Target]]
    """By UID of the policy that selects them."""
    pods: Mapping[Target, Sequence[Pod]]
    fleet: int
    workload_events: Mapping[Target, Sequence[Event]]
    """Events about annotations, by their workload."""
    autoscalers: Mapping[Target, Autoscaler]
    """Autoscalers that follow the load of workloads."""


class Loop:
    """Passes over all policies."""

    def __init__(self, parts: Parts) -> None:
        self.progress = parts.clock()
        """Time of the last decision, or when none was waited for: only decisions have no timeout of their own."""
        self._undecided = 0
        self._spent_at = inf
        """CPU seconds at which the pass has spent its budget."""
        self._left_out = self._hurried = False
        """Whether the pass had no time for some policies, and whether the pass before had none."""
        self._p = parts
        self._annotated = AnnotatedPolicies(parts.defaults)
        self._held: dict[Key, _Held] = {}
        self._busy: dict[Hashable, asyncio.Task[None]] = {}
        self._signed: dict[Target, tuple[Change, str, str, str]] = {}
        self._refused: dict[str, str] = {}
        self._releases = Releases()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._ending = False

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
            while (left := apart(interval, spent() - cpu, left_out=self._left_out) - (clock() - begun)) > 0:  # noqa: ASYNC110 - CPU time has no event
                await asyncio.sleep(left)
            self._p.metrics.observe("pass_seconds", lasted)
            self._p.metrics.count("pass_cpu_seconds", by=spent() - cpu)

    async def end(self, within: float) -> None:
        """Start nothing more, and wait for running writes, up to ``within`` seconds."""
        self._ending = True
        if self._busy:
            _, late = await asyncio.wait(self._busy.values(), timeout=within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def once(self) -> None:
        """Make one pass."""
        p = self._p
        self._spent_at, self._hurried, self._left_out = p.cpu() + BUDGET, self._left_out, False
        if not self._undecided:
            self.progress = p.clock()
        # 1. Policies for annotated workloads
        pods = p.fleet.pods_by_target()
        selected = select(p.fleet.policies, p.fleet.workloads(), pods)
        by_hand = assign((each for each in p.fleet.policies if not each.annotated), selected)
        plan = self._annotated.plan(
            p.fleet.workloads(), p.fleet.policies, p.fleet.namespaces, by_hand, p.fleet.lists_workloads
        )
        for wish in plan.keep:
            self._start(("policy", wish.workload.target), self._keep(wish))
        for policy in plan.drop:
            self._start(("policy", policy.uid), self._drop(policy))
        for workload, event in plan.events:
            p.recorder.record(_about(workload), event, p.wall(), LASTING)
        # 2. The owner of each workload, and objects without an owner
        policies = {Key(each.namespace, each.name): each for each in p.fleet.policies}
        events: dict[Target, list[Event]] = {}
        for workload, event in plan.events:
            events.setdefault(workload.target, []).append(event)
        owners = assign(policies.values(), selected)
        owned: dict[str, list[Target]] = {}
        for target, owner in owners.items():
            owned.setdefault(owner.uid, []).append(target)
        scene = _Scene(owners, owned, selected, pods, len(p.fleet.pods), events, p.fleet.autoscalers())
        self._forget(policies, scene)
        self._release_due(policies, scene)
        # 3. Every policy, those that waited longest first
        waiting_since = {key: held.begun for key, held in self._held.items()}
        order = sorted(policies, key=lambda key: waiting_since.get(key, -inf))
        tasks = [self._start(key, self._policy(key, policies[key], scene)) for key in order]
        tasks.append(self._start("events", p.recorder.flush(p.wall())))
        waiting = [task for task in tasks if task is not None]
        await asyncio.wait(waiting, timeout=PATIENCE) if waiting else None
        p.metrics.set("pods_acknowledged", sum(each.acknowledged for each in self._held.values()))
        p.metrics.set("pods_missed", sum(each.missed for each in self._held.values()))

    def _start(self, key: Hashable, work: Any) -> asyncio.Task[None] | None:  # noqa: ANN401 - a coroutine
        """Start a task, unless the same one is still running."""
        if key in self._busy:
            work.close()
            return None
        task: asyncio.Task[None] = asyncio.create_task(self._guarded(key, work))
        self._busy[key] = task
        return task

    async def _guarded(self, key: Hashable, work: Awaitable[None]) -> None:
        try:
            await work
        except NotLeading:
            pass
        except Exception:
            # An error skips one policy in this pass; the operator goes on.
            self._p.metrics.count("step_errors")
            self._p.log.exception("an error; the next pass tries again", extra={"of": key})
        finally:
            del self._busy[key]

    def _forget(self, policies: Mapping[Key, Policy], scene: _Scene) -> None:
        """Forget everything that is not there any more."""
        p = self._p
        uids = {policy.uid for policy in policies.values()}
        pods = {pod.uid for pod in p.fleet.pods}
        self._held = {key: held for key, held in self._held.items() if held.uid in uids}
        self._signed = {target: each for target, each in self._signed.items() if target in scene.owners}
        self._refused = {uid: each for uid, each in self._refused.items() if uid in pods}
        p.sources.forget(pods, uids)
        p.inspector.forget(set(scene.owners))
        wanted = {config_map(target) for target in scene.owners}
        # A policy whose targets can't be read claims nothing, but its published configuration stays. So does one of a
        # namespace that can't be read.
        unread = {policy.uid for policy in policies.values() if not self._knows_targets(policy)}
        for key in p.maps.keys():  # noqa: SIM118 - no mapping
            known = p.fleet.is_listed(POLICIES, key.namespace) and p.maps.owner(key) not in unread
            if key not in wanted and known:
                self._start(("configmap", key), self._remove(key))
        p.backoff.rest(p.clock())

    def _knows_targets(self, policy: Policy) -> bool:
        """Whether all targets of a policy are known: it can be read, and the kind that it selects can be listed."""
        if policy.spec is None:
            return False
        selector = policy.spec.target_selector
        return selector is None or self._p.fleet.lists_workloads(str(selector.kind), policy.namespace)

    def _release_due(self, policies: Mapping[Key, Policy], scene: _Scene) -> None:
        """Begin to release pods whose policy is gone: each may take seconds to answer, so only some per pass."""
        now, backoff = self._p.clock(), self._p.backoff
        unread = {policy.namespace for policy in policies.values() if policy.spec is None}
        # A workload may be missing only because its kind can't be listed: then a selector selects nothing.
        known = {target: pods for target, pods in scene.pods.items() if self._p.fleet.workload(target) is not None}
        there = {*self._p.maps.keys()}
        published = [target for target in known if target not in scene.owners and config_map(target) in there]
        due = self._releases.due(now, known, scene.owners.keys(), unread, published)
        self._releases.forget(
            lambda target: target not in scene.owners and target not in scene.pods and config_map(target) not in there
        )
        for pod in [pod for pod in due if backoff.ready(("release", pod.uid), now)][:AT_ONCE]:
            self._start(("release", pod.uid), self._release(pod))

    async def _release(self, pod: Pod) -> None:
        """Return a pod without a policy to the state before it had one, unless it is in it."""
        p, target, key = self._p, pod.target, ("release", pod.uid)
        reading = await p.sources.directly(pod)
        if reading.report is not None and is_standby(reading.report):
            self._releases.done(pod.uid, p.clock())
            return
        if self._ending or not self._releases.is_without(target):
            return
        if reading.report is None and not self._releases.had(target):
            p.backoff.failed(key, p.clock())  # it may be starting, and never have had a policy: nothing to report
            return
        error, workload = reading.error, p.fleet.workload(target)
        if reading.report is not None:
            p.writer.check()
            change = release(target, reading.report.generation, p.wall(), p.signer.announced)
            error = await p.pusher.push(pod, *p.signer.sign(change))
            p.metrics.count("pushes", "refused" if error else "taken")
        if error:
            p.backoff.failed(key, p.clock())
            p.log.warning("a pod whose policy is gone can't be released", extra={"pod": pod.name, "error": error})
        else:
            p.backoff.succeeded(key)
            self._releases.done(pod.uid, p.clock())
        if workload is not None:
            p.recorder.record(_about(workload), _released(workload, done=not error), p.wall(), LASTING)

    async def _write(self, key: Hashable, resource: str, work: Callable[[], Awaitable[object]]) -> bool:
        """Write something unless it failed too recently; returns whether it was written."""
        p = self._p
        if not p.backoff.ready(key, p.clock()):
            return False
        try:
            await work()
        except ApiError as error:
            p.backoff.failed(key, p.clock(), error.retry_after)
            # 409: others wrote meanwhile; their version arrives by the watch.
            report = p.log.info if error.status == 409 else p.log.warning
            report("a write failed", extra={"of": key, "status": error.status, "error": str(error)})
            return False
        p.backoff.succeeded(key)
        p.metrics.count("writes", resource)
        return True

    async def _keep(self, wish: Keep) -> None:
        async def write() -> None:
            self._annotated.kept(wish, self._took(await keep(self._p.writer, wish)).policy())

        await self._write(("policy", wish.workload.target), PLURAL, write)

    async def _drop(self, policy: Policy) -> None:
        key, there = Key(policy.namespace, policy.name), self._p.fleet.policies
        if await self._write(("policy", policy.uid), PLURAL, lambda: drop(self._p.writer, policy)):
            now = there.get(key)
            if now is not None and now.uid == policy.uid:
                there.drop(key, there.version(key))

    async def _remove(self, key: Key) -> None:
        await self._write(("configmap", key), "configmaps", lambda: self._p.maps.remove(key))

    def _took(self, body: bytes) -> RawPolicy:
        """Store a policy as the server returned it; its event comes later."""
        raw: RawPolicy = KINDS[POLICIES].kept.one.decode(body)
        self._p.fleet.seen(POLICIES, raw.metadata.key, raw.metadata.version, raw.policy())
        return raw

    async def _policy(self, key: Key, policy: Policy, scene: _Scene) -> None:
        """Read, decide and act, for one policy."""
        p = self._p
        # Prometheus' answers are cached anyway, and a server that hangs delays no other policy.
        asks = policy.spec is not None and policy.spec.metrics.source is MetricsSource.PROMETHEUS
        async with nullcontext() if asks else self._slots:
            if self._ending or p.cpu() > self._spent_at:
                self._left_out = True
                return
            # 1. Its targets
            targets = scene.owned.get(policy.uid, ())
            held = self._held.get(key)
            if held is None or held.uid != policy.uid:
                held = self._held[key] = _Held(policy.uid, p.controller())
            held.begun = p.clock()
            for target in set(targets) - held.targets:
                change = p.maps.change(target, p.wall())
                if change is not None:
                    held.controller.restore(target, change)
            held.targets = frozenset(targets)
            selected = scene.selected.get(policy.uid, ())
            named = targets if policy.spec is None else targets_of(policy.namespace, policy.spec, selected)
            workloads = {
                target: followed(each, scene.autoscalers.get(target))
                for target in named
                if (each := p.fleet.workload(target)) is not None
            }
            pods = {target: scene.pods.get(target, ()) for target in named}
            # 2. Their readings
            mine = [pod for target in targets for pod in pods[target]]
            readings = await p.sources.read(policy, mine, fleet=scene.fleet)
            for reading in readings.values():
                p.metrics.count("readings", "error" if reading.report is None else "ok")
            engines = await self._engines(policy, workloads, pods)
            missed, workloads = await self._inspect(targets, workloads, pods)
            if self._ending:
                return
            # 3. The decision
            view = View(
                now=p.clock(),
                wall=p.wall(),
                policy=policy,
                owners=scene.owners,
                selected=selected,
                workloads=workloads,
                pods=pods,
                readings=readings,
                refused={pod.uid: self._refused[pod.uid] for pod in mine if pod.uid in self._refused},
                missed=missed,
                workload_events={
                    target: (*scene.workload_events.get(target, ()), *p.inspector.bypassed(target))
                    for target in targets
                },
                engines=engines,
                keys=p.signer.announced,
                hurried=self._hurried,
            )
            outcome = await self._decided(held, view)
            del readings, view
        # 4. The actions
        await self._published(policy, held, targets)
        for document in outcome.documents:
            await self._pushed(document, pods.get(document.target, ()))
        await self._write_status(key, policy, held, outcome)
        for event in outcome.events:
            about = About(API_VERSION, KIND, policy.namespace, policy.name, policy.uid)
            p.recorder.record(about, event, p.wall())

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

    async def _engines(
        self, policy: Policy, workloads: Mapping[Target, Workload], pods: Mapping[Target, Sequence[Pod]]
    ) -> dict[Target, dict[str, Counters | str]]:
        """Read the engines of targets without sidecars, if the policy only recommends."""
        p = self._p
        if policy.spec is None or not watches_engines(policy.spec):
            return {}
        bare: dict[Target, tuple[str, ...]] = {}
        for target, workload in workloads.items():
            if pods[target] or asks(workload):
                continue
            try:
                bare[target] = await p.inspector.bare(workload, p.clock())
            except ApiError as error:
                p.log.warning("can't list pods", extra={"target": str(target), "error": str(error)})
        found = await p.sources.engines(policy, [pod for names in bare.values() for pod in names])
        if found is None:
            return {}
        return {target: {pod: found[pod] for pod in names} for target, names in bare.items()}

    async def _inspect(
        self, targets: Sequence[Target], workloads: Mapping[Target, Workload], pods: Mapping[Target, Sequence[Pod]]
    ) -> tuple[dict[Target, tuple[Missed, ...]], dict[Target, Workload]]:
        """Look for pods without a sidecar, for rejected pods, and for Services that bypass sidecars.

        Returns the first by target, and the workloads with the rejections.
        """
        p = self._p
        missed: dict[Target, tuple[Missed, ...]] = {}
        known = dict(workloads)
        for target in targets:
            workload = workloads.get(target)
            if workload is None:
                continue
            try:
                known[target] = replace(workload, refused=await p.inspector.refused(workload, pods[target], p.clock()))
                if not workload.rolling:
                    missed[target] = await p.inspector.missed(workload, pods[target], p.clock())
                await p.inspector.look_at_services(workload, pods[target], p.clock())
                for event in p.inspector.bypassed(target):
                    p.recorder.record(_about(workload), event, p.wall(), LASTING)
            except ApiError as error:
                p.log.warning("can't read a workload", extra={"target": str(target), "error": str(error)})
        return missed, known

    def _counted(self, held: _Held, outcome: Outcome) -> None:
        last = outcome.status.get("lastDecision") or {}
        decided = (last.get("action"), last.get("reason"), last.get("at"))
        if last and decided != held.decided:
            self._p.metrics.count("decisions", decided[0], decided[1])
        held.decided = decided
        held.acknowledged = sum(each.get("acknowledged", 0) for each in outcome.status.get("targets", ()))
        held.missed = sum(len(each.get("missed", ())) for each in outcome.status.get("targets", ()))

    async def _published(self, policy: Policy, held: _Held, targets: Sequence[Target]) -> None:
        """Write the targets' ConfigMaps as wanted."""
        p = self._p
        for target in targets:
            change = held.controller.change(target)
            if change is None:
                continue
            known = self._signed.get(target)
            if known is None or known[0] != change or known[3] != p.signer.public:
                body, signature = p.signer.sign(change)
                known = self._signed[target] = (change, body.decode(), signature, p.signer.public)
            wanted = Published(known[1], known[2], policy.uid)
            if p.maps.differs(target, wanted):
                await self._write(
                    ("configmap", config_map(target)),
                    "configmaps",
                    lambda target=target, wanted=wanted: p.maps.write(target, wanted, policy),  # type: ignore[misc]
                )

    async def _pushed(self, document: Document, pods: Sequence[Pod]) -> None:
        """Send a document to its pods."""
        p = self._p
        body, signature = p.signer.sign(document.change)
        to = [
            pod for pod in pods if pod.ip and not pod.deleting and (document.pods is None or pod.uid in document.pods)
        ]
        answers = await asyncio.gather(*(p.pusher.push(pod, body, signature) for pod in to))
        for pod, answer in zip(to, answers, strict=True):
            p.metrics.count("pushes", "refused" if answer else "taken")
            if answer:
                self._refused[pod.uid] = answer
            else:
                self._refused.pop(pod.uid, None)

    async def _write_status(self, key: Key, policy: Policy, held: _Held, outcome: Outcome) -> None:
        """Write the status where it differs from the server's."""
        p = self._p
        current = p.fleet.policies.get(key)
        if current is None or current.uid != policy.uid:
            return
        there, wanted = without_nulls(current.status), without_nulls(outcome.status)
        patch = difference(there, wanted)
        if not patch or held.unwritable == (wanted, there):
            return
        # Based on this very version: another writer's change is read before it is overwritten.
        body = {"metadata": {"resourceVersion": str(p.fleet.policies.version(key))}, "status": patch}

        async def write() -> None:
            path = path_of(API_VERSION, PLURAL, key.namespace, key.name, "status")
            raw = self._took(await p.writer.send("PATCH", path, body, content=MERGE))
            held.unwritable = None
            if difference(without_nulls(raw.status), wanted):
                held.unwritable = (wanted, without_nulls(raw.status))
                p.log.warning("the CRD does not know all of the status: update it", extra={"policy": key})

        await self._write(("status", policy.uid), f"{PLURAL}/status", write)


def apart(interval: float, cpu: float, *, left_out: bool) -> float:
    """Return the seconds between the starts of two passes, from the CPU seconds that the first took."""
    return max(interval, (HURRIES if left_out else RESTS) * cpu)


def _released(workload: Workload, *, done: bool) -> Event:
    """Return the event for a workload whose pod was released, or could not be."""
    if done:
        message = "no BatchingPolicy tunes it any more: its pods pass every request through until one does"
    else:
        kind, target = BY_NAME[workload.target.kind], workload.target
        restart = kind.restarted(target.namespace, target.name, workload.selector)
        message = (
            "no BatchingPolicy tunes it any more, and some of its pods don't answer: they may still run the last "
            f"policy's parameters: {restart}"
        )
    return Event(warning=not done, reason="PolicyGone", message=message)


def _about(workload: Workload) -> About:
    target = workload.target
    return About(BY_NAME[target.kind].api, target.kind, target.namespace, target.name, workload.uid)
