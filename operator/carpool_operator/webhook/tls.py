"""A TLS context whose certificate can change while it serves: open connections stay, new ones use the new one."""

from __future__ import annotations

import os
import ssl


class ServingContext:
    """The server's side of TLS; it refuses handshakes until a certificate is loaded."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.loaded: tuple[bytes, bytes] | None = None
        """Certificate chain and private key in use, PEM."""

    def load(self, certificate: bytes, key: bytes) -> bool:
        """Serve a certificate from now on; returns whether it changed.

        Raises ``ssl.SSLError`` if certificate and key don't match; the previous ones then stay in use.
        """
        if self.loaded == (certificate, key):
            return False
        # Loaded in a separate context first: a pair that doesn't match would leave half of it behind.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            _load(context, certificate + b"\n" + key)
        self.loaded = (certificate, key)
        return True


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """OpenSSL reads only files; this one is in memory alone, so that no key reaches a disk."""
    file = os.memfd_create("carpool")
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
