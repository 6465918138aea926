"""An environment for each engine, outside the tree: the pins of requirements/NAME.txt, installed once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
CACHE = Path.home() / ".cache" / "carpool"

SYSTEM_PYTHON = "/usr/bin/python3"
"""Triton's Python backend is linked against it, so pytriton runs on no other."""


class NotInstalled(Exception):  # noqa: N818 - not an error of ours: an engine that can't be had here
    """An environment that could not be made; the text says why."""


def environment(name: str) -> Path:
    """Return the `bin` of an engine's environment, made first if it is not there or its requirements have changed.

    Raises ``NotInstalled``.
    """
    wanted = REQUIREMENTS / f"{name}.txt"
    if not wanted.exists():
        return Path(sys.executable).parent  # Carpool runs in this one
    folder = CACHE / f"peers-{name}"
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text("utf-8") != wanted.read_text("utf-8"):
        print(f"installing {' '.join(wanted.read_text('utf-8').split())} in {folder} (this may take minutes) ...")
        python = SYSTEM_PYTHON if name == "triton" else sys._base_executable  # type: ignore[attr-defined]  # noqa: SLF001 - no other way past our own environment
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "-r", str(wanted)]
        for command in ([python, "-m", "venv", str(folder)], pip):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotInstalled((done.stderr or done.stdout).strip().splitlines()[-1])
        installed.write_text(wanted.read_text("utf-8"), "utf-8")
    return folder / "bin"


def versions(place: Path, name: str) -> dict[str, str]:
    """Return the interpreter's version and those of the packages that an engine's requirements name."""
    listing = "import sys; from importlib.metadata import version; print(sys.version.split()[0]); "
    wanted = REQUIREMENTS / f"{name}.txt"
    packages = [line.partition("==")[0].partition("[")[0] for line in wanted.read_text("utf-8").split()]
    listing += "".join(f"print(version({package!r})); " for package in packages)
    said = subprocess.run([str(place / "python"), "-c", listing], capture_output=True, text=True, check=True)
    return dict(zip(["python", *packages], said.stdout.split(), strict=True))
