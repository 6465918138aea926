"""The chart as helm renders it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

CHART = Path(__file__).parents[2] / "charts" / "carpool"


class Helm:
    """The real one, without a cluster."""

    def __init__(self, binary: Path, home: Path) -> None:
        self._binary = binary
        self._environment = os.environ | {
            f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
        }

    def run(self, *arguments: str, values: dict | None = None) -> subprocess.CompletedProcess[str]:
        extra = [] if values is None else ["--values", "-"]
        return subprocess.run(  # noqa: S603 - helm, by our own arguments
            [self._binary, *arguments, *extra],
            input=None if values is None else yaml.safe_dump(values),
            env=self._environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def render(self, values: dict | None = None, *, namespace: str = "carpool-system") -> list[dict]:
        """Objects of ``helm template``, in its order."""
        done = self.run(
            "template", "carpool", str(CHART), "--namespace", namespace, "--kube-version", "1.30",
            values=values or {},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]
