"""The field lines of a head, in a file of their own: a subclass of list can't be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class FieldLines(list[tuple[bytes, bytes]]):
    """The field lines of a received head. They never change, so results computed from them are kept with them.

    Peers repeat heads: a connection returns the same object for as long as it receives the same head. The kept results
    live no longer than that, so one caller's data never reaches another caller.
    """

    __slots__ = ("encoded", "encoded_for", "facts", "kept")

    def __init__(self, fields: Iterable[tuple[bytes, bytes]] | None = None) -> None:
        super().__init__(fields or ())
        self.kept: FieldLines | None = None
        """The fields that are forwarded, once they were computed."""
        self.encoded = b""
        """The last head that was encoded from them, without the fields that this hop adds."""
        self.encoded_for: object = None
        """Its first line: the status, or the method and target."""
        self.facts: Any = None
        """For the application: what it has read in them."""
