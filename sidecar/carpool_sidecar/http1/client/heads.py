"""Reads the heads of an upstream's answers from the data of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

from carpool_sidecar.http1.parsing import LONGEST_KEPT, HeadCheck, HttpError, ResponseHead, parse_response_head

if TYPE_CHECKING:
    from carpool_sidecar.http1.limits import ClientLimits


class ResponseHeadReader:
    """Reads the heads of one connection, within the limits: interim responses (1xx), and the answer behind them.

    Upstreams repeat the same head for all callers, so the last one is kept as received and as parsed.
    """

    __slots__ = ("_beginning", "_check", "_interim", "_last", "_last_head", "_limits")

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._last = b""
        self._last_head: ResponseHead | None = None
        self.reset()

    def reset(self) -> None:
        """Start with the next answer."""
        self._beginning = b""  # of a head that is not complete
        self._check: HeadCheck | None = None  # of that
        self._interim = 0  # interim responses before the answer

    def joined(self, data: bytes) -> bytes:
        """Return the data with the beginning of the head that came before them."""
        return self._beginning + data if self._beginning else data

    def read(self, data: bytes, position: int, method: bytes) -> tuple[ResponseHead | None, int]:
        """Read the head at data[position:] of a response to `method`; return it and its end.

        If it is not complete, its beginning is kept, and None is returned. Raises HttpError (502) for what is malformed
        or over a limit.
        """
        # Whether there is a body depends on the method. Heads are only kept for methods other than HEAD.
        if not position and (last := self._last_head) is not None and data.startswith(self._last) and not method:
            return last, len(self._last)
        limits = self._limits
        stop = data.find(b"\r\n\r\n", position) + 4
        size = (stop if stop > 3 else len(data)) - position
        if size > limits.max_head_bytes:
            text = f"the model answers with a head of over {limits.max_head_bytes:.0f} bytes, a fixed limit"
            raise HttpError(502, "head-too-large", text)
        if stop == 3:
            self._keep(data[position:])
            return None, position
        raw = data if size == len(data) else data[position:stop]
        head = parse_response_head(raw, method)
        self._check = None
        if head.status >= 200:
            if size <= LONGEST_KEPT and not method:
                self._last, self._last_head = raw, head
        elif head.status != 101:
            self._interim += 1
            if self._interim > limits.max_interim:
                text = f"the upstream sent over {limits.max_interim} interim responses (1xx) and no answer"
                raise HttpError(502, "too-many-interim", text)
        return head, stop

    def _keep(self, beginning: bytes) -> None:
        self._beginning = beginning
        if beginning:
            if self._check is None:
                self._check = HeadCheck(httptools.HttpResponseParser)
            self._check.feed(beginning)
