"""Requests of OpenAI's Batch API, one per line: sent one by one, with answers in the format of its output files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from carpool_cli.batch.formats import BadRow, Item, JsonLines, Row
from carpool_cli.profiling.targets import FIXES, Connections, TargetError
from carpool_sidecar.jobs.api.submission import check_path
from carpool_sidecar.jobs.records import UNREADABLE, Answer, Outcome, Place, Refused
from carpool_sidecar.jobs.storage import lines
from carpool_sidecar.jobs.storage.lines import Line, Wrong

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool_cli.options import Address
    from carpool_sidecar.http1.messages import Headers

CONCURRENCY = 16
"""Default number of concurrent requests: a server that batches by itself needs many."""

AHEAD = 8
"""Requests that are read ahead for each running one: answers are written in order, and differ in length."""

TIMEOUT = 600.0
"""Default timeout of an answer in seconds: it arrives as a whole."""

DECISIVE = 8
"""First lines of a file that are checked: one of them must be JSON, to determine the protocol."""

LONGEST_WAIT = 600.0
"""Longest wait in seconds that a server can demand by ``Retry-After``."""

LATER = {408, 409, 425, 429, 502, 503, 504}
"""Statuses that do not depend on the request: it is sent again, and in the end the run stops."""
REFUSED = {401, 403}
"""Statuses that concern the caller, not the request: the run stops at once."""
UNCLEAR = 500
"""Sent again, too. In the end the request is at fault: the server may be unable to answer it."""

BATCH_PRIORITY = (b"x-carpool-priority", b"batch")
"""Behind interactive requests at a sidecar; other servers ignore it."""


class Request(NamedTuple):
    """A line to send."""

    number: int
    line: Line


class _Body(msgspec.Struct):
    stream: bool | None = None


_body = msgspec.json.Decoder(_Body)
_line = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_request(path: Path) -> bool:
    """Return whether a file has requests of the Batch API, by its first line that is JSON.

    Raises ``click.UsageError`` if none of the first few is.
    """
    source = JsonLines(path, 0, 0, None)
    items: list[Item] = []
    wrong = 0
    while not items and source.number < DECISIVE and source.position < source.size:
        items, bad = source.read(1)
        wrong += len(bad)
    source.close()
    if wrong and not items:
        raise click.UsageError(
            f"{path}: none of the first {source.number} lines is JSON, so their protocol is unknown: name --protocol"
        )
    try:
        return bool(items) and {"custom_id", "url", "body"} <= set(_line.decode(items[0].row))
    except UNREADABLE:
        return False


class RequestLines:
    """The lines of a file. Invalid lines are bad rows, in the Batch API's format with their number."""

    assemble = None
    unit = "line"
    ahead = JsonLines.ahead

    def __init__(self, source: JsonLines) -> None:
        self._source = source
        self.size = source.size

    @property
    def position(self) -> int:
        """Where the next line begins."""
        return self._source.position

    @property
    def number(self) -> int:
        """Number of the last line read."""
        return self._source.number

    def read(self, count: int) -> tuple[list[Item], list[BadRow]]:
        """Read lines."""
        found, wrong = self._source.read(count)
        items: list[Item] = []
        bad = [_bad(row.number, Wrong(None, row.error)) for row in wrong]
        for item in found:
            try:
                items.append(item._replace(row=_request(item.number, item.row)))
            except Wrong as error:
                bad.append(_bad(item.number, error))
        return items, bad

    def encode(self, answers: Sequence[Row | BadRow | None]) -> bytes:
        """Return the records of answers; bad and blank lines have none here."""
        return b"".join(answer for answer in answers if isinstance(answer, bytes))

    def report(self, row: BadRow) -> bytes:
        """Return the record of a line without a successful answer."""
        return row.record

    def close(self) -> None:
        """Close the file."""
        self._source.close()


class Sender:
    """Sends requests to the path that each names, relative to the server's base URL."""

    def __init__(self, address: Address, headers: Headers, timeout: float) -> None:
        self._server = Connections(address, timeout)
        self.abandon = self._server.abandon
        self._prefix = address.path
        self._headers = [(b"content-type", b"application/json"), BATCH_PRIORITY, *headers]

    def run(self, rows: Sequence[Row]) -> list[Row]:
        """Answer the one request of ``rows``; raises ``TargetError``."""
        ((number, line),) = rows
        answer, body = self._server.post(self._path(line.url), bytes(line.body), self._headers)
        status = answer.status
        fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.getheaders()]
        kept, of = Answer(status, fields, body), Place(0, number)
        if 200 <= status < 300:
            return [lines.written(line.custom_id, Outcome(of, kept))]
        said = f"status {status}: {body[:200].decode('utf-8', 'replace')}"
        if status in LATER | REFUSED:
            wait = answer.headers.get("retry-after", "")
            seconds = min(float(wait), LONGEST_WAIT) if wait.isdecimal() else 0.0
            if status in REFUSED:
                said = f"status {status}, {FIXES[status]}{said.removeprefix(f'status {status}')}"
            raise TargetError(said, input_fault=False, retry_after=seconds, final=status in REFUSED)
        record = lines.written(line.custom_id, Outcome(of, kept, f"status-{status}"), number=number)
        raise TargetError(said, input_fault=status != UNCLEAR, record=record)

    def close(self) -> None:
        """Close each thread's connection."""
        self._server.close()

    def _path(self, url: str) -> str:
        """Return the request target: base URLs may end in ``/v1``, as for OpenAI's clients, and paths begin with it."""
        doubled = self._prefix.endswith("/v1") and url.startswith("/v1/")
        return (self._prefix.removesuffix("/v1") if doubled else self._prefix) + url


def _request(number: int, text: bytes) -> Request:
    line = lines.read(text, None)
    try:
        check_path(line.url)
        streams = _body.decode(line.body).stream
    except (Refused, *UNREADABLE) as error:
        raise Wrong(line.custom_id, str(error)) from None
    if streams:
        raise Wrong(line.custom_id, "stream is true: answers of a batch come whole, leave it out")
    return Request(number, line)


def _bad(number: int, wrong: Wrong) -> BadRow:
    return BadRow(number, str(wrong), lines.refused(wrong, number))
