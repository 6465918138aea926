"""What serves the models: the port that the driver sends batches through."""

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
        """Give it up: its receiver hears nothing more. Ignored once it is over."""


class Forward(Protocol):
    """An exchange that is no inference, on its way."""

    def begin(self) -> None:
        """Choose how its body is read (in ``Application.head``)."""

    def request(self) -> None:
        """Go on with a body that was read whole (in ``Application.request``)."""

    def cancel(self) -> None:
        """Give it up (in ``Application.disconnected``)."""


class Document(NamedTuple):
    """An answer to a question of the sidecar's own.

    ``status`` is 0 where there was none: ``reachable`` says whether somebody was there, too slow, or nobody at all;
    ``foreign`` that the server accepted the connection, and hung up, sent what is no HTTP/1.1, or was asked nothing.
    ``why`` says in words why there was nobody.
    """

    status: int
    body: bytes = b""
    reachable: bool = True
    foreign: bool = False
    why: str = ""


class Traffic(NamedTuple):
    """What callers have of the server: requests with it now, and answers so far; without those about health."""

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
        """Post a request for inference; its framing is added to the headers. Never blocks, never raises.

        ``idempotent``: whether the model may receive it twice. ``merged``: it was made of several, so rows are known to
        be independent of each other.
        """

    def forward(self, exchange: Exchange, *, inference: bool = False) -> Forward:
        """Pass on anything else; ``inference``: it is some, which can't be batched."""

    def generate(self, exchange: Exchange, endpoint: Endpoint, watcher: Watcher) -> Forward:
        """Pass on a request to a language model; asked only where ``streams``."""

    def passage(self, exchange: Exchange) -> Forward | None:
        """Pass on a connection that is no HTTP/1.1; None: that can't be served here."""

    @property
    def streams(self) -> bool:
        """Whether a request for inference that is too large to be batched can be forwarded as it comes."""

    @property
    def readiness(self) -> bytes | None:
        """The target that surely answers 200 when the models can be served, and else an error; None: not known."""

    def axis(self, model: str) -> Axis | None:
        """Say which axis of a model is the batch, where that is known here; None: by what its server says."""

    @property
    def traffic(self) -> Traffic:
        """Say whether the server works for callers."""

    async def ask(self, target: bytes) -> Document:
        """Get a document about the server or a model."""

    async def connect(self) -> Document:
        """Say whether the server accepts connections, without asking anything: then ``foreign``."""

    async def close(self) -> None:
        """Let go of everything."""
