"""The address and credentials of a policy's Prometheus, from the settings and the Secrets they name.

Errors name the field whose Secret or ConfigMap lacks a valid value; never the value.
"""

from __future__ import annotations

import os
import ssl
from base64 import b64encode
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from carpool.policy.plain import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from carpool_operator.api.spec import CA, KeyRef
    from carpool_operator.api.spec import Prometheus as Settings

Key: TypeAlias = tuple[Literal["Secret", "ConfigMap"], str, str]
"""A key of an object in the policy's namespace: kind, name, key."""


class Grant(NamedTuple):
    """The request for a token: OAuth 2.0 client credentials (RFC 6749, 4.4)."""

    url: str
    client_id: str
    client_secret: str
    form: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | bool


class Endpoint(NamedTuple):
    """The address and credentials for queries."""

    url: str
    """Complete URL of the API's query endpoint."""
    base: str
    """The base URL, as shown to users."""
    headers: dict[str, str]
    tls: ssl.SSLContext | bool
    server_name: str | None
    grant: Grant | None = None
    """Where to get the token, if needed."""


def needed(settings: Settings) -> list[Key]:
    """Return the keys whose values ``endpoint`` needs."""
    return [key for _, key in _references(settings)]


def _secret(ref: KeyRef) -> Key:
    return "Secret", ref.name, ref.key


def _references(settings: Settings) -> Iterator[tuple[str, Key]]:
    auth, tls = settings.auth, settings.tls
    if auth is not None and auth.bearer is not None:
        yield "auth.bearer", _secret(auth.bearer)
    if auth is not None and auth.basic is not None:
        yield "auth.basic.username", _secret(auth.basic.username)
        yield "auth.basic.password", _secret(auth.basic.password)
    if auth is not None and auth.oauth2 is not None:
        yield "auth.oauth2.clientId", _secret(auth.oauth2.client_id)
        yield "auth.oauth2.clientSecret", _secret(auth.oauth2.client_secret)
        yield from _authorities("auth.oauth2.ca", auth.oauth2.ca)
    for index, header in enumerate(settings.headers):
        if header.secret is not None:
            yield f"headers[{index}]", _secret(header.secret)
    if tls is not None:
        yield from _authorities("tls.ca", tls.ca)
    if tls is not None and tls.client is not None:
        yield "tls.client.certificate", _secret(tls.client.certificate)
        yield "tls.client.key", _secret(tls.client.key)


def _authorities(path: str, ca: CA | None) -> Iterator[tuple[str, Key]]:
    if ca is not None and ca.secret is not None:
        yield f"{path}.secret", _secret(ca.secret)
    if ca is not None and ca.config_map is not None:
        yield f"{path}.configMap", ("ConfigMap", ca.config_map.name, ca.config_map.key)


def endpoint(settings: Settings, values: Mapping[Key, bytes]) -> Endpoint:
    """Build the address and credentials for queries.

    ``values`` are those of the keys that ``needed`` returns. Raises ``PolicyError`` naming the field whose Secret or
    ConfigMap lacks the key or a valid value; never the value.
    """
    found: dict[str, bytes] = {}
    for path, key in _references(settings):
        if key not in values:
            kind, name, entry = key
            raise PolicyError(
                f"spec.metrics.prometheus.{path}",
                f"the policy's namespace has no {kind} {name} with the key {entry}, or the operator may not read it: "
                "docs/prometheus.md has the Role that lets it",
            )
        found[path] = values[key].strip()
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    for index, header in enumerate(settings.headers):
        path = f"headers[{index}]"
        headers[header.name] = header.value if header.value is not None else _printable(path, found[path])
    if (token := found.get("auth.bearer")) is not None:
        headers["Authorization"] = f"Bearer {_printable('auth.bearer', token)}"
    elif (user := found.get("auth.basic.username")) is not None:
        if b":" in user:
            raise PolicyError("spec.metrics.prometheus.auth.basic.username", "a name with a colon can't be sent")
        pair = user + b":" + found["auth.basic.password"]
        headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
    base = settings.url.rstrip("/")
    return Endpoint(
        url=f"{base}/api/v1/query",
        base=without_password(base),
        headers=headers,
        tls=_context(settings, found),
        server_name=None if settings.tls is None else settings.tls.server_name,
        grant=_grant(settings, found),
    )


def _grant(settings: Settings, found: Mapping[str, bytes]) -> Grant | None:
    oauth2 = None if settings.auth is None else settings.auth.oauth2
    if oauth2 is None:
        return None
    form = [("grant_type", "client_credentials")]
    if oauth2.scopes:
        form.append(("scope", " ".join(oauth2.scopes)))
    if oauth2.audience is not None:
        form.append(("audience", oauth2.audience))
    return Grant(
        url=oauth2.token_url,
        client_id=_printable("auth.oauth2.clientId", found["auth.oauth2.clientId"]),
        client_secret=_printable("auth.oauth2.clientSecret", found["auth.oauth2.clientSecret"]),
        form=tuple(form),
        tls=True if oauth2.ca is None else _trusting("auth.oauth2.ca", found),
    )


def _context(settings: Settings, found: Mapping[str, bytes]) -> ssl.SSLContext | bool:
    tls = settings.tls
    if tls is None:
        return True
    if tls.client is None:
        if tls.insecure_skip_verify:
            return False
        return True if tls.ca is None else _trusting("tls.ca", found)
    context = ssl.create_default_context() if tls.ca is None else _trusting("tls.ca", found)
    if tls.insecure_skip_verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _show(context, found["tls.client.certificate"], found["tls.client.key"])
    return context


def _trusting(path: str, found: Mapping[str, bytes]) -> ssl.SSLContext:
    authorities = found.get(f"{path}.secret", found.get(f"{path}.configMap", b""))
    try:
        # Not create_default_context, which trusts the system's authorities if these are "".
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise PolicyError(f"spec.metrics.prometheus.{path}", f"no certificates in PEM: {error}") from None
    return context


def _show(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # Python reads them only from files. This one is in memory: the root file system is read-only, and keys must not
    # reach a disk.
    file = os.memfd_create("client")
    try:
        os.write(file, certificate + b"\n" + key + b"\n")
        # Without a password for an encrypted key OpenSSL would prompt on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{file}", password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise PolicyError(
            "spec.metrics.prometheus.tls.client", f"no certificate with its key, both in PEM and unencrypted: {error}"
        ) from None
    finally:
        os.close(file)


def _printable(path: str, value: bytes) -> str:
    if not value or not value.isascii() or not value.decode("ascii").isprintable():
        raise PolicyError(f"spec.metrics.prometheus.{path}", "the token is empty, or has bytes that no header may have")
    return value.decode("ascii")


def without_password(url: str) -> str:
    """Return a URL without its password, to be shown to users."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
