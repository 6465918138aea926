"""A pod's volumes as folders: written, swapped at once when their source changes, bound where containers want them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from minicluster.environment import ConfigError, field
from minicluster.sources import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.client import Client, Object
    from minicluster.sources import Sources


class _Token(NamedTuple):
    text: str
    renew: float  # on the monotonic clock


class Volumes:
    """The volumes of one pod, below ``folder``."""

    def __init__(self, pod: Object, folder: Path, client: Client, sources: Sources) -> None:
        self._pod = pod
        self._namespace = pod["metadata"]["namespace"]
        self._folder = folder
        self._client = client
        self._sources = sources
        self._volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        self._tokens: dict[tuple[str, int], _Token] = {}

    async def write(self, pod: Object) -> None:
        """Make or renew what is out of date, for a pod whose labels and annotations may have changed.

        Raises:
            ConfigError: What is not optional is missing.
        """
        self._pod = pod
        for name, volume in self._volumes.items():
            folder = self._folder / name
            if "emptyDir" in volume:
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o777)
            else:
                _swap(folder, await self._content(volume))

    def renew_in(self) -> float:
        """Return the seconds until a token has to be renewed."""
        return max(0.0, min((token.renew for token in self._tokens.values()), default=float("inf")) - time.monotonic())

    def mounts(self, container: Object) -> list[Object]:
        """Return what to bind in a container, as ``launcher`` takes it."""
        mounts = []
        for mount in sorted(container.get("volumeMounts", ()), key=lambda mount: mount["mountPath"].count("/")):
            volume = self._volumes[mount["name"]]
            source = self._folder / mount["name"] / mount.get("subPath", "")
            if "subPath" in mount:
                if "emptyDir" in volume:
                    source.mkdir(parents=True, exist_ok=True)
                source = source.resolve()  # the file of now: a subPath is never updated, as in Kubernetes
            read_only = mount.get("readOnly", False) or "emptyDir" not in volume
            mounts.append({"source": str(source), "target": mount["mountPath"], "read_only": read_only})
        return mounts

    async def _content(self, volume: Object) -> dict[str, bytes]:
        """Return files by relative path."""
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        files: dict[str, bytes] = {}
        for source in sources:
            if one := source.get("configMap"):
                files |= self._keys("configmaps", one["name"], one)
            elif one := source.get("secret"):
                files |= self._keys("secrets", one.get("secretName") or one["name"], one)
            elif one := source.get("serviceAccountToken"):
                files[one["path"]] = (await self._token(one.get("audience", ""), one["expirationSeconds"])).encode()
            elif one := source.get("downwardAPI"):
                for item in one.get("items", ()):
                    files[item["path"]] = field(self._pod, item["fieldRef"]["fieldPath"]).encode()
            else:
                raise ConfigError(f"this node has no such volumes: {', '.join(source.keys() - {'name'})}")
        return files

    def _keys(self, plural: str, name: str, source: Object) -> dict[str, bytes]:
        data = self._sources.data(Key(plural, self._namespace, name))
        optional = source.get("optional", False)
        if data is None:
            if optional:
                return {}
            raise ConfigError(f'{plural} "{name}" not found')
        if "items" not in source:
            return data
        missing = [item["key"] for item in source["items"] if item["key"] not in data]
        if missing and not optional:
            raise ConfigError(f"{plural} {name} has no {', '.join(missing)}")
        return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}

    async def _token(self, audience: str, seconds: int) -> str:
        """Return the ServiceAccount's token, bound to this pod; a new one when four fifths of its life are over."""
        key = audience, seconds
        if key not in self._tokens or time.monotonic() >= self._tokens[key].renew:
            metadata, account = self._pod["metadata"], self._pod["spec"].get("serviceAccountName", "default")
            bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
            wanted: Object = {"expirationSeconds": seconds, "boundObjectRef": bound}
            if audience:
                wanted["audiences"] = [audience]
            path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": wanted}
            made = await self._client.call("POST", path, body)
            self._tokens[key] = _Token(made["status"]["token"], time.monotonic() + 0.8 * seconds)
        return self._tokens[key].text


def _swap(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder hold these files, all of them changing at once: readers go through the link ``..data``."""
    current = folder / "..data"
    if current.exists() and _files(current) == files:
        return
    fresh = folder / f"..{time.time_ns()}"
    for name, content in files.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_bytes(content)
    fresh.mkdir(parents=True, exist_ok=True)
    old = current.resolve() if current.exists() else None
    link = folder / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(current)
    tops = {name.split("/", maxsplit=1)[0] for name in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if old:
        shutil.rmtree(old)


def _files(folder: Path) -> dict[str, bytes]:
    found: Iterable[Path] = (Path(where) / name for where, _, names in os.walk(folder.resolve()) for name in names)
    return {str(path.relative_to(folder.resolve())): path.read_bytes() for path in found}
