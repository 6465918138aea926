"""What a container gets: its environment, its command, the fields of its pod. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from minicluster.client import Object

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")


class ConfigError(Exception):
    """The container cannot be made as it says, yet."""


class Reference(NamedTuple):
    """A ConfigMap or Secret that a pod uses."""

    plural: str  # "configmaps", "secrets"
    name: str
    optional: bool


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by a variable; what is unknown stays, ``$$`` is a dollar sign."""
    return _REFERENCE.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


def field(pod: Object, path: str) -> str:
    """Return the field of a pod that a ``fieldRef`` names.

    Raises:
        ConfigError: There is none that this node knows.
    """
    if match := _SUBSCRIPT.fullmatch(path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    if path in {"metadata.labels", "metadata.annotations"}:
        values = pod["metadata"].get(path.removeprefix("metadata."), {})
        return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
    if path in {"status.podIPs", "status.hostIPs"}:
        path = path.removesuffix("s")
    value: object = pod
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if value is None:
        raise ConfigError(f"this node knows no field {path}")
    return str(value)


def references(pod: Object) -> Iterator[Reference]:
    """Yield each ConfigMap and Secret that a pod's volumes and environments name."""
    spec = pod["spec"]
    for volume in spec.get("volumes", ()):
        yield from _of_volume(volume)
        for source in volume.get("projected", {}).get("sources", ()):
            yield from _of_volume(source)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        for one in container.get("envFrom", ()):
            for key, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if key in one:
                    yield Reference(plural, one[key]["name"], one[key].get("optional", False))
        for one in container.get("env", ()):
            for key, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
                if reference := one.get("valueFrom", {}).get(key):
                    yield Reference(plural, reference["name"], reference.get("optional", False))


def _of_volume(volume: Object) -> Iterator[Reference]:
    if one := volume.get("configMap"):
        yield Reference("configmaps", one["name"], one.get("optional", False))
    if one := volume.get("secret"):
        yield Reference("secrets", one.get("secretName") or one["name"], one.get("optional", False))


def environment(
    pod: Object, container: Object, base: Mapping[str, str], data: Callable[[str, str], Mapping[str, bytes] | None]
) -> dict[str, str]:
    """Return a container's variables: those of the node (``base``), then envFrom, then env, each over the last.

    Args:
        pod: With ``status.podIP`` set.
        container: Of its spec.
        base: The node's own.
        data: The keys of ("configmaps" | "secrets", name), None where there is none.

    Raises:
        ConfigError: A key that is not optional is missing.
    """
    variables = dict(base)
    for one in container.get("envFrom", ()):
        for key, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if key in one:
                for name, value in (data(plural, one[key]["name"]) or {}).items():
                    variables[one.get("prefix", "") + name] = value.decode()
    for one in container.get("env", ()):
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            variables[one["name"]] = field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            raise ConfigError("this node offers no resourceFieldRef")
        elif source:
            ((key, reference),) = source.items()
            plural = "secrets" if key == "secretKeyRef" else "configmaps"
            found = (data(plural, reference["name"]) or {}).get(reference["key"])
            if found is not None:
                variables[one["name"]] = found.decode()
            elif not reference.get("optional", False):
                raise ConfigError(f"couldn't find key {reference['key']} in {plural} {reference['name']}")
        else:
            variables[one["name"]] = expand(one.get("value", ""), variables)
    return variables


def command(container: Object, entrypoint: list[str], words: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return the argv: ``command`` replaces an image's entrypoint and its words, ``args`` its words.

    Raises:
        ConfigError: There is nothing to run.
    """
    if "command" in container:
        argv = [*container["command"], *container.get("args", ())]
    else:
        argv = [*entrypoint, *container.get("args", words)]
    if not argv:
        raise ConfigError("no command specified")
    return [expand(word, variables) for word in argv]
