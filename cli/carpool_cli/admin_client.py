"""Asks a sidecar's admin port, and reads what it answers as types."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from carpool import report
from carpool.policy import Parameters, PolicyError, from_plain
from carpool.tuning import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from carpool.report import Report
    from carpool_cli.options import Address


class AdminError(Exception):
    """Nobody answers on the admin port, or not as a sidecar would."""


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

    def report(self) -> Report:
        """Return what was counted so far, and the present state.

        Raises ``AdminError``.
        """
        try:
            return report.decode(self._ask("/v1/stats"))
        except PolicyError as error:
            raise self._differs("/v1/stats", error) from None

    def explanation(self) -> Explanation:
        """Return the last decisions.

        Raises ``AdminError``.
        """
        try:
            return from_plain(self.get("/v1/explain"), Explanation, what="/v1/explain")
        except PolicyError as error:
            raise self._differs("/v1/explain", error) from None

    def get(self, path: str) -> Any:  # noqa: ANN401 - whatever the document holds
        """Return a JSON document.

        Raises ``AdminError`` naming what to do.
        """
        try:
            return msgspec.json.decode(self._ask(path))
        except msgspec.DecodeError:
            raise AdminError(f"{self.address}{path} does not answer as a sidecar's admin port would") from None

    def _ask(self, path: str) -> bytes:
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
        if answer.status != 200:
            raise AdminError(f"{self.address}{path} answers {answer.status}: that is no sidecar's admin port")
        return body

    def _differs(self, path: str, error: PolicyError) -> AdminError:
        return AdminError(f"{self.address}{path} does not answer as this version would: {error}")


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
