"""CRDs of other projects, as these publish them: out of their Go modules, into ~/.cache/carpool/crds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from minicluster.binaries import CACHE, MissingError

FOLDER = CACHE / "crds"
MODULES = {
    "argoproj.io_rollouts": ("github.com/argoproj/argo-rollouts@v1.9.0", "manifests/crds/rollout-crd.yaml"),
    "leaderworkerset.x-k8s.io_leaderworkersets": (
        "sigs.k8s.io/lws@v0.8.0",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    ),
    "ray.io_rayservices": (
        "github.com/ray-project/kuberay/ray-operator@v1.5.0",
        "config/crd/bases/ray.io_rayservices.yaml",
    ),
    "serving.kserve.io_inferenceservices": (
        "github.com/kserve/kserve@v0.15.2",
        "config/crd/full/serving.kserve.io_inferenceservices.yaml",
    ),
}
"""By the name of the file that is kept: module, and the file in it."""


def missing() -> str:
    """Say which are not at hand; empty when all are."""
    lacking = [name for name in MODULES if not (FOLDER / f"{name}.json").exists()]
    return f"no CRDs {', '.join(lacking)} at hand: `make test-cluster` gets them" if lacking else ""


def get() -> None:
    """Download what is missing.

    Raises:
        MissingError: There is no Go, or a module can't be had.
    """
    go = shutil.which("go")
    if not missing():
        return
    if go is None:
        raise MissingError(f"{missing()}, with Go")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (module, path) in MODULES.items():
        kept = FOLDER / f"{name}.json"
        if kept.exists():
            continue
        done = subprocess.run(  # noqa: S603 - fixed words
            [go, "mod", "download", "-json", module], cwd=CACHE, capture_output=True, text=True, check=False
        )  # fmt: skip
        told = json.loads(done.stdout or "{}")
        if done.returncode or "Dir" not in told:
            raise MissingError(f"{module} can't be downloaded: {told.get('Error') or done.stderr.strip()}")
        crd = yaml.safe_load((Path(told["Dir"]) / path).read_text("utf-8"))
        # Their own webhook translates between versions; it isn't here.
        crd["spec"]["conversion"] = {"strategy": "None"}
        # As JSON: a CRD of pods has 20,000 lines of YAML, which take a minute to read on a busy machine.
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(crd), "utf-8")
        part.rename(kept)


def crds() -> list[dict[str, Any]]:
    """Return them."""
    return [json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in MODULES]


if __name__ == "__main__":
    try:
        get()
    except MissingError as error:  # tests that need them are skipped, and say so
        sys.stderr.write(f"{error}\n")
