"""What follows decisions: ConfigMaps, pushes to pods and statuses; and for pods whose policy is gone, their release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_operator.api.model import Event
from carpool_operator.api.spec import API_VERSION, KIND, PLURAL
from carpool_operator.cluster.kube import MERGE, path_of
from carpool_operator.cluster.merge_patch import difference, without_nulls
from carpool_operator.delivery.publishing import Published, config_map
from carpool_operator.delivery.releases import Releases, is_standby, release
from carpool_operator.reporting.events import LASTING, About
from carpool_operator.workloads.metadata import Key
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

    from carpool.exchange.change import Change
    from carpool_operator.api.model import Document, Outcome, Pod, Policy, Target, Workload
    from carpool_operator.controller import Controller
    from carpool_operator.loop.parts import Parts, Tasks
    from carpool_operator.loop.scene import Scene

AT_ONCE = 16
"""Pods that a pass begins to release: each may take seconds to answer."""


class Actions:
    """Does what was decided for a policy, and remembers what need not be done again."""

    def __init__(self, parts: Parts) -> None:
        self.refused: dict[str, str] = {}
        """By UID of a pod that did not take its last document: why."""
        self._p = parts
        self._signed: dict[Target, tuple[Change, str, str, str]] = {}
        """Changes, as they were signed: with which public key, the text, and its signature."""
        self._unwritable: dict[str, tuple[Any, Any]] = {}
        """By UID of a policy: the wanted status, and the server's version of it. An older CRD drops fields that it
        doesn't know."""

    def forget(self, policies: Collection[str], targets: Collection[Target], pods: Collection[str]) -> None:
        """Forget all but these: UIDs of policies and pods, and the targets of policies."""
        self._unwritable = {uid: each for uid, each in self._unwritable.items() if uid in policies}
        self._signed = {target: each for target, each in self._signed.items() if target in targets}
        for uid in self.refused.keys() - set(pods):
            del self.refused[uid]  # in place: policies that are being read have this dict

    async def do(
        self,
        policy: Policy,
        controller: Controller,
        outcome: Outcome,
        targets: Sequence[Target],
        pods: Mapping[Target, Sequence[Pod]],
    ) -> None:
        """Publish the documents before they are pushed: a pod that starts in between finds them."""
        for target in targets:
            await self._publish(policy, target, controller.change(target))
        for document in outcome.documents:
            await self._push(document, pods.get(document.target, ()))
        await self._write_status(policy, outcome.status)
        for event in outcome.events:
            about = About(API_VERSION, KIND, policy.namespace, policy.name, policy.uid)
            self._p.recorder.record(about, event, self._p.wall())

    async def _publish(self, policy: Policy, target: Target, change: Change | None) -> None:
        """Write a target's ConfigMap as wanted."""
        p = self._p
        if change is None:
            return
        known = self._signed.get(target)
        if known is None or known[:2] != (change, p.signer.public):
            body, signature = p.signer.sign(change)
            known = self._signed[target] = (change, p.signer.public, body.decode(), signature)
        wanted = Published(*known[2:], policy.uid)
        if p.maps.differs(target, wanted):
            key = ("configmap", config_map(target))
            await p.write(key, "configmaps", lambda: p.maps.write(target, wanted, policy))

    async def _push(self, document: Document, pods: Sequence[Pod]) -> None:
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
                self.refused[pod.uid] = answer
            else:
                self.refused.pop(pod.uid, None)

    async def _write_status(self, policy: Policy, status: Mapping[str, Any]) -> None:
        """Write the status where it differs from the server's."""
        p, key = self._p, Key(policy.namespace, policy.name)
        current = p.fleet.policies.get(key)
        if current is None or current.uid != policy.uid:
            return
        there, wanted = without_nulls(current.status), without_nulls(status)
        patch = difference(there, wanted)
        if not patch or self._unwritable.get(policy.uid) == (wanted, there):
            return
        # Based on this very version: another writer's change is read before it is overwritten.
        body = {"metadata": {"resourceVersion": str(p.fleet.policies.version(key))}, "status": patch}

        async def write() -> None:
            path = path_of(API_VERSION, PLURAL, key.namespace, key.name, "status")
            raw = p.fleet.took(await p.writer.send("PATCH", path, body, content=MERGE))
            self._unwritable.pop(policy.uid, None)
            if difference(without_nulls(raw.status), wanted):
                self._unwritable[policy.uid] = (wanted, without_nulls(raw.status))
                p.log.warning("the CRD does not know all of the status: update it", extra={"policy": key})

        await p.write(("status", policy.uid), f"{PLURAL}/status", write)


class Releasing:
    """Releases pods until each of them is as it was before it had a policy."""

    def __init__(self, parts: Parts, tasks: Tasks) -> None:
        self.releases = Releases()
        self._p = parts
        self._tasks = tasks

    def start(self, policies: Iterable[Policy], scene: Scene) -> None:
        """Begin to release those that are due."""
        now, backoff = self._p.clock(), self._p.backoff
        unread = {policy.namespace for policy in policies if policy.spec is None}
        # A workload may be missing only because its kind can't be listed: then a selector selects nothing.
        known = {target: pods for target, pods in scene.pods.items() if self._p.fleet.workload(target) is not None}
        there = {*self._p.maps.keys()}
        published = [target for target in known if target not in scene.owners and config_map(target) in there]
        due = self.releases.due(now, known, scene.owners.keys(), unread, published)
        self.releases.forget(
            lambda target: target not in scene.owners and target not in scene.pods and config_map(target) not in there
        )
        for pod in [pod for pod in due if backoff.ready(("release", pod.uid), now)][:AT_ONCE]:
            self._tasks.start(("release", pod.uid), self._release(pod))

    async def _release(self, pod: Pod) -> None:
        """Return a pod without a policy to the state before it had one, unless it is in it."""
        p, target, key = self._p, pod.target, ("release", pod.uid)
        reading = await p.sources.directly(pod)
        if reading.report is not None and is_standby(reading.report):
            self.releases.done(pod.uid, p.clock())
            return
        if self._tasks.ending or not self.releases.is_without(target):
            return
        if reading.report is None and not self.releases.had(target):
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
            self.releases.done(pod.uid, p.clock())
        if workload is not None:
            p.recorder.record(About.of(workload), _released(workload, done=not error), p.wall(), LASTING)


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
