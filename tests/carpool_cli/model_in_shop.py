"""A model in namespace ``shop`` as a preflight sees it: its workload, its pod, and what is around it."""

from __future__ import annotations

import json
import shlex

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry, sample
from carpool_cli.manifest_checks.objects import Around, Subject
from carpool_operator.workloads.registry import BY_NAME

PROBE = {"httpGet": {"path": "/", "port": "http"}}
NAMESPACE = {"metadata": {"name": "shop"}}


def subject(kind="Deployment", spec=None, **metadata):
    of = {"metadata": {"name": "web", "namespace": "shop", **metadata}}
    return Subject(BY_NAME[kind], of if spec is None else {**of, "spec": spec})


def pod(**changes):
    """One with a sidecar, as the server would store it."""
    sidecar = {"name": "carpool"}
    server = {"name": "server", "ports": [{"name": "http", "containerPort": 14080}, {"containerPort": 9000}]}
    status = {"version": "1", "container": "server", "port": 9000, "dataPort": 14080, "adminPort": 14090, "notes": []}
    annotations = {"carpool.dev/status": json.dumps(status), "carpool.dev/target": "Deployment/web"}
    metadata = {"namespace": "shop", "labels": {"app": "web"}, "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": [server], "initContainers": [sidecar], **changes}}


def plain():
    return {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "server", "readinessProbe": PROBE}]},
    }


def template(**container):
    """A pod template with its port, and no sidecar."""
    server = {"name": "server", "ports": [{"name": "http", "containerPort": 9000}], "readinessProbe": PROBE}
    return {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{**server, **container}]}}


def sent(of, *, inject, kind="Deployment"):
    """A pod as a dry run asks for it."""
    return sample(subject(kind), of, inject=inject)


def around(namespace=NAMESPACE, services=(), policies=(), autoscalers=(), **others):
    return Around(namespace, list(services), list(policies), list(autoscalers), **others)


def all_of(near, of=None, account=None):
    """All findings; ``account``: the service account that the pod runs as, which the server writes into it."""
    runs_as = {} if account is None else {"serviceAccountName": account}
    return checks.all_of(of or subject(), Dry(plain()), Dry(pod(**runs_as)), near)


def codes(near, of=None):
    return [each.code for each in all_of(near, of)]


def patched(fix):
    """The first JSON patch in a fix: what it names, operation, path and value."""
    words = shlex.split(fix.partition("; or ")[0])
    (change,) = json.loads(words[words.index("-p") + 1])
    return words[words.index("patch") + 1 : words.index("--type=json")], change["op"], change["path"], change["value"]
