from __future__ import annotations

import logging

import pytest

from carpool_operator.cluster.kube import ApiError
from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.webhook import main as module
from carpool_operator.webhook import store
from carpool_operator.webhook.certificates import LIFE, issue
from carpool_operator.webhook.main import Upkeep, main
from carpool_operator.webhook.server import Injector
from carpool_operator.webhook.tls import ServingContext

NAMES = store.Names("carpool-system")
NOW = 1_800_000_000.0


class Cluster:
    """What is read of it, by the end of the path; an exception is raised."""

    def __init__(self, **answers):
        self.answers = answers

    async def request(self, method, path, body=None, *, content=""):
        answer = self.answers.get(path.rsplit("/", 1)[1].replace("-", "_"), ApiError(404, f"{path} not found"))
        if isinstance(answer, Exception):
            raise answer
        return answer


def key(text):
    return b'{"data": {"publicKey": "%s"}}' % text.encode()


@pytest.fixture
def upkeep(tmp_path):
    pair, _ = issue(NAMES.dns, NOW)
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    injector, cluster = Injector(InjectorSettings(image="i", version="1")), Cluster(carpool_public_key=key("ab" * 32))
    return Upkeep(injector, ServingContext(), cluster, NAMES, folder=tmp_path), injector, cluster, tmp_path


async def test_one_look_makes_it_ready(upkeep):
    look, injector, _, _ = upkeep
    assert injector.problem == "no certificate yet"
    await look.look()
    assert injector.problem is None
    assert injector.settings.public_key == "ab" * 32
    assert injector.registry.get_sample_value("carpool_injector_certificate_end_timestamp_seconds") == int(NOW + LIFE)


async def test_a_key_that_is_gone_stays_and_another_takes_its_place(upkeep):
    look, injector, cluster, _ = upkeep
    await look.look()
    for answer, expected in (
        (ApiError(404, "gone"), "ab"),
        (ApiError(0, "unreachable"), "ab"),
        (b"{}", "ab"),
        (key("cd" * 32), "cd"),
    ):
        cluster.answers["carpool_public_key"] = answer
        await look.look()
        assert injector.settings.public_key == expected * 32
    assert injector.registry.get_sample_value("carpool_injector_sync_failures_total") == 1


async def test_a_mounted_certificate_is_followed(upkeep, caplog):
    look, injector, _, folder = upkeep
    await look.look()
    first = look._context.loaded
    # Half of a change: what was served stays.
    pair, _ = issue(NAMES.dns, NOW + LIFE)
    (folder / "tls.crt").write_bytes(pair.certificate)
    with caplog.at_level(logging.WARNING):
        await look.look()
    assert "the certificate and its key can't be loaded" in caplog.text
    assert look._context.loaded == first
    (folder / "tls.key").write_bytes(pair.key)
    await look.look()
    assert look._context.loaded == pair
    assert injector.registry.get_sample_value("carpool_injector_certificate_end_timestamp_seconds") == int(
        NOW + 2 * LIFE
    )
    (folder / "tls.key").unlink()
    await look.look()
    assert injector.problem is None


async def test_without_a_folder_it_makes_its_own(upkeep):
    _, injector, cluster, _ = upkeep
    cluster.answers |= {"carpool_injector": b'{"webhooks": []}', "secrets": b"{}"}
    look = Upkeep(injector, ServingContext(), cluster, NAMES, folder=None, wall=lambda: NOW)
    await look.look()
    assert injector.problem is None
    # After this error there may or may not be a certificate. That is no reason to stop serving.
    cluster.answers["carpool_injector_cert"] = ApiError(500, "etcd is slow")
    await look.look()
    assert injector.problem is None


def test_the_options_are_what_every_sidecar_has(monkeypatch):
    made = []
    monkeypatch.setattr(module, "set_up", lambda _: None)
    monkeypatch.setattr(module, "_run", lambda _options, injector: made.append(injector.settings))
    monkeypatch.setattr(module.asyncio, "run", lambda _: None)
    flags = ["--sidecar-pull-secret=registry", "--sidecar-pull-secret=mirror", "--sidecar-user=-1"]
    assert main(["--sidecar-image=i", *flags]) == 0
    assert main(["--sidecar-image=i"]) == 0
    assert [(each.pull_secrets, each.user) for each in made] == [(("registry", "mirror"), None), ((), 65532)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--sidecar-image"),
        (["--sidecar-image=i", "--sidecar-memory=1M1"], "is not a size"),
        (["--sidecar-image=i", "--sidecar-memory=1Mi"], "128Mi is the least"),
        (["--sidecar-image=i", "--sidecar-pull-secret="], "'': write the name of a Secret"),
        (["--sidecar-image=i", "--sidecar-pull-secret=Bad Name"], "'Bad Name': write the name of a Secret"),
    ],
)
def test_wrong_options_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_cluster_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "set_up", lambda _: None)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["--sidecar-image=i", "--kubeconfig", str(tmp_path / "none")]) == 3
    assert capsys.readouterr().err.startswith("carpool-injector: ")


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("carpool-injector 0.")


def test_ports_of_sidecars_have_to_differ(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--sidecar-image=s", "--sidecar-data-port=14090"])
    assert ended.value.code == 2
    assert "--sidecar-data-port and --sidecar-admin-port are both 14090: they have to differ" in capsys.readouterr().err
