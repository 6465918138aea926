"""`make images`: the sidecar's and the operator's image, without a container engine and without a registry.

mmdebstrap makes a Debian with a C compiler, `inside.py` makes the trees of the images in it, umoci packs them, skopeo
writes archives. What was made is the same to the byte each time, while our sources and Debian's archive are the same.

    dist/images/carpool-sidecar/                   OCI layout, tags VERSION and VERSION-ARCHITECTURE
    dist/images/carpool-sidecar-VERSION-ARCHITECTURE.tar        for `docker load`, `ctr image import`
    dist/images/carpool-sidecar-VERSION-ARCHITECTURE.cdx.json   bill of materials, CycloneDX
    dist/images/digests.json                       the digest of each
    dist/images/*.whl                              the wheels in them

Exit codes: 0, made; 1, not so, and a program said why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import layout
import sbom
from inside import CONTENTS, HOME, MACHINES, platforms

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION: str = PROJECT["project"]["version"]
PREFIX = "carpool-"


class Origin(NamedTuple):
    """What is built: a commit, and the time that its files get."""

    revision: str
    seconds: int


def origin() -> Origin:
    """Find the last commit that changed what goes in; $SOURCE_DATE_EPOCH is another time. Raises RuntimeError."""
    paths = CONTENTS["sources"]["paths"]
    commit, _, seconds = git("log", "-1", "--format=%H %ct", "--", *paths).partition(" ")
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or seconds
    if not seconds:
        raise RuntimeError("This is no git checkout: set SOURCE_DATE_EPOCH, the time in seconds that files get")
    changed = "-modified" if git("status", "--porcelain", "--", *paths) else ""
    return Origin((commit or "unknown") + changed, int(seconds))


def git(*words: str) -> str:
    """Return what git says, empty where it can't."""
    said = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() if said.returncode == 0 else ""


def requirements(extras: str) -> list[str]:
    """Return what the project with extras of it (``onnx,signing``) needs, without the project itself."""
    found = list(PROJECT["project"]["dependencies"])
    for extra in extras.split(","):
        for each in PROJECT["project"]["optional-dependencies"][extra]:
            name, _, more = each.rstrip("]").partition("[")
            if name != PROJECT["project"]["name"]:
                found.append(each)
            elif more:
                found += requirements(more)
    return list(dict.fromkeys(found))


def download(folder: Path, wanted: list[str], architecture: str) -> None:
    """Put the wheels of requirements, and of what they need, into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    versions = ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder), *platforms(architecture)]
    subprocess.run([*pip, *versions, *wanted], check=True)


def stage(folder: Path, images: list[str], architecture: str, here: str) -> None:
    """Gather what the Debian gets: our sources and the wheels, so that it needs no index."""
    for name in CONTENTS["sources"]["paths"]:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".mypy_cache")
            shutil.copytree(path, folder / "source" / name, ignore=ignored)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(path, folder / "source" / name)
    hook = PROJECT["tool"]["hatch"]["build"]["hooks"]["custom"]["requires"]
    download(folder / "wheels/build", [*PROJECT["build-system"]["requires"], *hook], here)
    needed = dict.fromkeys(each for name in images for each in requirements(CONTENTS["image"][name]["extra"]))
    download(folder / "wheels/app", list(needed), architecture)


def bootstrap(folder: Path, images: list[str], architecture: str, here: str, seconds: int) -> Path:
    """Make a Debian, and in it the layers; returns the folder that has them."""
    out = folder / "out"
    out.mkdir()
    packages = list(CONTENTS["debian"]["build"])
    if architecture != here:
        packages += CONTENTS["debian"]["cross"][architecture]
    made = [*(f"{name}.tar" for name in ("base", *images)), "inputs.json", "wheel"]
    variables = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"SOURCE_DATE_EPOCH={seconds}", "LC_ALL=C.UTF-8"]
    inside = ["python3", "/carpool/source/images/inside.py", *images, "--source=/carpool/source", "--out=/carpool/out"]
    options = [f"--architecture={architecture}", "--wheels=/carpool/wheels", "--tar"]
    hooks = [
        'mkdir -p "$1/carpool"',
        shlex.join(["copy-in", f"{folder}/source", f"{folder}/wheels", "/carpool"]),
        f'chroot "$1" {shlex.join([*variables, *inside, *options])}',
        shlex.join(["copy-out", *(f"/carpool/out/{name}" for name in made), str(out)]),
    ]
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale", "info")]
    command = ["mmdebstrap", "--quiet", "--variant=apt", "--format=null", f"--include={','.join(packages)}", *excluded]
    command += [f"--architectures={','.join(dict.fromkeys((here, architecture)))}"]
    command += [f"--customize-hook={hook}" for hook in hooks]
    mirror = [os.environ["MIRROR"]] if os.environ.get("MIRROR") else []
    subprocess.run([*command, CONTENTS["debian"]["suite"], "/dev/null", *mirror], check=True)
    return out


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def settings(name: str, architecture: str, bill: Path, origin: Origin) -> dict[str, Any]:
    """Return what an image's configuration says."""
    image = CONTENTS["image"][name]
    labels = CONTENTS["labels"] | {
        "org.opencontainers.image.title": f"{PREFIX}{name}",
        "org.opencontainers.image.description": image["title"],
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.revision": origin.revision,
        "org.opencontainers.image.created": layout.moment(origin.seconds),
    }
    return {
        "architecture": architecture,
        "user": f"{CONTENTS['root']['user']}:{CONTENTS['root']['user']}",
        "entrypoint": [image["programs"][0]],
        "cmd": image["cmd"],
        "ports": image["ports"],
        "env": {**CONTENTS["env"], "PATH": f"/{HOME}/bin:/usr/bin"},
        "labels": labels,
        "annotations": labels | {"dev.carpool.sbom": bill.name, "dev.carpool.sbom.digest": f"sha256:{digest(bill)}"},
    }


def pack(out: Path, made: Path, name: str, architecture: str, origin: Origin) -> str:
    """Write one image, its bill of materials and its archive; returns its digest."""
    full = f"{PREFIX}{name}"
    stem = f"{full}-{VERSION}-{architecture}"
    layers = {"base": made / "base.tar", name: made / f"{name}.tar"}
    facts = {"name": full, "version": VERSION, "license": PROJECT["project"]["license"], "kind": name}
    inputs = json.loads((made / "inputs.json").read_text())
    bill = out / f"{stem}.cdx.json"
    bill.write_text(sbom.bill(facts, inputs, {key: digest(file) for key, file in layers.items()}, origin.seconds))
    tag = f"{VERSION}-{architecture}"
    found = layout.add(out / full, tag, layers, settings(name, architecture, bill, origin), origin.seconds)
    layout.archive(out / full, tag, out / f"{stem}.tar", f"{full}:{VERSION}")
    megabytes = sum(file.stat().st_size for file in layers.values()) / 1e6
    print(f"{full} {architecture}: {megabytes:.0f} MB, {layout.size(out / full, tag) / 1e6:.0f} compressed, {found}")
    return found


def build(out: Path, images: list[str], architectures: list[str], origin: Origin) -> dict[str, dict[str, str]]:
    """Make all; returns the digest of each image by architecture, and of all architectures together as ``all``."""
    here = next(name for name, machine in MACHINES.items() if machine == platform.machine())
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    digests: dict[str, dict[str, str]] = {name: {} for name in images}
    for architecture in architectures:
        with TemporaryDirectory(prefix="carpool-images-") as name:
            folder = Path(name)
            folder.chmod(0o755)  # mmdebstrap may be another user in there
            stage(folder, images, architecture, here)
            made = bootstrap(folder, images, architecture, here, origin.seconds)
            for wheel in (made / "wheel").iterdir():
                shutil.copy(wheel, out)
            for image in images:
                digests[image][architecture] = pack(out, made, image, architecture, origin)
    for image in images:
        parts = {architecture: f"{VERSION}-{architecture}" for architecture in architectures}
        digests[image]["all"] = layout.join(out / f"{PREFIX}{image}", VERSION, parts)
    (out / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    return digests


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist/images", help="emptied first (dist/images)")
    parser.add_argument(
        "--image", action="append", choices=sorted(CONTENTS["image"]), help="by default all but the optional"
    )
    parser.add_argument("--architecture", action="append", choices=sorted(MACHINES), help="this machine's by default")
    options = parser.parse_args()
    standard = [name for name, image in CONTENTS["image"].items() if not image.get("optional")]
    here = next(name for name, machine in MACHINES.items() if machine == platform.machine())
    try:
        build(options.out, options.image or standard, options.architecture or [here], origin())
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"make images: {error.cmd[0]} failed, see above ({error.returncode})\n")
        return 1
    except RuntimeError as error:
        sys.stderr.write(f"make images: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
