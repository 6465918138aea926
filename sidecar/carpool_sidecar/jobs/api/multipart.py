"""Forms with files (RFC 7578), read as they come. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_HEAD = 8192
"""Bytes of a part's headers."""

MOST_PARTS = 16
"""Parts of a form; OpenAI's clients send 2 to 4."""

_BOUNDARY = re.compile(rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILE = re.compile(rb'[;\s]filename="([^"]*)"', re.IGNORECASE)


class FormError(ValueError):
    """The body is not such a form."""


class Part(NamedTuple):
    """A field begins. ``file``: its name, if it is one."""

    name: str
    file: str | None


class Form:
    """Parses the body into a sequence of parts and pieces of their content."""

    def __init__(self, content_type: bytes) -> None:
        """Begin a form; raises ``FormError`` if the type names no boundary."""
        found = _BOUNDARY.match(content_type)
        if found is None:
            raise FormError("the content type is not multipart/form-data with a boundary")
        self._delimiter = b"\r\n--" + (found[1] or found[2])
        self._rest = b"\r\n"  # the body may start with the first delimiter
        self._inside = False
        self._head = False
        self._parts = 0
        self.complete = False
        """Whether the last delimiter has come."""

    def feed(self, chunk: bytes) -> list[Part | bytes]:
        """Take the next bytes; raises ``FormError``."""
        self._rest += chunk
        events: list[Part | bytes] = []
        while not self.complete and (self._read_head(events) if self._head else self._read_body(events)):
            pass
        if self.complete:
            self._rest = b""
        return events

    def _read_body(self, events: list[Part | bytes]) -> bool:
        """Read up to a delimiter; return whether there was one."""
        at = self._rest.find(self._delimiter)
        if at < 0:
            # The end may be the beginning of a delimiter.
            keep = len(self._delimiter) - 1
            if self._inside and len(self._rest) > keep:
                events.append(self._rest[:-keep])
            self._rest = self._rest[-keep:]
            return False
        if self._inside and at:
            events.append(self._rest[:at])
        after = at + len(self._delimiter)
        if len(self._rest) < after + 2:
            self._rest = self._rest[at:]
            return False
        self._inside = False
        self.complete = self._rest[after : after + 2] == b"--"
        self._rest = self._rest[after:]
        self._head = not self.complete
        return True

    def _read_head(self, events: list[Part | bytes]) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if len(self._rest) > LONGEST_HEAD:
                raise FormError(f"a part of the form has over {LONGEST_HEAD} bytes of headers")
            return False
        head = self._rest[: end + 2]
        self._rest = self._rest[end + 4 :]
        disposition = next(
            (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b""
        )
        name, file = _NAME.search(disposition), _FILE.search(disposition)
        if name is None:
            raise FormError("a part of the form has no name")
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise FormError(f"the form has over {MOST_PARTS} parts: send the fields purpose and file only")
        events.append(
            Part(name[1].decode("utf-8", "replace"), None if file is None else file[1].decode("utf-8", "replace"))
        )
        self._head, self._inside = False, True
        return True
