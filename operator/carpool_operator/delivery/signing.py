"""The operator's key: what it signs, sidecars believe; nobody else holds it.

Ed25519 gives the same bytes for the same document, so that a document that is signed again differs in nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode, urlsafe_b64encode
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from carpool.exchange.change import Change, Ticket, encode, read_change
from carpool.policy.plain import PolicyError
from carpool_operator.cluster.kube import APPLY, FIELD_MANAGER, ApiError, path_of

if TYPE_CHECKING:
    from carpool_operator.api.model import Target
    from carpool_operator.cluster.writing import Writer

SECRET = "carpool-signing-key"  # noqa: S105 - its name
PRIVATE = "privateKey.pem"
PUBLIC_MAP = "carpool-public-key"
PUBLIC = "publicKey"

TICKET_LIFE = 300.0
"""Seconds for which a ticket opens a target's sidecars: clocks may be minutes apart, a stolen one is soon worthless."""


class BadKey(Exception):  # noqa: N818 - what it is, not that it is an error
    """The Secret holds no key that can sign."""


class Signer:
    """Signs with one private key."""

    def __init__(self, pem: bytes) -> None:
        try:
            key = load_pem_private_key(pem, password=None)
        except ValueError as error:
            raise BadKey(f"{SECRET} holds no PEM key under {PRIVATE}: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise BadKey(f"{SECRET} holds a key of another kind under {PRIVATE}: it has to be Ed25519")
        self._key = key
        self._tickets: dict[str, tuple[float, str]] = {}

    @property
    def public(self) -> str:
        """The key that sidecars check with, as hexadecimal digits."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, change: Change) -> tuple[bytes, str]:
        """Return the bytes of a change, and their signature in base64."""
        body = encode(change)
        return body, b64encode(self._key.sign(body)).decode()

    def read(self, body: bytes, signature: str) -> Change | None:
        """Return a change that this key signed; ``None`` for anything else, whoever wrote it."""
        try:
            self._key.public_key().verify(b64decode(signature, validate=True), body)
            return read_change(msgspec.json.decode(body))
        except (InvalidSignature, ValueError, msgspec.DecodeError, PolicyError):
            return None

    def ticket(self, target: Target, wall: float) -> str:
        """Return the ``Authorization`` header that opens a target's sidecars; ``wall`` is seconds since the epoch.

        One serves for half its life: signing 5,000 every two seconds would cost a core's third.
        """
        name = str(target)
        until, header = self._tickets.get(name, (0.0, ""))
        if until < wall + TICKET_LIFE / 2:
            # Those of workloads that are gone by now go with the first that is renewed after them.
            self._tickets = {known: each for known, each in self._tickets.items() if each[0] > wall}
            until = wall + TICKET_LIFE
            body = encode(Ticket(target=name, expires=until))
            parts = (urlsafe_b64encode(part).decode() for part in (body, self._key.sign(body)))
            header = "Carpool " + ".".join(parts)
            self._tickets[name] = (until, header)
        return header


def new_key() -> bytes:
    """Return a new private key as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class _Secret(msgspec.Struct):
    data: dict[str, str] = msgspec.field(default_factory=dict)


async def obtain(writer: Writer, namespace: str) -> Signer:
    """Read the key, or make it where there is none yet, and publish its public half.

    Two that make one at once end with the same: the server takes the first. Raises ``ApiError`` or ``BadKey``.
    """
    path = path_of("v1", "secrets", namespace, SECRET)
    try:
        body = await writer.read(path)
    except ApiError as error:
        if error.status != 404:
            raise
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET, "labels": {"app.kubernetes.io/part-of": "carpool"}},
            "type": "Opaque",
            "data": {PRIVATE: b64encode(new_key()).decode()},
        }
        try:
            body = await writer.send("POST", path_of("v1", "secrets", namespace), secret)
        except ApiError as refusal:
            if refusal.status != 409:
                raise
            body = await writer.read(path)
    signer = Signer(b64decode(msgspec.json.decode(body, type=_Secret).data.get(PRIVATE, "")))
    public = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": PUBLIC_MAP, "labels": {"app.kubernetes.io/part-of": "carpool"}},
        "data": {PUBLIC: signer.public},
    }
    # Applying what is there already writes nothing.
    await writer.send(
        "PATCH",
        path_of("v1", "configmaps", namespace, PUBLIC_MAP),
        public,
        query={"fieldManager": FIELD_MANAGER, "force": "true"},
        content=APPLY,
    )
    return signer
