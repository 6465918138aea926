"""Two network namespaces with a cable between them: a pod, and somebody who calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from namespaces import Namespace, cable, namespaces_allowed


@pytest.fixture(scope="session")
def allowed():
    if why := namespaces_allowed():
        pytest.skip(f"network namespaces can't be made here: {why}")


@pytest.fixture
def pod(allowed):
    one = Namespace()
    yield one
    one.close()


@pytest.fixture
def caller(pod):
    """One with addresses 10.99.0.1 and fd99::1; the pod has 10.99.0.2 and fd99::2."""
    one = Namespace()
    cable(one, pod)
    yield one
    one.close()
