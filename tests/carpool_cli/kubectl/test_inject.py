from __future__ import annotations

import json

import pytest
import yaml

MODEL = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "resnet"},
    "spec": {
        "selector": {"matchLabels": {"app": "resnet"}},
        "template": {
            "metadata": {"labels": {"app": "resnet"}},
            "spec": {"containers": [{"name": "server", "image": "s", "ports": [{"containerPort": 8080}]}]},
        },
    },
}
KEY = "ab" * 32


def installed(*arguments):
    containers = [{"name": "injector", "args": list(arguments)}]
    return json.dumps(
        {
            "items": [
                {"kind": "ConfigMap", "data": {"publicKey": KEY}},
                {"kind": "Deployment", "spec": {"template": {"spec": {"containers": containers}}}},
            ]
        }
    )


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(MODEL))
    return path


def test_sidecars_believe_the_cluster_s_operator(kubectl, manifest):
    kubectl.prints(installed("--port=8443", "--sidecar-image=registry.example/sidecar:1"))
    result = kubectl.run("inject", "-f", manifest, "-n", "shop", "--context", "far")
    assert result.exit_code == 0
    (made,) = yaml.safe_load_all(result.stdout)
    (sidecar,) = made["spec"]["template"]["spec"]["initContainers"]
    assert sidecar["image"] == "registry.example/sidecar:1"
    (config,) = (json.loads(each["value"]) for each in sidecar["env"] if each["name"] == "CARPOOL_CONFIG")
    assert config["publicKey"] == KEY
    assert config["target"] == "shop/Deployment/resnet"
    assert kubectl.asked == [
        [
            "get", "configmap/carpool-public-key", "deployment/carpool-injector", "--output=json",
            "--namespace=carpool-system", "--context=far", "--request-timeout=20s",
        ]
    ]  # fmt: skip


def test_the_image_is_pulled_with_the_secrets_of_the_installation(kubectl, manifest):
    kubectl.prints(installed("--sidecar-pull-secret=registry", "--sidecar-pull-secret=mirror"))
    result = kubectl.run("inject", "-f", manifest, "-n", "shop")
    (made,) = yaml.safe_load_all(result.stdout)
    assert made["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert "ServiceAccount" in result.stderr


def test_without_a_namespace_it_is_the_context_s(kubectl, manifest):
    kubectl.prints(installed())
    printed = kubectl.run("inject", "-f", manifest).stdout
    assert "from-the-context/Deployment/resnet" in printed
    assert "image: carpool-sidecar:" in printed


def test_where_there_is_no_carpool(kubectl, manifest):
    kubectl.fails('Error from server (NotFound): configmaps "carpool-public-key" not found')
    told = kubectl.run("inject", "-f", manifest, "--carpool-namespace", "other")
    assert told.exit_code == 1
    assert "Carpool is not in namespace other" in told.output


def test_who_may_not_read_the_key(kubectl, manifest):
    kubectl.fails('Error from server (Forbidden): configmaps "carpool-public-key" is forbidden: User "me" cannot get')
    assert "carpool inject --public-key" in kubectl.run("inject", "-f", manifest).output
