"""The node runs pods as a kubelet does: containers in their order, probes, hooks, volumes, the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
from minicluster.waiting import eventually

# A server that ends on SIGTERM, as a container's first process has to. It serves /?FILE, and says what it was sent.
SERVER = """
import http.server, os, signal, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, name = self.path.partition("?")
        print(self.path, self.headers.get("x-secret", ""), time.time(), flush=True)
        try:
            body = open(name, "rb").read() if name else b"fine"
        except OSError:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
def end(*_):
    print("SIGTERM", time.time(), flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
"""
# Prints the codes of two questions to the API server, asked with the pod's token, and its namespace.
ASK = """
import os, ssl, urllib.error, urllib.request
here = "/var/run/secrets/kubernetes.io/serviceaccount/"
server = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
token, space = (open(here + name).read() for name in ("token", "namespace"))
trust = ssl.create_default_context(cafile=here + "ca.crt")
def code(path):
    request = urllib.request.Request(server + path, headers={"Authorization": "Bearer " + token})
    try:
        return urllib.request.urlopen(request, context=trust).status
    except urllib.error.HTTPError as error:
        return error.code
print(code("/api"), code(f"/api/v1/namespaces/{space}/pods"), space)
"""
NO_KEY = {"configMapKeyRef": {"name": "kube-root-ca.crt", "key": "none"}}
SOON = {"periodSeconds": 1, "failureThreshold": 30}


def server(name="main", port=8000, **more):
    return {
        "name": name,
        "image": "python:3",
        "command": ["python", "-c", SERVER, str(port)],
        "ports": [{"name": name, "containerPort": port}],
        "readinessProbe": {"httpGet": {"port": name}, **SOON},
        **more,
    }


def pod(*containers, name="one", **spec):
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers), **spec}}


def deployment(*containers, replicas=2, **spec):
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": list(containers), **spec}}
    body = {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": body}


def condition(found, kind):
    return {one["type"]: one["status"] for one in found.get("status", {}).get("conditions", ())}.get(kind)


def is_ready(found):
    return bool(found) and all(condition(one, "Ready") == "True" for one in found)


def until_ready(api, namespace, name="one"):
    (found,) = api.until("pods", namespace, is_ready, name=name)
    return found


def state(found, name):
    statuses = [*found["status"].get("initContainerStatuses", ()), *found["status"].get("containerStatuses", ())]
    return next(one for one in statuses if one["name"] == name)


def has_ended(found):
    return all("terminated" in one["state"] for one in found[0]["status"]["containerStatuses"])


def has(name, what):
    """A test for ``until``: the only pod's container says ``what(status)``."""

    def test(found):
        return bool(found) and "containerStatuses" in found[0].get("status", {}) and what(state(found[0], name))

    return test


def test_a_deployment_rolls_and_its_endpoints_follow(api, namespace):
    service = {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": "main"}]}
    api.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service}, namespace=namespace
    )
    api.apply(deployment(server()), namespace=namespace)
    api.until_ready("web", namespace)
    before = {one["metadata"]["name"]: one["status"]["podIP"] for one in api.find("pods", namespace)}

    def served(slices):
        return {
            (address, port["port"])
            for one in slices
            for endpoint in one["endpoints"] or ()
            if endpoint["conditions"]["ready"]
            for address in endpoint["addresses"]
            for port in one["ports"]
        }

    api.until("endpointslices", namespace, lambda found: served(found) == {(ip, 8000) for ip in before.values()})
    api.apply(deployment(server(env=[{"name": "NEW", "value": "1"}])), namespace=namespace)
    api.until_ready("web", namespace)
    after = {one["metadata"]["name"]: one["status"]["podIP"] for one in api.find("pods", namespace, labels="app=web")}
    after = {name: ip for name, ip in after.items() if name not in before}

    assert len(after) == 2
    api.until("endpointslices", namespace, lambda found: served(found) == {(ip, 8000) for ip in after.values()})
    api.until("pods", namespace, lambda found: {one["metadata"]["name"] for one in found} == set(after))


def test_init_containers_run_in_turn_and_sidecars_before_and_after_the_rest(api, cluster, namespace):
    step = {"image": "python", "command": ["python", "-c", "import time; print('done', time.time())"]}
    startup = {"httpGet": {"port": "side", "path": "/startup"}, **SOON}
    side = {**server("side", 9000), "restartPolicy": "Always", "startupProbe": startup}
    api.apply(pod(server(), initContainers=[{"name": "a", **step}, side, {"name": "b", **step}]), namespace=namespace)
    found = until_ready(api, namespace)

    assert state(found, "a")["state"]["terminated"]["exitCode"] == 0
    assert state(found, "side")["started"]
    api.delete("pods", "one", namespace)
    api.until_gone("pods", namespace)
    said = cluster.outputs(namespace, "one")
    assert at(said["a"], "done") < at(said["side"], "/startup") < at(said["b"], "done") < at(said["main"], "/")
    assert at(said["main"], "SIGTERM") < at(said["side"], "SIGTERM")


def at(text, what):
    """When a container first printed a line that begins so."""
    return next(float(line.split()[-1]) for line in text.splitlines() if line.split()[0] == what)


def test_the_hook_comes_before_the_signal_and_grace_ends_in_a_kill(api, cluster, namespace):
    secret = [{"name": "x-secret", "value": "s3cret"}]
    hook = {"httpGet": {"port": "main", "path": "/drain", "httpHeaders": secret}}
    deaf = {"name": "deaf", "image": "busybox", "command": ["sleep", "1000"]}
    # A container that stops by itself has all the time that a slow machine needs for it.
    for name, container, grace in (("one", server(lifecycle={"preStop": hook}), 300), ("two", deaf, 1)):
        body = pod(container, name=name, terminationGracePeriodSeconds=grace)
        body["metadata"]["finalizers"] = ["test.carpool.dev/read"]  # so that its last status can be read
        api.apply(body, namespace=namespace)
        until_ready(api, namespace, name)
    last = {}

    for name in ("one", "two"):
        api.delete("pods", name, namespace)
        (last[name],) = api.until("pods", namespace, has_ended, name=name)
        api.patch("pods", name, namespace, body={"metadata": {"finalizers": None}})
    api.until_gone("pods", namespace)

    said = cluster.outputs(namespace, "one")["main"]
    assert at(said, "/drain") < at(said, "SIGTERM")
    assert "/drain s3cret" in said
    assert state(last["one"], "main")["state"]["terminated"]["exitCode"] == 0
    assert state(last["two"], "deaf")["state"]["terminated"]["exitCode"] == 128 + 9
    assert {condition(each, "Ready") for each in last.values()} == {"False"}


def test_volumes_are_where_they_belong_and_follow_their_source(api, namespace, cluster):
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "stringData": {"key": "k"}}
    labels = [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
    volumes = [
        {"name": "settings", "configMap": {"name": "settings", "optional": True}},
        {"name": "key", "secret": {"secretName": "key"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "info", "downwardAPI": {"items": labels}},
    ]
    mounts = [
        {"name": "settings", "mountPath": "/etc/carpool/change"},
        {"name": "key", "mountPath": "/key"},
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "info", "mountPath": "/etc/info"},
    ]
    script = "import pathlib; pathlib.Path('/scratch/note').write_text('hello'); pathlib.Path('/etc/mine').touch()"
    write = {"name": "write", "image": "python", "command": ["python", "-c", script], "volumeMounts": mounts}
    api.apply(secret, namespace=namespace)
    api.apply(pod(server(volumeMounts=mounts), initContainers=[write], volumes=volumes), namespace=namespace)
    ip = until_ready(api, namespace)["status"]["podIP"]

    def read(path):
        answer = requests.get(f"http://{ip}:8000/?{path}", timeout=10)
        return answer.text if answer.ok else None

    assert read("/etc/carpool/change/colour") is None
    assert read("/key/key") == "k"
    assert read("/scratch/note") == "hello"
    assert read("/etc/info/labels") == 'app="one"'
    assert read("/etc/mine") is None  # each container has a root of its own ...
    assert not Path("/etc/mine").exists()  # ... and none the machine's
    assert not Path("/etc/carpool/change").exists()
    assert read(f"{cluster.folder}/tokens.csv") is None
    for colour in ("blue", "red"):
        api.apply({**settings, "data": {"colour": colour}}, namespace=namespace)
        eventually(lambda colour=colour: read("/etc/carpool/change/colour") == colour)
    api.delete("configmaps", "settings", namespace)
    eventually(lambda: read("/etc/carpool/change/colour") is None)


def test_a_pod_has_its_token_and_no_more_rights_than_its_account(api, namespace):
    once = {"name": "main", "image": "python", "command": ["python", "-c", ASK]}
    api.apply(pod(once, restartPolicy="Never"), namespace=namespace)
    api.until("pods", namespace, lambda found: found and found[0]["status"].get("phase") == "Succeeded", name="one")

    assert api.logs("one", namespace) == f"200 403 {namespace}\n"


def test_environment_and_commands_are_expanded(api, namespace):
    variables = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "key"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "x", "optional": True}}},
        {"name": "BOTH", "value": "$(NAME)/$(KEY)/$(NONE)/$$(KEY)"},
    ]
    shown = 'echo "$1 $IP $APP $BOTH ${NONE-unset} $(hostname) $(pwd)"'
    main = {"name": "main", "image": "busybox", "command": ["sh", "-c", shown, "sh"], "args": ["$(KEY)"]}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "stringData": {"key": "k"}}
    api.apply(pod({**main, "env": variables, "workingDir": "/usr"}, restartPolicy="Never"), namespace=namespace)
    api.until("pods", namespace, has("main", lambda one: one["state"].get("waiting", {}).get("message")), name="one")
    api.apply(secret, namespace=namespace)
    (found,) = api.until("pods", namespace, lambda found: found[0]["status"]["phase"] == "Succeeded", name="one")

    ip = found["status"]["podIP"]
    assert api.logs("one", namespace) == f"k {ip} one one/k/$(NONE)/$(KEY) unset one /usr\n"


def test_a_container_that_fails_is_started_again_ever_later(api, namespace):
    api.apply(
        pod({"name": "main", "image": "busybox", "command": ["sh", "-c", "echo bye; exit 3"]}), namespace=namespace
    )

    (found,) = api.until(
        "pods",
        namespace,
        has(
            "main",
            lambda one: (
                one["restartCount"] >= 2 and one["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
            ),
        ),
        name="one",
    )

    assert state(found, "main")["lastState"]["terminated"]["exitCode"] == 3
    assert api.logs("one", namespace, previous=True) == "bye\n"


def test_liveness_restarts_and_readiness_does_not(api, namespace):
    patient = {"periodSeconds": 1, "timeoutSeconds": 30}
    dead = {"exec": {"command": ["sh", "-c", "test ! -e /tmp/dead"]}, "failureThreshold": 1, **patient}
    shy = {"exec": {"command": ["test", "-e", "/ready"]}, **patient}
    script = "test -e /scratch/again && exec sleep 1000; touch /scratch/again /tmp/dead; exec sleep 1000"
    mounts = [{"name": "scratch", "mountPath": "/scratch"}]
    main = {"name": "main", "image": "busybox", "command": ["sh", "-c", script], "volumeMounts": mounts}
    volumes = [{"name": "scratch", "emptyDir": {}}]
    probed = {**main, "livenessProbe": dead, "readinessProbe": shy}
    api.apply(pod(probed, volumes=volumes, terminationGracePeriodSeconds=0), namespace=namespace)

    (found,) = api.until(
        "pods", namespace, has("main", lambda one: one["restartCount"] == 1 and one["state"].get("running")), name="one"
    )

    assert state(found, "main")["lastState"]["terminated"]["exitCode"] == 128 + 9
    assert not state(found, "main")["ready"]


@pytest.mark.parametrize(
    ("container", "reason"),
    [
        ({"image": "no-such-image:1"}, "ErrImagePull"),
        ({"image": "python", "command": ["no-such-program"]}, "RunContainerError"),
        ({"image": "python", "env": [{"name": "X", "valueFrom": NO_KEY}]}, "CreateContainerConfigError"),
    ],
)
def test_what_cannot_start_says_why(api, namespace, container, reason):
    api.apply(pod({"name": "main", **container}), namespace=namespace)

    api.until(
        "pods", namespace, has("main", lambda one: one["state"].get("waiting", {}).get("reason") == reason), name="one"
    )


def test_a_pod_that_fits_no_node_waits(api, namespace):
    api.apply(pod(server(), name="one", nodeSelector={"gpu": "yes"}), namespace=namespace)
    api.apply(pod(server(), name="two"), namespace=namespace)
    until_ready(api, namespace, "two")

    assert "nodeName" not in api.get("pods", "one", namespace)["spec"]


def test_a_forced_deletion_ends_it_at_once(api, namespace, kubectl):
    api.apply(pod(server()), namespace=namespace)
    ip = until_ready(api, namespace)["status"]["podIP"]

    kubectl("delete", "pod", "one", "--force", "--grace-period=0")

    def answers():
        try:
            return requests.get(f"http://{ip}:8000/", timeout=20).ok
        except requests.RequestException:
            return False

    eventually(lambda: not answers())


def test_a_read_only_root_is_one(api, namespace):
    script = "touch /tmp/x || echo refused; touch /scratch/x && echo kept"
    mounts = [{"name": "scratch", "mountPath": "/scratch"}]
    main = {"name": "main", "image": "busybox", "command": ["sh", "-c", script], "volumeMounts": mounts}
    main["securityContext"] = {"readOnlyRootFilesystem": True}
    api.apply(pod(main, restartPolicy="Never", volumes=[{"name": "scratch", "emptyDir": {}}]), namespace=namespace)
    api.until("pods", namespace, lambda found: found and found[0]["status"].get("phase") == "Succeeded", name="one")

    assert {"refused", "kept"} <= set(api.logs("one", namespace).split())
