"""The injector's objects in the cluster: its certificates, the API servers' trust bundle, the public key.

Replicas share one Secret. A write names the version that was read, so that of two writers the first wins and the other
reads again.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct, field

from carpool_operator.cluster.kube import JSON, ApiError, path_of
from carpool_operator.webhook.certificates import Material, read, renewed

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON_PATCH = "application/json-patch+json"
PUBLIC_KEY = "publicKey"
ATTEMPTS = 5
"""Most attempts: each lost race means that another replica won one."""


class Server(Protocol):
    """The API server."""

    async def request(self, method: str, path: str, body: object = None, *, content: str = JSON) -> bytes:
        """Send the request, and return the answer's body. Raises ``ApiError``."""
        ...


class Names(NamedTuple):
    """Names of the objects. ``namespace`` is the injector's own."""

    namespace: str
    service: str = "carpool-injector"
    secret: str = "carpool-injector-cert"  # noqa: S105 - its name
    webhook: str = "carpool-injector"
    public_key: str = "carpool-public-key"

    @property
    def dns(self) -> tuple[str, ...]:
        """The webhook's DNS name for API servers."""
        return (f"{self.service}.{self.namespace}.svc",)


class _Meta(Struct):
    resource_version: str = field(name="resourceVersion")


class _Secret(Struct):
    metadata: _Meta
    data: dict[str, str] = field(default_factory=dict)


class _Map(Struct):
    data: dict[str, str] = field(default_factory=dict)


class _Client(Struct):
    ca: str = field(default="", name="caBundle")


class _Webhook(Struct):
    name: str
    client: _Client = field(name="clientConfig")


class _Configuration(Struct):
    webhooks: list[_Webhook] = field(default_factory=list)


async def public_key(server: Server, names: Names) -> str | None:
    """Return the operator's public keys, each 64 hex digits, separated by commas; ``None`` while there is none.

    Raises ``ApiError``.
    """
    path = path_of("v1", "configmaps", names.namespace, names.public_key)
    try:
        found = msgspec.json.decode(await server.request("GET", path), type=_Map)
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    keys = found.data.get(PUBLIC_KEY, "").strip().lower()
    return keys if re.fullmatch(r"[0-9a-f]{64}(,[0-9a-f]{64})*", keys) else None


async def material(server: Server, names: Names, now: float) -> Material:
    """Update certificates to what they should be at ``now`` (seconds since the epoch), and return them.

    API servers get the new trust bundle before anything new is served. Writes nothing if all is current. Raises
    ``ApiError``.
    """
    for _ in range(ATTEMPTS):
        version, held = await _held(server, names)
        if held is not None and await publish(server, names, held.bundle) and held.current.serves(names.dns, now):
            # They did not trust the announced authority yet: they need time before it may be served.
            return held
        wanted = renewed(held, names.dns, now)
        if wanted is held:
            return held
        try:
            await _hold(server, names, version, wanted)
        except ApiError as error:
            if error.status == 409:
                continue
            raise
        await publish(server, names, wanted.bundle)
        return wanted
    raise ApiError(409, f"secret {names.secret}: lost {ATTEMPTS} races in a row")


async def publish(server: Server, names: Names, bundle: bytes) -> bool:
    """Publish the bundle of authorities for API servers; returns whether anything had to be written.

    Raises ``ApiError``.
    """
    path = path_of("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", None, names.webhook)
    found = msgspec.json.decode(await server.request("GET", path), type=_Configuration)
    encoded = b64encode(bundle).decode()
    operations: list[dict[str, Any]] = []
    for index, webhook in enumerate(found.webhooks):
        if webhook.client.ca != encoded:
            # Another writer may have replaced it since it was read.
            operations += [
                {"op": "test", "path": f"/webhooks/{index}/name", "value": webhook.name},
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": encoded},
            ]
    if operations:
        await server.request("PATCH", path, operations, content=JSON_PATCH)
    return bool(operations)


async def _held(server: Server, names: Names) -> tuple[str | None, Material | None]:
    """Return the Secret's version, ``None`` where there is none, and its content."""
    try:
        body = await server.request("GET", path_of("v1", "secrets", names.namespace, names.secret))
    except ApiError as error:
        if error.status == 404:
            return None, None
        raise
    secret = msgspec.json.decode(body, type=_Secret)
    return secret.metadata.resource_version, read({key: b64decode(value) for key, value in secret.data.items()})


async def _hold(server: Server, names: Names, version: str | None, wanted: Material) -> None:
    metadata: Mapping[str, Any] = {"name": names.secret, "labels": {"app.kubernetes.io/part-of": "carpool"}}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": metadata,
        "data": {key: b64encode(value).decode() for key, value in wanted.secret().items()},
    }
    if version is None:
        await server.request("POST", path_of("v1", "secrets", names.namespace), secret)
    else:
        secret["metadata"] = {**metadata, "resourceVersion": version}
        await server.request("PUT", path_of("v1", "secrets", names.namespace, names.secret), secret)
