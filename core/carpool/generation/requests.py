"""The gate's input and output: requests for token streams, and the actions for them."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import NamedTuple


class State(Enum):
    """State of a request. It only moves down this list, and may end from any state."""

    QUEUED = "Queued"
    PREFILLING = "Prefilling"
    """Admitted; its first token has not come yet."""
    DECODING = "Decoding"
    ENDED = "Ended"


class Slo(NamedTuple):
    """The targets of a class of requests, in seconds; ``inf`` for none."""

    ttft: float = inf
    """From arrival to the first token."""
    tpot: float = inf
    """Mean time per output token after the first."""


class ClassTargets(NamedTuple):
    """Targets of a class, as `Slo`; ``later``: by how many seconds its TTFT is longer than that of the gate."""

    ttft: float
    tpot: float
    later: float


class Request:
    """One request for a token stream.

    ``prompt_tokens`` may be an estimate. ``max_tokens`` is the client's limit of the answer, if it gave one. ``batch``
    requests have no targets: they use what interactive ones leave. ``targets``: those of its class; None: those of
    the gate. ``deadline`` is a time, not a duration. ``choices``: answers to one prompt (OpenAI's ``n``), each a
    sequence of the engine; they share the prompt.
    """

    __slots__ = (
        "arrival",
        "batch",
        "choices",
        "cost",
        "deadline",
        "key",
        "max_tokens",
        "output_tokens",
        "prompt_tokens",
        "sequences",
        "state",
        "targets",
        "tenant",
    )

    def __init__(
        self,
        key: int,
        arrival: float,
        prompt_tokens: int,
        *,
        max_tokens: int | None = None,
        tenant: str = "",
        batch: bool = False,
        deadline: float = inf,
        targets: ClassTargets | None = None,
        choices: int = 1,
    ) -> None:
        self.key = key
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tenant = tenant
        self.batch = batch
        self.deadline = deadline
        self.targets = targets
        self.choices = choices
        self.sequences = choices
        """Choices that have not ended."""
        self.state = State.QUEUED
        self.output_tokens = 0
        """Mean output tokens of a choice; known once the request has ended."""
        self.cost = 0.0
        """Cost in tokens that its tenant was charged at admission."""


class Reason(Enum):
    """Why a request got no answer from the engine, with the HTTP status."""

    TTFT = "the first token would come too late"
    QUEUE_FULL = "too many tokens are queued"
    DEADLINE = "the deadline can't be met"


class Admit(NamedTuple):
    """Send the request to the engine."""

    request: Request


class Refuse(NamedTuple):
    """Answer 429 (503 for a deadline), ``retry_after`` seconds in ``Retry-After``; no byte was sent before."""

    request: Request
    reason: Reason
    retry_after: float


Action = Admit | Refuse
