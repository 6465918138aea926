"""What commands print: names and messages from elsewhere, on a terminal; and data, as JSON."""

from __future__ import annotations

import msgspec


def printable(text: str) -> str:
    r"""Return a line with everything that a terminal might act on as an escape, such as ``\x1b``.

    Clients choose the names of models and paths.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def json_of(document: object) -> bytes:
    """Return data as indented JSON; what is neither plain data nor a struct is written as its text."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1)
