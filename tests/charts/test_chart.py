"""What the chart renders, without a cluster; tests/cluster/test_chart.py applies it to one."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from chart import CHART

from carpool_operator.api.annotations import KNOWN, KNOWN_IN_TEMPLATE, OF_CLASSES, PREFIX
from carpool_operator.cluster.sharding import Shard
from carpool_operator.main import parser as operator_parser
from carpool_operator.webhook.main import _parser as injector_parser
from carpool_operator.webhook.main import _settings as injector_settings

VALUES = {
    "default": {},
    "namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "cert-manager": {"certificates": {"source": "CertManager"}},
    "issuer": {"certificates": {"source": "CertManager", "issuerRef": {"kind": "ClusterIssuer", "name": "internal"}}},
    "least": {"networkPolicy": {"enabled": False}, "crds": {"install": False}, "injector": {"replicas": 1}},
    "most": {
        "image": {"repository": "registry.local/carpool-operator", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "sidecar": {"imagePullSecrets": ["registry", "mirror"]},
        "priorityClassName": "system-cluster-critical",
        "commonLabels": {"team": "platform"},
        "logLevel": "Debug",
        "operator": {
            "replicas": 2,
            "interval": "5s",
            "resync": "10m",
            **(
                EVERYWHERE := {
                    "nodeSelector": {"kubernetes.io/arch": "amd64"},
                    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                    "affinity": {"nodeAffinity": {}},
                    "topologySpreadConstraints": [
                        {"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
                    ],
                    "annotations": {"of": "deployment"},
                    "podLabels": {"sidecar.istio.io/inject": "false"},
                    "podAnnotations": {"of": "pods"},
                    "serviceAccount": {"annotations": {"of": "account"}},
                    "extraArgs": ["--kubeconfig=/etc/other"],
                    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                }
            ),
        },
        "injector": {"timeoutSeconds": 10, "hostNetwork": True, "port": 9443, "metricsPort": 9080, **EVERYWHERE},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "carpool-extra-object"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: 'carpool-extra-of-{{ .Release.Name }}'}\n",
        ],
        "networkPolicy": {
            "scrapers": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "apiServers": [{"ipBlock": {"cidr": "10.0.0.0/28"}}],
            "egress": {
                "enabled": True,
                "apiServers": [{"ipBlock": {"cidr": "10.0.0.0/28"}}],
                "rules": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 9090}]}],
            },
            "sidecarNamespaces": [{"name": "team-a", "callers": [{"podSelector": {}}]}],
        },
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True},
        },
    },
}

CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "MutatingWebhookConfiguration",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
}  # fmt: skip


@pytest.fixture(scope="module", params=VALUES)
def objects(request, helm):
    return helm.render(VALUES[request.param])


def of(objects, kind, name=None):
    return [each for each in objects if each["kind"] == kind and name in {None, each["metadata"]["name"]}]


def pods(objects):
    """Pod specs by the name of what makes them, with the labels they will have."""
    for each in objects:
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            yield each["metadata"]["name"], template["metadata"]["labels"], template["spec"]
        elif each["kind"] == "Pod":
            yield each["metadata"]["name"], each["metadata"]["labels"], each["spec"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_lints(helm, values):
    done = helm.run("lint", str(CHART), "--strict", "--kube-version", "1.30", values=values)
    assert done.returncode == 0, done.stdout


def test_everything_is_set_where_it_belongs(helm):
    objects = helm.render(VALUES["most"])
    for name, labels, spec in pods(objects):
        assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}, name
        assert spec["tolerations"] == EVERYWHERE["tolerations"], name
        assert spec["affinity"] == EVERYWHERE["affinity"], name
        assert spec["topologySpreadConstraints"] == EVERYWHERE["topologySpreadConstraints"], name
        assert labels["team"] == "platform", name
    for name in ("carpool-operator", "carpool-injector"):
        (deployment,), (account,) = of(objects, "Deployment", name), of(objects, "ServiceAccount", name)
        assert deployment["metadata"]["annotations"] == {"of": "deployment"}
        assert account["metadata"]["annotations"] == {"of": "account"}
        template = deployment["spec"]["template"]
        assert template["metadata"]["annotations"]["of"] == "pods"
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
        (container,) = template["spec"]["containers"]
        assert container["args"][-1] == "--kubeconfig=/etc/other"
        assert container["env"][-1] == EVERYWHERE["extraEnv"][0]
        assert of(objects, "PodDisruptionBudget", name)
    arguments = {name: spec["containers"][0].get("args", []) for name, _, spec in pods(objects)}
    assert {"--interval=5s", "--resync=10m", "--log-level=Debug"} <= {*arguments["carpool-operator"]}
    assert {"--log=debug", "--port=9443", "--metrics-port=9080"} <= {*arguments["carpool-injector"]}
    secrets = {"--sidecar-pull-secret=registry", "--sidecar-pull-secret=mirror"}
    assert secrets <= {*arguments["carpool-injector"]}
    (hooks,) = of(objects, "MutatingWebhookConfiguration")
    assert {hook["timeoutSeconds"] for hook in hooks["webhooks"]} == {10}
    (injector,) = [spec for name, _, spec in pods(objects) if name == "carpool-injector"]
    assert (injector["hostNetwork"], injector["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    # Where each node has a replica, none has free ports for one more.
    (deployment,) = of(objects, "Deployment", "carpool-injector")
    assert deployment["spec"]["strategy"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    assert of(objects, "ConfigMap", "carpool-extra-object")
    assert of(objects, "ConfigMap", "carpool-extra-of-carpool")


@pytest.mark.parametrize("digest", ["", "sha256:" + "ab" * 32])
def test_an_injector_starts_once_the_sidecar_s_image_does(helm, digest):
    """Else pods would get a sidecar that keeps them from starting."""
    image = {"repository": "registry.example.com/sidecar", "tag": "7", "digest": digest, "pullPolicy": "Always"}
    sidecar = {"image": image, "imagePullSecrets": ["team", "registry"]}
    values = {"sidecar": sidecar, "imagePullSecrets": [{"name": "registry"}]}
    found = {name: spec for name, _, spec in pods(helm.render(values))}
    spec = found["carpool-injector"]
    (check,) = spec["initContainers"]
    (argument,) = [each for each in spec["containers"][0]["args"] if each.startswith("--sidecar-image=")]
    assert check["image"] == argument.partition("=")[2]
    assert (check["args"], check["imagePullPolicy"]) == (["--version"], "Always")
    assert check["securityContext"] == spec["containers"][0]["securityContext"]
    (mount,) = check["volumeMounts"]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"  # where its token would be
    assert {"name": mount["name"], "emptyDir": {}} in spec["volumes"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "team"}]
    assert found["carpool-operator"]["imagePullSecrets"] == [{"name": "registry"}]
    assert "initContainers" not in found["carpool-operator"]
    unchecked = {name: spec for name, _, spec in pods(helm.render({"sidecar": {"checkImage": False}}))}
    assert not {"initContainers", "volumes"} & unchecked["carpool-injector"].keys()


def test_the_commands_take_their_arguments(objects):
    parsers = {"carpool-operator": operator_parser(), "carpool-injector": injector_parser()}
    for name, _, spec in pods(objects):
        if name in parsers:
            parsers[name].parse_args(spec["containers"][0]["args"])  # SystemExit where it knows one not


def test_a_single_replica_does_not_block_a_drain(helm):
    assert {each["metadata"]["name"] for each in of(helm.render(), "PodDisruptionBudget")} == {"carpool-injector"}
    values = {"operator": {"replicas": 2}, "injector": {"podDisruptionBudget": {"enabled": False}}}
    assert {each["metadata"]["name"] for each in of(helm.render(values), "PodDisruptionBudget")} == {"carpool-operator"}


def test_older_clusters_are_refused(helm):
    done = helm.run("template", "carpool", str(CHART), "--kube-version", "1.29.9")
    assert "kubeVersion: >=1.30" in done.stderr


def test_objects_say_where_they_are_and_whose(objects):
    # `helm template | kubectl apply` knows no release namespace: each object names its own.
    for each in objects:
        metadata = each["metadata"]
        where = f"{each['kind']} {metadata['name']}"
        if metadata["name"].startswith("carpool-extra-"):
            continue  # a user's
        assert ("namespace" in metadata) == (each["kind"] not in CLUSTER_WIDE), where
        if each["kind"] != "CustomResourceDefinition":  # one and the same file for `kubectl apply` by hand
            assert metadata["labels"]["app.kubernetes.io/part-of"] == "carpool", where
            assert metadata["name"].startswith("carpool"), where


def test_no_object_twice(objects):
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(keys) == len(set(keys))


def test_selectors_find_their_pods(objects):
    labels = {name: found for name, found, _ in pods(objects)}
    for kind in ("Deployment", "PodDisruptionBudget"):
        for each in of(objects, kind):
            wanted = each["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= labels[each["metadata"]["name"]].items()
    for each in of(objects, "Service"):
        assert each["spec"]["selector"].items() <= labels[each["metadata"]["name"]].items()
    for each in of(objects, "NetworkPolicy"):
        if each["metadata"]["name"] in labels:
            assert each["spec"]["podSelector"]["matchLabels"].items() <= labels[each["metadata"]["name"]].items()


def test_ports_that_are_named_exist(objects):
    ports = {
        name: {port["name"] for container in spec["containers"] for port in container.get("ports", ())}
        for name, _, spec in pods(objects)
    }
    for name, _, spec in pods(objects):
        for container in spec["containers"]:
            for probe in ("livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports[name]
    for each in of(objects, "Service"):
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports[each["metadata"]["name"]]


def test_pods_are_restricted(objects):
    # The API server's own check is in tests/cluster; what it does not ask for is asked here.
    for name, _, spec in pods(objects):
        assert spec["securityContext"]["runAsNonRoot"], name
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert not container["securityContext"]["allowPrivilegeEscalation"], name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name


def test_namespaces_narrow_rights(helm):
    objects = helm.render(VALUES["namespaces"])
    assert {role["metadata"]["name"] for role in of(objects, "ClusterRole")} == {
        "carpool-injector", "carpool-policies-edit", "carpool-policies-view",
    }  # fmt: skip
    for name in ("team-a", "team-b"):
        roles = [role for role in of(objects, "Role") if role["metadata"]["namespace"] == name]
        named = {role["metadata"]["name"] for role in roles} - {"carpool-test"}
        assert named == {"carpool-operator-work", "carpool-injector-namespaces"}
    operator = next(spec for name, _, spec in pods(objects) if name == "carpool-operator")
    assert {"--watch-namespace=team-a", "--watch-namespace=team-b"} <= set(operator["containers"][0]["args"])


def test_rights_are_the_same_in_one_namespace_and_in_all(helm):
    one = of(helm.render(VALUES["namespaces"]), "Role", "carpool-operator-work")
    [everywhere] = of(helm.render(), "ClusterRole", "carpool-operator-work")
    assert [role["rules"] for role in one] == [everywhere["rules"]] * 2


def test_rights_have_no_wildcards_and_secrets_have_names(objects):
    for each in [*of(objects, "Role"), *of(objects, "ClusterRole")]:
        for rule in each["rules"]:
            said = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in said, rule
            if "secrets" in rule["resources"] and set(rule["verbs"]) != {"create"}:
                assert each["kind"] == "Role", rule
                assert each["metadata"]["namespace"] == "carpool-system", rule
                assert rule["resourceNames"], rule


def test_the_webhook_s_condition_knows_the_annotations_that_are_read(helm):
    (webhooks,) = [each["webhooks"] for each in helm.render() if each["kind"] == "MutatingWebhookConfiguration"]
    expression = webhooks[0]["matchConditions"][0]["expression"]
    own, template = (set(json.loads(found)) for found in re.findall(r"\[\"[^]]*,[^]]*\]", expression))
    assert {PREFIX + name for name in own} == KNOWN
    assert {PREFIX + name for name in template} == KNOWN_IN_TEMPLATE
    assert f"substring({len(PREFIX)})" in expression
    of_class = re.compile(re.search(r'name\.matches\("(.*?)"\)', expression)[1])
    for name in OF_CLASSES:
        assert of_class.search(name.replace("CLASS", "gold-2"))
        assert not of_class.search(name)  # no capitals
        assert not of_class.search(name.replace(".CLASS", ""))


class Once(yaml.SafeLoader):
    """Refuses an object with one key twice: of these, some readers take the first value and others the last."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice: {keys}"
        return super().construct_mapping(node, deep)


def test_labels_and_annotations_of_the_chart_win_and_none_is_there_twice(helm):
    own = {"app.kubernetes.io/name": "mine", "app.kubernetes.io/part-of": "mine"}
    pod = {
        "podLabels": {**own, "of": "pod"},
        "podAnnotations": {"kubectl.kubernetes.io/default-container": "mine", "of": "pod"},
    }
    monitoring = {name: {"enabled": True, "labels": {**own, "of": name}} for name in VALUES["most"]["monitoring"]}
    values = {
        "commonLabels": {**own, "of": "all", "team": "platform"},
        "operator": pod,
        "injector": pod,
        "monitoring": monitoring,
    }
    done = helm.run("template", "carpool", str(CHART), "--kube-version", "1.30", values=values)
    objects = [each for each in yaml.load_all(done.stdout, Once) if each]
    assert objects, done.stderr
    for each in objects:
        labels = each["metadata"].get("labels", {})
        assert "mine" not in labels.values(), each["metadata"]["name"]
        if each["kind"] in {"PodMonitor", "PrometheusRule"}:
            assert labels["of"] == each["kind"][0].lower() + each["kind"][1:]
            assert labels["team"] == "platform"
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]["metadata"]
            assert "mine" not in {**template["labels"], **template["annotations"]}.values()
            assert (template["labels"]["of"], template["annotations"]["of"]) == ("pod", "pod")


def test_a_certificate_of_the_chart_s_own_issuer_is_trusted_after_its_renewal(helm):
    """The API server trusts what signed it: a CA whose key stays. A self-signed one would be its own trust anchor."""
    objects = helm.render(VALUES["cert-manager"])
    certificates = {each["metadata"]["name"]: each["spec"] for each in of(objects, "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in of(objects, "Issuer")}
    leaf, authority = certificates["carpool-injector"], certificates["carpool-injector-ca"]
    assert issuers[leaf["issuerRef"]["name"]] == {"ca": {"secretName": authority["secretName"]}}
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}
    assert (authority["isCA"], authority["privateKey"]["rotationPolicy"]) == (True, "Never")
    # cert-manager writes the CA to the leaf's Secret as well; from there it comes to the webhook.
    (webhooks,) = of(objects, "MutatingWebhookConfiguration")
    injected = webhooks["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert injected == "carpool-system/carpool-injector"
    theirs = helm.render(VALUES["issuer"])
    assert [each["metadata"]["name"] for each in of(theirs, "Certificate")] == ["carpool-injector"]
    assert not of(theirs, "Issuer")


def test_targets_of_classes_are_defaults_too(helm):
    rendered = json.dumps(helm.render({"defaults": {"slo-ttft-p99": "2s", "slo-ttft-p99.gold": "1s"}}))
    assert "--default=slo-ttft-p99.gold=1s" in rendered


def test_what_the_documentation_sets_is_accepted(helm):
    pages = "".join(page.read_text("utf-8") for page in (CHART.parents[1] / "docs").glob("*.md"))
    found = re.findall(r"^<!-- chart values: \S+ -->\n```yaml\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    assert len(found) >= 5
    for values in found:
        helm.render(yaml.safe_load(values))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"operator": {"replica": 2}}, "replica"),
        ({"operator": {"replicas": 3}}, "operator.replicas"),
        ({"operator": {"replicas": "2"}}, "operator.replicas"),
        ({"watchNamespace": ["team-a"]}, "watchNamespace"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["Team A"]}, "watchNamespaces.0"),
        ({"certificates": {"source": "cert-manager"}}, "certificates.source"),
        ({"certificates": {"issuerRef": {"kind": "ClusterIssuer"}}}, "name"),
        ({"image": {"digest": "0123"}}, "image.digest"),
        ({"injector": {"replicas": 0}}, "injector.replicas"),
        ({"injector": {"resources": {"limits": {"memory": "128 MB"}}}}, "injector.resources.limits.memory"),
        ({"networkPolicy": {"scrapers": [{"namespace": "monitoring"}]}}, "namespace"),
        ({"networkPolicy": {"sidecarNamespaces": ["team-a"]}}, "networkPolicy.sidecarNamespaces.0"),
        ({"networkPolicy": {"sidecarNamespaces": [{"name": "team-a"}]}}, "callers"),
        (
            {"watchNamespaces": ["a"], "networkPolicy": {"sidecarNamespaces": [{"name": "b", "callers": []}]}},
            "sidecarNamespaces has b, which is not in watchNamespaces",
        ),
        (
            {"networkPolicy": {"sidecarNamespaces": [{"name": "a", "callers": []}, {"name": "a", "callers": []}]}},
            "networkPolicy.sidecarNamespaces has a twice: join the callers in one entry",
        ),
        ({"operator": {"interval": "2"}}, "operator.interval"),
        ({"operator": {"interval": "0s"}}, "operator.interval is 0s: it has to be longer than 0s"),
        ({"operator": {"resync": "0m"}}, "operator.resync is 0m"),
        ({"sidecar": {"ports": {"admin": 14080}}}, "sidecar.ports.data and sidecar.ports.admin are both 14080"),
        ({"sidecar": {"memory": "127Mi"}}, "sidecar.memory is 127Mi: 128Mi is the least"),
        ({"sidecar": {"memory": 1000000}}, "128Mi is the least"),
        ({"sidecar": {"memoryRequest": "1Gi"}}, "sidecar.memoryRequest is 1Gi"),
        ({"sidecar": {"memoryRequest": "0"}}, "sidecar.memoryRequest is 0"),
        ({"sidecar": {"cpu": "0m"}}, "sidecar.cpu is 0m: it has to be more than 0"),
        ({"sidecar": {"cpuLimit": "400m"}}, "sidecar.cpuLimit is 400m, less than sidecar.cpu, 500m"),
        ({"sidecar": {"cpu": 2, "cpuLimit": 1.5}}, "sidecar.cpuLimit is 1.5, less than sidecar.cpu, 2"),
        # What the injector refuses as well
        ({"sidecar": {"cpu": "1000000m"}}, "sidecar.cpu"),
        ({"sidecar": {"cpuLimit": "1000.5"}}, "sidecar.cpuLimit"),
        ({"sidecar": {"cpu": 1000000}}, "sidecar.cpu"),
        ({"sidecar": {"cpu": 0.0015}}, "sidecar.cpu"),
        ({"logLevel": "info"}, "logLevel"),
        ({"injector": {"timeoutSeconds": 31}}, "injector.timeoutSeconds"),
        ({"injector": {"port": 8080}}, "injector.port and injector.metricsPort are the same"),
        ({"operator": {"extraArgs": ["log-level"]}}, "operator.extraArgs.0"),
        ({"operator": {"extraEnv": [{"key": "A"}]}}, "key"),
        (
            {"operator": {"extraEnv": [{"name": "POD_NAME", "value": "a"}]}},
            "operator.extraEnv has POD_NAME, which the chart sets: take it out",
        ),
        ({"injector": {"extraEnv": [{"name": "POD_NAMESPACE", "value": "a"}]}}, "injector.extraEnv has POD_NAMESPACE"),
        ({"injector": {"affinity": {"node": {}}}}, "node"),
        ({"monitoring": {"podMonitor": {"interval": "15"}}}, "monitoring.podMonitor.interval"),
        ({"monitoring": {"podMonitor": {"metricRelabelings": ["drop"]}}}, "metricRelabelings.0"),
        ({"monitoring": {"alerts": {"enabled": True}}}, "alerts"),
        ({"defaults": {"slo-ttft-p99.Gold": "1s"}}, "slo-ttft-p99.Gold"),
        ({"defaults": {"max-batch": 65537}}, "defaults.max-batch"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else value,
)
def test_a_wrong_value_is_refused_by_name(helm, values, named):
    done = helm.run("template", "carpool", str(CHART), "--kube-version", "1.30", values=values)
    assert done.returncode != 0
    # Both ways in which helm's checkers write a path.
    assert named in done.stderr or "/" + named.replace(".", "/") in done.stderr, done.stderr


@pytest.mark.parametrize(
    "sidecar",
    [
        {"memory": "128Mi", "memoryRequest": "134217728"},
        {"memory": 536870912, "memoryRequest": 1000000},
        {"memory": "1G", "memoryRequest": "900M", "cpu": "0.5", "cpuLimit": "500m"},
        {"cpu": 2, "cpuLimit": 2},
        {"cpu": "999999m", "cpuLimit": 999.999},
        {"cpu": 0.07, "cpuLimit": "1000"},
    ],
)
def test_the_injector_takes_what_the_chart_does_for_sidecars(helm, sidecar):
    rendered = helm.render({"sidecar": sidecar})
    (arguments,) = [spec["containers"][0]["args"] for name, _, spec in pods(rendered) if name == "carpool-injector"]
    settings = injector_settings(injector_parser(), injector_parser().parse_args(arguments))
    assert settings.resources.memory >= 128 * 2**20


def schema_paths(schema, definitions, path=()):
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    yield path
    for name, below in schema.get("properties", {}).items():
        yield from schema_paths(below, definitions, (*path, name))


def value_paths(values, path=()):
    yield path
    if isinstance(values, dict):
        for name, below in values.items():
            yield from value_paths(below, (*path, name))


OPEN = {("global",)}
"""Helm's own, for charts of charts."""

FREE = {
    (part, field)
    for part in ("operator", "injector")
    for field in ("resources", "nodeSelector", "affinity", "annotations", "podLabels", "podAnnotations")
}
FREE |= {("defaults",), ("certificates", "issuerRef"), ("monitoring", "dashboard", "labels")}
"""Values whose content is Kubernetes' or the user's."""


def test_schema_and_values_name_the_same():
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))

    def outside(paths):
        return {path for path in paths if not any(path[: len(free)] == free != path for free in FREE)} - OPEN

    assert outside(value_paths(values)) == outside(schema_paths(schema, schema["definitions"]))


def test_the_schema_is_strict_throughout():
    def strict(schema):
        if isinstance(schema, dict):
            assert "properties" not in schema or schema["additionalProperties"] is False, schema
            for below in schema.values():
                strict(below)
        elif isinstance(schema, list):
            for below in schema:
                strict(below)

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    strict(schema)


def test_every_value_is_used():
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    templates = "".join(path.read_text("utf-8") for path in (CHART / "templates").rglob("*") if path.is_file())
    for section in values:
        assert re.search(rf"\.Values\.{section}\b", templates), section


def test_versions_are_the_distributions():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = (CHART.parents[1] / "pyproject.toml").read_text("utf-8")
    [version] = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert chart["appVersion"] == chart["version"] == version


def test_shards_are_deployments_of_their_own_with_the_rights_to_their_leases(helm):
    objects = helm.render({"operator": {"shards": 2, "replicas": 2}})
    deployments = {each["metadata"]["name"]: each["spec"] for each in of(objects, "Deployment")}
    assert {*deployments} == {"carpool-operator-0", "carpool-operator-1", "carpool-injector"}
    leases = set()
    for index in (0, 1):
        spec = deployments[f"carpool-operator-{index}"]
        labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        assert spec["selector"]["matchLabels"]["carpool.dev/shard"] == str(index)
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert pod["serviceAccountName"] == "carpool-operator"
        shard = operator_parser().parse_args(pod["containers"][0]["args"]).shard
        assert shard == Shard(index, 2)
        leases.add(shard.lease("carpool-operator"))
        (budget,) = of(objects, "PodDisruptionBudget", f"carpool-operator-{index}")
        assert budget["spec"]["selector"]["matchLabels"] == spec["selector"]["matchLabels"]
    (role,) = of(objects, "Role", "carpool-operator")
    assert {
        name for rule in role["rules"] if rule["resources"] == ["leases"] for name in rule.get("resourceNames", ())
    } == leases
    assert len(of(objects, "ServiceAccount", "carpool-operator")) == 1


def test_a_single_shard_has_no_label_of_it(helm):
    objects = helm.render()
    (deployment,) = of(objects, "Deployment", "carpool-operator")
    assert "carpool.dev/shard" not in json.dumps(deployment)
    assert not any(
        "--shard" in argument for argument in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    )
