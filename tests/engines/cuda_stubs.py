"""Stand-ins for the CUDA libraries that PyPI's torch links against, so that it imports without them.

``python cuda_stubs.py SITE_PACKAGES/torch OUT``. Every function answers 100 (cudaErrorNoDevice), so
``torch.cuda.is_available()`` is False and the CPU works as ever. Needs ``readelf``, ``nm`` and ``gcc``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOREIGN = re.compile(r"lib(cu|nv|nccl)")
PLAIN = re.compile(r"(cu|__cuda|nv|nccl|cupti)")


def _said(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed(libraries: list[Path]) -> set[str]:
    """Return the names of CUDA's libraries that are linked and not there."""
    own = {each.name for each in libraries}
    lines = [line for each in libraries for line in _said("readelf", "-dW", each)]
    names = {found[1] for line in lines if (found := re.search(r"NEEDED.*\[(.+?)\]", line))}
    return {name for name in names - own if FOREIGN.match(name)}


def versions(libraries: list[Path]) -> dict[str, str]:
    """Return the library of each symbol version."""
    found, library = {}, ""
    for each in libraries:
        for line in _said("readelf", "-VW", each):
            if file := re.search(r"File: (\S+)", line):
                library = file[1]
            if (name := re.search(r"Name: (\S+)\s+Flags", line)) and library:
                found[name[1]] = library
            if "Version definition" in line:
                library = ""
    return found


def symbols(libraries: list[Path], missing: set[str]) -> dict[str, dict[str, set[str]]]:
    """Return the functions to stand in for, by library and version; "" for those without a version."""
    where = versions(libraries)
    # Symbols without a version live in a library whose versions nobody asks for.
    host = next(name for name in sorted(missing) if name.startswith("libcusparseLt"))
    defined = {
        line.split()[-1].partition("@")[0] for each in libraries for line in _said("nm", "-D", "--defined-only", each)
    }
    found: dict[str, dict[str, set[str]]] = {name: {} for name in missing}
    for each in libraries:
        for line in _said("nm", "-D", "--undefined-only", each):
            kind, _, symbol = line.strip().partition(" ")
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if kind == "U" and version and where.get(version) in missing:
                found[where[version]].setdefault(version, set()).add(name)
            elif kind == "U" and not version and PLAIN.match(name) and name not in defined:
                found[host].setdefault("", set()).add(name)
    return found


def build(torch: Path, out: Path) -> None:
    """Write the libraries."""
    out.mkdir(parents=True, exist_ok=True)
    libraries = sorted(each for each in (torch / "lib").iterdir() if ".so" in each.name)
    for library, by_version in symbols(libraries, needed(libraries)).items():
        source, script = out / f"{library}.c", out / f"{library}.map"
        names = sorted({name for each in by_version.values() for name in each})
        source.write_text("".join(f"long {name}(){{return 100;}}\n" for name in names))
        nodes = [
            f"{version} {{ global: {'; '.join(sorted(each))}; }};\n" for version, each in by_version.items() if version
        ]
        script.write_text("".join(nodes))
        more = [f"-Wl,--version-script={script}"] if nodes else []
        command = ["gcc", "-w", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}", "-o", out / library, source, *more]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
