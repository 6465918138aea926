"""Answers of servers that may be any: the exceptions by which there is none, or none that can be read."""

from __future__ import annotations

import http.client

import msgspec

NO_ANSWER = (OSError, http.client.HTTPException)
"""No connection, one that breaks in the answer, or no HTTP, as from the port of a TLS or gRPC server."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""No JSON, no UTF-8, nested too deep, or another form than was asked for."""
