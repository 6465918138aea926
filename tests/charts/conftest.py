from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cluster")]

from chart import Helm  # noqa: E402 - of this folder
from minicluster.binaries import find  # noqa: E402 - of the one beside it


@pytest.fixture(scope="session")
def helm(tmp_path_factory):
    binary = find().get("helm")
    if binary is None:
        say = pytest.fail if "CARPOOL_CLUSTER_REQUIRED" in os.environ else pytest.skip
        say("helm is not at hand: `make test-cluster` gets it first")
    return Helm(binary, tmp_path_factory.mktemp("helm"))
