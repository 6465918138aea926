from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chart import Helm


@pytest.fixture(scope="session")
def helm(program, tmp_path_factory):
    return Helm(program("helm"), tmp_path_factory.mktemp("helm"))
