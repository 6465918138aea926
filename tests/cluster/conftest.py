"""A cluster for the tests: started by the first that asks, shared by all, gone at the end. See README.md."""

from __future__ import annotations

import itertools
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from minicluster import binaries
from minicluster.cluster import Cluster, network_restored

HERE = Path(__file__).parent
_running: list[Cluster] = []
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items):
    needy = [item for item in items if item.path.is_relative_to(HERE) and "cluster" in item.fixturenames]
    why = binaries.missing() if needy else ""
    if why:
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Run each test of this folder, with its fixtures, in the cluster's network; tests elsewhere see nothing of it."""
    with network_restored():
        if _running:
            _running[-1].enter()
        return (yield)


@contextmanager
def _started():
    """Start a cluster; the test that asks for it, and those after it as long as it is there, run in its network."""
    one = Cluster()
    try:
        one.start()
        one.enter()
        _running.append(one)
        yield one
    finally:
        if one in _running:
            _running.remove(one)
        one.stop()


@pytest.fixture(scope="session")
def cluster():
    """A running cluster (see Cluster); this test and all after it in this folder run in its network."""
    with _started() as one:
        yield one


@pytest.fixture(scope="module")
def own_cluster():
    """A running cluster of this file's own, for a file to override ``cluster`` with; its tests run in its network."""
    with _started() as one:
        yield one


@pytest.fixture(scope="module")
def api(cluster):
    """Access as an administrator (see Api)."""
    with closing(cluster.api()) as one:
        yield one


@pytest.fixture
def namespace(api, request):
    """A namespace of the test's own, in which pods can be made; deleted after it."""
    name = (
        f"t{next(_numbers)}-{request.node.originalname.removeprefix('test_').replace('_', '-')[:40].strip('-').lower()}"
    )
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    api.until("serviceaccounts", name, bool, name="default")
    api.until("configmaps", name, bool, name="kube-root-ca.crt")
    yield name
    api.delete("namespaces", name, missing_ok=True)


@pytest.fixture
def kubectl(cluster, namespace):
    """Run kubectl in the test's namespace: kubectl("get", "pods", text="its input", check=True) -> its output."""

    def run(*argv, **options):
        return cluster.run("kubectl", "--namespace", namespace, *argv, **options)

    return run
