"""Reads and checks a caller's submission of a job. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from carpool_sidecar.http1.parsing import FIELD_TEXT, TOKEN
from carpool_sidecar.jobs.records import UNREADABLE, Call, Refused
from carpool_sidecar.protocols.headers import HOP_BY_HOP

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Buffer

OURS = ("/v1/jobs", "/v1/files", "/v1/batches")
"""Paths that the sidecar serves itself: no job may use them."""

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})

CREDENTIALS = frozenset(
    {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-auth-token", "x-goog-api-key"}
)
"""Headers that a job may not have: they would be on disk as long as the job."""

MOST_HEADERS, LONGEST_TARGET, LONGEST_HEADERS = 64, 4096, 8192

_FRAMING = frozenset(name.decode() for name in HOP_BY_HOP) | {"content-length", "host"}
_TARGET = re.compile(r"/[\x21-\x7e]*")
_NAME = re.compile(TOKEN.decode("latin-1"))
_VALUE = re.compile(FIELD_TEXT.decode("latin-1"))


class Submission(Struct, frozen=True, forbid_unknown_fields=True):
    """A submitted job. ``body``: any JSON, sent unchanged; ``base64``: bytes."""

    path: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: Raw | UnsetType = UNSET
    base64: str | UnsetType = UNSET


_submission = msgspec.json.Decoder(Submission)


def read(text: Buffer) -> Call:
    """Read a submission; raises ``Refused`` naming the field and the fix."""
    try:
        given = _submission.decode(text)
    except UNREADABLE as error:
        raise _wrong(f'{error}; write {{"path": "/v1/models/m:predict", "body": {{...}}}}') from None
    if given.method not in METHODS:
        raise _wrong(f"method {given.method!r}: write one of {', '.join(sorted(METHODS))}")
    check_path(given.path)
    headers = _headers(given.headers)
    if given.body is not UNSET and given.base64 is not UNSET:
        raise _wrong("both body and base64 are given: write one of the two")
    body = b""
    if given.body is not UNSET:
        body = bytes(given.body)
        if not any(name.lower() == "content-type" for name, _ in headers):
            headers.append(("content-type", "application/json"))
    elif given.base64 is not UNSET:
        try:
            body = base64.b64decode(given.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _wrong(f"base64: {error}") from None
    return Call(given.method, given.path, headers, body)


def check_path(target: str) -> None:
    """Raise ``Refused`` unless the target is a path of the model's."""
    if _TARGET.fullmatch(target) is None or len(target) > LONGEST_TARGET:
        raise _wrong(f"path {target[:80]!r}: write the path of a request, e.g. /v1/models/m:predict")
    path = target.partition("?")[0]
    if any(path == own or path.startswith(f"{own}/") for own in OURS):
        raise _wrong(f"path {path!r} is served by the sidecar itself: name a path of the model's")


def _headers(given: dict[str, str]) -> list[tuple[str, str]]:
    if len(given) > MOST_HEADERS or sum(len(name) + len(value) for name, value in given.items()) > LONGEST_HEADERS:
        raise _wrong(f"headers: at most {MOST_HEADERS}, of {LONGEST_HEADERS} bytes in all")
    for name, value in given.items():
        lower = name.lower()
        if lower in CREDENTIALS:
            text = f"header {name} would be kept on disk: name the credential in jobs.authorizationFile instead"
            raise Refused(400, "jobs-credentials", text)
        if lower in _FRAMING or lower.startswith("x-carpool-"):
            raise _wrong(f"header {name} is written by the sidecar: leave it out")
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise _wrong(f"header {name[:80]!r} is no header")
    return list(given.items())


def _wrong(text: str) -> Refused:
    return Refused(400, "jobs-malformed", text)
