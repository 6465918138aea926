"""Messages with their length before them, on pipes between the sidecar's processes. It imports nothing."""

LENGTH = 4
"""Bytes of a message's length, little-endian."""


def framed(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(body).to_bytes(LENGTH, "little") + body
