"""Runs inside a Debian, as root: makes the trees of the images' file systems, and tar files of them.

Two callers share it: `make images`, which has the Debian made by mmdebstrap, and the Dockerfile. Only Python's own
library is at hand here. What goes in is listed in contents.toml.

    OUT/base                of all images: Debian's Python, without a shell
    OUT/IMAGE               of one image: /opt/carpool
    OUT/base.tar ...        the same, byte for byte reproducible (--tar). Files of an image get the time
                            SOURCE_DATE_EPOCH, those of the base that of Debian's newest file: releases share a base
    OUT/wheel/              our wheel (--tar)
    OUT/inputs.json         each Debian package and wheel with its version and SHA-256 (--tar)
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from base64 import urlsafe_b64encode
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).parent
CONTENTS: dict[str, Any] = tomllib.loads((HERE / "contents.toml").read_text())
PYTHON: str = CONTENTS["python"]["program"]
VERSION = Path(PYTHON).name.removeprefix("python")  # 3.11
HOME = "opt/carpool"
LIBRARY = f"{HOME}/lib/python{VERSION}/site-packages"

SAME = r"-g0 -Wno-builtin-macro-redefined -D__FILE__=\"mypyc\""
"""Of the C compiler: no name of a file. Debug information and asserts name a folder that is another one each time."""

APT = ("apt-get", "download", "-qq", "--option=APT::Sandbox::User=root")

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's names of architectures, and the kernel's."""

LAUNCHER = """\
#!/{home}/bin/python
import sys
from {module} import {function}
sys.exit({function}())
"""
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n{name}:x:{user}:{user}:{name}:/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\n{name}:x:{user}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}
LINKS = {"usr/lib/ssl/cert.pem": "/etc/ssl/certs/ca-certificates.crt", "var/run": "/run"}


def run(*command: str | Path, **environment: str) -> str:
    """Run a program; returns its output. Raises CalledProcessError, after the program said why."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def platforms(architecture: str) -> list[str]:
    """Return pip's options for wheels that run on this Debian: its glibc is 2.36."""
    machine = MACHINES[architecture]
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    names += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    return ["--only-binary=:all:", f"--python-version={VERSION}", *(f"--platform={name}" for name in names)]


class Inside:
    """One run, for one architecture."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.source: Path = options.source
        self.out: Path = options.out
        self.work: Path = options.out / "work"
        self.base: Path = options.out / "base"
        self.architecture: str = options.architecture
        # A folder for each kind of wheel where there is no index to be had: build/, app/.
        self.wheels: Path | None = options.wheels
        self.released = 0  # when Debian made the newest file of the base
        self.native = options.architecture == run("dpkg", "--print-architecture").strip()
        self.prefix = "" if self.native else f"{MACHINES[options.architecture]}-linux-gnu-"

    def debian(self) -> list[dict[str, str]]:
        """Unpack Debian's packages into the base; returns what each is."""
        names = [f"{name}:{self.architecture}" for name in CONTENTS["debian"]["packages"]]
        names += CONTENTS["debian"]["common"]
        folder = fresh(self.work / "debian")
        subprocess.run([*APT, *names], cwd=folder, check=True)
        fresh(self.base)
        for name in ("bin", "lib", "lib64", "sbin"):  # one /usr, as in any Debian since 12
            (self.base / f"usr/{name}").mkdir(parents=True)
            (self.base / name).symlink_to(f"usr/{name}")
        found, status = [], ""
        for package in sorted(folder.glob("*.deb")):
            files = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
            run_tar = ["tar", "--extract", "--keep-directory-symlink", "--directory", str(self.base)]
            subprocess.run(run_tar, stdin=files.stdout, check=True)
            if files.wait():
                raise RuntimeError(f"dpkg-deb can't read {package.name}")
            control = run("dpkg-deb", "--field", package)
            first, _, rest = control.partition("\n")
            status += f"{first}\nStatus: install ok installed\n{rest.strip()}\n\n"
            found.append(described(package, control))
        self.released = max(
            int(path.lstat().st_mtime) for path in self.base.rglob("*") if path.is_file() and not path.is_symlink()
        )
        # Scanners look for vulnerable packages here.
        (self.base / "var/lib/dpkg").mkdir(parents=True, exist_ok=True)
        (self.base / "var/lib/dpkg/status").write_text(status)
        return found

    def finish_base(self) -> None:
        """Write what maintainer scripts would have, and remove what nobody needs."""
        for path, text in ACCOUNTS.items():
            (self.base / path).write_text(text.format(**CONTENTS["root"]))
        certificates = sorted((self.base / "usr/share/ca-certificates").rglob("*.crt"))
        bundle = self.base / "etc/ssl/certs/ca-certificates.crt"
        bundle.parent.mkdir(parents=True, exist_ok=True)
        bundle.write_text("".join(each.read_text() for each in certificates))
        library = self.base / CONTENTS["python"]["library"]
        for pattern in CONTENTS["python"]["remove"]:
            remove(library, pattern)
        for pattern in CONTENTS["root"]["remove"]:
            remove(self.base, pattern)
        for path, target in LINKS.items():
            (self.base / path).parent.mkdir(exist_ok=True)
            (self.base / path).symlink_to(target)
        byte_compile(library, self.base)

    def wheel(self) -> Path:
        """Make our wheel, with machine code for the architecture."""
        folder = fresh(self.work / "wheel")
        tools = fresh(self.work / "tools")
        project = tomllib.loads((self.source / "pyproject.toml").read_text())
        wanted = project["build-system"]["requires"] + project["tool"]["hatch"]["build"]["hooks"]["custom"]["requires"]
        pip("install", "--quiet", "--target", tools, *wanted, **self._index("build"))
        environment = {"CARPOOL_COMPILE": "always", "CFLAGS": SAME, "PYTHONHASHSEED": "0", "PYTHONPATH": str(tools)}
        # Without pip, which would look for build tools of the other architecture, and compile twice.
        command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
        subprocess.run(command, cwd=self.source, env={**os.environ, **environment, **self._cross()}, check=True)
        (made,) = folder.iterdir()
        return made

    def _cross(self) -> dict[str, str]:
        """Return the variables with which Python compiles for another machine: its own build uses the same."""
        if self.native:
            return {}
        machine = MACHINES[self.architecture]
        headers = fresh(self.work / "headers")
        subprocess.run([*APT, f"libpython{VERSION}-dev:{self.architecture}"], cwd=headers, check=True)
        run("dpkg-deb", "--extract", *headers.glob("*.deb"), headers)
        data = f"_sysconfigdata__{machine}-linux-gnu"
        shutil.copy(self.base / CONTENTS["python"]["library"] / f"{data}.py", Path(os.__file__).parent)
        return {
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "_PYTHON_SYSCONFIGDATA_NAME": data,
            "CC": f"{self.prefix}gcc",
            "CPATH": f"{headers}/usr/include",
        }

    def _index(self, kind: str) -> dict[str, str]:
        """Return the variables that say where pip looks, and for which versions."""
        found = {"PIP_CONSTRAINT": str(self.source / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if self.wheels:
            found |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels / kind)}
        return found

    def app(self, name: str, wheel: Path) -> list[dict[str, str]]:
        """Fill the tree of one image with our wheel and what it needs; returns what each wheel is."""
        image = CONTENTS["image"][name]
        root = fresh(self.out / name)
        library = root / LIBRARY
        report = self.work / f"{name}.json"
        where = ("--target", library, "--no-compile", "--quiet", "--report", report)
        pip("install", *where, *platforms(self.architecture), f"{wheel}[{image['extra']}]", **self._index("app"))
        shutil.rmtree(library / "bin", ignore_errors=True)
        ours = {Path(package).name for package in packaged(self.source)}
        for package in ours - set(image["packages"]):
            shutil.rmtree(library / package)
        for pattern in CONTENTS["app"]["remove"]:
            remove(library, pattern)
        for each in elf_files(library):
            if each.parent.name.endswith(".libs"):
                continue  # auditwheel's copies: strip breaks what patchelf has moved
            run(f"{self.prefix}strip", "--strip-unneeded", each)
        for record in library.glob("*.dist-info/RECORD"):
            rewrite(record)
        environment(root, image["programs"], scripts(self.source))
        byte_compile(library, root)
        return [of_wheel(each, library, wheel) for each in json.loads(report.read_text())["install"]]

    def missing(self, *trees: Path) -> list[str]:
        """Name each file that needs a library that none of the trees has, and the library."""
        files = [each for tree in trees for each in elf_files(tree)]
        here = {each.name for tree in trees for each in tree.rglob("*.so*")}
        lines = [(each, line) for each in files for line in run("readelf", "--dynamic", "--wide", each).splitlines()]
        needed = [(each, line.split("[")[1].rstrip("]")) for each, line in lines if "(NEEDED)" in line]
        return sorted(f"{each.name} needs {library}" for each, library in needed if library not in here)


def fresh(folder: Path) -> Path:
    """Make an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def remove(root: Path, pattern: str) -> None:
    """Remove what a pattern matches."""
    for path in list(root.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def pip(*words: str | Path, **environment: str) -> None:
    """Run Debian's pip."""
    run(sys.executable, "-m", "pip", *words, PIP_ROOT_USER_ACTION="ignore", **environment)


def packaged(source: Path) -> list[str]:
    """Return the folders of the packages that our wheel has."""
    project = tomllib.loads((source / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def scripts(source: Path) -> dict[str, str]:
    """Return what each command of ours runs: NAME -> MODULE:FUNCTION."""
    return dict(tomllib.loads((source / "pyproject.toml").read_text())["project"]["scripts"])


def environment(root: Path, programs: Iterable[str], targets: dict[str, str]) -> None:
    """Make what `python -m venv` makes, without running the Python of another machine."""
    folder = root / HOME / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / name).symlink_to(PYTHON)
    (root / HOME / "pyvenv.cfg").write_text(f"home = {Path(PYTHON).parent}\ninclude-system-site-packages = false\n")
    for program in programs:
        module, _, function = targets[program].partition(":")
        (folder / program).write_text(LAUNCHER.format(home=HOME, module=module, function=function))
        (folder / program).chmod(0o755)


def byte_compile(folder: Path, root: Path) -> None:
    """Compile for a read-only root, where each start would do it again; by content, since all times are set to one."""
    for cache in list(folder.rglob("__pycache__")):
        shutil.rmtree(cache)
    mode = "--invalidation-mode=unchecked-hash"
    run(sys.executable, "-m", "compileall", "-q", mode, "-s", root, "-p", "/", folder, PYTHONHASHSEED="0")


def elf_files(tree: Path) -> Iterator[Path]:
    """Yield each program and library."""
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def rewrite(record: Path) -> None:
    """Bring the list of a wheel's files in line with what is there."""
    (record.parent / "direct_url.json").unlink(missing_ok=True)  # it names a file of the build
    library = record.parents[1]
    rows = []
    for name, digest, size in csv.reader(record.read_text().splitlines()):
        path = library / name
        if not path.is_file():
            continue
        if digest:
            content = path.read_bytes()
            hashed = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={hashed}", str(len(content))))
        else:
            rows.append((name, digest, size))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted(rows))
    record.write_text(text.getvalue())


def described(package: Path, control: str) -> dict[str, str]:
    """Return what a Debian package is."""
    fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line and not line.startswith(" "))
    source = fields.get("Source", fields["Package"]).split(" ")[0]
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    wanted = {"name": "Package", "version": "Version", "architecture": "Architecture", "homepage": "Homepage"}
    return {key: fields.get(field, "") for key, field in wanted.items()} | {"source": source, "sha256": digest}


def of_wheel(entry: dict[str, Any], library: Path, ours: Path) -> dict[str, str]:
    """Return what a wheel is, from an entry of pip's report and from what was installed."""
    name, version = entry["metadata"]["name"], entry["metadata"]["version"]
    file = Path(entry["download_info"]["url"]).name
    stated = entry["download_info"].get("archive_info", {}).get("hash", "").removeprefix("sha256=")
    digest = hashlib.sha256(ours.read_bytes()).hexdigest() if file == ours.name else stated
    (folder,) = (each for each in library.glob("*.dist-info") if same(each.name, f"{name}-{version}.dist-info"))
    metadata = HeaderParser().parsestr((folder / "METADATA").read_text())
    classifiers = [each for each in metadata.get_all("Classifier", []) if each.startswith("License :: ")]
    classified = classifiers[0].rpartition(" :: ")[2] if classifiers else ""
    license_text = metadata["License-Expression"] or metadata["License"] or classified
    return {"name": name, "version": version, "license": license_text, "file": file, "sha256": digest}


def same(one: str, other: str) -> bool:
    """Compare names as Python's packages do."""
    return re.sub("[-_.]+", "-", one).lower() == re.sub("[-_.]+", "-", other).lower()


def pack(tree: Path, file: Path, seconds: int) -> None:
    """Write a tree as a tar file whose bytes depend on nothing but names, modes and contents."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            entry = tarfile.TarInfo(str(path.relative_to(tree)))
            entry.mode, entry.mtime = path.lstat().st_mode & 0o7777, seconds
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(entry)
            elif path.is_dir():
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            else:
                entry.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(entry, content)


def main() -> int:
    """Make the trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", choices=sorted(CONTENTS["image"]))
    parser.add_argument("--source", type=Path, required=True, help="our sources")
    parser.add_argument("--out", type=Path, required=True, help="where the trees go")
    parser.add_argument("--wheels", type=Path, help="folder with build/ and app/; without: from the index")
    parser.add_argument("--architecture", choices=sorted(MACHINES), default=run("dpkg", "--print-architecture").strip())
    parser.add_argument("--tar", action="store_true", help="tar files too; needs SOURCE_DATE_EPOCH")
    options = parser.parse_args()
    os.umask(0o022)
    inside = Inside(options)
    inputs: dict[str, Any] = {"architecture": options.architecture, "debian": inside.debian(), "wheels": {}}
    wheel = inside.wheel()
    inside.finish_base()
    for name in options.images:
        inputs["wheels"][name] = inside.app(name, wheel)
        if missing := inside.missing(inside.base, inside.out / name):
            sys.stderr.write(f"contents.toml lacks a Debian package for {name}: {'; '.join(missing)}\n")
            return 1
    if options.tar:
        pack(inside.base, inside.out / "base.tar", inside.released)
        for name in options.images:
            pack(inside.out / name, inside.out / f"{name}.tar", int(os.environ["SOURCE_DATE_EPOCH"]))
        (inside.out / "inputs.json").write_text(json.dumps(inputs, indent=1))
        shutil.copy(wheel, fresh(inside.out / "wheel"))
    shutil.rmtree(inside.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
