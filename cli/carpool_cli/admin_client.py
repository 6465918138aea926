"""What a sidecar's admin port says of itself, as types."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import Struct, field

from carpool.policy import Parameters, PolicyError, from_plain
from carpool.statistics import Stats
from carpool.tuning import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from carpool_cli.options import Address

T = TypeVar("T")


class AdminError(Exception):
    """Nobody answers on the admin port, or not as a sidecar would."""


class Queue(Struct, frozen=True, rename="camel"):
    """What waits and what is with the upstream."""

    rows: int
    in_flight: int
    slots: int


class LaneState(Struct, frozen=True, rename="camel"):
    """One model's present state; times in seconds, by rows."""

    parameters: Parameters
    pass_through: bool
    queued_requests: int
    cap: int
    quarantined: bool
    service_seconds: tuple[float, ...] | None = None
    executors: int | None = None


class Alone(Struct, frozen=True):
    """Requests that may not be merged."""

    model: str
    reason: str
    requests: int


class Stalls(Struct, frozen=True):
    """Pauses of the sidecar's host."""

    count: int
    seconds: float


class Snapshot(Struct, frozen=True, rename="camel"):
    """``/v1/stats``."""

    stats: Stats
    uptime_seconds: float
    ready: bool
    readiness: str
    generation: int
    slo_seconds: float
    queue: Queue
    lanes: dict[str, LaneState]
    alone: list[Alone] = field(default_factory=list)
    stalls: Stalls = Stalls(0, 0.0)


class Predicted(Struct, frozen=True):
    """A forecast; ``None`` stands for no end, as in an overload."""

    p50: float | None
    p99: float | None
    p99_ahead: float | None
    miss_fraction: float
    goodput: float
    device_time: float | None
    mean_batch: float


class Decided(Struct, frozen=True):
    """A decision of the tuner, without what only the Batcher needs of it."""

    parameters: Parameters
    change: bool
    reason: Reason
    message: str
    uncapped: Parameters | None = None
    capped_by: str = ""
    predicted: Predicted | None = None
    shed_slo: bool = False
    rate: float = 0.0


class Explained(Struct, frozen=True):
    """A decision, when it was taken last (seconds since the epoch), and how often in a row."""

    model: str
    at: float
    decision: Decided
    times: int = 1


class Explanation(Struct, frozen=True):
    """``/v1/explain``: decisions, oldest first."""

    tuned: bool
    decisions: list[Explained]


class AdminClient:
    """Asks one admin port, a connection a question. ``timeout`` in seconds."""

    def __init__(self, address: Address, key: str | None = None, timeout: float = 5.0) -> None:
        self.address = address
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout = timeout

    def snapshot(self) -> Snapshot:
        """Return what was counted so far, and the present state.

        Raises ``AdminError``.
        """
        return self._typed("/v1/stats", Snapshot)

    def explanation(self) -> Explanation:
        """Return the last decisions.

        Raises ``AdminError``.
        """
        return self._typed("/v1/explain", Explanation)

    def get(self, path: str) -> Any:  # noqa: ANN401 - whatever the document holds
        """Return a JSON document.

        Raises ``AdminError`` naming what to do.
        """
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=self._timeout)
        try:
            connection.request("GET", self.address.path + path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise AdminError(f"no sidecar answers at {self.address}: {error}; name its admin port") from None
        finally:
            connection.close()
        if answer.status in {401, 403}:
            raise AdminError(f"{self.address} wants the admin key: give --key-file")
        try:
            if answer.status != 200:
                raise AdminError(f"{self.address}{path} answers {answer.status}: that is no sidecar's admin port")
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            raise AdminError(f"{self.address}{path} does not answer as a sidecar's admin port would") from None

    def _typed(self, path: str, kind: type[T]) -> T:
        document = self.get(path)
        try:
            return from_plain(document, kind, what=path)
        except PolicyError as error:
            raise AdminError(f"{self.address}{path} does not answer as this version would: {error}") from None


def key_of(path: Path | None) -> str | None:
    """Read the admin key.

    Raises ``click.ClickException`` where the file can't be read.
    """
    try:
        return None if path is None else path.read_text("utf-8").strip()
    except OSError as error:
        raise click.ClickException(f"no admin key in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"no admin key in {path}: it is not text") from None
