"""What an application implements: the methods that the server calls, and where a streamed request body goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange


class Application(Protocol):
    """Called by a server. Every exchange that reached `head` ends in exactly one of `sent` and `disconnected`."""

    def head(self, exchange: Exchange) -> None:
        """Take note of a request's head; its body has not been read.

        The application chooses here: `exchange.buffer(limit)`, `exchange.stream(sink)`, or an answer at once.
        Without a choice the body is buffered up to the server's limit.
        """

    def request(self, exchange: Exchange) -> None:
        """Take a request whose body was buffered and is complete; answer it now or later."""

    def sent(self, exchange: Exchange) -> None:
        """Take note that the answer's last byte went to the transport.

        The server itself may have answered (400, 408, 413, 503): see `exchange.status`.
        """

    def disconnected(self, exchange: Exchange) -> None:
        """Take note that the client is gone before its answer was complete; answering from now on does nothing.

        A client that closes while it waits is noticed within a tick; once its answer has begun, at the next write.
        """

    def refused(self, refusal: HttpError) -> None:
        """Take note that the server answered a request whose head it did not accept: it made no exchange."""


class Sink(Protocol):
    """Where a streamed request body goes. `end` or `aborted` is the last call, unless the exchange ended before."""

    def data(self, chunk: bytes) -> None:
        """Take the next piece."""

    def end(self) -> None:
        """Take note that the body is complete."""

    def aborted(self) -> None:
        """Take note that the rest will not come: the client left, was too slow, or broke the framing."""


class Overflow(Protocol):
    """Called when a body can't be buffered."""

    def __call__(self, exchange: Exchange, *, too_large: bool) -> bool:
        """Choose a sink, which gets the data collected so far, and return True; False: refuse the request.

        ``too_large``: the body is over its limit, and would be at any other time.
        """
