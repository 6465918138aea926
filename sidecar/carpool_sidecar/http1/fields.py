"""The field lines of a head. They are a list, and no subclass of a list can be compiled: they have this file alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class FieldLines(list[tuple[bytes, bytes]]):
    """The field lines of a head that came in. They are never changed, so what was made of them is kept with them.

    Peers repeat themselves: a connection hands out the same object for as long as the same head comes in. What is kept
    lives no longer than that, so nothing of one caller is ever told to another.
    """

    __slots__ = ("encoded", "encoded_for", "facts", "kept")

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] | None = None) -> None:
        super().__init__(fields or ())
        self.kept: FieldLines | None = None
        """Those that are forwarded, once somebody asked."""
        self.encoded = b""
        """The last head that was made of them, and, below, what else went into it."""
        self.encoded_for: object = None
        self.facts: Any = None
        """The application's: what it reads in them."""
