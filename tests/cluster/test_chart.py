"""The chart on a real API server: every object is taken, rights are as narrow as they look, and all of it can go."""

from __future__ import annotations

import re
import time
import urllib.request
from base64 import b64encode
from itertools import product
from pathlib import Path

import pytest
import yaml
from minicluster import carpool
from minicluster.waiting import eventually

from carpool_operator.webhook.certificates import issue
from carpool_operator.workloads.registry import KINDS

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "charts" / "carpool")
HOME, OTHER = "carpool-system", "team-a"
DEPLOYMENTS = ("carpool-operator", "carpool-injector")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}

EVERYTHING = {
    "watchNamespaces": [OTHER],
    "certificates": {"source": "CertManager"},
    "networkPolicy": {
        "scrapers": [{"namespaceSelector": {}}],
        "apiServers": [{"ipBlock": {"cidr": "10.0.0.0/28"}}],
        "egress": {"enabled": True, "rules": [{"ports": [{"port": 9090}]}]},
        "sidecarNamespaces": [{"name": OTHER, "callers": [{"podSelector": {}}]}],
    },
    "operator": {"replicas": 2},
    "commonLabels": {"team": "platform"},
    "monitoring": {
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
FOREIGN = {
    ("monitoring.coreos.com", "v1"): ["PodMonitor", "PrometheusRule"],
    ("cert-manager.io", "v1"): ["Certificate", "Issuer"],
}
"""Kinds of others that the chart can make use of."""


@pytest.fixture(scope="module")
def cluster(own_cluster):
    """One of this file's own: there is one release to a cluster, and its end is tried in every order."""
    return own_cluster


@pytest.fixture
def helm(cluster, program):
    program("helm")

    def run(verb, *arguments, values=None, **options):
        given = [] if values is None else ["--values", "-"]
        text = None if values is None else yaml.safe_dump(values)
        return cluster.run("helm", verb, *arguments, "--namespace", HOME, *given, text=text, **options)

    return run


@pytest.fixture
def namespaces(api):
    """Where the release is, held to what the chart promises, and where models are."""
    for name in (HOME, OTHER):
        api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})


@pytest.fixture
def foreign(cluster, api):
    """Let the server know the kinds of others; it takes any object of them (their schemas are their owners')."""
    crds = []
    for (group, version), kinds in FOREIGN.items():
        for kind in kinds:
            plural = f"{kind.lower()}s"
            schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            spec = {
                "group": group,
                "scope": "Namespaced",
                "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
                "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
            }
            crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
            crds.append(crd | {"metadata": {"name": f"{plural}.{group}"}, "spec": spec})
    cluster.run("kubectl", "apply", "--server-side", "-f", "-", text=yaml.safe_dump_all(crds))
    for crd in crds:
        api.until_served(crd["metadata"]["name"])


@pytest.fixture
def release(helm, namespaces):
    """The chart as it is by default, without waiting for its pods."""
    helm("install", "carpool", CHART)
    yield
    helm("uninstall", "carpool", "--ignore-not-found", check=False)


def without_pods(api):
    """Wait until those of an uninstalled release have ended: a namespace's end is slow to come while some do."""
    api.until_gone("pods", HOME)


def leftovers(api):
    """What of the release is still on the server."""
    kinds = ("clusterroles", "clusterrolebindings", "mutatingwebhookconfigurations", "validatingadmissionpolicies",
             "validatingadmissionpolicybindings", "roles", "rolebindings",
             "deployments", "services", "serviceaccounts", "networkpolicies", "poddisruptionbudgets")  # fmt: skip
    return [
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in api.find(kind, labels="app.kubernetes.io/part-of=carpool")
        if "deletionTimestamp" not in each["metadata"]
    ]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_the_server_takes_every_object(cluster, helm, namespaces, foreign, values):
    rendered = helm("template", "carpool", CHART, values=values)

    for _ in range(2):  # kubectl asks for strictness: a field that is misspelt is refused
        said = cluster.run("kubectl", "apply", "--server-side", "-f", "-", text=rendered)
    assert said.count("serverside-applied") == sum(1 for each in yaml.safe_load_all(rendered) if each)

    cluster.run("kubectl", "delete", "-f", "-", text=rendered)


def test_pods_are_let_in_where_only_restricted_ones_are(api, release):
    for name in DEPLOYMENTS:
        api.until("pods", HOME, lambda found, name=name: any(pod["metadata"]["name"].startswith(name) for pod in found))


OPERATOR = {
    ("carpool.dev", "batchingpolicies", OTHER): ["list", "watch", "create", "patch", "delete"],
    ("carpool.dev", "batchingpolicies/status", OTHER): ["patch"],
    **{(kind.group, kind.plural, OTHER): ["list", "watch"] for kind in KINDS},
    ("", "namespaces", ""): ["get", "list", "watch"],
    ("", "pods", OTHER): ["list", "watch"],
    ("", "services", OTHER): ["list"],
    ("", "events", OTHER): ["list"],
    ("", "configmaps", OTHER): ["list", "create", "patch", "delete"],
    ("events.k8s.io", "events", OTHER): ["create"],
    ("coordination.k8s.io", "leases", HOME): ["create", "list"],
    ("coordination.k8s.io", "leases/carpool-operator", HOME): ["get", "update"],
    ("", "secrets", HOME): ["create"],
    ("", "secrets/carpool-signing-key", HOME): ["get"],
    ("", "configmaps/carpool-public-key", HOME): ["patch"],
}
INJECTOR = {
    ("", "configmaps/carpool-public-key", HOME): ["get"],
    ("", "secrets", HOME): ["create"],
    ("", "secrets/carpool-injector-cert", HOME): ["get", "update"],
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations/carpool-injector", ""): ["get", "patch"],
    ("", "namespaces", ""): ["get"],
    ("", "limitranges", OTHER): ["list"],
    ("", "resourcequotas", OTHER): ["list"],
}
NOBODY = [
    *product(["get", "list", "watch", "create", "update", "patch", "delete"], [("", "secrets", OTHER)]),
    *product(["list", "watch", "update", "patch", "delete"], [("", "secrets", HOME)]),
    *product(["get"], [("", "secrets/other", HOME)]),
    *product(["create", "update", "patch", "delete"], [("", "pods", OTHER), ("apps", "deployments", OTHER)]),
    *product(["create", "update", "patch", "delete"], [("apps", "deployments", HOME), ("apps", "statefulsets", OTHER)]),
    *product(["create"], [("", "pods/exec", OTHER), ("", "pods/eviction", OTHER), ("", "serviceaccounts/token", HOME)]),
    *product(["create", "update", "delete"], [("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "")]),
    *product(["patch"], [("admissionregistration.k8s.io", "mutatingwebhookconfigurations/other", "")]),
    *product(["escalate", "bind", "update"], [("rbac.authorization.k8s.io", "clusterroles", "")]),
    *product(["impersonate"], [("", "users", ""), ("", "serviceaccounts", HOME)]),
    *product(["get", "list"], [("", "nodes", "")]),
    *product(["create", "update", "patch", "delete"], [("", "namespaces", "")]),
]


def may(api, account, verb, group, resource, namespace):
    """Ask the server what a ServiceAccount of the release may; ``pods/exec`` is a subresource, ``leases/x`` a name."""
    plural, _, rest = resource.partition("/")
    sub = {"subresource": rest} if rest in {"status", "exec", "eviction", "token"} else {"name": rest}
    attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace, **sub}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "metadata": {"name": ""},
        "spec": {"user": f"system:serviceaccount:{HOME}:{account}", "resourceAttributes": attributes},
    }
    return api.create(review)["status"]["allowed"]


@pytest.mark.parametrize(
    ("account", "needed"), [("carpool-operator", OPERATOR), ("carpool-injector", INJECTOR)], ids=lambda v: str(v)[:16]
)
def test_rights_are_what_is_needed_and_no_more(api, release, account, needed):
    asked = [(verb, place) for place, verbs in needed.items() for verb in verbs]

    def lacks_nothing():
        lacking = [(verb, place) for verb, place in asked if not may(api, account, verb, *place)]
        assert not lacking
        return True

    eventually(lacks_nothing)  # the server takes rights in a moment after they are written
    beyond = [(verb, place) for verb, place in NOBODY if may(api, account, verb, *place)]

    assert not beyond


POLICY = {
    "apiVersion": "carpool.dev/v1alpha1",
    "kind": "BatchingPolicy",
    "metadata": {"name": "resnet"},
    "spec": {
        "targetRefs": [{"group": "apps", "kind": "Deployment", "name": "resnet"}],
        "slo": {"latency": {"p99": "50ms"}},
    },
}

OURS = {"carpool.dev/change": "true"}
ANNOTATED = {"carpool.dev/annotated": "true"}


def written(kind, name, namespace, labels=None, **content):
    versions = {"ConfigMap": "v1", "Secret": "v1", "Lease": "coordination.k8s.io/v1"}
    return {
        "apiVersion": versions.get(kind, "carpool.dev/v1alpha1"),
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        **content,
    }


def policy_of(name, labels=None):
    return written("BatchingPolicy", name, OTHER, labels, spec=POLICY["spec"])


MAY_WRITE = [
    ("operator", written("ConfigMap", "carpool-deployment-resnet", OTHER, OURS)),
    ("operator", written("ConfigMap", "carpool-statefulset-a.b-0", OTHER, OURS)),
    ("operator", written("ConfigMap", "carpool-public-key", HOME)),
    ("operator", written("Secret", "carpool-signing-key", HOME)),
    ("injector", written("Secret", "carpool-injector-cert", HOME)),
    ("operator", written("Lease", "carpool-operator", HOME)),
    ("operator", written("Lease", "carpool-operator-1-of-2", HOME)),
    ("operator", policy_of("deployment-resnet", ANNOTATED)),
]
MAY_NOT_WRITE = [
    ("operator", written("ConfigMap", "app-settings", OTHER, OURS)),
    ("operator", written("ConfigMap", "carpool-deployment-resnet", OTHER)),
    ("operator", written("ConfigMap", "carpool-public-key", OTHER, OURS)),
    ("operator", written("ConfigMap", "kube-root-ca.crt", OTHER, OURS)),
    ("operator", written("Secret", "anything", HOME)),
    ("operator", written("Secret", "carpool-injector-cert", HOME)),
    ("injector", written("Secret", "carpool-signing-key", HOME)),
    ("operator", written("Lease", "kube-scheduler", HOME)),
    ("operator", policy_of("by-hand")),
]


def test_each_part_writes_its_own_objects_and_no_other(api, cluster, release):
    def write(account, thing, verb="create"):
        """By the account, which has every right that RBAC can give it: the chart's, and more."""
        user = f"system:serviceaccount:{HOME}:carpool-{account}"
        return cluster.run(
            "kubectl", "--as", user, "--as-group", "system:masters", verb, "--dry-run=server", "-f", "-",
            text=yaml.safe_dump(thing), check=False,
        )  # fmt: skip

    def refused():
        return "no other" in write("operator", MAY_NOT_WRITE[0][1])

    eventually(refused)  # the server takes a policy in a moment after it is written
    for account, thing in MAY_WRITE:
        said = write(account, thing)
        # The chart's own parts may have written it already: the server looks for it after every admission.
        assert "dry run" in said or "AlreadyExists" in said, (account, thing["kind"], thing["metadata"], said)
    for account, thing in MAY_NOT_WRITE:
        said = write(account, thing)
        assert "carpool-least-rights" in said, (account, thing["kind"], thing["metadata"], said)

    # What a person wrote is neither changed nor deleted.
    api.apply(POLICY, namespace=OTHER)
    api.apply(written("ConfigMap", "carpool-deployment-mine", OTHER))
    by_hand = policy_of("resnet", ANNOTATED)
    assert "none that a person wrote" in write("operator", by_hand, "apply")
    assert "none that a person wrote" in write("operator", by_hand, "delete")
    mine = "carpool-deployment-mine"
    assert "no other" in write("operator", written("ConfigMap", mine, OTHER), "delete")
    assert "no other" in write("operator", written("ConfigMap", mine, OTHER, OURS, data={"a": "b"}), "apply")
    api.apply(written("ConfigMap", "carpool-deployment-ours", OTHER, OURS))
    ours = written("ConfigMap", "carpool-deployment-ours", OTHER, OURS, data={"a": "b"})
    assert "dry run" in write("operator", ours, "apply")
    # Others' writes are not looked at.
    assert "dry run" in cluster.run("kubectl", "create", "configmap", "app-settings", "-n", OTHER, "--dry-run=server")
    api.delete("configmaps", mine, OTHER)
    api.delete("configmaps", "carpool-deployment-ours", OTHER)
    api.delete("batchingpolicies", "resnet", OTHER)


def test_rights_end_at_the_namespaces_that_are_watched(api, helm, namespaces):
    helm("install", "carpool", CHART, values={"watchNamespaces": [OTHER]})
    try:
        for (group, resource, namespace), verbs in OPERATOR.items():
            if not namespace:
                continue  # of the whole cluster: there are no such rights then
            for verb in verbs:
                # The server takes rights in a moment after they are written.
                eventually(lambda asked=(verb, group, resource, namespace): may(api, "carpool-operator", *asked))
                if namespace == OTHER:
                    assert not may(api, "carpool-operator", verb, group, resource, "default"), (verb, resource)
    finally:
        helm("uninstall", "carpool")


@pytest.mark.parametrize(("role", "verbs"), [("view", ["get", "list"]), ("edit", ["get", "create", "delete"])])
def test_who_may_view_or_edit_a_namespace_may_do_so_with_its_policies(api, release, role, verbs):
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": f"someone-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": role, "namespace": HOME}],
    }  # fmt: skip
    api.apply(binding, namespace=OTHER)

    def aggregated(found):
        return any("batchingpolicies" in rule.get("resources", ()) for rule in found[0]["rules"])

    api.until("clusterroles", "", aggregated, name=role)  # the controller manager does it, in its own time

    for verb in verbs:
        eventually(lambda verb=verb: may(api, role, verb, "carpool.dev", "batchingpolicies", OTHER))
    assert not may(api, role, "patch", "carpool.dev", "batchingpolicies/status", OTHER)
    assert may(api, role, "create", "carpool.dev", "batchingpolicies", OTHER) == (role == "edit")


def test_policies_outlive_the_release_and_are_there_for_the_next(api, helm, release):
    api.apply(POLICY, namespace=OTHER)

    helm("uninstall", "carpool")

    assert not leftovers(api)
    assert api.get("batchingpolicies", "resnet", OTHER)["spec"]["slo"]["latency"]["p99"] == "50ms"
    helm("install", "carpool", CHART)
    helm("upgrade", "carpool", CHART, values={"operator": {"replicas": 2}})
    assert api.get("deployments", "carpool-operator", HOME)["spec"]["replicas"] == 2


def test_the_namespace_may_go_first(api, cluster, helm, namespaces):
    helm("install", "carpool", CHART)
    api.apply(POLICY, namespace=OTHER)
    for name in DEPLOYMENTS:
        api.patch("deployments", name, HOME, body={"spec": {"replicas": 0}})
    without_pods(api)

    cluster.run("kubectl", "delete", "namespace", HOME, "--timeout=120s")

    # What was the cluster's stays, and stops nothing: a pod that asks for a sidecar starts without.
    container = {"name": "model", "image": "none", "ports": [{"containerPort": 8000}]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "model", "annotations": {"carpool.dev/inject": "true"}},
        "spec": {"containers": [container]},
    }
    assert "initContainers" not in api.create(pod, "default")["spec"]
    api.delete("pods", "model", "default", grace=0)
    # By label it can be found and deleted, without helm.
    kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingadmissionpolicies"
    cluster.run("kubectl", "delete", f"{kinds},validatingadmissionpolicybindings",
                "-l", "app.kubernetes.io/part-of=carpool")  # fmt: skip
    assert not leftovers(api)


def test_the_crd_may_go_first(api, cluster, helm, release):
    api.apply(POLICY, namespace=OTHER)

    cluster.run("kubectl", "delete", "crd", "batchingpolicies.carpool.dev", "--timeout=60s")
    helm("uninstall", "carpool")

    assert not leftovers(api)


def followed(page):
    """What a page says to type on a cluster, in its order; the blocks that it says are run here."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(
        r"^<!-- not run: [^\n]*test_chart.py does it -->\n```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def shell(cluster, tmp_path):
    """The repository's root, as far as a page on the cluster needs it, with the values that the page begins with."""
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    values = re.search(r"^<!-- chart values: my-values.yaml -->\n```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my-values.yaml").write_text(values[1])
    return lambda text, **options: cluster.run("bash", "-euc", f"cd {tmp_path}; {text}", **options)


def bundles(api):
    hooks = api.get("mutatingwebhookconfigurations", "carpool-injector")["webhooks"]
    return {hook["clientConfig"].get("caBundle") for hook in hooks}


def test_the_page_on_installing_can_be_followed(api, helm, namespaces, shell):
    install, upgrade, uninstall, give, delete = followed("install.md")
    elsewhere = "helm install batching charts/carpool --namespace batching-system --dry-run=server"

    shell(install)  # with `helm test`
    trusted = bundles(api)
    key = api.get("secrets", "carpool-signing-key", HOME)["data"]
    assert None not in trusted
    shell(upgrade)
    assert bundles(api) == trusted
    assert api.get("secrets", "carpool-signing-key", HOME)["data"] == key
    shell(uninstall)
    assert not leftovers(api)
    assert api.get("secrets", "carpool-signing-key", HOME)["data"] == key
    assert "invalid ownership metadata" in shell(elsewhere, check=False)
    shell(f"{elsewhere} --take-ownership")
    shell(give)
    shell(elsewhere)
    without_pods(api)
    shell(delete)
    assert not api.find("namespaces", fields=f"metadata.name={HOME}")


def test_the_page_on_gitops_can_be_followed(api, cluster, helm, shell):
    without_pods(api)
    cluster.run("kubectl", "delete", "namespace", HOME, "--ignore-not-found")  # the page makes it
    [apply] = followed("gitops.md")
    again = apply.splitlines()[-1]

    shell(apply)
    api.until_ready("carpool-injector", HOME)
    trusted = bundles(api)
    generations = {name: api.get("deployments", name, HOME)["metadata"]["generation"] for name in DEPLOYMENTS}
    shell(again)

    assert None not in trusted
    assert bundles(api) == trusted
    assert {name: api.get("deployments", name, HOME)["metadata"]["generation"] for name in DEPLOYMENTS} == generations
    shell("kubectl delete -f carpool.yaml")


def test_with_these_rights_a_model_is_tuned(api, helm, namespaces):
    team = "team-b"
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    without_pods(api)  # of the release before, which lose their rights as they end
    helm("install", "carpool", CHART, "--wait", values={"watchNamespaces": [team]})
    try:
        api.apply(*carpool.model("resnet", replicas=1, **{"carpool.dev/slo-p99": "300ms"}), namespace=team)
        api.until("batchingpolicies", team, lambda found: found and acknowledged(found[0]), timeout=120)

        for pod in api.find("pods", HOME):
            with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8080/metrics", timeout=10) as answer:
                counted = answer.read().decode()
            assert 'code="403"' not in counted
            assert "carpool_injector_sync_failures_total 0.0" in counted or "carpool_operator_leader" in counted
    finally:
        helm("uninstall", "carpool")
        api.delete("namespaces", team)


def acknowledged(policy):
    return any(target["acknowledged"] for target in policy.get("status", {}).get("targets", ()))


def test_helm_s_test_says_what_is_wrong(api, cluster, helm, namespaces):
    helm("install", "carpool", CHART, "--wait", values={"watchNamespaces": [OTHER]})
    try:
        # The sidecar is let in where only restricted pods are: the question is about a pod in that namespace.
        assert helm("test", "carpool").count("Phase:          Succeeded") == 4
        api.patch("deployments", "carpool-injector", HOME, body={"spec": {"replicas": 0}})
        api.until_gone("pods", HOME, labels="app.kubernetes.io/component=injector")
        assert "Phase:          Failed" in helm("test", "carpool", check=False)
        log = cluster.run("kubectl", "logs", "--namespace", HOME, "carpool-test")
        assert "the injector was not asked, or did not answer" in log
    finally:
        helm("uninstall", "carpool")


def test_a_sidecar_that_can_t_be_pulled_keeps_no_pod_from_starting(api, helm, namespaces):
    """An injector waits for the image, and without one pods start as they are."""
    team = "team-c"
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    helm("install", "carpool", CHART, values={"sidecar": {"image": {"repository": "mistyped"}}})
    injectors = "app.kubernetes.io/component=injector"
    try:
        api.until("pods", HOME, lambda pods: pods and all(map(waits_for_image, pods)), labels=injectors, timeout=120)
        api.apply(*carpool.model("resnet", replicas=1, **{"carpool.dev/slo-p99": "300ms"}), namespace=team)
        (pod,) = api.until("pods", team, lambda pods: pods and all(map(is_ready, pods)), timeout=120)
        assert "initContainers" not in pod["spec"]
        helm("upgrade", "carpool", CHART, "--wait", values={"sidecar": {"image": {"repository": "carpool-sidecar"}}})
        carpool.until_injecting(api)
    finally:
        helm("uninstall", "carpool")
        api.delete("namespaces", team)


def waits_for_image(pod):
    states = [each["state"].get("waiting", {}) for each in pod.get("status", {}).get("initContainerStatuses", ())]
    return any(each.get("reason") in {"ErrImagePull", "ImagePullBackOff"} for each in states)


def is_ready(pod):
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def test_cert_manager_s_certificate_is_served(api, cluster, helm, namespaces, foreign):
    """Its part is played here: a Secret, and the authority in the webhook's configuration."""
    helm("install", "carpool", CHART, values={"certificates": {"source": "CertManager"}})
    try:
        [name] = api.get("certificates", "carpool-injector", HOME)["spec"]["dnsNames"]
        pair, authority = issue((name,), time.time())
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "carpool-injector-cert"}}
        api.apply(
            secret | {"stringData": {"tls.crt": pair.certificate.decode(), "tls.key": pair.key.decode()}},
            namespace=HOME,
        )
        trusted = {"op": "add", "value": b64encode(authority).decode()}
        webhooks = api.get("mutatingwebhookconfigurations", "carpool-injector")["webhooks"]
        paths = [{"path": f"/webhooks/{number}/clientConfig/caBundle"} for number in range(len(webhooks))]
        body, content = [trusted | path for path in paths], "application/json-patch+json"
        api.patch("mutatingwebhookconfigurations", "carpool-injector", body=body, content=content)
        api.until_ready("carpool-injector", HOME)

        helm("test", "carpool")
    finally:
        helm("uninstall", "carpool")
