"""An API server in memory, on a real socket: lists, watches, applies and refuses as the real one does, and on demand
fails in every way that the real one can."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

import kubernetes.client
from aiohttp import web

from carpool_operator.cluster.kube import Kube

PLURALS = {
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "secrets"): "Secret",
    ("v1", "pods"): "Pod",
    ("v1", "services"): "Service",
    ("v1", "namespaces"): "Namespace",
    ("v1", "events"): "Event",
    ("apps/v1", "deployments"): "Deployment",
    ("apps/v1", "statefulsets"): "StatefulSet",
    ("apps/v1", "daemonsets"): "DaemonSet",
    ("apps/v1", "replicasets"): "ReplicaSet",
    ("argoproj.io/v1alpha1", "rollouts"): "Rollout",
    ("autoscaling/v2", "horizontalpodautoscalers"): "HorizontalPodAutoscaler",
    ("keda.sh/v1alpha1", "scaledobjects"): "ScaledObject",
    ("carpool.dev/v1alpha1", "batchingpolicies"): "BatchingPolicy",
    ("coordination.k8s.io/v1", "leases"): "Lease",
    ("events.k8s.io/v1", "events"): "Event",
}


@dataclass
class Fault:
    """What happens instead of an answer, or after the work was done (``after``), to requests that ``match``."""

    match: object
    status: int = 500
    times: int = 1
    retry_after: str = ""
    after: bool = False
    drop: bool = False
    """The connection breaks."""
    stall: asyncio.Event | None = None
    """Answered only then."""


@dataclass
class Watcher:
    api: str
    plural: str
    namespace: str
    selector: str
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)


class FakeApi:
    """``objects``: by (api, plural, namespace, name). ``log``: every request (method, path), watches included."""

    def __init__(self):
        self.objects = {}
        self.log = []
        self.writes = Counter()
        self.faults = []
        self.muted = set()
        """Plurals whose events are not sent."""
        self.absent = {"rollouts", "scaledobjects"}
        """Plurals whose CRD is not installed."""
        self.closed = set()
        """Namespaces that nobody may read or write: their Roles are gone."""
        self.twice = False
        """Whether every event is sent twice."""
        self.version = 100
        self.oldest = 0
        """Watches from before are 410."""
        self.changed = asyncio.Condition()
        self.watchers = []
        self._history = []
        self._runner = None
        self.url = ""

    # ------------------------------------------------------------------------------------------- by the test

    async def __aenter__(self):
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._handle)
        # A watch whose client is gone ends, as on the real one.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        self.end_watches()
        await self._runner.cleanup()

    def kube(self, workers=4):
        configuration = kubernetes.client.Configuration()
        configuration.host = self.url
        return Kube(configuration, workers=workers)

    def fail(self, match, status=500, **options):
        """Have the next requests fail whose ``METHOD /path`` contains ``match``."""
        self.faults.append(Fault(match, status, **options))

    def end_watches(self):
        for watcher in list(self.watchers):
            watcher.queue.put_nowait(None)

    def close(self, namespace):
        """Take all rights in a namespace away; watches there end."""
        self.closed.add(namespace)
        for watcher in list(self.watchers):
            if watcher.namespace == namespace:
                watcher.queue.put_nowait(None)

    def expire(self):
        """Forget all history: watches from before get the error that it is gone."""
        self.oldest = self.version
        for watcher in list(self.watchers):
            watcher.queue.put_nowait(
                {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            )

    def babble(self):
        """Send watchers an object of no kind."""
        for watcher in list(self.watchers):
            watcher.queue.put_nowait({"type": "MODIFIED", "object": {"metadata": 7}})

    def bookmark(self):
        self.version += 1
        for watcher in list(self.watchers):
            watcher.queue.put_nowait(
                {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
            )

    async def until(self, test, within=20.0):
        """Wait until ``test()`` is true, looking whenever something changes here, and now and then besides: what is
        seen here may be on its way to where it is waited for."""
        async with asyncio.timeout(within):
            while not test():
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.01), self.changed:
                        await self.changed.wait()

    def put(self, api, plural, body, namespace="ns"):
        """Put an object there, as somebody else would."""
        body = deepcopy(body)
        name = body["metadata"]["name"]
        namespace = body["metadata"].setdefault("namespace", namespace)
        key = (api, plural, namespace, name)
        old = self.objects.get(key)
        self.version += 1
        meta = body["metadata"]
        meta["resourceVersion"] = str(self.version)
        meta.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{self.version}")
        meta.setdefault("creationTimestamp", old["metadata"]["creationTimestamp"] if old else "2026-11-21T12:00:00Z")
        generation = old["metadata"]["generation"] if old else 0
        meta["generation"] = generation + (old is None or old.get("spec") != body.get("spec"))
        self.objects[key] = body
        self._send("MODIFIED" if old else "ADDED", key, body)
        return body

    def get(self, api, plural, name, namespace="ns"):
        return self.objects.get((api, plural, namespace, name))

    def all(self, plural):
        return [each for (_, kind, _, _), each in sorted(self.objects.items()) if kind == plural]

    def remove(self, api, plural, name, namespace="ns"):
        key = (api, plural, namespace, name)
        body = self.objects.pop(key)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self._send("DELETED", key, body)

    # ------------------------------------------------------------------------------------------- inside

    def _send(self, kind, key, body):
        event = {"type": kind, "object": deepcopy(body)}
        plural = key[1]
        if plural not in self.muted:
            self._history.append((self.version, key, event))
            for watcher in self.watchers:
                if self._concerns(watcher, key, body):
                    for _ in range(2 if self.twice else 1):
                        watcher.queue.put_nowait(event)
        self._wake()

    def _wake(self):
        async def wake():
            async with self.changed:
                self.changed.notify_all()

        self._waking = asyncio.ensure_future(wake())

    @staticmethod
    def _concerns(watcher, key, body):
        api, plural, namespace, _ = key
        return (
            (api, plural) == (watcher.api, watcher.plural)
            and watcher.namespace in {"", namespace}
            and _selects(watcher.selector, body)
        )

    async def _handle(self, request):
        what = f"{request.method} {request.path}"
        if request.query.get("watch"):
            what = what.replace("GET", "WATCH")
        self.log.append(what)
        self._wake()
        if any(f"/namespaces/{each}" in request.path for each in self.closed):
            return self._status(403, "forbidden")
        fault = next((each for each in self.faults if each.match in what and each.times > 0), None)
        if fault is not None:
            fault.times -= 1
            if fault.after:
                await self._answer(request)
            if fault.stall is not None:
                await fault.stall.wait()
            if fault.drop:
                request.transport.abort()
            return self._status(
                fault.status, "made to fail", {"Retry-After": fault.retry_after} if fault.retry_after else {}
            )
        return await self._answer(request)

    def _status(self, code, message, headers=None):
        return web.json_response(
            {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}, status=code, headers=headers
        )

    async def _answer(self, request):
        parts = request.path.strip("/").split("/")
        discovered = self._discovery(parts)
        if discovered is not None:
            return web.json_response(discovered)
        api = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = (*rest, "", "")[:3]
        if (api, plural) not in PLURALS or plural in self.absent:
            return self._status(404, "the server could not find the requested resource")
        if request.method == "GET" and not name:
            if request.query.get("watch"):
                return await self._watch(request, api, plural, namespace)
            return self._list(request, api, plural, namespace)
        body = json.loads(await request.read() or b"null")
        return self._one(request, (api, plural, namespace, name), sub, body)

    def _one(self, request, key, sub, body):
        api, plural, namespace, name = key
        there = self.objects.get(key)
        if request.method == "GET":
            return self._status(404, f"{plural} {name!r} not found") if there is None else web.json_response(there)
        if request.method == "DELETE":
            if there is None:
                return self._status(404, f"{plural} {name!r} not found")
            uid = ((body or {}).get("preconditions") or {}).get("uid")
            if uid not in {None, there["metadata"]["uid"]}:
                return self._status(409, "the UID in the precondition is another")
            self._wrote(key)
            self.remove(*key[:2], name, namespace)
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.method == "POST":
            name = body["metadata"]["name"]
            key = (api, plural, namespace, name)
            if key in self.objects:
                return self._status(409, f"{plural} {name!r} already exists")
            self._wrote(key)
            return web.json_response(self.put(api, plural, body, namespace), status=201)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if there is not None and version not in {None, "", there["metadata"]["resourceVersion"]}:
            return self._status(409, "the object has been modified")
        apply = request.content_type == "application/apply-patch+yaml"
        if there is None and not apply:
            return self._status(404, f"{plural} {name!r} not found")
        if request.method == "PUT":
            made = body
        elif apply:
            made = _applied(deepcopy(there) if there else {}, body)
        else:
            made = _merged(deepcopy(there), {"status": body.get("status")} if sub == "status" else body)
        if there is not None and _same(made, there):
            return web.json_response(there)
        self._wrote(key)
        return web.json_response(self.put(api, plural, made, namespace))

    def _wrote(self, key):
        self.writes[key[1], key[3]] += 1

    def _list(self, request, api, plural, namespace):
        selector, field_ = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        items = [
            body
            for (version, kind, where, _), body in sorted(
                (key, body) for key, body in self.objects.items() if key[:2] == (api, plural)
            )
            if (version, kind) == (api, plural)
            and namespace in {"", where}
            and _selects(selector, body)
            and _has(field_, body)
        ]
        begin = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or len(items) + 1)
        meta = {"resourceVersion": str(self.version)}
        if begin + limit < len(items):
            meta["continue"] = str(begin + limit)
        return web.json_response(
            {
                "kind": PLURALS[api, plural] + "List",
                "apiVersion": api,
                "metadata": meta,
                "items": items[begin : begin + limit],
            }
        )

    async def _watch(self, request, api, plural, namespace):
        since = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        watcher = Watcher(api, plural, namespace, request.query.get("labelSelector", ""))
        if since < self.oldest:
            return self._status(410, "too old resource version")
        for version, key, event in self._history:
            if version > since and self._concerns(watcher, key, event["object"]):
                watcher.queue.put_nowait(event)
        self.watchers.append(watcher)
        self._wake()
        try:
            await response.prepare(request)
            while (event := await watcher.queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
                if event["type"] == "ERROR":
                    break
        except ConnectionResetError:
            pass
        finally:
            self.watchers.remove(watcher)
            self._wake()
        return response

    def _discovery(self, parts):
        """Answer what kopf asks at its start."""
        groups = sorted({api.split("/")[0] for api, _ in PLURALS if "/" in api})
        if parts == ["api"]:
            return {"versions": ["v1"]}
        if parts == ["apis"]:
            versions = {group: next(api for api, _ in PLURALS if api.startswith(group + "/")) for group in groups}
            return {
                "groups": [
                    {
                        "name": group,
                        "preferredVersion": {"version": version.split("/")[1]},
                        "versions": [{"version": version.split("/")[1]}],
                    }
                    for group, version in versions.items()
                ]
            }
        api = "/".join(parts[1:])
        if len(parts) == (2 if parts[0] == "api" else 3):
            extra = [("events", "Event", True)] if api == "v1" else []
            crds = [("customresourcedefinitions", "CustomResourceDefinition", False)]
            kinds = [
                (plural, kind, plural != "namespaces")
                for (of, plural), kind in PLURALS.items()
                if of == api and plural not in self.absent
            ]
            return {
                "resources": [
                    {
                        "name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": namespaced,
                        "verbs": ["get", "list", "watch", "patch"],
                    }
                    for plural, kind, namespaced in [*kinds, *extra, *(crds if "apiextensions" in api else [])]
                ]
            }  # fmt: skip
        return None


def _has(selector, body):
    """Whether an object's field is as a field selector of one term says."""
    path, _, value = selector.partition("=")
    for step in filter(None, path.split(".")):
        body = body[step]
    return not selector or body == value


def _selects(selector, body):
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        if "!=" in term:
            key, value = term.split("!=")
            if labels.get(key) == value:
                return False
        elif labels.get(term.split("=")[0]) != term.split("=")[1]:
            return False
    return True


def _merged(old, patch):
    for key, value in patch.items():
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            old[key] = _merged(old.get(key) or {}, value)
        else:
            old[key] = value
    return old


def _applied(old, body):
    """One manager owns all of what it applies here: lists are replaced whole."""
    body = deepcopy(body)
    spec = body.pop("spec", None)
    old = _merged(old, body)
    if spec is not None:
        old["spec"] = spec
    return old


def _same(new, old):
    def bare(body):
        body = deepcopy(body)
        for name in ("resourceVersion", "generation", "uid", "creationTimestamp", "namespace"):
            body["metadata"].pop(name, None)
        return body

    return bare(new) == bare(old)
