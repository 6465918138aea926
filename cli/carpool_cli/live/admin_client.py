"""Queries a sidecar's admin port, and decodes the answers to types."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec
from msgspec import Meta, Struct

from carpool.batching.counters import RECENT_ARRIVALS, ModelStats
from carpool.exchange import report
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain
from carpool.policy.spec import BatchingPolicy
from carpool_cli.answers import NO_ANSWER, UNREADABLE, get
from carpool_cli.options import Address, need
from carpool_cli.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from carpool.exchange.report import Report

END_OF_TIME = 253_402_214_400
"""Seconds from the epoch to the last day of the year 9999: later times have no date."""


class AdminError(Exception):
    """The admin port does not answer, or not as a sidecar's; one line for a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Predicted(Struct, frozen=True, rename="camel"):
    """A forecast; ``None`` means infinite, as in an overload."""

    p50: float | None
    p99: float | None
    p99_ahead: float | None
    miss_fraction: float
    goodput: float
    device_time: float | None
    mean_batch: float
    utilization: float = 0.0


class Decided(Struct, frozen=True, rename="camel"):
    """A decision of the tuner, without the fields that only the Batcher needs."""

    parameters: Parameters
    change: bool
    reason: str
    """A ``Reason``; a sidecar of another version may have others."""
    message: str
    uncapped: Parameters | None = None
    capped_by: str = ""
    predicted: Predicted | None = None
    recommended: Predicted | None = None
    shed_slo: bool = False
    rate: float = 0.0
    target_utilization: float = 0.0
    """0: the objective has none."""
    alternative: str = ""
    state: str = ""


class Explained(Struct, frozen=True):
    """A decision, the time it was last made (seconds since the epoch), and how often in a row."""

    model: str
    at: Annotated[float, Meta(ge=0, lt=END_OF_TIME)]
    decision: Decided
    times: int = 1


class LastBusy(Struct, frozen=True):
    """A model's last minute with requests: when it ended (seconds since the epoch), its length, and its forecast."""

    at: float
    seconds: float
    stats: ModelStats
    predicted: Predicted | None = None


class Explanation(Struct, frozen=True, rename="camel"):
    """``/v1/explain``: decisions, oldest first, and the last busy minute by model."""

    tuned: bool
    decisions: list[Explained]
    last_busy: dict[str, LastBusy] = {}


EVERYWHERE = {"0.0.0.0", "::", "[::]"}  # noqa: S104 - recognized, not listened on
"""Hosts of ports that listen on every address: no client can connect to these names."""


class AdminClient:
    """Queries one admin port, with a connection per request. ``timeout`` in seconds.

    ``ticket``: a whole ``Authorization`` header, as the operator signs it, instead of the admin ``key``.
    """

    def __init__(
        self, address: Address, key: str | None = None, timeout: float = 5.0, *, ticket: str | None = None
    ) -> None:
        self.address = address
        self._known = key is not None or ticket is not None
        authorization = ticket or f"Bearer {key}"
        # As bytes: http.client knows Latin-1 only, and the sidecar compares UTF-8.
        self._headers = {"Authorization": authorization.encode()} if self._known else {}
        self._timeout = timeout

    def report(self, *, arrivals: bool = False) -> Report:
        """Return the counts so far, and the present state; with the last ``arrivals`` of each model if requested.

        Raises ``AdminError``.
        """
        path = f"/v1/stats?arrivals={RECENT_ARRIVALS}" if arrivals else "/v1/stats"
        try:
            return _checked(report.decode(self._ask(path)))
        except PolicyError as error:
            raise self._differs("/v1/stats", error) from None
        except UNREADABLE:
            raise self._other("/v1/stats") from None

    def policy(self) -> BatchingPolicy:
        """Return the policy in force.

        Raises ``AdminError``.
        """
        document = self.get("/v1/config")
        try:
            return from_plain(document["config"]["policy"], BatchingPolicy, what="policy").validate()
        except PolicyError as error:
            raise self._differs("/v1/config", error) from None
        except (KeyError, TypeError):
            raise self._other("/v1/config") from None

    def data_address(self) -> str:
        """Return the URL of the data port; ``http://127.0.0.1:8080`` if the sidecar, an older one, does not say it.

        Raises ``AdminError``.
        """
        document = self.get("/v1/config")
        named = document.get("data") if isinstance(document, dict) else None
        host, _, port = str(named or "127.0.0.1:8080").rpartition(":")
        return f"http://{self.address.host if host in EVERYWHERE else host}:{port}"

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

        Raises ``AdminError`` with the fix.
        """
        try:
            return msgspec.json.decode(self._ask(path))
        except UNREADABLE:
            raise self._other(path) from None

    def _ask(self, path: str) -> bytes:
        try:
            status, body = get(self.address, self.address.path + path, self._timeout, self._headers)
        except NO_ANSWER as error:
            why = str(error) or type(error).__name__
            raise AdminError(f"no sidecar answers at {self.address}: {why}; name its admin port") from None
        if status in {401, 403}:
            raise AdminError(self._refused(status, _words(body)))
        if status == 404 and "the admin port serves" in _words(body):
            if self.address.path:
                raise AdminError(f"{self.address} is a page of a sidecar's admin port: leave the path out")
            raise AdminError(f"{self.address} is an older sidecar's, without {path.partition('?')[0]}: update it")
        if status != 200:
            raise AdminError(f"{self.address}{path} answers {status}: that is no sidecar's admin port")
        return body

    def _refused(self, status: int, words: str) -> str:
        """Return the error with the required key or ticket; ``words`` are the sidecar's own message."""
        if self._known:
            return f"{self.address} does not take this key ({words}): give the one that it was started with"
        if status == 403 and "ticket" in words:
            return (
                f"{self.address} is an injected sidecar's, which wants a ticket: give the operator's private key "
                "(--key-file) and whose sidecar it is (--workload NAMESPACE/Deployment/NAME)"
            )
        if status == 403:
            return f"{self.address} refuses: {words}"
        return f"{self.address} wants the admin key: give --key-file"

    def _other(self, path: str) -> AdminError:
        return AdminError(f"{self.address}{path} does not answer like a sidecar's admin port")

    def _differs(self, path: str, error: PolicyError) -> AdminError:
        return AdminError(f"{self.address}{path} does not answer like this version: {error}")


def _checked(found: Report) -> Report:
    """Check what is divided by: latencies of batches of 1, 2, ... rows, from the second place on.

    Raises ``PolicyError``.
    """
    for name, lane in found.lanes.items():
        times = lane.service_seconds
        if times is not None and (len(times) < 2 or min(times[1:]) <= 0):
            raise PolicyError(f"lanes.{name}.serviceSeconds", "the latency of a batch has to be above 0")
    return found


def _words(body: bytes) -> str:
    """Return the message of an answer other than 200."""
    try:
        return str(msgspec.json.decode(body)["error"])
    except (*UNREADABLE, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def client_of(address: Address, key_file: Path | None, workload: str | None) -> AdminClient:
    """Return a client with the required credentials: the admin key, or a ticket for a ``workload``'s sidecars.

    Raises ``click.ClickException`` if the file can't be read, or can't sign tickets.
    """
    if workload is None:
        return AdminClient(address, key_of(key_file))
    if key_file is None:
        raise click.UsageError("--workload needs --key-file: the operator's private key signs the ticket")
    parts = workload.split("/")
    if len(parts) != 3 or not all(parts):
        raise click.UsageError(f"--workload {workload!r}: write e.g. shop/Deployment/resnet")
    signing = need("carpool_operator.delivery.signing", "operator")
    from carpool_operator.api.model import Target  # noqa: PLC0415 - comes with the extra, too

    try:
        return AdminClient(
            address, ticket=signing.Signer(_content(key_file).encode()).ticket(Target(*parts), time.time())
        )
    except signing.BadKey as error:
        raise click.ClickException(f"{key_file}: {error}") from None


def key_of(path: Path | None) -> str | None:
    """Read the admin key.

    Raises ``click.ClickException`` if the file can't be read, or is not one line.
    """
    if path is None:
        return None
    key = _content(path)
    if len(key.splitlines()) != 1:
        more = (
            "more than one line; with the operator's private key, give --workload, too"
            if key
            else "empty: write the key to it"
        )
        raise click.ClickException(f"no admin key in {path}: it is {more}")
    return key


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise click.ClickException(f"no admin key in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"no admin key in {path}: it is not text") from None
