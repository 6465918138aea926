"""Containers of built images, as strict as Kubernetes' `restricted`: read-only root, not root, no capability.

They share the network of the tests, so that 127.0.0.1 is the same for both. It needs root, as runc does.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping

USER = 65532
PATIENCE = 120.0


class Container:
    """A running container: ``process`` is runc, which ends as the container does."""

    def __init__(self, name: str, state: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self._runc = ["runc", "--root", str(state)]
        self._name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its first process, as the machine numbers it."""
        return int(self._state()["pid"])

    def signal(self, number: signal.Signals) -> None:
        subprocess.run([*self._runc, "kill", self._name, str(int(number))], check=True)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def remove(self) -> None:
        subprocess.run([*self._runc, "delete", "--force", self._name], check=False, capture_output=True)
        self.process.wait(PATIENCE)

    def _state(self) -> Any:
        return json.loads(subprocess.run([*self._runc, "state", self._name], check=True, capture_output=True).stdout)


class Image:
    """An image, unpacked once: containers can't write to it."""

    def __init__(self, layout: Path, tag: str, folder: Path) -> None:
        self._folder = folder
        subprocess.run(["umoci", "--log=error", "unpack", "--image", f"{layout}:{tag}", folder / "image"], check=True)
        self.root = folder / "image/rootfs"
        self.settings: Any = json.loads((folder / "image/config.json").read_text())

    def run(self, *words: str, mounts: Mapping[Path, str] | None = None, command: bool = False) -> str:
        """Run to its end, which has to be 0; returns the output."""
        with self.started(*words, mounts=mounts, command=command) as container:
            code = container.process.wait(PATIENCE)
            assert code == 0, f"{words}: {code}\n{container.output()}"
            return container.output()

    @contextmanager
    def started(
        self,
        *words: str,
        mounts: Mapping[Path, str] | None = None,
        command: bool = False,
        context: Mapping[str, Any] | None = None,
        network: str | None = None,
    ) -> Iterator[Container]:
        """Start it; at the end of the block it is removed.

        Args:
            words: What follows the entrypoint, instead of the image's own words.
            mounts: Files and folders to see there, read-only: PATH -> TARGET.
            command: The words replace the entrypoint as well, as `command` in a pod does.
            context: User, group and added capabilities, as a pod's `securityContext` says them; default: the image's
                user, and none.
            network: Path of the network namespace that it joins, instead of the tests'.
        """
        name = f"carpool-{uuid.uuid4().hex[:12]}"
        bundle = self._folder / name
        bundle.mkdir()
        settings = self._strict(words, mounts or {}, command=command)
        if context is not None:
            _grant(settings["process"], context)
        if network is not None:
            settings["linux"]["namespaces"].append({"type": "network", "path": network})
        (bundle / "config.json").write_text(json.dumps(settings))
        log, state = bundle / "log", self._folder / "state"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["runc", "--root", str(state), "run", "--bundle", str(bundle), name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        container = Container(name, state, process, log)
        try:
            yield container
        finally:
            container.remove()

    def _strict(self, words: tuple[str, ...], mounts: Mapping[Path, str], *, command: bool) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(json.dumps(self.settings))
        process = settings["process"]
        process["terminal"] = False
        process["capabilities"] = {kind: [] for kind in process["capabilities"]}
        process["noNewPrivileges"] = True
        if words:
            process["args"] = list(words) if command else [process["args"][0], *words]
        settings["root"] = {"path": str(self.root), "readonly": True}
        for path, target in mounts.items():
            options = ["bind", "ro", "nosuid", "nodev"]
            settings["mounts"].append({"destination": target, "type": "bind", "source": str(path), "options": options})
        # Groups of processes are the host's to limit, and differ by host; its network is the tests'.
        settings["mounts"] = [each for each in settings["mounts"] if each["type"] != "cgroup"]
        kinds = [each["type"] for each in settings["linux"]["namespaces"]]
        settings["linux"]["namespaces"] = [{"type": kind} for kind in kinds if kind not in {"network", "cgroup"}]
        for each in settings["mounts"]:
            if each["destination"] == "/sys":  # a new sysfs belongs to a new network
                each |= {"type": "bind", "source": "/sys", "options": ["rbind", "ro", "nosuid", "noexec", "nodev"]}
        return settings


def _grant(process: dict[str, Any], context: Mapping[str, Any]) -> None:
    """Give a process what a `securityContext` says, as a kubelet's runtime does, and nothing more."""
    assert context["capabilities"]["drop"] == ["ALL"], context
    process["user"] = {"uid": context["runAsUser"], "gid": context["runAsGroup"]}
    process["noNewPrivileges"] = not context["allowPrivilegeEscalation"]
    added = [f"CAP_{each}" for each in context["capabilities"]["add"]]
    process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), added)


def rights(pid: int) -> dict[str, str]:
    """Return what the kernel says about a process: ``Uid``, ``CapEff``, ``NoNewPrivs`` ..."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def needs_root() -> str:
    """Say why containers can't be run; empty: they can."""
    return "" if os.geteuid() == 0 else "runc needs root"
