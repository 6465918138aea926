"""Policies kept for annotated workloads: compares the annotations with the existing policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool_operator.api import annotations as names
from carpool_operator.api.model import Event
from carpool_operator.api.spec import API_VERSION, KIND, PLURAL, PolicySpec, written
from carpool_operator.api.status import ANNOTATION_INVALID
from carpool_operator.cluster.kube import APPLY, FIELD_MANAGER, ApiError, path_of
from carpool_operator.cluster.merge_patch import without_nulls
from carpool_operator.cluster.objects import ANNOTATED
from carpool_operator.workloads.metadata import Key
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from carpool_operator.api.model import Namespace, Policy, Target, Workload
    from carpool_operator.cluster.cache import Cache
    from carpool_operator.cluster.writing import Writer


DEFAULT_INVALID = "DefaultInvalid"
"""Reason of an Event: a default of the namespace is invalid, and ignored."""
TEMPLATE_ANNOTATION = "TemplateAnnotationUnknown"
"""Reason of an Event: an annotation in the pod template is ignored. It changes nothing else."""


POLICY_ALTERED = "PolicyAltered"
"""Reason of an Event: the policy on the server differs from the one written."""


class Keep(NamedTuple):
    """A policy to write."""

    workload: Workload
    spec: PolicySpec


class Plan(NamedTuple):
    """Writes, deletions and Events to do."""

    keep: list[Keep]
    drop: list[Policy]
    events: list[tuple[Workload, Event]]
    """Problems of annotations, to be reported on their workload."""


class _Read(NamedTuple):
    """The result of reading one workload's annotations."""

    own: dict[str, str]
    template: dict[str, str]
    defaults: dict[str, str]
    wish: names.Wish
    misplaced: tuple[str, ...]


class _Written(NamedTuple):
    """The parts of a policy that the operator writes."""

    spec: PolicySpec | None
    orphaned: bool = False


def _written(policy: Policy) -> _Written:
    return _Written(policy.spec, policy.orphaned)


class AnnotatedPolicies:
    """Compares annotations with policies. Annotations are parsed again when they have changed.

    ``defaults``: of the cluster, by annotation; those of a namespace take precedence.
    """

    def __init__(self, defaults: Mapping[str, str] | None = None) -> None:
        self._defaults = dict(defaults or {})
        self._known: dict[Target, _Read] = {}
        # The wanted policy, and the server's version of it: an admission policy may change what we write.
        self._altered: dict[Target, tuple[PolicySpec, _Written]] = {}

    def kept(self, wish: Keep, there: Policy) -> None:
        """Record the server's version of a policy that was written."""
        if _written(there) == _Written(wish.spec):
            self._altered.pop(wish.workload.target, None)
        else:
            self._altered[wish.workload.target] = (wish.spec, _written(there))

    def plan(
        self,
        workloads: Iterable[Workload],
        policies: Cache[Key, Policy],
        namespaces: Iterable[Namespace] = (),
        claimed: Container[Target] = (),
        lists: Callable[[str, str], bool] = lambda _kind, _namespace: True,
    ) -> Plan:
        """Return the policies to write and delete, and the Events to record.

        ``claimed``: targets that users' policies name or select. A default SLO does not apply to these.
        ``lists``: whether workloads of a kind could be listed in a namespace. If not, more of them may exist.

        A policy stays unchanged while annotations are invalid: a typo removes no SLO. It stays while the kind of its
        workload can't be listed. If the workload is gone, Kubernetes' garbage collector deletes the policy.
        """
        plan = Plan([], [], [])
        known: dict[Target, _Read] = {}
        wanted: set[Key] = set()
        of = {each.name: each for each in namespaces}
        for workload in workloads:
            target, there = workload.target, of.get(workload.target.namespace)
            if not workload.annotations and not workload.template_annotations:
                continue
            read = known[target] = self._read(workload, there)
            plan.events.extend((workload, problem) for problem in _problems(read, there))
            wish, key = read.wish, Key(target.namespace, names.policy_name(target.kind, target.name))
            if wish.problems:
                wanted.add(key)
            if wish.spec is None or (wish.by_default and target in claimed):
                continue
            wanted.add(key)
            kept = policies.get(key)
            if kept is not None and not kept.annotated:
                text = (
                    f"BatchingPolicy {key.name} was written by hand and takes the name of the one for these "
                    "annotations: give it another name, or drop them"
                )
                plan.events.append((workload, Event(True, "PolicyNameTaken", text)))
            elif kept is None or _written(kept) != _Written(wish.spec):
                if kept is not None and self._altered.get(target) == (wish.spec, _written(kept)):
                    # Writing it again would have the same result, in every pass.
                    text = (
                        f"BatchingPolicy {key.name} is not what the annotations ask for: a mutating admission policy "
                        "changes it. Exempt batchingpolicies.carpool.dev from that policy"
                    )
                    plan.events.append((workload, Event(True, POLICY_ALTERED, text)))
                else:
                    plan.keep.append(Keep(workload, wish.spec))
        self._known = known
        self._altered = {target: each for target, each in self._altered.items() if target in known}
        plan.drop.extend(
            each
            for each in policies
            if each.made_for is not None
            and Key(each.namespace, each.name) not in wanted
            and lists(each.made_for.kind, each.namespace)
        )
        return plan

    def _read(self, workload: Workload, namespace: Namespace | None) -> _Read:
        """Read a workload's annotations, unless they and the defaults in its namespace are the same as before."""
        own, template, target = workload.annotations, workload.template_annotations, workload.target
        # If the namespace has its own SLO, none of the cluster's percentiles apply.
        defaults = self._defaults if namespace is None else names.merged(self._defaults, namespace.defaults)
        read = self._known.get(target)
        if read is not None and (read.own, read.template, read.defaults) == (own, template, defaults):
            return read
        wish = names.read(target.kind, target.name, own, defaults)
        # KServe copies a workload's own annotations to its pods, so these are correct there.
        return _Read(own, template, defaults, wish, names.misplaced(dict(template.items() - own.items())))


def _problems(read: _Read, namespace: Namespace | None) -> Iterator[Event]:
    """Return Events for the problems of a workload's annotations, and of its namespace's if it depends on these."""
    yield from (Event(True, ANNOTATION_INVALID, problem) for problem in read.wish.problems)
    if namespace is not None and names.asks(read.own):
        yield from (Event(True, DEFAULT_INVALID, f"of the namespace: {problem}") for problem in namespace.problems)
    yield from (Event(True, TEMPLATE_ANNOTATION, problem) for problem in read.misplaced)


async def keep(writer: Writer, wish: Keep) -> bytes:
    """Write a policy, owned by its workload, and return the server's version.

    Raises ``ApiError`` or ``NotLeading``.
    """
    target = wish.workload.target
    name = names.policy_name(target.kind, target.name)
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": target.namespace,
            "labels": {ANNOTATED: "true", "app.kubernetes.io/managed-by": FIELD_MANAGER},
            "ownerReferences": [
                {
                    "apiVersion": BY_NAME[target.kind].api,
                    "kind": target.kind,
                    "name": target.name,
                    "uid": wish.workload.uid,
                    "controller": True,
                }
            ],
        },
        "spec": without_nulls(written(wish.spec)),
    }
    return await writer.send(
        "PATCH",
        path_of(API_VERSION, PLURAL, target.namespace, name),
        body,
        query={"fieldManager": FIELD_MANAGER, "force": "true"},
        content=APPLY,
    )


async def drop(writer: Writer, policy: Policy) -> None:
    """Delete a policy that is not needed any more.

    Raises ``ApiError`` or ``NotLeading``.
    """
    try:
        await writer.send(
            "DELETE",
            path_of(API_VERSION, PLURAL, policy.namespace, policy.name),
            {"preconditions": {"uid": policy.uid}},
        )
    except ApiError as error:
        # Already deleted, or replaced by another.
        if error.status not in {404, 409}:
            raise
