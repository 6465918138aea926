"""Tokens become text, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 16
"""Tokens that are decoded again with each new one, at most, beside their context."""

CONTEXT = 4
"""Tokens before a window that are decoded with it: some tokenizers drop the blank before the first word."""

INCOMPLETE = "\ufffd"
"""What some tokenizers make of a character whose last bytes are still to come."""


class Text:
    """The text of one answer so far.

    Tokens are decoded outside, many answers at once. That has to be stable: with more tokens, text is only appended, or
    takes the place of ``INCOMPLETE``.
    """

    __slots__ = ("_from", "_held", "_ids", "_shown", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._from = 0
        """Where the window begins, its context included."""
        self._shown = 0
        """Characters of the window that were taken."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped = False
        """Whether a stop string has come: there is no more text."""

    def add(self, ids: Sequence[int]) -> list[int]:
        """Take more tokens; return those whose text ``take`` needs."""
        self._ids += ids
        return self._ids[self._from :]

    def take(self, decoded: str, *, end: bool = False) -> str:
        """Return the text that is new and complete. ``decoded``: of the tokens that ``add`` returned."""
        whole = decoded if end else decoded.rstrip(INCOMPLETE)
        new = whole[self._shown :]
        self._shown += len(new)
        return self._cut(new, end=end)

    @property
    def long(self) -> bool:
        """Whether ``move`` is due: decoding takes as long as its tokens are many."""
        return len(self._ids) - self._from >= WINDOW + CONTEXT

    def context(self) -> list[int]:
        """Return the tokens whose text ``move`` needs."""
        return self._ids[-CONTEXT:]

    def move(self, decoded: str) -> None:
        """Begin another window, if its beginning is clear. ``decoded``: of the tokens of ``context``.

        A character has four bytes at most, so one that is incomplete is in the context as a whole. A context without
        any complete one may have the end of another, which is text, and the beginning of the next, which is none yet.
        """
        shown = len(decoded.rstrip(INCOMPLETE))
        if shown:
            self._from = len(self._ids) - CONTEXT
            self._shown = shown

    def _cut(self, new: str, *, end: bool) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return new
        text, self._held = self._held + new, ""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        if end:
            return text
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``stop``."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
