"""Adds the sidecar to a pod: a pure function of the pod and the decision."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from carpool.policy.durations import Duration, Quantity
from carpool.policy.plain import to_plain
from carpool_operator.api import annotations as names
from carpool_operator.api.injection import STANDBY, STANDBY_SLO
from carpool_operator.injector import capture
from carpool_operator.injector.containers import DEFAULT_CONTAINER, handlers
from carpool_operator.injector.decide import SIDECAR, VOLUME, annotations_of
from carpool_operator.injector.meshes import annotated, exclude, original_probe
from carpool_operator.injector.quotas import UNKNOWN
from carpool_operator.injector.reasons import Note
from carpool_operator.injector.resources import raised
from carpool_operator.injector.undo import changes, undone

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Inject, InjectorSettings, Json
    from carpool_operator.injector.quotas import Surroundings

CHANGES = "/etc/carpool/change"
"""Mount path of the operator's signed change in the sidecar."""

CONFIG = "CARPOOL_CONFIG"
"""The environment variable with a sidecar's configuration."""

FOR_EVER = Duration(30 * 86400.0)
"""Never fails: a failure threshold of centuries, because probes have no value for infinity."""

ASK_TIMEOUT = 5
"""Default timeout in seconds of the sidecar's own requests to the model."""

LAME = 5
"""Seconds that a sidecar still accepts requests while unready, until load balancers notice."""
TO_END = 5
"""Seconds that the model has to shut down after the longest drain."""
MIN_GRACE = 20
"""LAME, 10 s to finish requests, TO_END."""

DRAIN_HEADER = "x-carpool-drain"


def patch(
    given: Json, inject: Inject, settings: InjectorSettings, drain_key: str, *, around: Surroundings = UNKNOWN
) -> Json:
    """Return the pod, or pod template, with its sidecar.

    ``drain_key``: this pod's secret, sent by the kubelet's preStop call.
    """
    pod = copy.deepcopy(given)
    spec = pod["spec"]
    model = next(each for each in spec["containers"] if each["name"] == inject.container)
    notes = list(inject.notes)
    asks = _asks(spec, model, inject)
    # 1. Callers of the model's port by name, or from outside the pod, reach the sidecar; with capture, all callers do
    if not inject.capture:
        name = None if inject.declared is None else _hand_over(model, inject.declared, inject.data_port)
        if name is None:
            notes.append(Note.PORT_UNNAMED)
        # 2. The kubelet calls the model directly
        for _, handler in handlers(model):
            if handler["port"] == name:
                handler["port"] = inject.port
    # 3. The model ends after the last answer
    if not _let_drain(model, inject.admin_port, drain_key):
        notes.append(Note.PRE_STOP_KEPT)
    grace = 30 if spec.get("terminationGracePeriodSeconds") is None else spec["terminationGracePeriodSeconds"]
    if grace < MIN_GRACE:
        notes.append(Note.GRACE_RAISED)
        grace = spec["terminationGracePeriodSeconds"] = MIN_GRACE
    # 4. The sidecar comes last: it starts after the init containers, and adds nothing to their resources
    config = sidecar_config(inject, settings, drain_key, asks=asks, limit=grace - TO_END)
    sidecar = _container(inject, settings, config)
    if spec.get("resources"):
        spec["resources"] = raised(spec["resources"], inject.resources)
    exclude(spec, inject.admin_port)
    added_first = []
    if inject.capture:
        where = (inject.port, inject.data_port)
        added_first = [capture.container(settings.image, settings.pull_policy, *where, inject.resources)]
    for each in (*added_first, sidecar):
        each["securityContext"] |= _apparmor(spec)
    spec["initContainers"] = [*(spec.get("initContainers") or []), *added_first, sidecar]
    _let_pull(spec, settings.pull_secrets)
    if inject.target is not None:
        change = {"name": names.change_name(inject.target.kind, inject.target.name), "optional": True}
        spec["volumes"] = [*(spec.get("volumes") or []), {"name": VOLUME, "configMap": change}]
    # 5. Labels and annotations
    _describe(pod, inject, around)
    status = {
        "version": settings.version,
        "container": inject.container,
        "port": inject.port,
        "dataPort": inject.data_port,
        "adminPort": inject.admin_port,
        "notes": notes,
        **({"capture": True} if inject.capture else {}),
        "undo": list(changes(given, pod)),
    }
    pod["metadata"]["annotations"][names.STATUS] = json.dumps(status, separators=(",", ":"))
    return pod


def _let_drain(model: Json, admin_port: int, drain_key: str) -> bool:
    """Delay the model's shutdown until the sidecar has drained; returns False if the model has a hook of its own."""
    lifecycle = model["lifecycle"] = model.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return False
    header = {"name": DRAIN_HEADER, "value": drain_key}
    lifecycle["preStop"] = {"httpGet": {"path": "/drain", "port": admin_port, "httpHeaders": [header]}}
    return True


def _let_pull(spec: Json, secrets: tuple[str, ...]) -> None:
    """Add the secrets for pulling the sidecar's image, where the pod lacks them."""
    own = spec.get("imagePullSecrets") or []
    more = [{"name": name} for name in dict.fromkeys(secrets) if {"name": name} not in own]
    if more:
        spec["imagePullSecrets"] = [*own, *more]


def _describe(pod: Json, inject: Inject, around: Surroundings) -> None:
    """Write labels and annotations for operators, meshes and kubectl."""
    metadata = pod["metadata"] = pod.get("metadata") or {}
    added = {}
    if inject.target is not None:
        # The operator finds the pod by it; a sidecar that tunes itself has none.
        metadata["labels"] = {**(metadata.get("labels") or {}), names.INJECTED: "true"}
        added[names.TARGET] = inject.target.local
    written = annotated(annotations_of(pod), around.annotations, inject.port, inject.data_port, inject.admin_port)
    metadata["annotations"] = {**written, **added}
    metadata["annotations"].setdefault(DEFAULT_CONTAINER, inject.container)
    metadata["annotations"].pop(names.SKIPPED, None)


def unpatch(pod: Json) -> Json | None:
    """Return the pod, or pod template, as it was before its sidecar; ``None`` if ``patch`` added none.

    Raises ``ValueError`` if it has changed too much since to be restored.
    """
    written = annotations_of(pod).get(names.STATUS)
    if written is None:
        return None
    changed = copy.deepcopy(pod)
    del changed["metadata"]["annotations"][names.STATUS]
    try:
        restored: Json = undone(changed, json.loads(written)["undo"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"its annotation {names.STATUS} was changed") from error
    return restored


def skipped(pod: Json, why: str) -> Json:
    """Return the pod with the annotation that gives the reason why it has no sidecar."""
    pod = copy.deepcopy(pod)
    pod["metadata"]["annotations"] = {**annotations_of(pod), names.SKIPPED: why}
    return pod


def sidecar_config(inject: Inject, settings: InjectorSettings, drain_key: str, *, asks: Json, limit: int) -> Json:
    """Return a sidecar's configuration, in the format of its file.

    ``asks``: how it checks whether the model can serve; ``limit``: longest drain in seconds. Under an operator it has
    no SLO and passes everything through until a document arrives.
    """
    # Half of the memory is for bodies; the rest for the process and its tuner.
    held = Quantity(inject.resources.memory // 2)
    # For both families: uvicorn with --host :: listens on IPv6 alone, as needed on a cluster with IPv6 only.
    upstream: Json = {"url": f"http://localhost:{inject.port}", "maxConnections": 4096, **asks}
    config: Json = {
        # IPv4 and IPv6: a pod may have either, or both.
        "listen": f"*:{inject.data_port}",
        "admin": f"*:{inject.admin_port}",
        "upstream": upstream,
        "bodies": {
            "maxRequest": str(inject.max_body),
            "maxBuffered": str(held),
            "maxAnswer": str(min(held, Quantity(256 * 2**20))),
        },
        "shutdown": {"lame": f"{LAME}s", "limit": f"{min(limit, 3600)}s"},
        "drainKey": drain_key,
    }
    if settings.policy is not None:
        return {**config, "policy": to_plain(settings.policy)}
    # No timeout: the model's own limits apply, as without a sidecar.
    upstream["timeout"] = "1h"
    return {
        **config,
        "target": str(inject.target),
        "publicKey": settings.public_key,
        "changes": CHANGES,
        "policy": {
            "slo": {"latency": {"p99": str(STANDBY_SLO)}},
            "admission": {"timeout": "1h", "maxQueuedRows": 65536, "shedAt": "Deadline"},
        },
        "parameters": {"*": {"passThrough": STANDBY.pass_through, "maxInFlight": STANDBY.max_in_flight}},
    }


def _hand_over(model: Json, declared: int, data_port: int) -> str | None:
    """Point the port's declaration to the sidecar; return its name, which the model's own probes can't use any more.

    The declaration stays in the model's container, where everyone looks for it, with the sidecar's number: a
    container's ports are only information, because a pod has one network. Before Kubernetes 1.33 Services don't find
    named ports of native sidecars, and some programs that read pods still don't.
    """
    port = model["ports"][declared]
    number = port["containerPort"]
    port["containerPort"] = data_port
    # A host port moves, too: callers of the node's port are callers like any other.
    model["ports"].append({"containerPort": number, "protocol": "TCP"})
    name: str | None = port.get("name")
    return name


def _asks(spec: Json, model: Json, inject: Inject) -> Json:
    """Return how the sidecar checks whether the model can serve, for ``upstream``: as the model's own probe does.

    Without that probe's tolerance, seconds of failure, such as loading another version, would take all replicas out at
    once. If the answer takes longer than a sidecar waits, the pod would never be ready: SGLang's ``/health_generate``
    generates tokens. Run one at a time, probes with a period of 10 s and a timeout of 20 s fail for the third time
    after 60 s.
    """
    probe = model.get("readinessProbe")
    if not probe:
        return {}
    timeout = probe.get("timeoutSeconds") or 1
    each = max(probe.get("periodSeconds") or 10, timeout)
    asks: Json = {"patience": str(min(Duration(each * (probe.get("failureThreshold") or 3)), FOR_EVER))}
    if timeout > ASK_TIMEOUT:
        asks["askTimeout"] = str(min(Duration(timeout), FOR_EVER))
    path = _readiness_path(spec, probe, model, inject)
    return asks if path is None else {"ready": path, **asks}


def _readiness_path(spec: Json, probe: Json, model: Json, inject: Inject) -> str | None:
    """Return the path of the model's own probe, if it is a plain GET."""
    handler = original_probe(spec, inject.container, probe.get("httpGet") or {})
    name = None if inject.declared is None else model["ports"][inject.declared].get("name")
    plain = handler.get("port") in {inject.port, name} and not handler.get("host") and not handler.get("httpHeaders")
    if not handler or not plain:
        return None
    # Same as the kubelet: with a leading slash, without a fragment, with invalid characters escaped.
    path, _, _ = str(handler.get("path") or "").removeprefix("/").partition("#")
    return "/" + quote(path, safe="%/?:@!$&'()*+,;=-._~[]")


def _container(inject: Inject, settings: InjectorSettings, config: Json) -> Json:
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if settings.user is not None:
        security |= {"runAsUser": settings.user, "runAsGroup": settings.user}
    container = {
        "name": SIDECAR,
        "image": settings.image,
        "restartPolicy": "Always",
        "args": ["--config-env", CONFIG],
        # The kubelet expands $(NAME) in values; $$ is a literal $.
        "env": [{"name": CONFIG, "value": json.dumps(config).replace("$", "$$")}],
        "ports": [{"name": "carpool-admin", "containerPort": inject.admin_port, "protocol": "TCP"}],
        # No startupProbe: the model's containers would wait for it. It may need one of them: the container of a mesh
        # that answers probes for the kubelet.
        "readinessProbe": _probe("/readyz", inject.admin_port, period=2, timeout=5, failures=2),
        # A minute: restarting a proxy that was paused with its node loses the requests that it holds.
        "livenessProbe": _probe("/livez", inject.admin_port, period=10, timeout=5, failures=6),
        "resources": inject.resources.written(),
        "securityContext": security,
    }
    if settings.pull_policy is not None:
        container["imagePullPolicy"] = settings.pull_policy
    if inject.target is not None:
        container["volumeMounts"] = [{"name": VOLUME, "mountPath": CHANGES, "readOnly": True}]
    return container


def _apparmor(spec: Json) -> Json:
    """Return the runtime's own profile if the pod's was written for the model, and may forbid everything else."""
    profile = (spec.get("securityContext") or {}).get("appArmorProfile") or {}
    return {"appArmorProfile": {"type": "RuntimeDefault"}} if profile.get("type") == "Localhost" else {}


def _probe(path: str, port: int, *, period: int, timeout: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
