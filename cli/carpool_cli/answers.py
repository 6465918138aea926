"""Answers of arbitrary servers: the exceptions for a missing answer, and for an unreadable one."""

from __future__ import annotations

import http.client

import msgspec

NO_ANSWER = (OSError, http.client.HTTPException)
"""No connection, one that breaks during the answer, or no HTTP, as from the port of a TLS or gRPC server."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Not JSON, not UTF-8, nested too deeply, or of an unexpected form."""
