from __future__ import annotations

import logging
import sys

import pytest

from carpool_operator import main as module
from carpool_operator.cluster.kinds import KINDS
from carpool_operator.cluster.watching import LeftOut
from carpool_operator.main import FAILED, NO_CLUSTER, OK, main, parser


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(module, "set_up", lambda level: None)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def started(monkeypatch):
    """What it would run with, if it found a cluster."""
    seen, before = [], sys.getrecursionlimit()

    async def run(settings, kube):
        seen.append(settings)
        if settings.lease == "taken":
            raise OSError("address in use")
        if settings.lease == "broken":
            raise RuntimeError("a part")

    monkeypatch.setattr(module, "connect", lambda file: file)
    monkeypatch.setattr(module, "run", run)
    yield seen
    sys.setrecursionlimit(before)


def test_flags_and_environment(started, monkeypatch):
    monkeypatch.setenv("POD_NAME", "carpool-operator-abc")
    monkeypatch.setenv("POD_NAMESPACE", "carpool")

    assert main(["--watch-namespace=a", "--watch-namespace=b", "--interval", "500ms"]) == OK

    (settings,) = started
    assert settings.namespaces == ("a", "b")
    assert (settings.identity, settings.namespace, settings.lease) == (
        "carpool-operator-abc", "carpool", "carpool-operator"
    )  # fmt: skip
    assert (settings.interval, settings.resync, settings.metrics_port) == (0.5, 300.0, 8080)


def test_all_namespaces_are_watched_by_default(started):
    main([])

    assert started[0].namespaces == (None,)


@pytest.mark.parametrize("form", ['{"a":', "["])
def test_an_object_as_deep_as_a_server_stores_is_read(started, form):
    main([])
    deep, kept = 9_990, KINDS["deployments"].kept
    spec = form * deep + "1" + ("}" if form[0] == "{" else "]") * deep
    item = '{"metadata":{"name":"web","namespace":"ns"},"spec":{"more":' + spec + "}}"
    page = kept.page.decode(f'{{"metadata":{{"resourceVersion":"1"}},"items":[{item}]}}')
    assert kept.read(page.items[0], LeftOut("deployments")).metadata.name == "web"


def test_exit_codes(started):
    assert main(["--lease-name=taken"]) == NO_CLUSTER
    assert main(["--lease-name=broken"]) == FAILED


def test_without_a_cluster_it_says_so(caplog, tmp_path):
    assert main(["--kubeconfig", str(tmp_path / "none")]) == NO_CLUSTER
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("wrong", [["--interval", "2"], ["--interval", "0s"], ["--log-level", "loud"]])
def test_wrong_flags_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(wrong)

    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_help_says_what_it_needs_and_does():
    text = parser().format_help()

    for word in ("Lease", "/livez", "SIGTERM", "exit codes", "$POD_NAMESPACE"):
        assert word in text


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("carpool-operator 0.")
