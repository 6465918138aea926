"""A cluster as its user sees it: started, entered, asked, and gone with everything in it."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster import binaries, images
from minicluster.api import Api
from minicluster.controlplane import SERVER, kubeconfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

STARTS_WITHIN = 150.0
CLONE_NEWNET = 0x40000000


def _join(descriptor: int) -> None:
    """Move the calling thread into a network namespace (os.setns came with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: joining a network namespace failed")


@contextmanager
def network_restored() -> Iterator[None]:
    """Return to this thread's present network afterwards."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _join(outside)
        os.close(outside)


class Cluster:
    """A control plane and a node in namespaces of their own; several may run at once.

    Attributes:
        folder: All its state and logs, in a temporary place.
        kubeconfig: An administrator's.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="carpool-cluster-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self._host: subprocess.Popen[str] | None = None
        self._network = -1
        self._images: dict[str, images.Image] = {}

    def start(self) -> Self:
        """Start it and return when the API server and the node serve (5-10 s).

        Raises:
            RuntimeError: It did not start; the message says why.
        """
        if why := binaries.missing():
            raise RuntimeError(why)
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
        # A process namespace: when its first process ends, the kernel ends all. A mount namespace: what is mounted
        # for a container is never seen outside.
        argv = ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        argv += [sys.executable, "-m", "minicluster.host", str(self.folder)]
        with (self.folder / "host.log").open("wb") as log:
            self._host = subprocess.Popen(  # noqa: S603 - our own module
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in a terminal is for us: we end it
            )
        assert self._host.stdout
        ready, _, _ = select.select([self._host.stdout], [], [], STARTS_WITHIN)
        line = self._host.stdout.readline() if ready else ""
        if line != "serving\n":
            errors = (self.folder / "host.log").read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the cluster did not start:\n{errors}")
        self._network = os.open(f"/proc/{self._host.pid}/ns/net", os.O_RDONLY)
        return self

    def api(self) -> Api:
        """Return an administrator's access; close it after use."""
        return Api.of(self.kubeconfig)

    def kubeconfig_of(self, token: str, *, server: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig with a token, for the API server or for what stands at ``server`` before it."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix="kubeconfig-", delete=False) as file:
            file.write(kubeconfig(server or SERVER, token, self.folder / "ca.crt", namespace))
        return Path(file.name)

    def environment(self) -> dict[str, str]:
        """Return an environment for programs run inside: KUBECONFIG, and kubectl, helm and ours on the PATH."""
        folders = [str(path.parent) for path in binaries.find().values()]
        path = os.pathsep.join([str(Path(sys.executable).parent), *dict.fromkeys(folders), os.environ["PATH"]])
        # What kubectl has learned of this cluster, it shall not believe of the next one at the same address.
        cache = str(self.folder / "kubectl")
        return {**os.environ, "PATH": path, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": cache}

    def run(self, *argv: str, text: str | None = None, check: bool = True, timeout: float = 300.0) -> str:
        """Run a program inside (``kubectl``, ``helm``, one of ours), with text as its input, and return its output.

        Raises:
            AssertionError: It failed, and ``check`` is on; the message is what it printed.
        """
        with self.inside():
            done = subprocess.run(  # noqa: S603 - what a test says
                argv, input=text, capture_output=True, text=True, timeout=timeout, check=False, env=self.environment()
            )
        if check:
            assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def outputs(self, namespace: str, pod: str) -> dict[str, str]:
        """Return what each container of a pod has printed in all its runs, also after the pod has gone."""
        texts: dict[str, str] = {}
        for file in sorted(self.folder.glob(f"logs/{namespace}_{pod}_*/*/*.log"), key=lambda file: int(file.stem)):
            name = file.parent.name
            texts[name] = texts.get(name, "") + file.read_text(errors="replace")
        return texts

    def add_image(self, name: str, *entrypoint: str, root: str = "", path: str = "") -> None:
        """Let images of this name (without registry and tag) stand for a command, here or in a root folder."""
        self._images[name] = images.Image(list(entrypoint), [], root, path)
        images.write(self.folder, self._images)

    def stop(self) -> None:
        """End everything in it, at once, and remove its state."""
        if self._host:
            assert self._host.stdin
            assert self._host.stdout
            self._host.stdin.close()  # its first process ends with it, and with that all others
            try:
                self._host.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._host.kill()  # unshare takes its child along
                self._host.wait()
            self._host.stdout.close()
        if self._network >= 0:
            os.close(self._network)
            self._network = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def enter(self) -> None:
        """Move this thread into the cluster's network, and so the threads and processes that it starts from now on."""
        _join(self._network)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be in the cluster's network for a while. A socket stays in the network that it was made in."""
        with network_restored():
            self.enter()
            yield
