"""The control plane's programs: where they are, and how they are made where there are none.

python -m minicluster.binaries          # say what is at hand
python -m minicluster.binaries --get    # build what is missing, into ~/.cache/carpool
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE = Path.home() / ".cache" / "carpool"
MODULE = Path(__file__).parent.parent / "controlplane"
KUBERNETES = "v1.35.4"
HELM = "v3.22.0"
# A cluster needs all of CONTROL_PLANE; kubectl and helm are for tests and people.
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager")
TOOLS = (*CONTROL_PLANE, "kubectl", "helm", "prometheus", "promtool")
# Of Debian's iproute2 and util-linux.
SYSTEM = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
# Unpacked, not installed: its package would start a server.
DEBIAN = {"prometheus": "prometheus", "promtool": "prometheus"}
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}


class MissingError(Exception):
    """A program is not at hand; the message says how to get it."""


def _folders() -> list[Path]:
    """Return where control plane programs may lie, best first."""
    folders = [CACHE]
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        folders.insert(0, Path(assets))
    if envtest := shutil.which("setup-envtest"):
        found = subprocess.run(  # noqa: S603 - the developer's own tool
            [envtest, "use", "--installed-only", "-p", "path"], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            folders.append(Path(found.stdout.strip()))
    return folders


def find() -> dict[str, Path]:
    """Return the programs at hand, by name: KUBEBUILDER_ASSETS, the cache, setup-envtest, and for tools the PATH."""
    found = {}
    folders = _folders()
    for name in TOOLS:
        places = [str(folder / name) for folder in folders]
        if name not in CONTROL_PLANE:
            places.append(name)
        path = next(filter(None, map(shutil.which, places)), None)
        if path:
            found[name] = Path(path)
    return found


def missing() -> str:
    """Say why there can be no cluster here and what helps; empty when there can."""
    for program, package in SYSTEM.items():
        if not shutil.which(program):
            return f"`{program}` is not installed (Debian: apt-get install {package})"
    if lacking := [name for name in CONTROL_PLANE if name not in find()]:
        return f"no {', '.join(lacking)} at hand: `make test-cluster` gets or builds them (about 5 minutes, once)"
    argv = ["unshare", "--net", "--pid", "--mount", "--fork", "true"]
    allowed = subprocess.run(argv, capture_output=True, check=False)  # noqa: S603 - fixed words
    if allowed.returncode:
        return "network namespaces need root here: `make test-cluster` makes a user namespace, or run as root"
    return ""


def get() -> dict[str, Path]:
    """Return every program, building what is missing. It takes minutes and says what it does.

    Raises:
        MissingError: Something cannot be had here; the message says what to install.
    """
    found = find()
    if all(name in found for name in TOOLS):
        return found
    if envtest := shutil.which("setup-envtest"):
        subprocess.run([envtest, "use", KUBERNETES[1:]], check=False)  # noqa: S603 - the developer's own tool
        found = find()
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in TOOLS:
        if name not in find():
            _unpack(name) if name in DEBIAN else _build(name)
    return find()


def _unpack(name: str) -> None:
    package = DEBIAN[name]
    advice = f"{name} is not at hand: put it on PATH (Debian: apt-get install {package})"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise MissingError(advice)
    _say(f"fetching Debian's {package} (once; it lands in {CACHE}) ...")
    apt = ["apt-get", "--quiet", "--quiet", "-o", "APT::Sandbox::User=root"]
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".unpack-") as folder:
        if not _does(*apt, "download", package, folder=folder):
            _does(*apt, "update", folder=folder)  # a fresh machine has no lists of packages yet
            if not _does(*apt, "download", package, folder=folder):
                raise MissingError(advice)
        (archive,) = Path(folder).glob("*.deb")
        if not _does("dpkg-deb", "--extract", archive.name, ".", folder=folder):
            raise MissingError(advice)
        for program in (each for each, source in DEBIAN.items() if source == package):
            (Path(folder) / "usr/bin" / program).rename(CACHE / program)


def _does(*command: str, folder: str) -> bool:
    return subprocess.run(command, cwd=folder, check=False).returncode == 0  # noqa: S603 - fixed words


def _build(name: str) -> None:
    go = shutil.which("go")
    if not go:
        raise MissingError(
            f"{name} is not at hand and there is no Go compiler to build it: install Go 1.26 or newer, "
            "or name a folder that has etcd, kube-apiserver and kube-controller-manager in KUBEBUILDER_ASSETS"
        )
    _say(f"building {name} (once; it lands in {CACHE}) ...")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".build-") as folder:
        environment = {**os.environ, "CGO_ENABLED": "0", "GOBIN": folder}
        if name == "helm":
            # Not part of the module: helm pins its own libraries.
            command = ["install", "-trimpath", "-ldflags", _helm_stamp(), f"helm.sh/helm/v3/cmd/helm@{HELM}"]
        else:
            command = ["build", "-trimpath", "-ldflags", _stamp(), "-o", folder, PACKAGES[name]]
        built = subprocess.run(  # noqa: S603 - our own module
            [*_nice(), go, *command], cwd=MODULE, env=environment, check=False
        )
        if built.returncode:
            raise MissingError(f"{name} could not be built; the compiler's output stands above")
        # Go names a program after its import path: server/v3 becomes "server", or "v3".
        (made,) = Path(folder).iterdir()
        made.rename(CACHE / name)  # atomic: another session sees all of it or nothing
    _say(f"built {name} in {time.monotonic() - started:.0f} s")


def _stamp() -> str:
    """Return linker flags: no debug symbols, and the version, without which the API server refuses to start."""
    package = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES[1:].split(".")
    values = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X {package}.{name}={value}" for name, value in values.items())


def _helm_stamp() -> str:
    """Return linker flags: no debug symbols, and the cluster that ``helm template`` has in mind (without: 1.20)."""
    major, minor, _ = KUBERNETES[1:].split(".")
    packages = [f"helm.sh/helm/v3/pkg/{name}.k8sVersion" for name in ("chartutil", "lint/rules")]
    return "-s -w " + " ".join(f"-X {package}Major={major} -X {package}Minor={minor}" for package in packages)


def _nice() -> list[str]:
    return ["nice"] if shutil.which("nice") else []


def _say(text: str) -> None:
    sys.stderr.write(f"cluster: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Say what is at hand; with --get, make the rest."""
    try:
        found = get() if "--get" in sys.argv[1:] else find()
    except MissingError as error:
        _say(str(error))
        return 1
    for name in TOOLS:
        sys.stdout.write(f"{name:24} {found.get(name, 'missing')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
