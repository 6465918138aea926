"""The Kubernetes API for tests: objects are dictionaries, waiting is watching with a deadline."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import requests

from minicluster.client import MERGE, ApiError, Object
from minicluster.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


class Resource(NamedTuple):
    """Where objects of a kind live."""

    prefix: str  # "/apis/apps/v1"
    plural: str
    namespaced: bool

    @property
    def group(self) -> str:
        """Its API group, empty for the oldest."""
        return self.prefix.split("/")[2] if self.prefix.startswith("/apis/") else ""

    def path(self, name: str = "", namespace: str = "", sub: str = "") -> str:
        """Return the path of a collection, an object or a subresource."""
        where = f"namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (self.prefix, where, self.plural, name, sub)))


class Api:
    """One user's access. Kinds are named as kubectl does: ``pods``, ``Deployment``, ``batchingpolicies``.

    Every method raises ``ApiError`` (``status``, ``reason``) where the server refuses.
    """

    def __init__(self, server: str, token: str, authority: Path | str) -> None:
        self.server = server
        self.token = token
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.verify = str(authority)
        self._session.headers["Authorization"] = f"Bearer {token}"
        self._kinds: dict[str, Resource] = {}

    @classmethod
    def of(cls, kubeconfig: Path) -> Api:
        """Return the access that a kubeconfig of ours (JSON, a token) gives; close it after use."""
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        return cls(cluster["server"], config["users"][0]["user"]["token"], cluster["certificate-authority"])

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    def call(self, method: str, path: str, body: Any = None, *, kind: str = "application/json", **query: Any) -> Any:
        """Ask for a path and return the answer: JSON parsed, anything else as text."""
        answer = self._session.request(
            method,
            self.server + path,
            params=query,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": kind},
            timeout=PATIENCE,
        )
        # By what it says it is: a log may hold one line of JSON.
        parsed = answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        if answer.status_code >= 400:
            raise ApiError(answer.status_code, parsed if isinstance(parsed, dict) else {"message": parsed})
        return parsed

    def resource(self, kind: str, version: str = "") -> Resource:
        """Return where a kind lives; of several versions the one named (``apps/v1``), else the server's first.

        Raises:
            KeyError: The server knows no such kind.
        """
        key = f"{version} {kind}".strip().lower()
        if key not in self._kinds:
            self._discover()
        return self._kinds[key]

    def _discover(self) -> None:
        kinds: dict[str, Resource] = {}
        for root in ("/api", "/apis"):
            answer = self._session.get(self.server + root, headers={"Accept": DISCOVERY}, timeout=PATIENCE)
            for group in answer.json()["items"]:
                name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    full = f"{name}/{version['version']}" if name else version["version"]
                    for one in version.get("resources", ()):
                        found = Resource(f"{root}/{full}", one["resource"], one["scope"] == "Namespaced")
                        for alias in {one["resource"], one["singularResource"], one["responseKind"]["kind"].lower()}:
                            kinds.setdefault(alias, found)
                            kinds[f"{full} {alias}".lower()] = found
        self._kinds = kinds

    def get(self, kind: str, name: str, namespace: str = "", *, sub: str = "") -> Object:
        """Return an object, or a subresource of it (``scale``)."""
        found: Object = self.call("GET", self.resource(kind).path(name, namespace, sub))
        return found

    def find(self, kind: str, namespace: str = "", *, labels: str = "", fields: str = "") -> list[Object]:
        """Return the objects of a namespace, or of all."""
        items: list[Object] = self.call(
            "GET", self.resource(kind).path("", namespace), labelSelector=labels, fieldSelector=fields
        )["items"]
        return items

    def create(self, manifest: Object, namespace: str = "", **query: Any) -> Object:
        """Create an object and return it as the server has it (``dryRun="All"`` only asks)."""
        made: Object = self.call("POST", self._home(manifest, namespace, named=False), manifest, **query)
        return made

    def apply(self, *manifests: Object, namespace: str = "", manager: str = "test") -> Object:
        """Apply objects server-side, taking fields over from others; return the last as the server has it."""
        applied: Object = {}
        for manifest in manifests:
            applied = self.call(
                "PATCH",
                self._home(manifest, namespace, named=True),
                manifest,
                kind="application/apply-patch+yaml",
                fieldManager=manager,
                force="true",
            )
        return applied

    def patch(
        self, kind: str, name: str, namespace: str = "", *, body: Any, sub: str = "", content: str = MERGE
    ) -> Object:
        """Patch an object: a merge patch, unless ``content`` says another."""
        patched: Object = self.call("PATCH", self.resource(kind).path(name, namespace, sub), body, kind=content)
        return patched

    def annotate(self, kind: str, name: str, namespace: str, **annotations: str | None) -> Object:
        """Set annotations of ``carpool.dev/`` (``slo_p99="50ms"``), and take out those that are None."""
        values = {f"carpool.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
        return self.patch(kind, name, namespace, body={"metadata": {"annotations": values}})

    def delete(
        self, kind: str, name: str, namespace: str = "", *, grace: int | None = None, missing_ok: bool = False
    ) -> None:
        """Delete an object; ``grace`` in seconds, for pods."""
        body: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.call("DELETE", self.resource(kind).path(name, namespace), body)
        except ApiError as error:
            if not (missing_ok and error.status == 404):
                raise

    def until(
        self,
        kind: str,
        namespace: str,
        test: Callable[[list[Object]], Any],
        *,
        name: str = "",
        labels: str = "",
        timeout: float = PATIENCE,
    ) -> list[Object]:
        """Watch a namespace's objects, by name or labels, until ``test`` of their list is true; return the list.

        Raises:
            AssertionError: It was not within ``timeout`` seconds; the message ends with what there was.
        """
        deadline = time.monotonic() + timeout
        path = self.resource(kind).path("", namespace)
        selectors = {"fieldSelector": f"metadata.name={name}" if name else "", "labelSelector": labels}
        objects: dict[str, Object] = {}
        while (left := deadline - time.monotonic()) > 0:
            listed = self.call("GET", path, **selectors)
            objects = {one["metadata"]["uid"]: one for one in listed["items"]}
            if test(list(objects.values())):
                return list(objects.values())
            query = {**selectors, "resourceVersion": listed["metadata"]["resourceVersion"]}
            for event in self._events(path, {**query, "watch": "true", "timeoutSeconds": int(left) + 1}, deadline):
                if event["type"] == "ERROR":
                    break
                uid = event["object"]["metadata"]["uid"]
                if event["type"] == "DELETED":
                    objects.pop(uid, None)
                else:
                    objects[uid] = event["object"]
                if test(list(objects.values())):
                    return list(objects.values())
        shown = json.dumps(
            [{"metadata": {"name": o["metadata"]["name"]}, "status": o.get("status")} for o in objects.values()]
        )
        raise AssertionError(
            f"{kind} {name or labels} in {namespace or 'all'}: not so within {timeout:g} s; there is {shown}"
        )

    def _events(self, path: str, query: dict[str, Any], deadline: float) -> Iterable[Object]:
        pending = b""
        try:
            with self._session.get(
                self.server + path, params=query, stream=True, timeout=max(deadline - time.monotonic(), 0.1)
            ) as answer:
                if not answer.ok:
                    return
                for chunk in answer.iter_content(chunk_size=None):
                    *lines, pending = (pending + chunk).split(b"\n")
                    yield from map(json.loads, lines)
        except requests.RequestException:
            return  # the deadline, or the server closed: the caller lists again

    def until_ready(self, deployment: str, namespace: str, *, timeout: float = PATIENCE) -> Object:
        """Wait until a Deployment's rollout is complete: all its pods are of the newest template and ready."""
        (found,) = self.until("deployments", namespace, _rolled, name=deployment, timeout=timeout)
        return found

    def until_gone(
        self, kind: str, namespace: str, *, name: str = "", labels: str = "", timeout: float = PATIENCE
    ) -> None:
        """Wait until there is no such object."""
        self.until(kind, namespace, lambda found: not found, name=name, labels=labels, timeout=timeout)

    def until_served(self, crd: str, *, timeout: float = PATIENCE) -> None:
        """Wait until the server serves a CustomResourceDefinition's kind, and lists it among what it serves.

        Both come a moment after its condition.
        """
        (found,) = self.until("customresourcedefinitions", "", _established, name=crd, timeout=timeout)
        plural = found["spec"]["names"]["plural"]

        def served() -> bool:
            self._discover()
            try:
                return plural in self._kinds and self.find(plural) is not None
            except ApiError as error:
                if error.status in {404, 429}:  # 429: its storage is made this moment
                    return False
                raise

        eventually(served, timeout)

    def until_allowed(self, verb: str, kind: str, namespace: str, *, timeout: float = PATIENCE) -> None:
        """Wait until this user may do something: the server takes roles in a moment after they are written."""
        where = self.resource(kind)
        attributes = {"verb": verb, "group": where.group, "resource": where.plural, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "metadata": {},
            "spec": {"resourceAttributes": attributes},
        }
        eventually(lambda: self.create(review)["status"]["allowed"], timeout)

    def logs(self, pod: str, namespace: str, container: str = "", *, previous: bool = False) -> str:
        """Return what a container has printed; of its run before the last restart, if asked for."""
        query = {"previous": "true"} if previous else {}
        path = self.resource("pods").path(pod, namespace, "log")
        return str(self.call("GET", path, container=container, **query))

    def account_token(self, account: str, namespace: str) -> str:
        """Return a ServiceAccount's token, as the API server signs it."""
        path = self.resource("serviceaccounts").path(account, namespace, "token")
        made = self.call("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        return str(made["status"]["token"])

    def as_account(self, account: str, namespace: str) -> Api:
        """Return access as a ServiceAccount, with its rights only."""
        return Api(self.server, self.account_token(account, namespace), str(self._session.verify))

    def _home(self, manifest: Object, namespace: str, *, named: bool) -> str:
        resource = self.resource(manifest["kind"], manifest["apiVersion"])
        metadata = manifest["metadata"]
        where = metadata.get("namespace") or namespace
        return resource.path(metadata["name"] if named else "", where)


def _established(found: Sequence[Object]) -> bool:
    """Before the server has looked at it there are no conditions, or they are null."""
    said = found[0].get("status", {}).get("conditions") or [] if found else []
    return ("Established", "True") in {(each["type"], each["status"]) for each in said}


def _rolled(found: Sequence[Object]) -> bool:
    """As `kubectl rollout status` has it."""
    if not found:
        return False
    (one,) = found
    wanted, status = one["spec"]["replicas"], one.get("status", {})
    return bool(
        status.get("observedGeneration", 0) >= one["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == status.get("replicas", 0) == status.get("readyReplicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )
