"""Reads one answer of an engine as its bytes pass, whether it comes in a stream or whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.generation.answers import LONGEST_WHOLE, Ends, Events, ending, longest
from carpool_sidecar.http1.messages import find

if TYPE_CHECKING:
    from carpool_sidecar.generation.answers import Ending
    from carpool_sidecar.generation.requests import Api
    from carpool_sidecar.http1.messages import Headers


class AnswerReader:
    """Reads one answer: which of its pieces carry tokens, and the engine's report at its end."""

    __slots__ = ("_ends", "_events", "_headers", "_whole", "status")

    def __init__(self) -> None:
        self.status = 0
        self._headers: Headers = ()
        self._ends = Ends()  # the answer's first and last bytes
        self._events: Events | None = None  # of an answer that comes in events
        self._whole = bytearray()  # of an answer that comes whole, with several choices

    def begin(self, status: int, headers: Headers, api: Api, *, several: bool) -> None:
        """Take the status and the headers; ``several``: several choices were requested."""
        self.status = status
        self._headers = headers
        if not self.succeeded:
            return
        kind = find(headers, b"content-type") or b""
        readable = find(headers, b"content-encoding") in {None, b"identity"}
        if readable and kind.lower().startswith(b"text/event-stream"):
            self._events = Events(api, several=several)

    @property
    def succeeded(self) -> bool:
        """Whether the answer began with success."""
        return 200 <= self.status < 300

    @property
    def in_events(self) -> bool:
        """Whether the answer comes in events, and they can be read."""
        return self._events is not None

    @property
    def size(self) -> int:
        """Bytes of the answer so far."""
        return self._ends.size

    def add(self, chunk: bytes) -> int:
        """Take the next piece; return how many events with a token ended in it."""
        self._ends.add(chunk)
        return 0 if self._events is None else self._events.feed(chunk)

    def keep(self, chunk: bytes) -> None:
        """Keep a piece, which was added, of an answer that comes whole with several choices."""
        if self._ends.size <= LONGEST_WHOLE:
            self._whole += chunk

    def begins(self, chunk: bytes) -> bool:
        """Whether a piece without text shows that the engine has computed the prompt."""
        return self._events is not None and self._events.begins(chunk)

    @property
    def choices_ended(self) -> int | None:
        """Choices that have ended, if there are several; None if that is not visible."""
        return None if self._events is None else self._events.ends

    def longest(self, choices: int) -> float:
        """Return the longest of the `choices` of a whole answer over their mean; 1 if that is not visible."""
        return longest(self._whole, choices) if self._whole else 1.0

    def ending(self) -> Ending:
        """Return the engine's report at the end."""
        return ending(self._ends.text(), self._headers)
