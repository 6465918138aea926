"""OCI layouts and archives, made by umoci and skopeo, from the tar files of layers."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

INDEX = "application/vnd.oci.image.index.v1+json"
NAME = "org.opencontainers.image.ref.name"


def add(layout: Path, tag: str, layers: Mapping[str, Path], settings: Mapping[str, Any], seconds: int) -> str:
    """Add an image to a layout, which is made where there is none; returns the digest of its manifest.

    Args:
        layout: A folder.
        tag: The image's name in it.
        layers: The tar file of each, the lowest first.
        settings: ``architecture``, ``user``, ``entrypoint``, ``cmd``, ``env``, ``ports``, ``labels``, ``annotations``.
        seconds: Since 1970: when it was made.
    """
    if not layout.exists():
        _umoci("init", "--layout", layout)
    image = f"{layout}:{tag}"
    when = moment(seconds)
    _umoci("new", "--image", image)
    for name, file in layers.items():
        history = ("--history.created", when, "--history.created_by", f"images/inside.py: {name}")
        _umoci("raw", "add-layer", "--image", image, *history, file)
    lists = {
        "--config.entrypoint": settings["entrypoint"],
        "--config.cmd": settings["cmd"],
        "--config.exposedports": settings["ports"],
        "--config.env": _pairs(settings["env"]),
        "--config.label": _pairs(settings["labels"]),
        "--manifest.annotation": _pairs(settings["annotations"]),
    }
    many = [word for option, values in lists.items() for value in values for word in (option, value)]
    one = ("--config.user", settings["user"], "--config.workingdir", "/", "--config.stopsignal", "SIGTERM")
    platform = ("--os", "linux", "--architecture", settings["architecture"], "--created", when)
    _umoci("config", "--image", image, "--no-history", *platform, *one, *many)
    _umoci("gc", "--layout", layout)
    return str(_named(layout, tag)["digest"])


def join(layout: Path, tag: str, parts: Mapping[str, str]) -> str:
    """Name the images of several architectures as one; returns the digest of the index.

    Args:
        layout: Has the images.
        tag: The name of all.
        parts: The tag of the image of each architecture.
    """
    manifests = []
    for architecture, part in parts.items():
        found = {key: value for key, value in _named(layout, part).items() if key != "annotations"}
        manifests.append(found | {"platform": {"architecture": architecture, "os": "linux"}})
    whole = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, sort_keys=True).encode()
    digest = hashlib.sha256(whole).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(whole)
    entry = {"mediaType": INDEX, "digest": f"sha256:{digest}", "size": len(whole), "annotations": {NAME: tag}}
    index = _index(layout)
    index["manifests"] = [*(each for each in index["manifests"] if each["annotations"].get(NAME) != tag), entry]
    (layout / "index.json").write_text(json.dumps(index))
    for path in layout.rglob("*"):  # umoci's files are readable by their owner only
        path.chmod(0o755 if path.is_dir() else 0o644)
    return f"sha256:{digest}"


def archive(layout: Path, tag: str, file: Path, name: str) -> None:
    """Write an archive that ``docker load``, ``podman load`` and ``ctr image import`` take."""
    file.unlink(missing_ok=True)
    subprocess.run(["skopeo", "copy", "--quiet", f"oci:{layout}:{tag}", f"docker-archive:{file}:{name}"], check=True)


def size(layout: Path, tag: str) -> int:
    """Return how many bytes of layers a node pulls."""
    manifest = json.loads((layout / "blobs/sha256" / _named(layout, tag)["digest"].partition(":")[2]).read_text())
    return sum(int(layer["size"]) for layer in manifest["layers"])


def moment(seconds: int) -> str:
    """Return a time as the images write it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _index(layout: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((layout / "index.json").read_text())
    return found


def _named(layout: Path, tag: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (each for each in _index(layout)["manifests"] if each.get("annotations", {}).get(NAME) == tag)
    return found


def _pairs(values: Mapping[str, str]) -> Sequence[str]:
    return [f"{key}={value}" for key, value in sorted(values.items())]


def _umoci(*words: str | Path) -> None:
    subprocess.run(["umoci", *(str(word) for word in words)], check=True)
