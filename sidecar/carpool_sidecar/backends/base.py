"""The interface between the driver and the backends that serve models."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from carpool_sidecar.generation.requests import Endpoint
    from carpool_sidecar.generation.stream import Watcher
    from carpool_sidecar.http1.client.calls import Receiver
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.protocols.models import Axis


class Call(Protocol):
    """One call under way."""

    def cancel(self) -> None:
        """Cancel it: its receiver is not called any more. Ignored once it is over."""


class Forward(Protocol):
    """A forwarded exchange under way."""

    def begin(self) -> None:
        """Decide how its body is read (in ``Application.head``)."""

    def request(self) -> None:
        """Continue with a complete body (in ``Application.request``)."""

    def cancel(self) -> None:
        """Cancel it (in ``Application.disconnected``)."""


class Document(NamedTuple):
    """An answer to one of the sidecar's own requests.

    ``status`` is 0 without an answer: then ``reachable`` says whether the server may be there but too slow;
    ``foreign`` that it accepted the connection and hung up, sent no HTTP/1.1, or was sent nothing.
    ``why`` says in words why no connection could be made.
    """

    status: int
    body: bytes = b""
    reachable: bool = True
    foreign: bool = False
    why: str = ""


class Traffic(NamedTuple):
    """Callers' requests with the server now, and answers so far; health requests are not counted."""

    under_way: int
    answers: int


class Backend(Protocol):
    """A model server, beside this process or inside it."""

    def send(
        self,
        target: bytes,
        headers: Headers,
        body: Body,
        receiver: Receiver,
        *,
        idempotent: bool = True,
        merged: bool = False,
    ) -> Call:
        """Post an inference request; its framing is added to the headers. Never blocks, never raises.

        ``idempotent``: whether the model may receive it twice. ``merged``: it was merged from several requests, so its
        rows are known to be independent.
        """

    def forward(self, exchange: Exchange, *, inference: bool = False) -> Forward:
        """Forward any other request; ``inference``: it is inference that can't be batched."""

    def generate(self, exchange: Exchange, endpoint: Endpoint, watcher: Watcher) -> Forward:
        """Forward a request to a language model; only called if ``streams``."""

    def passage(self, exchange: Exchange) -> Forward | None:
        """Forward a connection that is not HTTP/1.1; None: not supported here."""

    @property
    def streams(self) -> bool:
        """Whether an inference request that is too large to be batched can be forwarded as it comes."""

    @property
    def readiness(self) -> bytes | None:
        """The target that answers 200 when the models can be served, and else an error; None: not known."""

    def axis(self, model: str) -> Axis | None:
        """Return a model's batch axis if the backend knows it; None: the server's metadata decide."""

    @property
    def traffic(self) -> Traffic:
        """Return the counts of callers' requests at the server."""

    async def ask(self, target: bytes) -> Document:
        """Get a document about the server or a model."""

    async def connect(self) -> Document:
        """Test whether the server accepts connections, without a request: then ``foreign``."""

    async def close(self) -> None:
        """Release everything."""
