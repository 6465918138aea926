"""Changes from outside: parameters signed with Ed25519 over the very bytes that were sent.

The signed object names whom it is for, when it ends, and a generation that has to be newer, so that neither a copy from
another pod nor an old one changes anything.
"""

from __future__ import annotations

import time
from base64 import b64decode
from binascii import Error as Base64Error

import msgspec

from carpool.policy import Camel, Parameters, from_plain


class Unsigned(Exception):  # noqa: N818 - what it is, not that it is an error
    """The change is not by the holder of the key, not for this target, or not of this time."""


class Change(Camel, frozen=True, kw_only=True):
    """``expires``: seconds since the epoch. ``parameters`` by model name, ``*`` for the rest."""

    target: str
    generation: int
    expires: float
    parameters: dict[str, Parameters]


def read_change(
    body: bytes, signature: bytes, *, public_key: str, target: str, generation: int, now: float | None = None
) -> Change:
    """Read a change that ``signature`` (base64) holds for; ``generation`` is the newest seen so far.

    Raises ``Unsigned``, or ``PolicyError`` where a change that is signed is wrong.
    """
    # 5 MiB and 50 ms, for those who configure a key.
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - see above
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415 - see above

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(b64decode(signature, validate=True), body)
    except (InvalidSignature, Base64Error):
        raise Unsigned("x-carpool-signature does not hold for this body: base64 of its Ed25519 signature") from None
    try:
        plain = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Unsigned(f"the body is not JSON: {error}") from None
    change = from_plain(plain, Change, what="change")
    if change.target != target:
        raise Unsigned(f"this change is for target {change.target!r}, not {target!r}")
    if change.expires <= (time.time() if now is None else now):
        raise Unsigned("this change has expired")
    if change.generation <= generation:
        raise Unsigned(f"generation {change.generation} is not newer than {generation}, the newest so far")
    return change
