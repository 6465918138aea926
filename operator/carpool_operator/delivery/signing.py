"""The operator's keys: sidecars accept what they sign; nobody else holds them.

Ed25519 is deterministic, so that a document signed again has the same bytes.
"""

from __future__ import annotations

from base64 import b64decode, b64encode, urlsafe_b64encode
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from carpool.exchange.change import MAX_KEYS, Change, Ticket, encode, read_change
from carpool.policy.plain import PolicyError
from carpool_operator.cluster.kube import APPLY, FIELD_MANAGER, ApiError, path_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_operator.api.model import Target
    from carpool_operator.cluster.writing import Writer

SECRET = "carpool-signing-key"  # noqa: S105 - its name
PRIVATE, SUFFIX = "privateKey.pem", ".pem"
"""The entry for a generated key; every entry with this suffix is a key."""
PUBLIC_MAP = "carpool-public-key"
PUBLIC = "publicKey"

TICKET_LIFE = 300.0
"""Seconds for which a ticket gives access to a target's sidecars: clocks may differ by minutes, and a stolen ticket
soon expires."""


class BadKey(Exception):  # noqa: N818 - what it is, not that it is an error
    """The Secret holds no key that can sign."""


class Signer:
    """Signs with every key of a Secret: sidecars accept it if they know one of them, so keys are replaced step by step.

    ``secret``: its entries, whose names end in ``.pem`` for keys; or the PEM of one key. Raises ``BadKey``.
    """

    def __init__(self, secret: bytes | Mapping[str, bytes]) -> None:
        self._tickets: dict[str, tuple[float, str]] = {}
        self.adopt({PRIVATE: secret} if isinstance(secret, bytes) else secret)

    def adopt(self, secret: Mapping[str, bytes]) -> None:
        """Sign with these keys from now on. Raises ``BadKey``, and then keeps the previous keys."""
        keys = {name: _key(name, pem) for name, pem in sorted(secret.items()) if name.endswith(SUFFIX)}
        if not keys:
            raise BadKey(f"{SECRET} holds no entry that ends in {SUFFIX}, such as {PRIVATE}: no key to sign with")
        if len(keys) > MAX_KEYS:
            raise BadKey(f"{SECRET} holds {len(keys)} keys: sidecars take {MAX_KEYS}")
        self._keys = tuple(keys.values())
        self._publics = tuple(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex() for key in self._keys)
        # Sidecars older than this field get no keys while there is only the first one.
        self.announced = () if [*keys] == [PRIVATE] else self._publics
        """Public keys that documents ask sidecars to accept."""
        self._tickets.clear()

    @property
    def public(self) -> str:
        """The keys that sidecars verify with, as hexadecimal digits, separated by commas."""
        return ",".join(self._publics)

    def sign(self, change: Change) -> tuple[bytes, str]:
        """Return the bytes of a change, and their signatures in base64, separated by commas."""
        body = encode(change)
        return body, ",".join(b64encode(key.sign(body)).decode() for key in self._keys)

    def read(self, body: bytes, signature: str) -> Change | None:
        """Return a change signed by one of these keys; ``None`` for anything else."""
        try:
            signatures = [b64decode(each, validate=True) for each in signature.split(",")[:MAX_KEYS]]
            if not any(_verified(key, each, body) for key in self._keys for each in signatures):
                return None
            return read_change(msgspec.json.decode(body))
        except (ValueError, msgspec.DecodeError, PolicyError):
            return None

    def ticket(self, target: Target, wall: float) -> str:
        """Return the ``Authorization`` header for a target's sidecars; ``wall`` is seconds since the epoch.

        One serves for half its life: signing 5,000 every two seconds would cost a third of a core.
        """
        name = str(target)
        until, header = self._tickets.get(name, (0.0, ""))
        if until < wall + TICKET_LIFE / 2:
            # Tickets of deleted workloads are dropped with the first renewal after them.
            self._tickets = {known: each for known, each in self._tickets.items() if each[0] > wall}
            until = wall + TICKET_LIFE
            body = encode(Ticket(target=name, expires=until))
            signatures = ",".join(urlsafe_b64encode(key.sign(body)).decode() for key in self._keys)
            header = f"Carpool {urlsafe_b64encode(body).decode()}.{signatures}"
            self._tickets[name] = (until, header)
        return header


def _key(name: str, pem: bytes) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise BadKey(f"{SECRET} holds no PEM key without a passphrase under {name}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadKey(f"{SECRET} holds a key of another kind under {name}: it has to be Ed25519")
    return key


def _verified(key: Ed25519PrivateKey, signature: bytes, body: bytes) -> bool:
    try:
        key.public_key().verify(signature, body)
    except InvalidSignature:
        return False
    return True


def new_key() -> bytes:
    """Return a new private key as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class _Data(msgspec.Struct):
    data: dict[str, str] = msgspec.field(default_factory=dict)


async def obtain(writer: Writer, namespace: str) -> Signer:
    """Read the keys, or create one if there is none yet, and publish their public halves.

    Two operators that create one at once end with the same key: the server accepts the first. Raises ``ApiError`` or
    ``BadKey``.
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
    signer = Signer(_entries(body))
    await _publish(writer, namespace, signer)
    return signer


async def refresh(writer: Writer, namespace: str, signer: Signer) -> bool:
    """Sign with the Secret's present keys; returns whether they changed. A deleted Secret changes nothing.

    The public halves are published again if somebody has deleted or changed them: injectors that start without them
    are never ready. Raises ``ApiError`` or ``BadKey``; the previous keys then stay in use.
    """
    before = signer.public
    try:
        signer.adopt(_entries(await writer.read(path_of("v1", "secrets", namespace, SECRET))))
    except ApiError as error:
        if error.status != 404:
            raise
    if not await _is_published(writer, namespace, signer):
        await _publish(writer, namespace, signer)
    return signer.public != before


def _entries(secret: bytes) -> dict[str, bytes]:
    return {name: b64decode(value) for name, value in msgspec.json.decode(secret, type=_Data).data.items()}


async def _is_published(writer: Writer, namespace: str, signer: Signer) -> bool:
    try:
        found = await writer.read(path_of("v1", "configmaps", namespace, PUBLIC_MAP))
    except ApiError:  # it is not there, or the chart is older and gives no right to read it
        return False
    return msgspec.json.decode(found, type=_Data).data.get(PUBLIC) == signer.public


async def _publish(writer: Writer, namespace: str, signer: Signer) -> None:
    public = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": PUBLIC_MAP, "labels": {"app.kubernetes.io/part-of": "carpool"}},
        "data": {PUBLIC: signer.public},
    }
    # Applying the same content again writes nothing.
    await writer.send(
        "PATCH",
        path_of("v1", "configmaps", namespace, PUBLIC_MAP),
        public,
        query={"fieldManager": FIELD_MANAGER, "force": "true"},
        content=APPLY,
    )
