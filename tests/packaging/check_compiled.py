"""A compiled wheel does what the sources do: the tests of what is compiled pass on it. `make test-compiled` runs this.

It takes minutes and a package index, so it is no part of `make test`. Left out are the tests marked ``pure``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import compiled
import pytest

ROOT = Path(__file__).parents[2]
MODULES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["hooks"]["custom"]["modules"]
SUITES = [
    "carpool/batching",
    "carpool/exchange",
    "carpool/forecasting",
    "carpool/simulation",
    "carpool_sidecar/admin",
    "carpool_sidecar/backends",
    "carpool_sidecar/dispatch",
    "carpool_sidecar/end_to_end",
    "carpool_sidecar/generation",
    "carpool_sidecar/http1",
    "carpool_sidecar/protocols",
    "carpool_sidecar/tuning",
    "carpool_sidecar/axis_verification",
    "carpool_sidecar/test_app.py",
    "carpool_sidecar/test_main.py",
    "carpool_sidecar/test_models.py",
    "carpool_sidecar/test_sidecar.py",
    "clients",
]
STRUCTS = """\
import importlib, json, sys
from msgspec import Struct, inspect
from carpool.policy.plain import FrozenCamel, MutableCamel
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == name:
            config = kind.__struct_config__
            # Types count for what is read from JSON. The others, such as the Batcher's actions, are only made here.
            fields = repr(inspect.type_info(kind)) if issubclass(kind, FrozenCamel | MutableCamel) else ""
            options = {each: repr(getattr(config, each)) for each in dir(config) if not each.startswith("_")}
            found[f"{name}.{kind.__name__}"] = [fields, kind.__struct_encode_fields__, options]
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def wheel():
    return compiled.wheel()


def run(*command, path, **environment):
    ran = subprocess.run(  # noqa: S603 - our own
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    return ran.stdout


def test_all_that_is_listed_is_machine_code(wheel):
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    files = run("-c", code, *MODULES, path=[wheel]).split()
    assert len(files) == len(MODULES)
    assert all(file.startswith(str(wheel)) and file.endswith(".so") for file in files)


def test_structs_are_read_and_written_alike(wheel):
    machine, pure = (
        json.loads(run("-c", STRUCTS, *MODULES, path=path)) for path in ([wheel], [ROOT / "core", ROOT / "sidecar"])
    )
    assert machine == pure
    assert pure


@pytest.mark.parametrize("suite", SUITES)
def test_it_passes_the_tests_of_the_sources(wheel, suite):
    run("-m", "pytest", "-m", "not pure", f"tests/{suite}", path=[wheel, ROOT / "operator", ROOT / "cli"])


@pytest.mark.parametrize("environment", [{"CARPOOL_COMPILE": "never"}, {"CC": "/nowhere/cc"}])
def test_without_a_compiler_or_if_asked_for_a_wheel_is_pure_python(tmp_path, environment):
    pip = ["-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps"]
    run(*pip, "--wheel-dir", str(tmp_path), str(ROOT), path=[], **environment)
    (made,) = tmp_path.iterdir()
    assert made.name.endswith("-py3-none-any.whl")
    with ZipFile(made) as packed:
        assert not [name for name in packed.namelist() if name.endswith(".so")]


def test_it_can_be_required_to_be_machine_code(tmp_path):
    pip = ["-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps"]
    with pytest.raises(AssertionError, match="CARPOOL_COMPILE=always, but there is no C compiler"):
        run(*pip, "--wheel-dir", str(tmp_path), str(ROOT), path=[], CARPOOL_COMPILE="always", CC="/nowhere/cc")
