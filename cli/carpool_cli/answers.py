"""What servers and users' files hold: a GET, a file's text, and the exceptions for missing or unreadable ones."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import click
import msgspec

from carpool_sidecar.config.hints import not_utf8

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from carpool_cli.options import Address

NO_ANSWER = (OSError, http.client.HTTPException)
"""No connection, one that breaks during the answer, or no HTTP, as from the port of a TLS or gRPC server."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Not JSON, not UTF-8, nested too deeply, or of an unexpected form."""


class BadFile(click.ClickException):
    """A file of the user's that can't be read, or has other content than it should."""

    exit_code = 2


def read_text(path: Path) -> str:
    """Return the text of a user's file.

    Raises ``BadFile`` naming it.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: {not_utf8(error)}") from None


def get(
    address: Address, path: str, timeout: float, headers: Mapping[str, str] | Mapping[str, bytes] | None = None
) -> tuple[int, bytes]:
    """Return the status and body of a GET. ``path`` is whole: ``address.path`` is not put before it.

    Raises one of ``NO_ANSWER``.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    try:
        connection.request("GET", path, headers=headers or {})
        # The connection doesn't close an answer that has "Connection: close" and breaks off: its socket stays open.
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()
