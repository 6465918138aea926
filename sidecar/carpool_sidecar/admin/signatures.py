"""Signatures: documents are signed with Ed25519 over exactly the bytes that were sent.

Several keys may be accepted at once, and a document may have several signatures, separated by commas: one signature
must be by an accepted key. So keys can be replaced without a restart.

Each document names its target and its end, so that a copy from another pod or an old one is refused.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64decode
from binascii import Error as Base64Error
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from carpool.exchange.change import MAX_KEYS, Ticket, read_change
from carpool.policy.plain import PolicyError, from_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.exchange.change import Change

SKEW = 60.0
"""Seconds by which the signer's clock and this one may differ: a document is accepted for so long after its end."""

REMEMBERED = 16
"""Tickets whose signature is not checked again: pollers send the same one for minutes."""

SCHEME = b"Carpool "

Reason: TypeAlias = Literal["signature", "content", "target", "expired", "older"]


class Refused(Exception):  # noqa: N818 - what it is, not that it is an error
    """A document that is not accepted, why, and what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Authority:
    """Checks documents for ``target``; ``public_key``: the accepted keys, separated by commas.

    Raises ``PolicyError`` naming the field if a key is unusable.
    """

    def __init__(self, public_key: str, target: str) -> None:
        self._target = target
        self._tickets: dict[bytes, float] = {}
        """Tickets with a valid signature, and when they end."""
        self.accept(public_key.split(","))

    def accept(self, keys: Sequence[str]) -> None:
        """Accept documents signed with one of these keys, and no others.

        Raises ``PolicyError``.
        """
        # 9 MiB and 30 ms, only if a key is configured.
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415 - see above
        except ImportError:
            raise PolicyError(
                "publicKey", "needs the package `cryptography`: in Carpool's folder, pip install '.[signing]'"
            ) from None
        self._keys = tuple(Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in keys)
        self._tickets.clear()

    def change(self, body: bytes, signature: bytes, now: float) -> Change:
        """Read a change with a valid ``signature`` (base64); ``now`` in seconds since the epoch.

        Raises ``Refused``.
        """
        try:
            signed = [b64decode(each, validate=True) for each in signature.strip().split(b",")[:MAX_KEYS]]
        except (Base64Error, ValueError):
            signed = []
        plain = self._signed(body, signed, "x-carpool-signature (change.sig)")
        try:
            change = read_change(plain)
        except PolicyError as error:
            raise Refused("content", str(error)) from None
        self._check(change.target, change.expires, now)
        return change

    def admit(self, authorization: bytes, now: float) -> None:
        """Admit a reader with ``Carpool <base64url(ticket)>.<base64url(signature)>[,...]``; ``now`` as above.

        Raises ``Refused``.
        """
        ends = self._tickets.get(authorization)
        if ends is None:
            ends = self._read_ticket(authorization, now).expires
            if len(self._tickets) >= REMEMBERED:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[authorization] = ends
        self._check(self._target, ends, now)

    def _read_ticket(self, authorization: bytes, now: float) -> Ticket:
        body, _, signatures = authorization.removeprefix(SCHEME).partition(b".")
        parts = (body, *signatures.split(b",")[:MAX_KEYS])
        try:
            document, *signed = (urlsafe_b64decode(part + b"=" * (-len(part) % 4)) for part in parts)
        except (Base64Error, ValueError):
            document, signed = b"", []
        plain = self._signed(document, signed, "the ticket's second half")
        try:
            ticket = from_plain(plain, Ticket, what="ticket")
        except PolicyError as error:
            raise Refused("content", str(error)) from None
        self._check(ticket.target, ticket.expires, now)
        return ticket

    def _signed(self, body: bytes, signatures: Sequence[bytes], where: str) -> Any:  # noqa: ANN401 - any JSON
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - loaded with the key

        for key, signature in product(self._keys, signatures):
            try:
                key.verify(signature, body)
                break
            except InvalidSignature:
                continue
        else:
            raise Refused(
                "signature",
                f"{where} is no Ed25519 signature of these bytes by the holder of publicKey: sign with the operator's "
                "key, or have the pod injected anew if that key was replaced",
            )
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise Refused("content", f"what was signed is not JSON: {error}") from None

    def _check(self, target: str, expires: float, now: float) -> None:
        if target != self._target:
            raise Refused("target", f"this is for target {target!r}, not {self._target!r}: send it there")
        if now >= expires + SKEW:
            raise Refused("expired", f"this expired {now - expires:.0f} s ago: sign it anew, and compare clocks")
