"""Builds wheels with the modules that every request runs through as machine code, made by mypyc from the same source.

``CARPOOL_COMPILE`` says when: ``auto`` (the default) where there is a C compiler, ``always`` (the build fails without
one), ``never``. Editable installs are never compiled. The list of modules is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder

VARIABLE = "CARPOOL_COMPILE"
PACKAGES = ("core/carpool", "sidecar/carpool_sidecar")
GROUP = "carpool_compiled"
"""Name of the library that holds all of the machine code; beside it each module is a stub that loads it."""
MYPY = """\
[mypy]
ignore_missing_imports = true
follow_untyped_imports = true
"""


def compiler() -> str:
    """Say what is missing to compile with; empty: nothing."""
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(command) is None:
        return f"there is no C compiler ({command}; Debian: apt-get install gcc libc6-dev)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are missing (Debian: apt-get install python3-dev)"
    return ""


class CompileHook(BuildHookInterface[Any]):
    """Adds the machine code to a wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what compiling needs; nothing where nothing is compiled."""
        return list(self.config["requires"]) if self._wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not."""
        if version == "editable" or not self._wanted():
            return
        self._stage = TemporaryDirectory(prefix="carpool-compile-")
        stage = Path(self._stage.name).resolve()
        try:
            self._compile(stage)
        except Exception as error:
            if self._when() == "always":
                raise
            self.app.display_warning(f"Carpool is built as pure Python, about twice the CPU per request: {error}")
            return
        for library in stage.rglob("*.so"):
            build_data["force_include"][str(library)] = str(library.relative_to(stage))
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's signature
        """Remove the folder that was compiled in."""
        if hasattr(self, "_stage"):
            self._stage.cleanup()

    def _when(self) -> str:
        when = os.environ.get(VARIABLE) or "auto"
        if when not in {"auto", "always", "never"}:
            raise ValueError(f"{VARIABLE}={when}: want auto, always or never")
        return when

    def _wanted(self) -> bool:
        """Decide whether to compile. Raises RuntimeError where it has to be, and can't."""
        when = self._when()
        if when == "never" or self.target_name != "wheel":
            return False
        missing = compiler()
        if missing and when == "always":
            raise RuntimeError(f"{VARIABLE}=always, but {missing}")
        if missing:
            self.app.display_warning(f"Carpool is built as pure Python, about twice the CPU per request: {missing}")
        return not missing

    def _compile(self, stage: Path) -> None:
        """Run hatch-mypyc on a copy of the sources, since it takes one source folder and writes into it."""
        from hatch_mypyc.plugin import MypycBuildHook  # noqa: PLC0415 - only where something is compiled

        for package in PACKAGES:
            unwanted = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(Path(self.root) / package, stage / Path(package).name, ignore=unwanted)
        (stage / "mypy.ini").write_text(MYPY)
        (stage / "pyproject.toml").touch()  # hatch-mypyc hides it from setuptools
        project = {"name": GROUP, "version": "0"}
        names = [Path(package).name for package in PACKAGES]
        hatch = {"build": {"targets": {"wheel": {"packages": names}}}}
        builder = WheelBuilder(str(stage), config={"project": project, "tool": {"hatch": hatch}})
        modules = [module.replace(".", "/") + ".py" for module in self.config["modules"]]
        missing = [module for module in modules if not (stage / module).is_file()]
        if missing:
            raise RuntimeError(f"pyproject.toml lists modules that don't exist: {', '.join(missing)}")
        config = {
            "include": [f"/{module}" for module in modules],
            "mypy-args": [f"--config-file={stage / 'mypy.ini'}"],
            "options": {
                "group_name": GROUP,
                "opt_level": os.environ.get("CARPOOL_COMPILE_LEVEL") or "3",
                "debug_level": "0",
                "strip_asserts": False,
            },
        }
        hook = MypycBuildHook(str(stage), config, builder.config, builder.metadata, str(stage), "wheel", self.app)
        here = Path.cwd()
        os.chdir(stage)
        try:
            hook.initialize("standard", {"artifacts": [], "force_include": {}})
        finally:
            os.chdir(here)
        for made in ("build", "tmp", ".mypy_cache"):
            shutil.rmtree(stage / made, ignore_errors=True)
