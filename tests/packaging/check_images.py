"""The images that `make images` made do their work, with no right but to run. `make test-images` runs this.

It needs root, `runc` and `umoci`, and minutes for the images: it is no part of `make test`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from base64 import b64decode
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
import yaml
from minicluster.waiting import eventually
from namespaces import Namespace, cable, namespaces_allowed
from runc import USER, Image, needs_root, rights

from carpool.policy.durations import Quantity
from carpool_operator.injector import capture
from carpool_operator.injector.resources import Resources
from carpool_operator.webhook.certificates import issue

ROOT = Path(__file__).parents[2]
MADE = Path(os.environ.get("CARPOOL_IMAGES") or ROOT / "dist/images")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAMES = ("carpool-sidecar", "carpool-operator")
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
TAG = f"{VERSION}-{ARCHITECTURE}"
PROFILE = ROOT / "benchmarks/profiles/resnet50-v100.json"
MOST = {"carpool-sidecar": 100e6, "carpool-operator": 190e6}
"""Bytes of an image's file system: 71 and 153 MB when this was written."""

pytestmark = pytest.mark.skipif(bool(needs_root()), reason=needs_root() or "-")


def blob(name, digest):
    return MADE / name / "blobs" / digest.replace(":", "/")


def manifest(name, tag=TAG):
    index = json.loads((MADE / name / "index.json").read_text())
    (found,) = (each for each in index["manifests"] if each["annotations"]["org.opencontainers.image.ref.name"] == tag)
    return json.loads(blob(name, found["digest"]).read_text())


def config(name):
    return json.loads(blob(name, manifest(name)["config"]["digest"]).read_text())


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return {name: Image(MADE / name, TAG, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture
def sidecar(images):
    return images["carpool-sidecar"]


@pytest.fixture
def operator(images):
    return images["carpool-operator"]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def standin():
    (port,) = free_ports(1)
    command = [Path(sys.executable).with_name("carpool"), "standin", "--profile", str(PROFILE), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: requests.get(f"{url}/v2/health/ready", timeout=5).status_code == 200)
            yield url
        finally:
            process.terminate()


def configured(folder, upstream, **more):
    data, admin = free_ports(2)
    settings = {
        "listen": f"127.0.0.1:{data}",
        "admin": f"127.0.0.1:{admin}",
        "upstream": {"url": upstream},
        "policy": {"slo": {"latency": {"p99": "500ms"}}},
        **more,
    }
    file = folder / "sidecar.yaml"
    file.write_text(yaml.safe_dump(settings))
    return {file: "/etc/carpool/sidecar.yaml"}, f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}"


def ready(admin):
    return requests.get(f"{admin}/readyz", timeout=5).status_code == 200


def test_the_sidecar_serves_without_any_right(sidecar, standin, tmp_path):
    mounts, data, admin = configured(tmp_path, standin)
    with sidecar.started(mounts=mounts) as container:
        eventually(lambda: ready(admin))
        body = {"instances": [[1, 2.50]]}
        answer = requests.post(f"{data}/v1/models/standin:predict", json=body, timeout=30)
        assert (answer.status_code, answer.text.replace(" ", "")) == (200, '{"predictions":[[1,2.5]]}')
        assert "carpool_arrivals_total" in requests.get(f"{admin}/metrics", timeout=5).text
        stated = rights(container.pid)
        assert set(stated["Uid"].split()) == {str(USER)}
        assert stated["NoNewPrivs"] == "1"
        assert {int(stated[kind], 16) for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
        mounted = Path(f"/proc/{container.pid}/mountinfo").read_text().splitlines()
        (root,) = (line.split() for line in mounted if line.split()[4] == "/")
        assert "ro" in root[5].split(",")


class Answering(BaseHTTPRequestHandler):
    """Answers with JSON."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        pass


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Held(Answering):
    """A model that answers once it may."""

    arrived = threading.Event()
    may_answer = threading.Event()

    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.arrived.set()
        self.may_answer.wait(60)
        self.answer(200, {"predictions": [7]})


@pytest.fixture
def held():
    Held.arrived.clear()
    Held.may_answer.clear()
    with serving(Held) as url:
        yield url
        Held.may_answer.set()


def test_sigterm_drains(sidecar, held, tmp_path):
    mounts, data, admin = configured(tmp_path, held, shutdown={"lame": "3s", "limit": "60s"})
    answers = []

    def ask():
        answers.append(requests.post(f"{data}/v1/models/m:predict", json={"instances": [1]}, timeout=60))

    with sidecar.started(mounts=mounts) as container:
        eventually(lambda: ready(admin))
        caller = threading.Thread(target=ask)
        caller.start()
        assert Held.arrived.wait(60)
        container.signal(signal.SIGTERM)
        eventually(lambda: requests.get(f"{admin}/readyz", timeout=5).status_code == 503)
        assert not answers
        Held.may_answer.set()
        caller.join(60)
        assert [(each.status_code, each.json()) for each in answers] == [(200, {"predictions": [7]})]
        assert container.process.wait(60) == 0, container.output()


@pytest.fixture
def pod_and_caller():
    if why := namespaces_allowed():
        pytest.skip(f"network namespaces can't be made here: {why}")
    pod, caller = Namespace(), Namespace()
    try:
        cable(caller, pod)
        yield pod, caller
    finally:
        caller.close()
        pod.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_init_container_that_is_injected_captures_the_port_of_its_pod(sidecar, pod_and_caller, allowed):
    pod, caller = pod_and_caller
    pod.serve(model=8000, sidecar=14080)
    assert caller.ask(("10.99.0.2", 8000)) == ["model"]
    made = capture.container(
        "carpool-sidecar:0", None, 8000, 14080, Resources(100, None, Quantity(64 << 20), Quantity(256 << 20))
    )
    context = made["securityContext"]
    if not allowed:
        context["capabilities"]["add"] = []
    where = f"/proc/{pod.pid}/ns/net"
    with sidecar.started(*made["command"], *made["args"], command=True, context=context, network=where) as container:
        # Optional: without the right it ends well, and all stays as it was.
        assert container.process.wait(120) == 0, container.output()
        assert ("redirected 8000 to 14080" if allowed else "NET_ADMIN") in container.output()
    addresses = [("10.99.0.2", 8000), ("fd99::2", 8000)]
    assert caller.ask(*addresses) == ["sidecar" if allowed else "model"] * 2
    assert pod.ask(("127.0.0.1", 8000)) == ["model"]


@pytest.mark.parametrize("program", ["carpool-operator", "carpool-injector"])
def test_the_operators_programs_start(operator, program):
    assert operator.run(program, "--version", command=True).strip() == f"{program} {VERSION}"


def test_an_operator_without_a_cluster_says_so(operator):
    with operator.started("--kubeconfig", "/nowhere") as container:
        assert container.process.wait(120) == 2
        assert "no cluster to connect to" in container.output()


class ApiServer(Answering):
    """As much of a cluster as the injector asks for when it has a certificate: the operator's public key."""

    def do_GET(self):
        if self.path == "/api/v1/namespaces/carpool-system/configmaps/carpool-public-key":
            self.answer(200, {"data": {"publicKey": "ab" * 32}})
        else:
            self.answer(404, {"kind": "Status", "code": 404})


@pytest.fixture
def api_server():
    with serving(ApiServer) as url:
        yield url


def kubeconfig(url):
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": url}}],
        "users": [{"name": "it", "user": {"token": "t"}}],
    }


POD = {
    "metadata": {
        "name": "resnet-0",
        "annotations": {"carpool.dev/inject": "true"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "resnet", "controller": True}],
    },
    "spec": {"containers": [{"name": "server", "ports": [{"containerPort": 9000}]}]},
}
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "u-1", "kind": {"kind": "Pod"}, "namespace": "models", "object": POD},
}


def test_the_injector_answers_reviews_by_tls_and_ends_at_sigterm(operator, api_server, tmp_path):
    folder = tmp_path / "tls"
    folder.mkdir()
    pair, authority = issue(("localhost",), time.time())
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    for path, content in (("ca.crt", authority.decode()), ("kubeconfig", yaml.safe_dump(kubeconfig(api_server)))):
        (tmp_path / path).write_text(content)
    port, metrics = free_ports(2)
    words = ("carpool-injector", "--sidecar-image=carpool-sidecar:0", f"--port={port}", f"--metrics-port={metrics}")
    words += ("--cert-dir=/etc/carpool/tls", "--kubeconfig=/etc/carpool/kubeconfig")
    mounts = {folder: "/etc/carpool/tls", tmp_path / "kubeconfig": "/etc/carpool/kubeconfig"}
    with operator.started(*words, mounts=mounts, command=True) as container:
        eventually(lambda: requests.get(f"http://127.0.0.1:{metrics}/readyz", timeout=5).status_code == 200)
        url = f"https://localhost:{port}/mutate"
        response = requests.post(url, json=REVIEW, timeout=30, verify=str(tmp_path / "ca.crt")).json()["response"]
        patch = json.loads(b64decode(response["patch"]))
        assert response["allowed"]
        assert "carpool-sidecar:0" in json.dumps(patch)
        container.signal(signal.SIGTERM)
        assert container.process.wait(60) == 0, container.output()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_carries_only_what_is_its_own(images, name):
    packages = images[name].root / "opt/carpool/lib/python3.11/site-packages"
    here = {each.name for each in packages.iterdir()}
    of_operator = {"carpool_operator", "kopf", "kubernetes", "aiohttp", "pydantic"}
    of_sidecar = {"carpool_sidecar", "httptools", "uvloop"}
    mine, others = (of_operator, of_sidecar) if name == "carpool-operator" else (of_sidecar, of_operator)
    assert mine <= here
    assert not here & (others | {"carpool_cli", "pip", "setuptools", "mypy", "numpy"})


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_shell_no_installer_and_nothing_with_a_right_of_its_own(images, name):
    root = images[name].root
    programs = {each.name for folder in ("bin", "sbin") for each in (root / "usr" / folder).glob("*")}
    assert programs == {"python3.11"}
    assert not [each for each in root.rglob("*") if not each.is_symlink() and each.stat().st_mode & 0o6000]
    writable = [each for each in root.rglob("*") if not each.is_symlink() and each.stat().st_mode & 0o002]
    assert {str(each.relative_to(root)) for each in writable} == {"tmp", "var/tmp"}


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_ours_is_loaded_from_what_was_compiled(images, name):
    # A read-only root: what isn't compiled would be compiled again at each start. ONNX files are another image's.
    code = (
        "import importlib, pathlib, pkgutil, sys\n"
        "import carpool as top\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "for root in (top, package):\n"
        "    for each in pkgutil.walk_packages(root.__path__, root.__name__ + '.'):\n"
        "        try:\n"
        "            importlib.import_module(each.name)\n"
        "        except ModuleNotFoundError as error:\n"
        "            assert error.name in ('numpy', 'onnxruntime'), error\n"
        "missing = [m.__name__ for m in list(sys.modules.values())\n"
        "    if getattr(m, '__cached__', None) and not pathlib.Path(m.__cached__).exists()]\n"
        "import ssl\n"
        "print(missing, len(ssl.create_default_context().get_ca_certs()) > 100)\n"
    )
    package = name.replace("-", "_")
    assert images[name].run("python", "-c", code, package, command=True).splitlines()[-1] == "[] True"


def test_hot_modules_are_machine_code(sidecar):
    code = "import carpool.batching.batcher as b, carpool_sidecar.dispatch.driver as d; print(b.__file__, d.__file__)"
    files = sidecar.run("python", "-c", code, command=True).split()
    assert all(each.endswith(f".cpython-311-{os.uname().machine}-linux-gnu.so") for each in files), files


@pytest.mark.parametrize("name", NAMES)
def test_what_the_image_says_of_itself(images, name):
    settings = config(name)
    assert settings["config"]["User"] == f"{USER}:{USER}"
    assert settings["config"]["StopSignal"] == "SIGTERM"
    labels = settings["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch("[0-9a-f]{40}(-modified)?", labels["org.opencontainers.image.revision"])
    assert settings["architecture"] == ARCHITECTURE
    folder = images[name].root
    assert sum(each.lstat().st_size for each in folder.rglob("*") if each.is_file()) < MOST[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_bill_of_materials_names_all_that_is_in_the_image(images, name):
    annotations = manifest(name)["annotations"]
    file = MADE / annotations["dev.carpool.sbom"]
    content = file.read_bytes()
    assert annotations["dev.carpool.sbom.digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    bill = json.loads(content)
    stated = {(each["purl"].split(":")[1].split("/")[0], each["name"], each["version"]) for each in bill["components"]}
    assert all(each["hashes"][0]["content"] for each in bill["components"])
    root = images[name].root
    status = (root / "var/lib/dpkg/status").read_text()
    debian = re.findall(r"^Package: (.*)\n(?:.*\n)*?Version: (.*)$", status, re.MULTILINE)
    wheels = [
        re.search(r"^Name: (.*)\nVersion: (.*)$", each.read_text(), re.MULTILINE).groups()
        for each in root.glob("opt/carpool/lib/python3.11/site-packages/*.dist-info/METADATA")
    ]
    assert stated == {("deb", *each) for each in debian} | {("pypi", *each) for each in wheels}
    subject = {each["name"]: each["value"] for each in bill["metadata"]["component"]["properties"]}
    layers = [value for key, value in subject.items() if key.startswith("dev.carpool.layer.")]
    assert layers == config(name)["rootfs"]["diff_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_those_of_the_constraints(images, name):
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {key.lower().replace("_", "-"): value for key, value in pinned.items()}
    packages = images[name].root / "opt/carpool/lib/python3.11/site-packages"
    found = {}
    for each in packages.glob("*.dist-info/METADATA"):
        key, version = re.search(r"^Name: (.*)\nVersion: (.*)$", each.read_text(), re.MULTILINE).groups()
        found[key.lower().replace("_", "-")] = version
    assert found.pop("carpool-serving") == VERSION
    assert found == {key: pinned.get(key) for key in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_archive_has_the_same_image(name, tmp_path):
    archive = MADE / f"{name}-{TAG}.tar"
    copied = ["skopeo", "copy", "--quiet", f"docker-archive:{archive}:{name}:{VERSION}", f"oci:{tmp_path}:it"]
    subprocess.run(copied, check=True)
    index = json.loads((tmp_path / "index.json").read_text())
    found = json.loads((tmp_path / "blobs" / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    assert json.loads((tmp_path / "blobs" / found["config"]["digest"].replace(":", "/")).read_text()) == config(name)
