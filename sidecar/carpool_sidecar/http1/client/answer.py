"""The answer that a connection is reading: where its bytes go, and how many are counted in the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.bodies import BodyReader
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.memory import count_while_alive, counts_itself

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.calls import Call, StreamReceiver
    from carpool_sidecar.http1.limits import ClientLimits
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Buffer
    from carpool_sidecar.http1.parsing import ResponseHead


class IncomingAnswer:
    """Collects one answer at a time, or passes it on piece by piece.

    `head` is None until it was read. `streaming`: it was passed on, so the body follows piece by piece.
    """

    __slots__ = ("_budget", "_held", "_limits", "body", "head", "streaming")

    def __init__(self, limits: ClientLimits, budget: Budget) -> None:
        self._limits = limits
        self._budget = budget
        self._held = 0  # bytes of the body that are counted as held
        self.body = BodyReader(0)
        self.reset()

    def reset(self) -> None:
        """Start with the next answer."""
        self.head: ResponseHead | None = None
        self.streaming = False

    def begin(self, length: int) -> None:
        """Start a body of so many bytes, `IN_CHUNKS` or `UNTIL_CLOSE`."""
        self.body = BodyReader(length)

    def read(self, call: Call, head: ResponseHead, data: bytes, position: int) -> int:
        """Read the body in data[position:]; return where reading stopped (see `BodyReader.read`).

        A body that is complete before anything was passed on is not passed on: it can be delivered in one piece. Raises
        HttpError if the body is malformed, UpstreamError if it can't be held.
        """
        body, receiver = self.body, call.streamed
        pieces: list[Buffer] = []
        stop = body.read(data, position, pieces)
        if receiver is None or (body.complete and not self.streaming):
            self._keep(pieces, limited=receiver is None)
        else:
            self._pass_on(call, receiver, head, pieces)
        return stop

    def _keep(self, pieces: list[Buffer], *, limited: bool) -> None:
        body = self.body
        try:
            body.keep(pieces)
        except OSError:
            raise self.no_room() from None
        if limited and self.is_too_large(body.kept):
            raise self.too_large()
        held = body.held
        if not self._budget.take(held - self._held):
            raise self.no_room()
        self._held = held

    def _pass_on(self, call: Call, receiver: StreamReceiver, head: ResponseHead, pieces: list[Buffer]) -> None:
        if not self.streaming:
            self.streaming = True
            receiver.head(head.status, head.headers)
        if pieces and not call.done:  # its receiver has not cancelled it
            receiver.data(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))

    def join(self) -> bytes | memoryview:
        """Return the kept body. A large one stays counted in the budget for as long as a piece of it lives."""
        whole = self.body.join()
        self.let_go()
        if counts_itself(whole):
            count_while_alive(whole, self._budget)
        return whole

    def let_go(self) -> None:
        """Release what is kept of the body, and return its bytes to the budget."""
        self._budget.held -= self._held
        self._held = 0
        self.body.drop()

    # Limits of what is delivered in one piece

    def is_too_large(self, size: int) -> bool:
        """Whether a body of so many bytes is over the limit."""
        return size > self._limits.max_body_bytes

    def too_large(self) -> UpstreamError:
        """Return the error for such a body."""
        limit = self._limits.max_body_bytes
        text = f"the upstream's answer is over {limit:.0f} bytes; raise bodies.maxAnswer"
        return UpstreamError("too-large", text, answered_bytes=True)

    def has_room(self, size: int) -> bool:
        """Whether so many more bytes may be held."""
        return self._budget.held + size <= self._budget.limit

    def no_room(self) -> UpstreamError:
        """Return the error for a used-up budget."""
        self._budget.short = True
        limit = f"{self._budget.limit:.0f} bytes"
        text = f"with the upstream's answer over {limit} would be buffered; raise bodies.maxBuffered or replicas"
        return UpstreamError("buffers-full", text, answered_bytes=True)
