"""Stored results of rules and the oracle: played again only when their inputs have changed.

Equal seeds give equal rows on every machine, so what nothing touched since need not be played: two thirds of the work
while the tuner is what changes. A row is kept under a digest of all that it follows from: the source of every module
that it takes, followed from import to import, the scenario, its profile and recording, the oracle's points, the seed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import time
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from evidence import CACHE, UNUSED
from msgspec.structs import replace

from proof import experiments, oracle, rows
from proof.experiments import Reference, Rows
from proof.scenario import HERE, PROFILES, Trace, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from proof.scenario import Scenario

FOLDER = CACHE / "proof"

MODULES = ("proof.world", "proof.rivals", "proof.oracle", "proof.courses", "proof.measures", "proof.rows")
"""From whose imports all that decides a row is reached, but for what is in ``ALSO``."""

CONSTRAINTS = HERE.parent / "constraints.txt"

ALSO = (Path(experiments.__file__), CONSTRAINTS)
"""What puts contenders through their courses, whose own imports are of Carpool's tuner too; and what is installed."""

ROOTS = (HERE, *(HERE.parent / part for part in ("core", "sidecar", "cli", "operator")))
"""Of all packages of this project."""

_SEPARATOR = b"\0"

Played = TypeVar("Played")


def refer(scenario: Scenario, seed: int) -> Reference:
    """Return the stored result of ``experiments.refer``, or play it."""
    return stored(_path(rows.ORACLE, scenario, seed), Reference, partial(experiments.refer, scenario, seed))


def contend(scenario: Scenario, reference: Reference, name: str, seed: int) -> Rows:
    """Return the stored result of ``experiments.contend``, or play it; Carpool changes and is always played."""
    play = partial(experiments.contend, scenario, reference, name, seed)
    return play() if name == rows.CARPOOL else stored(_path(name, scenario, seed), Rows, play)


def has(name: str, scenario: Scenario, seed: int) -> bool:
    """Whether the result of a rule, or of the oracle, is stored."""
    return name != rows.CARPOOL and _path(name, scenario, seed).exists()


def stored(path: Path, kind: type[Played], play: Callable[[], Played]) -> Played:
    """Return what a file has, or play it and write it there.

    A file that can't be read or written is none: then it is played.
    """
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.msgpack.decode(path.read_bytes(), type=kind)
        with suppress(OSError):  # somebody else's, to read only
            path.touch()
        return found
    played = play()
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.msgpack.encode(played))
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
    return played


def forget(unused: float = UNUSED, folder: Path | None = None) -> None:
    """Delete what was not asked for in so many seconds, as far as it may be; another run may do so as well."""
    for path in (folder or FOLDER).glob("*"):
        with suppress(OSError):
            if path.stat().st_mtime <= time.time() - unused:
                path.unlink()


def _path(name: str, scenario: Scenario, seed: int) -> Path:
    profile = (PROFILES / f"{scenario.profile}.json").read_bytes()
    parts = [name.encode(), str(seed).encode(), repr(replace(scenario, why="")).encode(), profile, _sources()]
    # The points, whenever they were searched.
    parts.append(msgspec.json.encode(replace(oracle.known()[scenario.name], commit="", date="")))
    if isinstance(scenario.arrivals, Trace):
        parts.append(repr(recording()).encode())
    return FOLDER / file_name(*parts)


def file_name(*parts: bytes) -> str:
    """Name a file by all that its content follows from."""
    return f"{hashlib.sha256(_SEPARATOR.join(parts)).hexdigest()[:32]}.msgpack"


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """Return all code that affects a row."""
    return sources(*MODULES, also=ALSO)


def sources(*modules: str, also: Iterable[Path] = (CONSTRAINTS,)) -> bytes:
    """Return the code of modules and of what they import, and files beside."""
    return _SEPARATOR.join(path.read_bytes() for path in sorted({*reached(*modules), *also}))


def reached(*modules: str) -> set[Path]:
    """List the files of this project that modules are made of, those that they import included."""
    found: dict[str, Path] = {}

    def visit(name: str) -> None:
        source = _source(name) if name else None
        if source is None or name in found:
            return
        found[name] = source
        package = name.rpartition(".")[0]
        for other in (package, *_imports(ast.parse(source.read_bytes()))):
            visit(other)

    for module in modules:
        visit(module)
    return set(found.values())


def _source(name: str) -> Path | None:
    """Return the file that one of our modules is written in, whatever it was compiled to; ``None``: none of ours."""
    beside = [root / name.replace(".", "/") for root in ROOTS]
    files = [file for path in beside for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next((file for file in files if file.is_file()), None)


def _imports(tree: ast.AST) -> Iterator[str]:
    """List what a module imports when it runs; what is for the type checker alone decides nothing."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            # What is taken from a package may be a module of it.
            yield from (f"{node.module}.{each.name}" for each in node.names)
        else:
            yield from _imports(node)
