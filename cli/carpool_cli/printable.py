"""Names and messages from elsewhere, on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return a line with everything that a terminal might act on as an escape, such as ``\x1b``.

    Clients choose the names of models and paths.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
