"""The webhook's own certificates: what a Secret holds, and what it should hold at a given time.

Each serving certificate has its own certificate authority, whose key is discarded at once: no stored key could sign
another certificate. API servers trust a bundle of authorities. A new certificate is announced first, and served only
when API servers have known its authority for long enough, so that no call fails during the change.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LIFE = 90 * 86400.0
"""Seconds that a certificate is valid; it is renewed after two thirds."""
SETTLE = 600.0
"""Seconds between announcing a certificate and serving it: API servers and other replicas see changes within a few."""
SKEW = 300.0
"""Seconds that others' clocks may be behind."""


class Pair(NamedTuple):
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def made(self) -> float:
        """Start of validity, in seconds since the epoch."""
        return _leaf(self.certificate).not_valid_before_utc.timestamp() + SKEW

    @property
    def ends(self) -> float:
        """End of validity, in seconds since the epoch."""
        return _leaf(self.certificate).not_valid_after_utc.timestamp()

    def serves(self, names: Iterable[str], now: float) -> bool:
        """Whether API servers would accept it: now, and for these names."""
        leaf = _leaf(self.certificate)
        known = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return self.made - SKEW <= now < self.ends and set(names) <= set(known.get_values_for_type(x509.DNSName))


class Material(Struct, frozen=True):
    """A Secret's content: the pair in use, the announced one, and the authorities to trust."""

    current: Pair
    following: Pair | None
    bundle: bytes

    def secret(self) -> dict[str, bytes]:
        """Return the Secret's ``data``."""
        data = {"tls.crt": self.current.certificate, "tls.key": self.current.key, "ca.crt": self.bundle}
        if self.following is not None:
            data |= {"next.crt": self.following.certificate, "next.key": self.following.key}
        return data


def read(data: Mapping[str, bytes]) -> Material | None:
    """Parse a Secret's ``data``; ``None`` where it is empty or inconsistent."""
    try:
        current = _pair(data["tls.crt"], data["tls.key"])
        following = _pair(data["next.crt"], data["next.key"]) if "next.crt" in data else None
        bundle = data["ca.crt"]
        trusted = {authority.subject for authority in x509.load_pem_x509_certificates(bundle)}
        fits = all(_leaf(pair.certificate).issuer in trusted for pair in (current, following) if pair is not None)
    except (KeyError, ValueError, x509.ExtensionNotFound):
        return None
    return Material(current, following, bundle) if fits else None


def renewed(material: Material | None, names: tuple[str, ...], now: float) -> Material:
    """Return the wanted content; the same object if nothing has to be done.

    ``names``: DNS names to serve. ``now``: seconds since the epoch. A pair that can't serve now is replaced at once:
    waiting would not help.
    """
    # 1. No pair that can serve
    if material is None or not material.current.serves(names, now):
        following = None if material is None else material.following
        if material is not None and following is not None and following.serves(names, now):
            return Material(following, None, _living(material.bundle, now))
        pair, authority = issue(names, now)
        return Material(pair, None, authority + (b"" if material is None else _living(material.bundle, now)))
    current, following = material.current, material.following
    bundle = _living(material.bundle, now)
    # 2. One that was announced long enough ago
    if following is not None and (not following.serves(names, now) or now >= following.made + SETTLE):
        return Material(following if following.serves(names, now) else current, None, bundle)
    # 3. One that has to be renewed
    if following is None and now >= current.made + (current.ends - current.made) * 2 / 3:
        following, authority = issue(names, now)
        return Material(current, following, authority + bundle)
    return material if bundle == material.bundle else Material(current, following, bundle)


def issue(names: tuple[str, ...], now: float) -> tuple[Pair, bytes]:
    """Return a new pair, and the authority that signed it, PEM."""
    since, until = (datetime.fromtimestamp(at, UTC) for at in (now - SKEW, now + LIFE))
    serial = x509.random_serial_number()
    key, authority_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _named(f"carpool-injector-ca-{serial:040x}")
    authority = (
        _certificate(issuer, issuer, authority_key, serial, since, until + timedelta(seconds=SKEW))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        _certificate(_named("carpool-injector"), issuer, key, x509.random_serial_number(), since, until)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(leaf.public_bytes(Encoding.PEM), pem), authority.public_bytes(Encoding.PEM)


def _pair(certificate: bytes, key: bytes) -> Pair:
    """Raise ``ValueError`` if the two don't match."""
    private = load_pem_private_key(key, password=None)
    leaf = _leaf(certificate)
    leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    if leaf.public_key() != private.public_key():
        raise ValueError("the key is not the certificate's")
    return Pair(certificate, key)


def _leaf(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificates(pem)[0]


def _living(bundle: bytes, now: float) -> bytes:
    """Return a bundle without expired authorities."""
    authorities = x509.load_pem_x509_certificates(bundle)
    return b"".join(
        each.public_bytes(Encoding.PEM) for each in authorities if now < each.not_valid_after_utc.timestamp()
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    since: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
