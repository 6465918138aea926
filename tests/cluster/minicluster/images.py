"""Images name commands of this machine, or of a root file system: there is no registry and nothing is pulled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from minicluster import binaries

_BIN = Path(sys.executable).parent
_STANDARD = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Image(NamedTuple):
    """What runs when a container says no ``command`` (entrypoint), and no ``args`` either (words)."""

    entrypoint: list[str]
    words: list[str]
    root: str = ""  # a folder: the image's own file system, instead of this machine's
    path: str = ""  # the PATH in there


# By the last part of an image's name: registry and tag do not matter. Any program on PATH can be a `command`.
KNOWN = {
    "carpool": Image(["carpool"], []),
    "carpool-sidecar": Image(["carpool-sidecar"], []),
    "carpool-operator": Image(["carpool-operator"], []),
    "standin": Image(["carpool", "standin"], []),
    "python": Image([], ["python"]),
    "busybox": Image([], ["sh"]),
    "curl": Image(["curl"], []),
    "kubectl": Image(["kubectl"], []),
    "prometheus": Image(["prometheus"], []),
}


def write(folder: Path, images: dict[str, Image]) -> None:
    """Let a running node know images beside those that it knows already."""
    file = folder / "images.json"
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps(images))
    fresh.rename(file)


def find(folder: Path, name: str) -> Image | None:
    """Return an image by its full name, None where there is none."""
    short = name.rsplit("/", maxsplit=1)[-1].split("@", maxsplit=1)[0].split(":", maxsplit=1)[0]
    file = folder / "images.json"
    more = json.loads(file.read_text()) if file.exists() else {}
    return Image(*more[short]) if short in more else KNOWN.get(short)


def search_path() -> str:
    """Return the PATH of a container: our own commands first."""
    folders = dict.fromkeys(str(path.parent) for path in binaries.find().values())
    return os.pathsep.join([str(_BIN), *folders, _STANDARD])
