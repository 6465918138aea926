"""README's block for Kubernetes works as it is written, with the images that `make images` made.

`make test-images` runs this, on the tests' cluster, with a registry (Debian's docker-registry) on its 127.0.0.1.
The cluster's node pulls nothing: it is given what was pushed. It enforces no users; check_images.py does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import requests
from check_images import MADE, NAMES, TAG, VERSION
from minicluster import binaries, carpool
from minicluster.cluster import Cluster
from minicluster.waiting import eventually
from runc import Image, needs_root

ROOT = Path(__file__).parents[2]
REGISTRY = "127.0.0.1:5000"
WHY = needs_root() or binaries.missing()

pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "-")


def block():
    """Return the README's commands for Kubernetes."""
    section = (ROOT / "README.md").read_text().partition("\n## On Kubernetes\n")[2].partition("\n## ")[0]
    (found,) = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found.count("registry.example.com") == 1
    return found.replace("registry.example.com", REGISTRY)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    one = Cluster()
    try:
        one.start()
        for name in NAMES:
            image = Image(MADE / name, TAG, tmp_path_factory.mktemp(name))
            path = next(each for each in image.settings["process"]["env"] if each.startswith("PATH="))
            one.add_image(name, name, root=str(image.root), path=path.removeprefix("PATH="))
        yield one
    finally:
        one.stop()


@pytest.fixture
def registry(cluster, tmp_path):
    """Serve a registry in the cluster's network; returns the environment in which skopeo talks to it without TLS."""
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": REGISTRY},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(settings))
    home = tmp_path / "home"
    (home / ".config/containers").mkdir(parents=True)
    (home / ".config/containers/registries.conf").write_text(
        f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n'
    )
    with cluster.inside(), (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", tmp_path / "registry.yml"], stdout=log, stderr=log)
    try:
        with cluster.inside():
            eventually(lambda: requests.get(f"http://{REGISTRY}/v2/", timeout=5).status_code == 200)
        yield {"HOME": str(home)}
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def made(tmp_path):
    """Return a folder with a `make` for which the images are made already."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/make"
    program.write_text(f'#!/bin/sh\ntest "$*" = images && test -f {MADE}/digests.json\n')
    program.chmod(0o755)
    return tmp_path / "bin"


def running(program):
    """Return the process numbers of a program of an image."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"/opt/carpool/bin/{program}".encode() in words:
            found.append(int(folder.name))
    return found


def test_the_commands_of_the_readme(cluster, registry, made, tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "charts").symlink_to(ROOT / "charts")
    (folder / "dist").mkdir()
    (folder / "dist/images").symlink_to(MADE)
    with closing(cluster.api()) as api, cluster.inside():
        api.apply(*carpool.model("resnet", replicas=1), namespace="default")
        api.until_ready("resnet", "default")
        environment = {**cluster.environment(), **registry}
        # The plugin is found by what the block says, and not since the tests run in this environment.
        here = Path(sys.executable).parent
        (folder / ".venv").symlink_to(here.parent)
        others = [each for each in environment["PATH"].split(os.pathsep) if each != str(here)]
        environment["PATH"] = os.pathsep.join([str(made), *others])
        done = subprocess.run(
            [shutil.which("bash"), "-euo", "pipefail", "-c", block()],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

        # 1. What was pushed is what was made, by digest
        digests = json.loads((MADE / "digests.json").read_text())
        for name in NAMES:
            accept = {"Accept": "application/vnd.oci.image.index.v1+json"}
            answer = requests.head(f"http://{REGISTRY}/v2/{name}/manifests/{VERSION}", headers=accept, timeout=30)
            assert answer.headers["Docker-Content-Digest"] == digests[name.removeprefix("carpool-")]["all"]

        # 2. The model's pods return with a sidecar of that image in front
        def injected(pods):
            ready = [
                pod
                for pod in pods
                if not pod["metadata"].get("deletionTimestamp")
                and len(pod.get("status", {}).get("containerStatuses", [])) == 1
                and all(each["ready"] for each in pod["status"]["containerStatuses"])
                and all(each["ready"] for each in pod["status"].get("initContainerStatuses", []))
                and pod["spec"].get("initContainers")
            ]
            return len(ready) == len(pods) == 1

        (pod,) = api.until("pods", "default", injected, labels="app=resnet", timeout=240)
        assert pod["spec"]["initContainers"][0]["image"] == f"{REGISTRY}/carpool-sidecar:{VERSION}"
        slices = api.until("endpointslices", "default", bool, labels="kubernetes.io/service-name=resnet")
        ((address,), (port,)) = slices[0]["endpoints"][0]["addresses"], slices[0]["ports"]
        url = f"http://{address}:{port['port']}/v1/models/standin:predict"
        answer = requests.post(url, json={"instances": [[1]]}, timeout=30)
        assert (answer.status_code, answer.json()) == (200, {"predictions": [[1]]})

        # 3. Every part of it runs from its image
        for program in ("carpool-sidecar", "carpool-operator", "carpool-injector"):
            pids = running(program)
            assert pids, program
            assert all(Path(f"/proc/{pid}/exe").readlink() == Path("/usr/bin/python3.11") for pid in pids), program
            assert all(not Path(f"/proc/{pid}/root/bin/sh").exists() for pid in pids), program
