"""Lines of a batch's input, and the result lines: OpenAI's form. Pure."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from carpool_sidecar.http1.messages import find
from carpool_sidecar.jobs.records import UNREADABLE

if TYPE_CHECKING:
    from carpool_sidecar.jobs.records import Outcome


class Line(Struct, frozen=True):
    """One request. ``body`` is sent unchanged."""

    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class Wrong(Exception):  # noqa: N818 - of the line, not of this program
    """A line that can't be sent. ``custom_id``: if it could be read."""

    def __init__(self, custom_id: str | None, text: str) -> None:
        super().__init__(text)
        self.custom_id = custom_id


class _Named(Struct):
    custom_id: str | None = None


_line = msgspec.json.Decoder(Line)
_named = msgspec.json.Decoder(_Named)


def read(text: bytes, endpoint: str | None) -> Line:
    """Read a line whose path is ``endpoint``, any if None; raises ``Wrong``."""
    try:
        line = _line.decode(text)
    except UNREADABLE as error:
        raise Wrong(custom_id(text), f"the line is no request: {error}") from None
    if line.method != "POST":
        raise Wrong(line.custom_id, f"method {line.method!r}: write POST")
    if endpoint is not None and line.url != endpoint:
        raise Wrong(line.custom_id, f"url {line.url!r} is not the batch's endpoint, {endpoint!r}")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise Wrong(line.custom_id, "body has to be an object")
    return line


def check_length(number: int, length: int, longest: int) -> None:
    """Raise ``Wrong`` for a line that is too long."""
    if length > longest:
        raise Wrong(None, f"line {number} has {length} bytes: raise jobs.maxRequest ({longest})")


def custom_id(text: bytes) -> str | None:
    """Return the name of a line, if it can be read."""
    try:
        return _named.decode(text).custom_id
    except UNREADABLE:
        return None


def refused(wrong: Wrong, number: int | None = None) -> bytes:
    """Write the result of a line that can't be sent; ``number``: its line number, if it is to be named."""
    error = {"code": "invalid_request", "message": str(wrong)}
    return _written(wrong.custom_id, None, error, {} if number is None else {"line": number})


def written(
    name: str | None, outcome: Outcome, attempts: int = 1, *, rerun: bool = False, number: int | None = None
) -> bytes:
    """Write the result of a line: ``attempts`` only if it was sent more than once; ``number`` as above."""
    answer, error, response = outcome.answer, None, None
    if answer is not None:
        identity = find(answer.headers, b"x-request-id") or b""
        response = {
            "status_code": answer.status,
            "request_id": identity.decode("latin-1"),
            "body": _body(bytes(answer.body)),
        }
    if outcome.reason is not None:
        error = {"code": outcome.reason, "message": REASONS.get(outcome.reason, outcome.reason)}
    own: dict[str, Any] = {"carpool": {"attempts": attempts, "rerun": rerun}} if attempts > 1 else {}
    if number is not None:
        own["line"] = number
    return _written(name, response, error, own)


REASONS = {
    "interrupted": "the sidecar ended while this ran, and it is not sent again: idempotent: false, too often, or "
    "its batch had ended",
    "expired": "its window was over before it was answered",
    "cancelled": "it was cancelled",
}
"""Texts for some reasons; others are the status of an answer, or why there is none."""


def _written(name: str | None, response: Any, error: Any, own: dict[str, Any]) -> bytes:  # noqa: ANN401 - JSON
    record = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(record | own) + b"\n"


def _body(body: bytes) -> object:
    """Return an answer's JSON unchanged, on one line; an answer that is not JSON as text."""
    try:
        body.decode()
        msgspec.json.decode(body, type=Raw)
        return Raw(body if b"\n" not in body else msgspec.json.format(body, indent=-1))
    except UNREADABLE:
        return body.decode("utf-8", "replace")
