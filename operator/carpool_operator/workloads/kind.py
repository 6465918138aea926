"""What has to be known of a kind of workload. Each kind is a value of ``Kind``, in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

Json: TypeAlias = dict[str, Any]
"""An object of the Kubernetes API, as JSON has it."""


class State(NamedTuple):
    """What is so of a workload now."""

    template_annotations: Mapping[str, str]
    """Those that its pods get."""
    selector: str
    """Of its pods that may have a sidecar, as the API's ``labelSelector`` parameter takes it."""
    replicas: int
    """Pods wanted that may have a sidecar."""
    rolling: bool
    """Whether a rollout is under way."""
    refused: str = ""
    """Why the API server refuses its pods, in the server's words; ``""`` where it does not, or nothing says so."""


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of workload: how it is found, read, changed and named."""

    name: str
    """As ``kind`` says it. No two kinds of the registry share one, whatever their groups."""
    group: str
    version: str
    plural: str
    short: tuple[str, ...] = ()
    """Short names that kubectl takes."""
    raw: type[Struct]
    """What its JSON is decoded to; has ``metadata: Meta``."""
    state: Callable[[Any], State]
    """Reads one that was decoded."""
    owner: Callable[[Json, Json], str | None]
    """Returns the name of the workload of this kind that a pod belongs to: ``None`` where it is of another kind, ``""``
    where it is of this one and serves no model. Given the pod's labels and the reference to the object that controls
    the pod; reads nothing else, since the webhook asks no server."""
    made: Callable[[str], tuple[dict[str, str], dict[str, Any]]]
    """Returns labels and controller reference of a pod as the kind's controller makes it for the workload named."""
    revision: str
    """Label by which pods of two templates are told apart."""
    templates: tuple[str, ...]
    """Where its pods' annotations lie, as paths to the object that has ``metadata.annotations``, or ``annotations``
    itself where the path ends in that. The first that is there counts."""
    containers: tuple[str, ...] = ()
    """Where its containers lie besides in a pod template, as paths to a list, or to the model's own."""
    maker: tuple[str, str] | None = None
    """Kind and name of the objects whose Events say that the API server refuses its pods, the name as a pattern with
    ``name`` in braces; ``None`` where ``state`` has read it of the workload itself."""
    annotating: bool
    """Whether an annotation on the workload itself suffices: the webhook copies it to the template."""
    restart: str = "rollout restart {resource}"
    """Arguments of kubectl that make new pods, with ``resource``, ``name`` and ``selector`` (of pods) in braces."""
    remark: str = ""
    """What its users have to know; for the documentation."""

    @property
    def api(self) -> str:
        """``apps/v1``."""
        return f"{self.group}/{self.version}"

    @property
    def built_in(self) -> bool:
        """Whether every cluster has it. Others come and go with their CRDs."""
        return self.group == "apps"

    def resource(self, name: str) -> str:
        """Return how kubectl names one: ``deployment/resnet``; with the group where it may be somebody else's."""
        singular = self.name.lower()
        return f"{singular}/{name}" if self.built_in else f"{singular}.{self.group}/{name}"

    def restarted(self, namespace: str, name: str, selector: str) -> str:
        """Return the command that makes new pods; ``selector`` is theirs."""
        command = self.restart.format(resource=self.resource(name), name=name, selector=selector)
        return f"kubectl -n {namespace} {command}"

    def annotate_pods(
        self, namespace: str, name: str, annotations: Mapping[str, str], manifest: Json | None = None
    ) -> str:
        """Return how annotations get on its pods: a command where one does for all templates. It makes new pods.

        ``manifest``: its own, where it is known: it shows which template counts.
        """
        where, resource = f"kubectl -n {namespace}", self.resource(name)
        if not self.templates:
            written = ", ".join(f'{key}: "{value}"' for key, value in annotations.items())
            return f"write {written} in the templates of the pods that serve: {where} edit {resource}"
        patch: object = dict(annotations)
        for step in reversed(self.template(manifest or {}) or self.annotations_path()):
            patch = {step: patch}
        return f"{where} patch {resource}{self.merge} -p '{json.dumps(patch, separators=(',', ':'))}'"

    def makes(self, name: str, kind: str, maker: str) -> bool:
        """Whether an object, by kind and name, makes the pods of the workload named."""
        return self.maker is not None and kind == self.maker[0] and fnmatchcase(maker, self.maker[1].format(name=name))

    @property
    def merge(self) -> str:
        """The flag that a patch needs: strategic merges are for built-in kinds."""
        return "" if self.built_in else " --type=merge"

    def annotations_path(self, template: str | None = None) -> tuple[str, ...]:
        """Return where its pods' annotations lie, by the path of a template; by default the last of ``templates``."""
        steps = tuple((template or self.templates[-1]).split("."))
        return steps if steps[-1] == "annotations" else (*steps, "metadata", "annotations")

    def template(self, manifest: Json) -> tuple[str, ...] | None:
        """Return where in a manifest its pods' annotations lie; ``None`` where it has no template of its own."""
        for path in self.templates:
            if isinstance(at(manifest, path.removesuffix(".annotations").split(".")), Mapping):
                return self.annotations_path(path)
        return None

    def pod(self, manifest: Json) -> Json | None:
        """Return the pod template in a manifest; ``None`` where it has none, or another makes that."""
        path = self.template(manifest)
        return None if path is None or path[-2] != "metadata" else at(manifest, path[:-2])

    def container(self, manifest: Json, name: str) -> tuple[tuple[str, ...], Json] | None:
        """Return where in a manifest a container lies, and it; ``None`` where another makes it."""
        template = self.template(manifest)
        within = [] if template is None or template[-2] != "metadata" else [(*template[:-2], "spec", "containers")]
        for path in (*within, *(tuple(each.split(".")) for each in self.containers)):
            found = at(manifest, path)
            if isinstance(found, Mapping):
                return path, dict(found)
            for index, each in enumerate(found or ()):
                if each.get("name") == name:
                    return (*path, str(index)), each
        return None


def at(thing: Any, path: Iterable[str]) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return what lies at a path in JSON; ``None`` for nothing."""
    for step in path:
        thing = thing.get(step) if isinstance(thing, Mapping) else None
    return thing


def reference(api: str, kind: str, name: str) -> dict[str, Any]:
    """Return a reference to the object that controls a pod that is made for a look, and never stored."""
    return {"apiVersion": api, "kind": kind, "name": name, "uid": "preflight", "controller": True}


def controlled_by(owner: Json, group: str, kind: str) -> bool:
    """Whether a reference is to an object of some kind, of any version."""
    return str(owner.get("apiVersion", "")).startswith(f"{group}/") and owner.get("kind") == kind
