"""Everything needed to support a kind of workload. Each kind is a value of ``Kind``, in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

Json: TypeAlias = dict[str, Any]
"""An object of the Kubernetes API, as JSON has it."""


class State(NamedTuple):
    """The present state of a workload."""

    template_annotations: Mapping[str, str]
    """Annotations that its pods get."""
    selector: str
    """Selector of its pods that may have a sidecar, as the API's ``labelSelector`` parameter."""
    replicas: int
    """Desired number of pods that may have a sidecar."""
    rolling: bool
    """Whether a rollout is under way that ends by itself."""
    refused: str = ""
    """The API server's reason for rejecting its pods; ``""`` where it accepts them, or none is given."""
    held_back: str = ""
    """What keeps a new template from some pods, with the fix; ``""`` if nothing does."""


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of workload: how it is found, read, changed and named."""

    name: str
    """The value of ``kind``. It is unique in the registry, whatever the groups."""
    group: str
    version: str
    plural: str
    short: tuple[str, ...] = ()
    """Short names that kubectl accepts."""
    raw: type[Struct]
    """The type that its JSON is decoded to; has ``metadata: Meta``."""
    state: Callable[[Any], State]
    """Returns the state of a decoded object."""
    owner: Callable[[Json, Json], str | None]
    """Returns the name of the workload of this kind that a pod belongs to. ``None``: another kind; ``""``: this kind,
    but the pod serves no model. Takes the pod's labels and the reference to the object that controls the pod; reads
    nothing else, because the webhook makes no request."""
    made: Callable[[str], tuple[dict[str, str], dict[str, Any]]]
    """Returns labels and controller reference of a pod that the kind's controller would create for the named
    workload."""
    revision: str
    """Label that differs between pods of two templates."""
    templates: tuple[str, ...]
    """Paths to its pods' annotations: to the object that has ``metadata.annotations``, or to ``annotations`` itself
    where the path ends in that. The first existing one is used."""
    containers: tuple[str, ...] = ()
    """Further paths to its containers in a pod template: to a list, or to the model's own."""
    maker: tuple[str, str] | None = None
    """Kind and name of the objects whose Events report that the API server rejects its pods, the name as a pattern with
    ``name`` in braces; ``None`` if ``state`` reads that from the workload itself."""
    deployment: str | None = None
    """Name of the Deployment that it creates, with ``name`` in braces, if it has no scale of its own."""
    annotating: bool
    """Whether an annotation on the workload itself suffices: the webhook copies it to the template."""
    restart: str = "rollout restart {resource}"
    """Arguments of kubectl that recreate the pods, with ``resource``, ``name`` and ``selector`` (of pods) in braces."""
    remark: str = ""
    """What its users need to know; for the documentation."""

    @property
    def api(self) -> str:
        """``apps/v1``."""
        return f"{self.group}/{self.version}"

    @property
    def built_in(self) -> bool:
        """Whether every cluster has it. Other kinds appear and disappear with their CRDs."""
        return self.group == "apps"

    def resource(self, name: str) -> str:
        """Return kubectl's name for one: ``deployment/resnet``; with the group where other kinds may share the name."""
        singular = self.name.lower()
        return f"{singular}/{name}" if self.built_in else f"{singular}.{self.group}/{name}"

    def restarted(self, namespace: str, name: str, selector: str) -> str:
        """Return the command that recreates the pods; ``selector`` is theirs."""
        command = self.restart.format(resource=self.resource(name), name=name, selector=selector)
        return f"kubectl -n {namespace} {command}"

    def annotate_pods(
        self, namespace: str, name: str, annotations: Mapping[str, str], manifest: Json | None = None
    ) -> str:
        """Return how to annotate its pods: a command, if one works for all templates. It recreates the pods.

        ``manifest``: its own, where it is known: it shows which template is used.
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
        """Whether an object, by kind and name, creates the pods of the named workload."""
        return self.maker is not None and kind == self.maker[0] and fnmatchcase(maker, self.maker[1].format(name=name))

    def scaled(self, name: str) -> tuple[str, str]:
        """Return kind and name of the object that an autoscaler of the named workload refers to."""
        return (self.name, name) if self.deployment is None else ("Deployment", self.deployment.format(name=name))

    @property
    def merge(self) -> str:
        """The flag that a patch needs: strategic merges are for built-in kinds."""
        return "" if self.built_in else " --type=merge"

    def annotations_path(self, template: str | None = None) -> tuple[str, ...]:
        """Return where its pods' annotations are, by the path of a template; by default the last of ``templates``."""
        steps = tuple((template or self.templates[-1]).split("."))
        return steps if steps[-1] == "annotations" else (*steps, "metadata", "annotations")

    def template(self, manifest: Json) -> tuple[str, ...] | None:
        """Return where in a manifest its pods' annotations are; ``None`` where it has no template of its own."""
        for path in self.templates:
            if isinstance(at(manifest, path.removesuffix(".annotations").split(".")), Mapping):
                return self.annotations_path(path)
        return None

    def pod(self, manifest: Json) -> Json | None:
        """Return the pod template in a manifest; ``None`` if it has none, or another object's is used."""
        path = self.template(manifest)
        return None if path is None or path[-2] != "metadata" else at(manifest, path[:-2])

    def container(self, manifest: Json, name: str) -> tuple[tuple[str, ...], Json] | None:
        """Return a container and its path in a manifest; ``None`` if another object defines it."""
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
    """Return the value at a path in JSON; ``None`` if there is none."""
    for step in path:
        thing = thing.get(step) if isinstance(thing, Mapping) else None
    return thing


def reference(api: str, kind: str, name: str) -> dict[str, Any]:
    """Return a reference to the controller of a hypothetical pod, which is never stored."""
    return {"apiVersion": api, "kind": kind, "name": name, "uid": "preflight", "controller": True}


def controlled_by(owner: Json, group: str, kind: str) -> bool:
    """Whether a reference is to an object of some kind, of any version."""
    return str(owner.get("apiVersion", "")).startswith(f"{group}/") and owner.get("kind") == kind
