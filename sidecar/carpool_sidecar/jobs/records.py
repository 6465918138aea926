"""The store's records. Times are seconds since 1970, so that other processes can read them."""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import NamedTuple

import msgspec
from msgspec import Struct

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for a text that is not JSON, not UTF-8, or nested a thousand times."""


class State(StrEnum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """The model answered with success (2xx)."""
    FAILED = "failed"
    """It answered with an error, or not at all: `reason` says which."""
    CANCELLED = "cancelled"


class Stage(StrEnum):
    """State of a batch, in OpenAI's terms."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Refused(Exception):  # noqa: N818 - an answer, no fault of this program
    """The store refuses a request. ``status`` and ``reason`` go to the caller; the text names the option, if any.

    ``methods``: with a 405, those that the path takes.
    """

    def __init__(self, status: int, reason: str, text: str, methods: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.methods = methods


def path_of(target: str) -> str:
    """Return a target without its query: refusals pause this path."""
    return target.partition("?")[0]


class Call(Struct, frozen=True):
    """A job's request for the model."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return path_of(self.target)


class Job(Struct, frozen=True):
    """A job without its bodies. ``attempts``: how often it may have reached the model."""

    id: str
    state: State
    method: str
    target: str
    created: float
    expires: float
    """When it fails if it was not answered before."""
    started: float | None = None
    """When it was sent last."""
    ended: float | None = None
    attempts: int = 0
    rerun: bool = False
    """Whether it was sent again although the model may have computed it before."""
    status: int | None = None
    """Status of the answer, if there is one."""
    reason: str | None = None


class Answer(Struct, frozen=True):
    """The model's answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | memoryview


class File(Struct, frozen=True):
    """A file: JSON lines that were uploaded, or those that a batch wrote."""

    id: str
    seq: int
    name: str
    purpose: str
    created: float
    expires: float
    size: int = 0
    lines: int = 0
    batch: int | None = None
    """The batch that wrote it; None: it was uploaded."""
    failed: bool = False
    """Whether it has the batch's errors, or its answers."""


class Batch(Struct, frozen=True):
    """Requests from a file."""

    id: str
    seq: int
    stage: Stage
    endpoint: str
    window: str
    file: str
    created: float
    expires: float
    total: int = 0
    completed: int = 0
    failed: int = 0
    started: float | None = None
    cancelling: float | None = None
    ended: float | None = None
    output: str | None = None
    errors: str | None = None
    metadata: bytes = b"null"


class Place(NamedTuple):
    """The line of a batch."""

    batch: int
    number: int


class Task(NamedTuple):
    """A request to send now: of a job, by its number, or of a line."""

    of: int | Place
    call: Call
    expires: float


class Rest:
    """How many more tasks may begin, by path; a path that is not in ``left`` has no bound of its own."""

    def __init__(self, left: dict[str, int]) -> None:
        self._left = left

    @property
    def closed(self) -> list[str]:
        """Paths for which none may begin."""
        return [path for path, left in self._left.items() if left <= 0]

    def of(self, path: str) -> float:
        """Return how many may begin on a path."""
        return max(0, self._left.get(path, inf))

    def take(self, path: str, count: int = 1) -> None:
        """Note that so many begin."""
        if path in self._left:
            self._left[path] -= count


ANY = Rest({})
"""No path has a bound of its own."""


class Outcome(NamedTuple):
    """The outcome of a task.

    ``answer``: the model's, if there is one. ``reason``: why there is no usable one. ``again``: the task returns to
    the queue; ``reached``: the model may have computed it.
    """

    of: int | Place
    answer: Answer | None
    reason: str | None = None
    again: bool = False
    reached: bool = True
