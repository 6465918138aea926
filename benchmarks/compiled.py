"""Carpool as machine code: its core for benchmarks that run millions of requests, and the wheel that users get.

mypyc, which comes with mypy, makes C of the annotated sources as they are. What comes out lies in the user's cache,
in a folder named by a digest of them, and not beside them, where it would still run when they have changed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

from evidence import CACHE, UNUSED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "core" / "carpool"
SIDECAR = ROOT / "sidecar" / "carpool_sidecar"

_HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["hooks"]["custom"]
MODULES = tuple(name.removeprefix("carpool.") for name in _HOOK["modules"] if name.startswith("carpool."))
"""Those of the core that are machine code in a wheel, too (pyproject.toml)."""

FOLDER = CACHE / "compiled"


class NotCompiledError(Exception):
    """There is no compiler here, or it does not take the sources; the text says what it said, and what to install."""


def folder() -> Path:
    """Return what to put first on ``sys.path`` for the package as machine code; make it if there is none (minutes).

    Raises ``NotCompiledError``.
    """
    _forget()
    made = FOLDER / _digest()
    if not made.exists():
        beside = FOLDER / f"{made.name}.{os.getpid()}"
        try:
            shutil.copytree(PACKAGE, beside / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            _compile(beside)
            # Somebody else may have been faster: theirs is as good.
            with suppress(OSError):
                beside.rename(made)
        except OSError as error:
            raise NotCompiledError(f"{FOLDER} can't be written: {error}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    with suppress(OSError):  # somebody else's, to read only
        os.utime(made)
    return made


def wheel() -> Path:
    """Return a folder with core and sidecar as a compiled wheel has them; make it if there is none (three minutes).

    pip gets what building takes from a package index. Raises ``NotCompiledError``.
    """
    _forget()
    made = FOLDER / f"wheel-{_digest_of_wheel()}"
    if not made.exists():
        beside = FOLDER / f"{made.name}.{os.getpid()}"
        try:
            beside.mkdir(parents=True)
            _build_wheel(beside)
            with suppress(OSError):
                beside.rename(made)
        except OSError as error:
            raise NotCompiledError(f"{FOLDER} can't be written: {error}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    with suppress(OSError):
        os.utime(made)
    return made


def _build_wheel(where: Path) -> None:
    """Build a wheel and unpack it into a folder, without the packages in which nothing is compiled."""
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(where), str(ROOT)],
        env={**os.environ, "CARPOOL_COMPILE": "always"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise NotCompiledError(f"the wheel can't be built: {said}")
    (archive,) = where.glob("*.whl")
    with ZipFile(archive) as packed:
        packed.extractall(where)
    archive.unlink()
    for pure in (*where.glob("*.dist-info"), where / "carpool_operator", where / "carpool_cli"):
        shutil.rmtree(pure)


def _digest_of_wheel() -> str:
    """Name the wheel by what goes into it, and by what it is made for."""
    parts = [sys.version, platform.machine(), str(sysconfig.get_config_var("EXT_SUFFIX"))]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (
        ROOT / "pyproject.toml",
        ROOT / "hatch_build.py",
        *sorted(PACKAGE.rglob("*.py")),
        *sorted(SIDECAR.rglob("*.py")),
    ):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compile(where: Path) -> None:
    """Make machine code of the copy in a folder, in place."""
    files = [f"{PACKAGE.name}/{module.replace('.', '/')}.py" for module in MODULES]
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", *files],
        cwd=where,
        env={**os.environ, "MYPY_CACHE_DIR": str(where / ".mypy_cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-3:])
        raise NotCompiledError(f"mypyc failed (Debian: apt-get install gcc python3-dev): {said}")
    for left in ("build", ".mypy_cache"):
        shutil.rmtree(where / left, ignore_errors=True)


def _digest() -> str:
    """Name what comes out: by the sources, and by what they are made into machine code with, and for."""
    parts = [sys.version, platform.machine(), str(sysconfig.get_config_var("EXT_SUFFIX")), version("mypy")]
    parts += MODULES
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def use(made: str | None) -> None:
    """Set up a process that is about to play: with machine code or the sources, deaf to what interrupts its parent."""
    sys.path[:] = [each for each in sys.path if not Path(each).is_relative_to(FOLDER)]  # a new process has its parent's
    if made is not None:
        sys.path.insert(0, made)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_again() -> None:
    """Start the program again with the core as machine code, where that can be made: it takes a third of the time."""
    if is_used():
        return
    try:
        path = f"{folder()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    except NotCompiledError as error:
        print(f"{error}\nwithout machine code it takes three times as long", file=sys.stderr)
        return
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONPATH": path})  # noqa: S606 - itself


def is_used() -> bool:
    """Whether this process runs the machine code."""
    return import_module(f"{PACKAGE.name}.{MODULES[0]}").__file__ != str(PACKAGE / f"{MODULES[0].replace('.', '/')}.py")


def _forget() -> None:
    for path in FOLDER.glob("*"):
        with suppress(OSError):
            if path.stat().st_mtime <= time.time() - UNUSED:
                shutil.rmtree(path, ignore_errors=True)
